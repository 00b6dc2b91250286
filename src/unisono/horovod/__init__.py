"""Horovod's names over Unisono: `import unisono.horovod as hvd` in the place of `import horovod.torch as hvd`.

The workers are started by `unisono run -n 4 train.py` (or any other engine) instead of `horovodrun`. What Horovod has
and this has not is refused by name. `DistributedOptimizer(..., strategy="powersgd(rank=4)")` takes any of our methods.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from unisono.background import Handle
from unisono.horovod import elastic as elastic
from unisono.horovod.optimizer import Compression as Compression
from unisono.horovod.optimizer import DistributedOptimizer as DistributedOptimizer
from unisono.horovod.optimizer import refuse
from unisono.world import World, join

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Max",
    "Min",
    "Sum",
    "allgather",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "cross_rank",
    "cross_size",
    "elastic",
    "grouped_allreduce",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "poll",
    "rank",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]

T = TypeVar("T")
Op = Literal["mean", "sum", "min", "max", "adasum"]
Average: Op = "mean"
Sum: Op = "sum"
Min: Op = "min"
Max: Op = "max"
Adasum: Op = "adasum"

_world: World | None = None
_timeline: Path | None = None


def init() -> None:
    """Meet the other workers. Calling it again does nothing."""
    global _world, _timeline
    if _world is None:
        _world = join()
        if named := os.environ.get("HOROVOD_TIMELINE"):
            _timeline = Path(named)


def shutdown() -> None:
    """Write the timeline, where one was begun; the world stays until the program ends."""
    global _world
    if _timeline is not None:
        stop_timeline()
    _world = None


def is_initialized() -> bool:
    """Whether `init` was called."""
    return _world is not None


def _here() -> World:
    if _world is None:
        raise ValueError("Unisono has not been initialized; use hvd.init().")
    return _world


def rank() -> int:
    """My number among all workers."""
    return _here().rank


def size() -> int:
    """How many workers there are."""
    return _here().size


def local_rank() -> int:
    """My number among the workers of this host."""
    world = _here()
    return [r for r in range(world.size) if world.hosts[r] == world.host].index(world.rank)


def local_size() -> int:
    """How many workers this host has."""
    return _here().local_size


def cross_rank() -> int:
    """My host's number, among those that have a worker of my local rank."""
    return _list_peers().index(_here().rank)


def cross_size() -> int:
    """How many hosts have a worker of my local rank."""
    return len(_list_peers())


def _list_peers() -> list[int]:
    """The ranks with my local rank, one a host at most."""
    world, mine, seen = _here(), local_rank(), dict[str, int]()
    found = []
    for r, host in enumerate(world.hosts):
        if seen.get(host, 0) == mine:
            found.append(r)
        seen[host] = seen.get(host, 0) + 1
    return found


def is_homogeneous() -> bool:
    """Whether every host has as many workers."""
    hosts = list(_here().hosts)
    return len({hosts.count(host) for host in hosts}) == 1


# Collectives -------------------------------------------------------------------------------------------------------


def allreduce_async_(
    tensor: Tensor, average: bool | None = None, name: str = "", op: Op | None = None
) -> Handle[Tensor]:
    """Begin `allreduce_`; `synchronize` of what it gives waits for it."""
    how = _find_op(average, op)
    return _here().all_reduce(tensor, how, tag=name or "hvd.allreduce")  # type: ignore[arg-type]


def allreduce_async(
    tensor: Tensor, average: bool | None = None, name: str = "", op: Op | None = None
) -> Handle[Tensor]:
    """Begin `allreduce`."""
    return allreduce_async_(tensor.detach().clone(), average, name, op)


def allreduce_(tensor: Tensor, average: bool | None = None, name: str = "", op: Op | None = None) -> Tensor:
    """Replace a tensor by the mean over all workers, or by what `op` says."""
    return allreduce_async_(tensor, average, name, op).wait()


def allreduce(tensor: Tensor, average: bool | None = None, name: str = "", op: Op | None = None) -> Tensor:
    """The mean of a tensor over all workers, or what `op` says; the tensor stays as it is."""
    return allreduce_async(tensor, average, name, op).wait()


