"""Runs before the run: a script on a simulated world (`unisono run --dry`), or a few real steps with worlds of one and
several workers, which are to agree (`--small`)."""
