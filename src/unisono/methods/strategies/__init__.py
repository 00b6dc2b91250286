"""Ways to train together, one file a method; a method is found by its file's name."""