def grouped_allreduce(
    tensors: Sequence[Tensor], average: bool | None = None, name: str = "", op: Op | None = None
) -> list[Tensor]:
    """`allreduce` of several tensors, together."""
    copies = [x.detach().clone() for x in tensors]
    how = _find_op(average, op)
    found: list[Tensor] = _here().all_reduce(copies, how, tag=name or "hvd.allreduce").wait()  # type: ignore[arg-type]
    return found


def allgather(tensor: Tensor, name: str = "") -> Tensor:
    """All workers' tensors, one after the other along the first dimension, which may differ."""
    return torch.cat(_here().all_gather(tensor, tag=name or "hvd.allgather").wait())


def broadcast_(tensor: Tensor, root_rank: int, name: str = "") -> Tensor:
    """Replace a tensor by that of `root_rank`."""
    found: Tensor = _here().broadcast(tensor, root_rank, tag=name or "hvd.broadcast").wait()
    return found


def broadcast(tensor: Tensor, root_rank: int, name: str = "") -> Tensor:
    """The tensor of `root_rank`; the given one stays as it is."""
    return broadcast_(tensor.detach().clone(), root_rank, name)


def alltoall(tensor: Tensor, splits: Tensor | Sequence[int] | None = None, name: str = "") -> Tensor:
    """Send `splits[r]` rows to worker r (equal parts by default); what the workers sent to me, one after the other."""
    world = _here()
    rows = [int(n) for n in splits] if splits is not None else [len(tensor) // world.size] * world.size
    if len(rows) != world.size or sum(rows) != len(tensor):
        raise ValueError(
            f"alltoall of {len(tensor)} rows by splits={rows} over {world.size} workers: give one number a worker, "
            "which add up to the rows"
        )
    return torch.cat(world.all_to_all(list(tensor.split(rows)), tag=name or "hvd.alltoall").wait())


def broadcast_object(obj: T, root_rank: int = 0, name: str = "") -> T:
    """The object of `root_rank`, on every worker: plain values and tensors."""
    found: T = _here().broadcast_object(obj, root_rank)
    return found


def allgather_object(obj: T, name: str = "") -> list[T]:
    """Every worker's object."""
    return _here().gather_objects(obj)


def barrier() -> None:
    """Wait until all workers are here."""
    _here().barrier()


def synchronize(handle: Handle[T]) -> T:
    """Wait for what `allreduce_async` began."""
    return handle.wait()


def poll(handle: Handle[Any]) -> bool:
    """Whether it is done."""
    return handle.done()


def _find_op(average: bool | None, op: Op | None) -> Op:
    if average is not None and op is not None:
        raise ValueError("give either average or op, not both")
    chosen = op if op is not None else "sum" if average is False else "mean"
    if chosen == "adasum":
        refuse("Adasum", 'hvd.Average, or another method: DistributedOptimizer(..., strategy="local_sgd")')
    return chosen


# State -------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def broadcast_parameters(params: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], root_rank: int = 0) -> None:
    """Make parameters and buffers (`model.state_dict()` or `model.named_parameters()`) those of `root_rank`."""
    pairs = params.items() if isinstance(params, Mapping) else params
    tensors = [x.data if isinstance(x, Parameter) else x for _, x in pairs if isinstance(x, Tensor)]
    if tensors:
        _here().broadcast(tensors, root_rank, tag="hvd.broadcast_parameters").wait()


def broadcast_optimizer_state(optimizer: Optimizer, root_rank: int = 0) -> None:
    """Make an optimizer's state and settings those of `root_rank`."""
    state = _here().broadcast_object(optimizer.state_dict(), root_rank)
    if _here().rank != root_rank:
        optimizer.load_state_dict(state)


# Timeline ----------------------------------------------------------------------------------------------------------


def start_timeline(file_path: str | Path, mark_cycles: bool = False) -> None:
    """Write a trace of all workers to this file (for chrome://tracing or ui.perfetto.dev), at `stop_timeline` or
    `shutdown`. Every worker calls it; `mark_cycles` says nothing here."""
    global _timeline
    _here()
    _timeline = Path(file_path)


def stop_timeline() -> None:
    """Write the trace. Every worker calls it."""
    global _timeline
    if _timeline is None:
        return
    world, path, _timeline = _here(), _timeline, None
    report = world.ledger.gather(world)
    if world.rank == 0:
        report.trace(path)
