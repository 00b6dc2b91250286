"""Unisono: train PyTorch models on many workers; what they tell each other, and when, is one line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unisono.batch_norm import sync_batch_norm
    from unisono.callbacks import Callback, EarlyStopping
    from unisono.checkpoint import CheckpointError, Loaded, load, save
    from unisono.checkpoint.plain import read_checkpoint
    from unisono.data import Shard, shard
    from unisono.footprint import memory
    from unisono.launchers import EngineError, WorkerError, launch, on
    from unisono.map_reduce import mapreduce
    from unisono.strategy import Replica, Strategy, parallel
    from unisono.trainer import Trainer
    from unisono.world import Handle, Mismatch, PeerLost, World, join
    from unisono.world.virtual import run_threads, simulate

__version__ = "0.1.0"

_LAZY = {
    "Callback": "unisono.callbacks",
    "CheckpointError": "unisono.checkpoint",
    "EarlyStopping": "unisono.callbacks",
    "EngineError": "unisono.launchers",
    "Handle": "unisono.world",
    "Loaded": "unisono.checkpoint",
    "Mismatch": "unisono.world",
    "PeerLost": "unisono.world",
    "Replica": "unisono.strategy",
    "Shard": "unisono.data",
    "Strategy": "unisono.strategy",
    "Trainer": "unisono.trainer",
    "WorkerError": "unisono.launchers",
    "World": "unisono.world",
    "join": "unisono.world",
    "launch": "unisono.launchers",
    "load": "unisono.checkpoint",
    "mapreduce": "unisono.map_reduce",
    "memory": "unisono.footprint",
    "on": "unisono.launchers",
    "parallel": "unisono.strategy",
    "read_checkpoint": "unisono.checkpoint.plain",
    "run_threads": "unisono.world.virtual",
    "save": "unisono.checkpoint",
    "shard": "unisono.data",
    "simulate": "unisono.world.virtual",
    "sync_batch_norm": "unisono.batch_norm",
}

__all__ = [
    "Callback",
    "CheckpointError",
    "EarlyStopping",
    "EngineError",
    "Handle",
    "Loaded",
    "Mismatch",
    "PeerLost",
    "Replica",
    "Shard",
    "Strategy",
    "Trainer",
    "WorkerError",
    "World",
    "join",
    "launch",
    "load",
    "mapreduce",
    "memory",
    "on",
    "parallel",
    "read_checkpoint",
    "run_threads",
    "save",
    "shard",
    "simulate",
    "sync_batch_norm",
]


def __getattr__(name: str) -> Any:
    """Import each part when it is first asked for: the launcher and the command line need no torch."""
    if name in _LAZY:
        import importlib

        value = getattr(importlib.import_module(_LAZY[name]), name)
        globals()[name] = value
        return value
    import sys

    if name in ("boost", "estimators"):  # these need extras: `un.boost.XGBoost`
        import importlib

        return importlib.import_module(f"unisono.{name}")
    raise AttributeError(f"module 'unisono' has no attribute {name!r}", name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
