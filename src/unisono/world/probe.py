"""Timing collectives between the actual ranks. Every rank calls these at the same point, and all get one answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from unisono.predict.costs import all_reduce_bytes
from unisono.world.world import World

__all__ = ["measure_link", "take_slowest", "time_runs"]

_SMALL_BYTES = 64
_LARGE_BYTES = (1 << 18, 1 << 20, 1 << 22, 1 << 24)
_LONG_ENOUGH_S = 0.02  # so that latency, and what a shaped link lets through at once, count for little
_REPEATS = 3


def measure_link(world: World, *, most_bytes: int = _LARGE_BYTES[-1], tag: str = "probe") -> tuple[float, float]:
    """Seconds that an all-reduce takes however small it is, and seconds for each byte that a rank sends in one.

    Sizes grow up to `most_bytes`, until one takes long enough to tell.
    """
    small_s = _time_all_reduce(world, _SMALL_BYTES, tag)
    for nbytes in (size for size in _LARGE_BYTES if size <= most_bytes):
        large_s = _time_all_reduce(world, nbytes, tag)
        if large_s >= _LONG_ENOUGH_S:
            break
    return small_s, max(0.0, large_s - small_s) / all_reduce_bytes(nbytes - _SMALL_BYTES, world.size)


def _time_all_reduce(world: World, nbytes: int, tag: str) -> float:
    """The shortest of a few: what else the machine does only adds to it."""
    x = torch.zeros(nbytes // 4, dtype=torch.float32, device=world.device)
    times = [time_runs(world, lambda: world.all_reduce(x, "mean", tag=tag).wait()) for _ in range(_REPEATS)]
    return take_slowest(world, [min(times)], tag)[0]


def time_runs(world: World, run: Callable[[], Any], times: int = 1) -> float:
    """Seconds that this rank takes to call `run` so many times, with what its device still does then."""
    began = world.ledger.clock()
    for _ in range(times):
        run()
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    return world.ledger.clock() - began


def take_slowest(world: World, numbers: Sequence[float], tag: str = "probe") -> list[float]:
    """The largest of each number over the ranks."""
    found: list[float] = world.all_reduce(torch.tensor(numbers, dtype=torch.float64), "max", tag=tag).wait().tolist()
    return found
