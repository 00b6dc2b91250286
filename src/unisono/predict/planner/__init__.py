"""`unisono plan`: which method trains fastest, measured in the user's own loop and predicted for every method."""
