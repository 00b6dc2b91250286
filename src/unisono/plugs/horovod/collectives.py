"""Who this worker is, under Horovod's names, and Horovod's collectives, with its arguments and what it returns.

Gradients pass through those collectives that give new tensors.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, Literal, NoReturn, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from unisono.background import Handle
from unisono.methods import autograd
from unisono.world import World, join

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "Max",
    "Min",
    "Product",
    "Sum",
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
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "here",
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
    "refuse",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")
Op = Literal["mean", "sum", "min", "max", "product", "adasum"]
Average: Op = "mean"
Sum: Op = "sum"
Min: Op = "min"
Max: Op = "max"
Product: Op = "product"
Adasum: Op = "adasum"
Tensors = Sequence[Tensor]
_world: World | None = None
_timeline: Path | None = None


class Compression:
    """How gradients travel: as they are, or as float16. For more, `DistributedOptimizer(..., strategy=...)`."""

    none = "allreduce"
    fp16 = "allreduce(reducer=fp16)"


def refuse(what: str, instead: str) -> NoReturn:
    """Refuse a feature of Horovod's, and name what to use instead."""
    raise NotImplementedError(f"{what} is not offered here; use {instead}")


# Who this worker is -------------------------------------------------------------------------------------------------


def init() -> None:
    """Meet the other workers. Calling it again does nothing."""
    global _world, _timeline
    if _world is None:
        _world = join()
        if named := os.environ.get("HOROVOD_TIMELINE"):
            _timeline = Path(named)


def shutdown() -> None:
    """Write the timeline, if one was started; the world stays until the program ends."""
    global _world
    if _timeline is not None:
        stop_timeline()
    _world = None


def is_initialized() -> bool:
    """Whether `init` was called."""
    return _world is not None


def here() -> World:
    """The world, after `init`."""
    if _world is None:
        raise ValueError("Unisono has not been initialized; use hvd.init().")
    return _world


def rank() -> int:
    """This worker's number among all."""
    return here().rank


def size() -> int:
    """How many workers there are."""
    return here().size


def local_rank() -> int:
    """This worker's number among those of its host."""
    return here().local_rank


def local_size() -> int:
    """How many workers this host has."""
    return here().local_size


def cross_rank() -> int:
    """The number of this host among those that have a worker of the same local rank."""
    return _list_peers().index(here().rank)


def cross_size() -> int:
    """How many hosts have a worker of the same local rank."""
    return len(_list_peers())


def _list_peers() -> list[int]:
    """The ranks that have this worker's local rank on their host."""
    world, mine, seen = here(), local_rank(), dict[str, int]()
    found = []
    for r, host in enumerate(world.hosts):
        if seen.get(host, 0) == mine:
            found.append(r)
        seen[host] = seen.get(host, 0) + 1
    return found


def is_homogeneous() -> bool:
    """Whether all hosts have the same number of workers."""
    hosts = list(here().hosts)
    return len({hosts.count(host) for host in hosts}) == 1


# What programs ask before they choose ------------------------------------------------------------------------------


def nccl_built() -> bool:
    """Whether torch has NCCL."""
    return torch.distributed.is_available() and torch.distributed.is_nccl_available()


def cuda_built() -> bool:
    """Whether torch is one for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether torch is one for ROCm."""
    return torch.version.hip is not None


def gloo_built() -> bool:
    """Whether torch has gloo."""
    return torch.distributed.is_available() and torch.distributed.is_gloo_available()


def gloo_enabled() -> bool:
    """No: workers talk over our own transports."""
    return False


mpi_built = mpi_enabled = mpi_threads_supported = ccl_built = ddl_built = gloo_enabled


# Timeline ----------------------------------------------------------------------------------------------------------


def start_timeline(file_path: str | Path, mark_cycles: bool = False) -> None:
    """Write a trace of all workers to this file (for chrome://tracing or ui.perfetto.dev), at `stop_timeline` or
    `shutdown`. Every worker calls it; `mark_cycles` says nothing here."""
    global _timeline
    here()
    _timeline = Path(file_path)


def stop_timeline() -> None:
    """Write the trace. Every worker calls it."""
    global _timeline
    if _timeline is None:
        return
    world, path, _timeline = here(), _timeline, None
    report = world.ledger.gather(world)
    if world.rank == 0:
        report.trace(path)


# Forms of one operation ---------------------------------------------------------------------------------------------


