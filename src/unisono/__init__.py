"""Unisono: train PyTorch models on many workers; what they tell each other, and when, is one line.

Public is what `dir(unisono)` lists, with what the packages among it list in `__all__`, and every method under
`unisono.strategies` and `unisono.reducers` by its spec. Everything else is internal and may change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same as below, for type checkers: a test compares them
    from unisono.launchers import EngineError as EngineError
    from unisono.launchers import WorkerError as WorkerError
    from unisono.launchers import launch as launch
    from unisono.launchers import on as on
    from unisono.launchers.runtime.debugger import breakpoint as breakpoint  # noqa: A004
    from unisono.methods.hybrid import Mesh as Mesh
    from unisono.methods.hybrid import mesh as mesh
    from unisono.methods.hybrid import split_stages as split_stages
    from unisono.methods.hybrid import tensor_plan as tensor_plan
    from unisono.methods.strategy import Average as Average
    from unisono.methods.strategy import Replica as Replica
    from unisono.methods.strategy import Strategy as Strategy
    from unisono.methods.strategy import average as average
    from unisono.methods.strategy import follow as follow
    from unisono.methods.strategy import parallel as parallel
    from unisono.observe.runs.recording import log as log
    from unisono.plugs import horovod as horovod
    from unisono.plugs import huggingface as huggingface
    from unisono.plugs import keras as keras
    from unisono.plugs import lightning as lightning
    from unisono.plugs import skorch as skorch
    from unisono.plugs.comm_hook import ddp_hook as ddp_hook
    from unisono.predict.footprint import memory as memory
    from unisono.tables import boost as boost
    from unisono.tables import estimators as estimators
    from unisono.tables.map_reduce import mapreduce as mapreduce
    from unisono.training.batch_norm import sync_batch_norm as sync_batch_norm
    from unisono.training.checkpoint import CheckpointError as CheckpointError
    from unisono.training.checkpoint import Loaded as Loaded
    from unisono.training.checkpoint import load as load
    from unisono.training.checkpoint import save as save
    from unisono.training.checkpoint import wait_saved as wait_saved
    from unisono.training.checkpoint.export import export as export
    from unisono.training.checkpoint.plain import read_checkpoint as read_checkpoint
    from unisono.training.data import Shard as Shard
    from unisono.training.data import mix as mix
    from unisono.training.data import pack as pack
    from unisono.training.data import records as records
    from unisono.training.data import shard as shard
    from unisono.training.trainer import Callback as Callback
    from unisono.training.trainer import EarlyStopping as EarlyStopping
    from unisono.training.trainer import Trainer as Trainer
    from unisono.world import Handle as Handle
    from unisono.world import Mismatch as Mismatch
    from unisono.world import PeerLost as PeerLost
    from unisono.world import World as World
    from unisono.world import backend as backend
    from unisono.world import join as join
    from unisono.world import preempted as preempted
    from unisono.world.virtual import run_threads as run_threads
    from unisono.world.virtual import simulate as simulate

__version__ = "1.0.0"  # the one place that has it

_EXPORTS = {  # names, and modules of which some need extras: `un.boost.XGBoost`
    "unisono.tables": "boost estimators",
    "unisono.plugs": "horovod huggingface keras lightning skorch",
    "unisono.training.batch_norm": "sync_batch_norm",
    "unisono.training.checkpoint": "CheckpointError Loaded load save wait_saved",
    "unisono.training.checkpoint.export": "export",
    "unisono.training.checkpoint.plain": "read_checkpoint",
    "unisono.training.data": "Shard mix pack records shard",
    "unisono.plugs.comm_hook": "ddp_hook",
    "unisono.predict.footprint": "memory",
    "unisono.methods.hybrid": "Mesh mesh split_stages tensor_plan",
    "unisono.launchers": "EngineError WorkerError launch on",
    "unisono.tables.map_reduce": "mapreduce",
    "unisono.launchers.runtime.debugger": "breakpoint",
    "unisono.observe.runs.recording": "log",
    "unisono.methods.strategy": "Average Replica Strategy average follow parallel",
    "unisono.training.trainer": "Callback EarlyStopping Trainer",
    "unisono.world": "Handle Mismatch PeerLost World join preempted backend",
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
    home = importlib.import_module(_MODULE_OF[name])
    try:
        value = getattr(home, name)
    except AttributeError:  # a module
        value = importlib.import_module(f"{home.__name__}.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


def _serve_old_paths() -> None:
    """`import unisono.reducer` and others, documented before there were rooms."""
    from unisono.old_paths import serve_old_paths

    serve_old_paths()


_serve_old_paths()


def _register_backend() -> None:
    """`unisono` among torch's backends, once torch is there: without importing it."""
    from unisono.world.backend.registration import register

    register()


_register_backend()
