"""Optimizer state outside the device: on the host or on disk, and stepped there block by block."""