def _wait_for(begin: Callable[P, Handle[T]], says: str) -> Callable[P, T]:
    """The form of an operation that returns when it is done."""

    @wraps(begin)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        return begin(*args, **kwargs).wait()

    run.__doc__, run.__name__ = says, begin.__name__.replace("_async", "")
    shown = inspect.signature(begin)
    gives = shown.return_annotation.removeprefix("Handle[").removesuffix("]")
    run.__signature__ = shown.replace(return_annotation=gives)  # type: ignore[attr-defined]
    return run


def _on_copies(begin: Callable[P, Handle[T]], says: str) -> Callable[P, Handle[T]]:
    """The form of an operation that leaves its tensors as they are."""

    @wraps(begin)
    def run(*args: P.args, **kwargs: P.kwargs) -> Handle[T]:
        args, kwargs = tree_map_only(Tensor, lambda x: x.detach().clone(), (args, kwargs))
        return begin(*args, **kwargs)

    run.__doc__, run.__name__ = says, begin.__name__.removesuffix("_")
    return run


# Reductions --------------------------------------------------------------------------------------------------------


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[Tensor]:
    """Begin `allreduce_`; `synchronize` of what it gives waits for it."""
    handle = grouped_allreduce_async_([tensor], average, name, op, prescale_factor, postscale_factor)
    return _then(handle, lambda found: found[0])


allreduce_async = _on_copies(allreduce_async_, "Begin `allreduce`.")
allreduce_ = _wait_for(allreduce_async_, "Replace a tensor by the mean over all workers, or by what `op` says.")


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: str = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """The mean of a tensor over all workers, or what `op` says; the tensor stays as it is."""
    how, world = _find_op(average, op), here()
    given = _compress(tensor, compression)
    if how in ("mean", "sum") and given.requires_grad:
        found = autograd.all_reduce(given * prescale_factor, world, how, tag=name or "hvd.allreduce")
        return (found * postscale_factor).to(tensor.dtype)
    handle = allreduce_async(given, None, name, how, prescale_factor, postscale_factor)
    return handle.wait().to(tensor.dtype)


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[list[Tensor]]:
    """Begin `grouped_allreduce_`."""
    how, given = _find_op(average, op), [x.detach() for x in tensors]
    _scale(given, prescale_factor)
    begun: Handle[Any] = here().all_reduce(given, how, tag=name or "hvd.allreduce")  # type: ignore[arg-type]

    def finish(_: Any) -> list[Tensor]:
        _scale(given, postscale_factor)
        return list(tensors)

    return _then(begun, finish)


grouped_allreduce_async = _on_copies(grouped_allreduce_async_, "Begin `grouped_allreduce`.")
grouped_allreduce_ = _wait_for(grouped_allreduce_async_, "`allreduce_` of several tensors, together.")


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: str = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """`allreduce` of several tensors, together."""
    if any(x.requires_grad for x in tensors):
        scales = prescale_factor, postscale_factor
        return [allreduce(x, average, name, compression, op, *scales) for x in tensors]
    given = [_compress(x, compression) for x in tensors]
    found = grouped_allreduce_async(given, average, name, op, prescale_factor, postscale_factor).wait()
    return [mine.to(x.dtype) for mine, x in zip(found, tensors, strict=True)]


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: Op = Average,
    *,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[Tensor]:
    """Begin `reducescatter`."""
    how, world = _find_op(None, op), here()
    given = tensor.detach() * prescale_factor if prescale_factor != 1.0 else tensor.detach()
    begun = world.reduce_scatter(_deal_rows(given, world), how, tag=name or "hvd.reducescatter")  # type: ignore[arg-type]
    return begun if postscale_factor == 1.0 else _then(begun, lambda found: found * postscale_factor)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: str = Compression.none,
    op: Op = Average,
    *,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """This worker's part of the rows of the mean over all workers, or of what `op` says. If rows do not divide evenly,
    the first ranks have one more."""
    scales = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    if tensor.requires_grad:  # the same numbers, by a way that gradients pass through
        whole = allreduce(tensor, None, name, compression, op, **scales)
        return _deal_rows(whole, here())[here().rank]
    return reducescatter_async(_compress(tensor, compression), name, op, **scales).wait().to(tensor.dtype)


def grouped_reducescatter(
    tensors: Tensors, name: str | None = None, compression: str = Compression.none, op: Op = Average
) -> list[Tensor]:
    """`reducescatter` of several tensors."""
    return [reducescatter(x, name, compression, op) for x in tensors]


# From one to another -----------------------------------------------------------------------------------------------


def allgather_async(tensor: Tensor, name: str | None = None) -> Handle[Tensor]:
    """Begin `allgather`."""
    return _then(here().all_gather(tensor.detach(), tag=name or "hvd.allgather"), torch.cat)


