"""Timing collectives and messages between the actual ranks: how fast a link is. Every rank calls these at the same
point, and all get one answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Any

import torch

from unisono.predict.costs import all_reduce_bytes
from unisono.world.world import World

__all__ = [
    "EncryptionCost",
    "MeasuredLink",
    "measure_encryption",
    "measure_link",
    "measure_links",
    "take_slowest",
    "time_runs",
]

_SMALL_BYTES = 64
_LARGE_BYTES = (1 << 18, 1 << 20, 1 << 22, 1 << 24)
_LONG_ENOUGH_S = 0.02  # so that latency, and what a shaped link lets through at once, count for little
_REPEATS = 3
_MOST_HOSTS = 6  # with more, only neighbours' links are measured
_PINGS = 5
_MESSAGE_BYTES = (256 << 10, 1 << 20, 4 << 20, 16 << 20)
_MESSAGE_S = 0.04


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


# Between two hosts ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MeasuredLink:
    """The link between the first ranks of two hosts."""

    first: str
    second: str
    latency_s: float
    bits_per_s: float


def measure_links(channel: World) -> list[MeasuredLink]:
    """Measure the links between hosts one after the other; every rank gets all results."""
    leaders = [channel.hosts.index(host) for host in dict.fromkeys(channel.hosts)]
    if len(leaders) < 2:
        return []
    pairs: Sequence[tuple[int, int]] = list(combinations(leaders, 2))
    if len(leaders) > _MOST_HOSTS:
        pairs = [(leaders[i], leaders[(i + 1) % len(leaders)]) for i in range(len(leaders))]
    found: list[MeasuredLink] = []
    for first, second in pairs:
        channel.barrier()
        mine: list[float] = []
        if channel.rank in (first, second):
            mine = list(_measure_pair(channel, second if channel.rank == first else first, leads=channel.rank == first))
        latency_s, bits_per_s = channel.gather_objects(mine)[first]
        found.append(MeasuredLink(channel.hosts[first], channel.hosts[second], latency_s, bits_per_s))
    return found


@dataclass(frozen=True)
class EncryptionCost:
    """What a link between two hosts passes, encrypted and not; `is_on`: what this world does."""

    is_on: bool
    plain_bits_per_s: float
    encrypted_bits_per_s: float


def measure_encryption(world: World) -> EncryptionCost | None:
    """Measure the link between the first two hosts over further connections, encrypted and not; every rank gets both.

    None for ranks of one host: nothing of theirs is encrypted.
    """
    transport, second = world.transport, next((r for r, host in enumerate(world.hosts) if host != world.hosts[0]), None)
    if transport is None or second is None:
        return None
    rates = []
    for is_encrypted in (False, True):
        base = transport.connect_again(is_encrypted=is_encrypted)
        if base is None:
            return None
        again = World(base, device=torch.device("cpu"), hosts=list(world.hosts), name="probe")
        try:
            mine = 0.0
            if world.rank in (0, second):
                mine = _measure_pair(again, second if world.rank == 0 else 0, leads=world.rank == 0)[1]
            rates.append(float(again.gather_objects(mine)[0]))
        finally:
            again.close()
    return EncryptionCost(transport.is_encrypted, *rates)


def _measure_pair(channel: World, other: int, *, leads: bool) -> tuple[float, float]:
    """Half the time of a small message there and back; the bytes of a large one by what it takes longer."""

    def there_and_back(nbytes: int) -> float:
        data, word = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
        began = time.perf_counter()
        if leads:
            channel.send(data, other, tag="probe").wait()
            channel.recv(word, other, tag="probe").wait()
        else:
            channel.recv(data, other, tag="probe").wait()
            channel.send(word, other, tag="probe").wait()
        return time.perf_counter() - began

    there_and_back(8)
    small = median([there_and_back(8) for _ in range(_PINGS)])
    points: list[tuple[int, float]] = [(8, small)]
    for nbytes in _MESSAGE_BYTES:
        there_and_back(nbytes)
        points.append((nbytes, there_and_back(nbytes)))
        long = torch.tensor([float(points[-1][1] > _MESSAGE_S)], dtype=torch.float64)
        if leads:  # one decides for both
            channel.send(long, other, tag="probe").wait()
        else:
            channel.recv(long, other, tag="probe").wait()
        if long.item():
            break
    (before, earlier), (last, later) = points[-2:]
    rate = (last - before) / (later - earlier) if later > earlier else last / later
    return small / 2, 8 * rate
