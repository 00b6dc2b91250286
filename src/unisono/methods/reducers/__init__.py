"""Ways to reduce gradients, one file a method; a method is found by its file's name."""
