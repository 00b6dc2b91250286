"""Unisono: train PyTorch models on many workers; what they tell each other, and when, is one line.

Public is what `dir(unisono)` lists, with what the packages among it list in `__all__`, and every method under
`unisono.strategies` and `unisono.reducers` by its spec. Everything else is internal and may change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same as below, for type checkers: a test compares them
    from unisono import backend as backend
    from unisono import boost as boost
    from unisono import estimators as estimators
    from unisono import horovod as horovod
    from unisono import huggingface as huggingface
    from unisono import keras as keras
    from unisono import lightning as lightning
    from unisono import on as on
    from unisono import skorch as skorch
    from unisono.batch_norm import sync_batch_norm as sync_batch_norm
    from unisono.checkpoint import CheckpointError as CheckpointError
    from unisono.checkpoint import Loaded as Loaded
    from unisono.checkpoint import load as load
    from unisono.checkpoint import save as save
    from unisono.checkpoint.plain import read_checkpoint as read_checkpoint
    from unisono.comm_hook import ddp_hook as ddp_hook
    from unisono.data import Shard as Shard
    from unisono.data import shard as shard
    from unisono.footprint import memory as memory
    from unisono.hybrid import Mesh as Mesh
    from unisono.hybrid import mesh as mesh
    from unisono.hybrid import split_stages as split_stages
    from unisono.hybrid import tensor_plan as tensor_plan
    from unisono.launchers import EngineError as EngineError
    from unisono.launchers import WorkerError as WorkerError
    from unisono.launchers import launch as launch
    from unisono.map_reduce import mapreduce as mapreduce
    from unisono.progress import EarlyStopping as EarlyStopping
    from unisono.runs.metrics import log as log
    from unisono.runtime.debugger import breakpoint as breakpoint  # noqa: A004
    from unisono.strategy import Replica as Replica
    from unisono.strategy import Strategy as Strategy
    from unisono.strategy import follow as follow
    from unisono.strategy import parallel as parallel
    from unisono.trainer import Callback as Callback
    from unisono.trainer import Trainer as Trainer
    from unisono.world import Handle as Handle
    from unisono.world import Mismatch as Mismatch
    from unisono.world import PeerLost as PeerLost
    from unisono.world import World as World
    from unisono.world import join as join
    from unisono.world import preempted as preempted
    from unisono.world.virtual import run_threads as run_threads
    from unisono.world.virtual import simulate as simulate

__version__ = "1.0.0"  # the one place that has it

_EXPORTS = {
    # Modules; some need extras: `un.boost.XGBoost`.
    "unisono": "backend boost estimators horovod huggingface keras lightning on skorch",
    "unisono.batch_norm": "sync_batch_norm",
    "unisono.checkpoint": "CheckpointError Loaded load save",
    "unisono.checkpoint.plain": "read_checkpoint",
    "unisono.data": "Shard shard",
    "unisono.comm_hook": "ddp_hook",
    "unisono.footprint": "memory",
    "unisono.hybrid": "Mesh mesh split_stages tensor_plan",
    "unisono.launchers": "EngineError WorkerError launch",
    "unisono.map_reduce": "mapreduce",
    "unisono.progress": "EarlyStopping",
    "unisono.runtime.debugger": "breakpoint",
    "unisono.runs.metrics": "log",
    "unisono.strategy": "Replica Strategy follow parallel",
    "unisono.trainer": "Callback Trainer",
    "unisono.world": "Handle Mismatch PeerLost World join preempted",
    "unisono.world.virtual": "run_threads simulate",
}
_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names.split()}

__all__ = sorted(["__version__", *_MODULE_OF])


def __getattr__(name: str) -> Any:
    """Import each part when it is first asked for: the launcher and the command line need no torch."""
    import importlib
    import sys

    if name not in _MODULE_OF:
        raise AttributeError(f"module 'unisono' has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    if _MODULE_OF[name] == __name__:
        return importlib.import_module(f"{__name__}.{name}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


def _register_backend() -> None:
    """`unisono` among torch's backends, once torch is there: without importing it."""
    from unisono.backend.registration import register

    register()


_register_backend()
