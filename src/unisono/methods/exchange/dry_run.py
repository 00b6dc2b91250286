"""What a reducer does to a bucket in a given world: its own code, run as one rank whose others need not exist."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from unisono.methods.buckets import Bucket
from unisono.methods.reducer import Reducer
from unisono.predict.costs import Operation
from unisono.world import World
from unisono.world.transports.silent import Among, SilentTransport

_REPEATS = 4


@dataclass(frozen=True)
class Cost:
    """What one rank does for one bucket: operations in order, and the seconds of its own work."""

    operations: tuple[Operation, ...]
    work_s: float


def run_reducer(
    reducer: Reducer,
    bucket: Bucket,
    hosts: Sequence[str],
    *,
    rank: int = 0,
    by_messages: bool = True,
    repeats: int = _REPEATS,
    clock: Callable[[], float] = time.process_time,
) -> Cost:
    """Reduce random gradients a few times as `rank`, with messages that take no time; the fastest time counts.

    hosts: of every rank. by_messages: hosts would send messages, rather than share memory. The program's random
    numbers stay as they are.
    """
    if len(hosts) == 1:
        return Cost((), 0.0)
    operations: list[Operation] = []

    def listen(op: str, nbytes: int, among: Among, began: float, ended: float) -> None:
        operations.append(Operation(op, nbytes, among))

    transport = SilentTransport(rank, len(hosts), listen, hosts=hosts, by_messages=by_messages)
    world = World(transport, device=bucket.device, hosts=hosts)
    generator = torch.Generator(bucket.device).manual_seed(1)
    state, fastest = reducer.init(bucket), math.inf
    try:
        with torch.no_grad():
            for _ in range(repeats):
                bucket.flat.normal_(generator=generator)
                bucket.zero_gaps()
                operations.clear()
                began = clock()
                _, state = reducer.reduce(bucket, state, world)
                if bucket.flat.is_cuda:
                    torch.cuda.synchronize(bucket.device)
                fastest = min(fastest, clock() - began)
    finally:
        world.close()
    return Cost(tuple(operations), 0.0 if reducer.exact else fastest)
