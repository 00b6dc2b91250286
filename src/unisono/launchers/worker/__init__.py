"""What runs on a worker's host: the agent that starts a worker, and what is around the user's program in it."""
