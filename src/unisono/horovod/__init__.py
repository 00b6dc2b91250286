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

from unisono.batch_norm import Link
from unisono.batch_norm import SyncBatchNorm as _Joined
from unisono.horovod import elastic as elastic
from unisono.horovod.collectives import Adasum as Adasum
from unisono.horovod.collectives import Average as Average
from unisono.horovod.collectives import Max as Max
from unisono.horovod.collectives import Min as Min
from unisono.horovod.collectives import Product as Product
from unisono.horovod.collectives import Sum as Sum
from unisono.horovod.collectives import allgather as allgather
from unisono.horovod.collectives import allgather_async as allgather_async
from unisono.horovod.collectives import allgather_object as allgather_object
from unisono.horovod.collectives import allreduce as allreduce
from unisono.horovod.collectives import allreduce_ as allreduce_
from unisono.horovod.collectives import allreduce_async as allreduce_async
from unisono.horovod.collectives import allreduce_async_ as allreduce_async_
from unisono.horovod.collectives import alltoall as alltoall
from unisono.horovod.collectives import alltoall_async as alltoall_async
from unisono.horovod.collectives import barrier as barrier
from unisono.horovod.collectives import broadcast as broadcast
from unisono.horovod.collectives import broadcast_ as broadcast_
from unisono.horovod.collectives import broadcast_async as broadcast_async
from unisono.horovod.collectives import broadcast_async_ as broadcast_async_
from unisono.horovod.collectives import broadcast_object as broadcast_object
from unisono.horovod.collectives import grouped_allgather as grouped_allgather
from unisono.horovod.collectives import grouped_allgather_async as grouped_allgather_async
from unisono.horovod.collectives import grouped_allreduce as grouped_allreduce
from unisono.horovod.collectives import grouped_allreduce_ as grouped_allreduce_
from unisono.horovod.collectives import grouped_allreduce_async as grouped_allreduce_async
from unisono.horovod.collectives import grouped_allreduce_async_ as grouped_allreduce_async_
from unisono.horovod.collectives import grouped_reducescatter as grouped_reducescatter
from unisono.horovod.collectives import poll as poll
from unisono.horovod.collectives import reducescatter as reducescatter
from unisono.horovod.collectives import reducescatter_async as reducescatter_async
from unisono.horovod.collectives import synchronize as synchronize
from unisono.horovod.optimizer import Compression as Compression
from unisono.horovod.optimizer import DistributedOptimizer as DistributedOptimizer
from unisono.horovod.place import ccl_built as ccl_built
from unisono.horovod.place import cross_rank as cross_rank
from unisono.horovod.place import cross_size as cross_size
from unisono.horovod.place import cuda_built as cuda_built
from unisono.horovod.place import ddl_built as ddl_built
from unisono.horovod.place import gloo_built as gloo_built
from unisono.horovod.place import gloo_enabled as gloo_enabled
from unisono.horovod.place import here
from unisono.horovod.place import init as init
from unisono.horovod.place import is_homogeneous as is_homogeneous
from unisono.horovod.place import is_initialized as is_initialized
from unisono.horovod.place import local_rank as local_rank
from unisono.horovod.place import local_size as local_size
from unisono.horovod.place import mpi_built as mpi_built
from unisono.horovod.place import mpi_enabled as mpi_enabled
from unisono.horovod.place import mpi_threads_supported as mpi_threads_supported
from unisono.horovod.place import nccl_built as nccl_built
from unisono.horovod.place import rank as rank
from unisono.horovod.place import rocm_built as rocm_built
from unisono.horovod.place import shutdown as shutdown
from unisono.horovod.place import size as size
from unisono.horovod.place import start_timeline as start_timeline
from unisono.horovod.place import stop_timeline as stop_timeline
from unisono.world import PeerLost, World

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "synchronize",
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
