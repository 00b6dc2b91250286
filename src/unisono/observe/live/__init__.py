"""A run as it goes on: the live page in a browser, and `unisono top` in a terminal."""
