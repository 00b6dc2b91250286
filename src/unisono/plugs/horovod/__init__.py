"""Horovod's names over Unisono: `import unisono.horovod as hvd` in the place of `import horovod.torch as hvd`.

The workers are started by `unisono run -n 4 train.py` (or any other engine) instead of `horovodrun`. What Horovod has
and this has not is refused by name. `DistributedOptimizer(..., strategy="powersgd(rank=4)")` takes any of our methods.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from unisono.plugs.horovod import collectives, place
from unisono.plugs.horovod import elastic as elastic
from unisono.plugs.horovod.collectives import *  # noqa: F403
from unisono.plugs.horovod.optimizer import Compression as Compression
from unisono.plugs.horovod.optimizer import DistributedOptimizer as DistributedOptimizer
from unisono.plugs.horovod.place import *  # noqa: F403
from unisono.plugs.horovod.place import here
from unisono.training.batch_norm import Link
from unisono.training.batch_norm import SyncBatchNorm as _Joined
from unisono.world import PeerLost, World

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "SyncBatchNorm",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "elastic",
    *collectives.__all__,
    *(name for name in place.__all__ if name != "here"),
]

_links: WeakKeyDictionary[World, Link] = WeakKeyDictionary()  # all layers of a world share one
HorovodInternalError = PeerLost  # a worker was lost in a collective

_NOT_OFFERED = {
    "ProcessSet": "un.join().split([[0, 1], [2, 3]]): a world of some workers",
    "add_process_set": "un.join().split([[0, 1], [2, 3]]): a world of some workers",
    "global_process_set": "no process_set: all workers take part",
    "grouped_reducescatter_async": "hvd.reducescatter_async of each tensor",
    "join": "un.shard: every worker has as many batches, and every sample counts once",
    "remove_process_set": "un.join().split([[0, 1], [2, 3]]): a world of some workers",
    "run": "un.launch(function, workers=4)",
    "sparse_allreduce_async": "hvd.allreduce of the dense tensor",
}


def __getattr__(name: str) -> NoReturn:
    if name in _NOT_OFFERED:
        raise AttributeError(f"{name} of Horovod is not offered here; use {_NOT_OFFERED[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@torch.no_grad()
def broadcast_parameters(params: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], root_rank: int = 0) -> None:
    """Make parameters and buffers (`model.state_dict()` or `model.named_parameters()`) those of `root_rank`."""
    pairs = params.items() if isinstance(params, Mapping) else params
    tensors = [x.data if isinstance(x, Parameter) else x for _, x in pairs if isinstance(x, Tensor)]
    if tensors:
        here().broadcast(tensors, root_rank, tag="hvd.broadcast_parameters").wait()


def broadcast_optimizer_state(optimizer: Optimizer, root_rank: int = 0, model: nn.Module | None = None) -> None:
    """Make an optimizer's state and settings those of `root_rank`."""
    state = here().broadcast_object(optimizer.state_dict(), root_rank)
    if here().rank != root_rank:
        optimizer.load_state_dict(state)


def SyncBatchNorm(
    num_features: int,
    eps: float = 1e-5,
    momentum: float = 0.1,
    affine: bool = True,
    track_running_stats: bool = True,
) -> nn.Module:
    """A layer of batch normalisation over the joined batch of all workers; its input has 2 dimensions or more."""
    link = _links[here()] = _links.get(here()) or Link(here())
    return _Joined(nn.BatchNorm1d(num_features, eps, momentum, affine, track_running_stats), link)