def allgather(tensor: Tensor, name: str | None = None) -> Tensor:
    """All workers' tensors, one after the other along the first dimension, which may differ. As in Horovod, the
    gradient is the mean of all workers' gradients for this worker's rows."""
    if tensor.requires_grad:
        return autograd.all_gather(tensor, here(), "mean", tag=name or "hvd.allgather")
    return allgather_async(tensor, name).wait()


def grouped_allgather_async(tensors: Tensors, name: str | None = None) -> Handle[list[Tensor]]:
    """Begin `grouped_allgather`."""
    begun = [allgather_async(x, name) for x in tensors]
    return Handle(lambda: [handle.wait() for handle in begun], lambda: all(handle.done() for handle in begun))


def grouped_allgather(tensors: Tensors, name: str | None = None) -> list[Tensor]:
    """`allgather` of several tensors."""
    return [allgather(x, name) for x in tensors]


def broadcast_async_(tensor: Tensor, root_rank: int, name: str | None = None) -> Handle[Tensor]:
    """Begin `broadcast_`."""
    begun: Handle[Any] = here().broadcast(tensor.detach(), root_rank, tag=name or "hvd.broadcast")
    return _then(begun, lambda _: tensor)


broadcast_async = _on_copies(broadcast_async_, "Begin `broadcast`.")
broadcast_ = _wait_for(broadcast_async_, "Replace a tensor by that of `root_rank`.")


def broadcast(tensor: Tensor, root_rank: int, name: str | None = None) -> Tensor:
    """The tensor of `root_rank`; the given one stays as it is."""
    if tensor.requires_grad:
        return autograd.broadcast(tensor, root_rank, here(), "mean", tag=name or "hvd.broadcast")
    return broadcast_async(tensor, root_rank, name).wait()


def alltoall(
    tensor: Tensor, splits: Tensor | Sequence[int] | None = None, name: str | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Send `splits[r]` rows to worker r (equal parts by default); returns what all sent here, one after the other.
    With `splits`, as in Horovod, also how many rows each of them sent."""
    world = here()
    rows = [int(n) for n in splits] if splits is not None else [len(tensor) // world.size] * world.size
    if len(rows) != world.size or sum(rows) != len(tensor):
        raise ValueError(
            f"alltoall of {len(tensor)} rows by splits={rows} over {world.size} workers: give one number a worker, "
            "which add up to the rows"
        )
    found, received = autograd.all_to_all(tensor, rows, world, tag=name or "hvd.alltoall")
    return found if splits is None else (found, torch.tensor(received, dtype=torch.int32))


def alltoall_async(
    tensor: Tensor, splits: Tensor | Sequence[int] | None = None, name: str | None = None
) -> Handle[Tensor | tuple[Tensor, Tensor]]:
    """`alltoall`, which is done when this returns."""
    return Handle.of(alltoall(tensor.detach(), splits, name))


def broadcast_object(obj: T, root_rank: int = 0, name: str | None = None) -> T:
    """The object of `root_rank`, on every worker: plain values and tensors."""
    found: T = here().broadcast_object(obj, root_rank)
    return found


def allgather_object(obj: T, name: str | None = None) -> list[T]:
    """Every worker's object."""
    return here().gather_objects(obj)


def barrier() -> None:
    """Wait until all workers are here."""
    here().barrier()


def synchronize(handle: Handle[T]) -> T:
    """Wait for an operation that a function such as `allreduce_async` began."""
    return handle.wait()


def poll(handle: Handle[Any]) -> bool:
    """Whether an operation is done."""
    return handle.done()


# Helpers -----------------------------------------------------------------------------------------------------------


def _find_op(average: bool | None, op: Op | None) -> Op:
    if average is not None and op is not None:
        raise ValueError("give either average or op, not both")
    chosen = op if op is not None else "sum" if average is False else "mean"
    if chosen == "adasum":
        refuse("Adasum of Horovod", 'hvd.Average, or another method: DistributedOptimizer(..., strategy="local_sgd")')
    return chosen


def _compress(x: Tensor, compression: str) -> Tensor:
    return x.half() if compression == Compression.fp16 and x.is_floating_point() else x


@torch.no_grad()
def _scale(tensors: Tensors, factor: float) -> None:
    if factor != 1.0:
        for x in tensors:
            x.mul_(factor)


def _deal_rows(x: Tensor, world: World) -> list[Tensor]:
    """The rows in one part for each worker."""
    least, more = divmod(len(x), world.size)
    return list(x.split([least + (r < more) for r in range(world.size)]))


def _then(handle: Handle[T], finish: Callable[[T], R]) -> Handle[R]:
    return Handle(lambda: finish(handle.wait()), handle.done)
