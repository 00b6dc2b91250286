"""Parameter servers: the server itself, what is said to it, and who serves whom."""
