"""The random number generators of this process: Python's, numpy's, torch's on the CPU and on my GPU.

They belong to the process, so ranks that are threads of one process share them.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["capture", "derive", "restore", "seed_all"]


def capture(device: torch.device) -> dict[str, Any]:
    """The states of all generators, as plain values that `unisono.packing.pack` takes."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore(state: Mapping[str, Any], device: torch.device) -> None:
    """Set all generators; a GPU's only if the state has one and this rank has a GPU."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def derive(state: Mapping[str, Any], rank: int) -> None:
    """Seed all generators from another rank's state and my rank: for a rank that has none of its own."""
    digest = hashlib.blake2b(state["torch"].numpy().tobytes() + rank.to_bytes(8, "little"), digest_size=8)
    seed_all(int.from_bytes(digest.digest(), "little") >> 1)


def seed_all(seed: int) -> None:
    """Seed all generators of this process."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
