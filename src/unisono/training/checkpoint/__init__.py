"""Checkpoints: a whole training run in a folder, written atomically, checksummed, for any number of workers."""

from __future__ import annotations

from unisono.training.checkpoint.checkpoint import CheckpointError, Loaded, ModelPart, Savable, load, save

__all__ = ["CheckpointError", "Loaded", "ModelPart", "Savable", "load", "save"]
