"""Who this worker is, under Horovod's names, and what it was built with."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from unisono.world import World, join

__all__ = [
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
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
    "rank",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]

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
