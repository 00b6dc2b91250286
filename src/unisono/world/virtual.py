"""Worlds without other processes: ranks as threads (`run_threads`), or one rank of N alone (`simulate`)."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from unisono.launchers.runtime.debugger import RankThreads
from unisono.launchers.runtime.frames import CalledByAll
from unisono.world.ledger import Ledger
from unisono.world.rendezvous import enter
from unisono.world.transports import PeerLost
from unisono.world.transports.simulated import SimulatedTransport
from unisono.world.transports.threads import RETURNED, Hub, ThreadTransport, be
from unisono.world.world import World

__all__ = ["run_threads", "simulate"]

T = TypeVar("T")


def run_threads(
    fn: Callable[..., T],
    size: int,
    *,
    hosts: Sequence[str] | None = None,
    device: str | torch.device = "cpu",
    timeout_s: float = 60.0,
) -> list[T]:
    """Run `fn(world)` on `size` threads, each a rank; returns every rank's result, or raises the first error.

    fn: called with the world, once per rank.
    size: the number of ranks.
    hosts: each rank's host, for `split`; default: all on one.
    device: `world.device` of every rank, such as "cuda": ranks share that GPU, and what they exchange stays on it.
    timeout_s: how long a rank waits for another.

    >>> import torch
    >>> run_threads(lambda world: world.all_reduce(torch.tensor(float(world.rank)), "sum").wait().item(), 3)
    [3.0, 3.0, 3.0]
    """
    if not callable(fn):
        raise TypeError(f"run_threads takes a function of a world, got {fn!r}")
    if size < 1:
        raise ValueError(f"a world has at least one rank, got size={size}")
    where = torch.device(device)
    if where.type == "cuda" and where.index is None:
        where = torch.device("cuda", torch.cuda.current_device())
    hub, seats = Hub(size, timeout_s), RankThreads(size)
    results: list[Any] = [None] * size
    errors: list[BaseException | None] = [None] * size

    def work(rank: int) -> None:
        transport = ThreadTransport(hub, rank) if size > 1 else None
        world = World(transport, device=where, hosts=hosts or ["localhost"] * size)
        enter(world)
        be(transport.member if transport is not None else None)
        seats.enter(rank)
        try:
            if where.type == "cuda":
                torch.cuda.set_device(where)  # a new thread is at the first
            with torch.autograd.set_multithreading_enabled(False):  # else one thread is every rank's backward on a GPU
                results[rank] = fn(world)
            if transport is not None:
                transport.member.why = RETURNED
        except BaseException as error:
            errors[rank] = error
            hub.lose(f"rank {rank} failed: {error!r}")
        finally:
            seats.leave()
            enter(None)
            world.close()

    threads = [threading.Thread(target=work, args=(r,), name=f"rank {r}", daemon=True) for r in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failed = [e for e in errors if e is not None]
    if failed:
        first = next((e for e in failed if not isinstance(e, PeerLost)), failed[0])
        if isinstance(first, CalledByAll):
            first.hide_frames()
        raise first
    return results


def simulate(size: int, *, rank: int = 0, bits_per_s: float = 1e9, latency_s: float = 1e-4, per_host: int = 1) -> World:
    """A world of `size` ranks of which only `rank` exists, to compute costs without machines.

    bits_per_s, latency_s: of the links between hosts.
    per_host: ranks per host.

    >>> import torch
    >>> world = simulate(4, bits_per_s=1e9, latency_s=0.0)
    >>> _ = world.all_reduce(torch.empty(250_000, device="meta")).wait()
    >>> world.transport.seconds
    0.012
    """
    if size < 1 or not 0 <= rank < size:
        raise ValueError(f"expected size >= 1 and 0 <= rank < size, got size={size}, rank={rank}")
    if not (bits_per_s > 0 and latency_s >= 0 and math.isfinite(latency_s)):
        raise ValueError(f"expected bits_per_s > 0 and latency_s >= 0, got {bits_per_s} and {latency_s}")
    hosts = [f"host{r // per_host}" for r in range(size)]
    if size == 1:
        return World(None, hosts=hosts)
    transport = SimulatedTransport(rank, size, bits_per_s=bits_per_s, latency_s=latency_s)
    ledger = Ledger(rank, clock=lambda: time.perf_counter() + transport.seconds)
    # In the thread that calls: one behind it would turn the clock before or after the program begins to wait.
    return World(transport, hosts=hosts, ledger=ledger, inline=True)
