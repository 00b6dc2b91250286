"""A run as it is recorded: each worker writes its steps, metrics and events to a folder, and a reader follows them.

Nothing is imported here: reading.py needs no torch.
"""
