"""Checkpoints: a whole training run in a folder, written atomically, checksummed, for any number of workers."""

from __future__ import annotations

from unisono.training.checkpoint.behind import wait_saved
from unisono.training.checkpoint.checkpoint import CheckpointError, Loaded, load, save
from unisono.training.checkpoint.savable import ModelPart, Savable

__all__ = ["CheckpointError", "Loaded", "ModelPart", "Savable", "load", "save", "wait_saved"]
