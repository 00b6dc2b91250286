"""The network between the actual workers, measured: each link, and each operation at several sizes.

Every rank calls these at the same step. What one rank would decide by its own clock, all decide by the slowest's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count, takewhile
from statistics import median
from typing import Any

import torch

from unisono.launchers.runtime.machine import read_boot_id, usable_cores
from unisono.predict.costs import Link, Network, Operation, fit
from unisono.predict.costs.network import take_medians
from unisono.world import World
from unisono.world.probe import EncryptionCost, MeasuredLink, measure_encryption, measure_links, take_slowest, time_runs

OPS = ("all_reduce", "all_gather", "all_to_all", "broadcast", "exchange", "reduce_scatter")
_LEAST_BYTES = 512
_GROWTH = 8
_CHUNK_S = 0.02  # a short operation is repeated for so long
_LONG_S = 0.12  # a longer one is the last of its kind
_CHUNKS = 3


def probe(world: World, most_bytes: int) -> tuple[Network, list[MeasuredLink], EncryptionCost | None]:
    """Measure every operation at sizes up to `most_bytes`, every link between hosts, and what encryption costs."""
    channel = world.channel()
    try:
        busy: dict[str, float] = {}
        curves = {op: measure_operation(channel, op, most_bytes, busy) for op in OPS}
        links = measure_links(channel)
        encryption = measure_encryption(channel)
        inside = _measure_inside(world) if world.local_size > 1 else None
    finally:
        channel.close()
    fitted = {op: fit(points) for op, points in curves.items()}
    per_host = max(world.hosts.count(host) for host in set(world.hosts))
    unit = Network(world.size, per_host, Link(1.0, 8.0)).formula(Operation("all_reduce", 0))
    latency_s, s_per_byte = fitted["all_reduce"]  # the slowest link on the way round is in it
    latency_s = median(link.latency_s for link in links) if links else latency_s / unit.latency_s
    between = Link(latency_s, 8 * unit.s_per_byte / max(s_per_byte, 1e-15))
    typical = {op: take_medians(points) for op, points in curves.items()}
    spread = _find_spread(curves)
    steals = _find_steals(world, busy)
    return Network(world.size, per_host, between, inside, fitted, typical, steals, spread), links, encryption


def _find_steals(world: World, busy: dict[str, float]) -> dict[str, float]:
    """By operation: what it takes away from compute, where the ranks of a machine want more cores than there are.

    Emulated hosts share a machine: what counts is the machine's boot.
    """
    boots = world.gather_objects(read_boot_id())
    share = boots.count(read_boot_id()) / usable_cores()
    threads = torch.get_num_threads()
    mine = {op: max(0.0, share * (threads + used) - max(1.0, share * threads)) for op, used in busy.items()}
    everyone = world.gather_objects(mine)
    return {op: max(each[op] for each in everyone) for op in mine}


def measure_operation(
    channel: World, op: str, most_bytes: int, busy: dict[str, float] | None = None
) -> list[tuple[float, float]]:
    """Points (bytes, seconds): sizes grow until one takes long; short ones are repeated.

    busy: takes how many cores this process kept busy meanwhile.
    """
    points = []
    times = 1
    growing = (_LEAST_BYTES * _GROWTH**i for i in count())
    for nbytes in [*takewhile(lambda size: size < most_bytes, growing), max(most_bytes, _LEAST_BYTES)]:
        run = _prepare(channel, op, nbytes)
        run()
        used, began = time.process_time(), time.perf_counter()
        for _ in range(_CHUNKS):
            channel.barrier()
            seconds = take_slowest(channel, [time_runs(channel, run, times)])[0] / times
            points.append((float(nbytes), seconds))
            if seconds > _LONG_S:
                break
        if busy is not None:  # the largest size's is kept: there it counts
            busy[op] = (time.process_time() - used) / (time.perf_counter() - began)
        if seconds > _LONG_S:
            break
        times = max(1, min(20, int(_CHUNK_S / (seconds * 2))))
    return points


def _prepare(channel: World, op: str, nbytes: int) -> Callable[[], Any]:
    """The operation, on tensors that are there already."""
    n, device = channel.size, channel.device
    whole = torch.zeros(-(-nbytes // 4 // n) * n, dtype=torch.float32, device=device)
    if op == "all_reduce":
        line = channel.empty(whole.numel())
        line.zero_()
        return lambda: channel.all_reduce(line, "mean", tag="probe").wait()
    if op == "reduce_scatter":
        return lambda: channel.reduce_scatter(whole, tag="probe").wait()
    if op == "broadcast":
        return lambda: channel.broadcast(whole, tag="probe").wait()
    if op == "all_gather":
        mine = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        outs = [torch.zeros_like(mine) for _ in range(n)]
        return lambda: channel.all_gather(mine, even=True, out=outs, tag="probe").wait()
    if op == "all_to_all":
        parts = list(whole.split(whole.numel() // n))
        into = [torch.zeros_like(part) for part in parts]
        return lambda: channel.all_to_all(parts, out=into, tag="probe").wait()
    data = bytes(nbytes)
    return lambda: channel.gather_objects(data)


def _measure_inside(world: World) -> Link:
    """Memory that the ranks of a host share, by an all-reduce in it."""
    inner = world.split("host", inline=True)
    try:
        points = measure_operation(inner, "all_reduce", 1 << 22)
    finally:
        inner.close()
    latency_s, s_per_byte = fit(points)
    return Link(latency_s / 2, 8 * 2 / max(s_per_byte, 1e-15))


def _find_spread(curves: dict[str, list[tuple[float, float]]]) -> float:
    """How far single times are from the median of their size, as a share of it: that of four of five."""
    off = []
    for points in curves.values():
        typical = dict(take_medians(points))
        off += [abs(seconds / typical[nbytes] - 1) for nbytes, seconds in points if nbytes > _LEAST_BYTES]
    return sorted(off)[int(0.8 * len(off))] if off else 0.05
