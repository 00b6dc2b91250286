"""What a reducer does to a bucket in a world of any size: its own code, run as one rank of some that need not exist."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from unisono.buckets import Bucket
from unisono.costs import Operation
from unisono.reducer import Reducer
from unisono.world import World
from unisono.world.ledger import Record
from unisono.world.virtual import simulate

__all__ = ["Cost", "DryRun", "read_operation"]

Shapes = tuple[tuple[int, ...], ...]
_TRIED = (8, 16)  # ranks (hosts, in two levels); up to the larger each number is tried by itself
_REPEATS = 4


@dataclass(frozen=True)
class Cost:
    """What one rank does for one bucket: operations in order, and the seconds of its own work."""

    operations: tuple[Operation, ...]
    work_s: float


@dataclass
class DryRun:
    """A reducer and a bucket's shapes; `at(ranks)` runs it for few ranks, and goes on from there for many.

    What is sent for many ranks: the same operations, each with a + b/n bytes for n ranks, as found with 8 and 16. Work
    grows by as much for each rank as it did from 8 to 16 where every rank's bytes come to all, and not at all where
    means are taken on the way. per_host: ranks a host, for reducers that work in two levels.
    """

    reducer: Reducer
    shapes: Shapes
    per_host: int = 1
    _found: dict[int, Cost] = field(default_factory=dict)

    def at(self, ranks: int) -> Cost:
        """In a world of so many ranks."""
        groups = self._groups(ranks)
        if groups <= _TRIED[-1]:
            return self._run(ranks)
        low, high = (self._run(n * self._each) for n in _TRIED)
        if [o.op for o in low.operations] != [o.op for o in high.operations]:
            return high
        pairs = zip(low.operations, high.operations, strict=True)
        operations = tuple(replace(b, nbytes=round(_extend(a.nbytes, b.nbytes, groups))) for a, b in pairs)
        if not _gathers_more(low, high):
            return Cost(operations, min(low.work_s, high.work_s))
        growth = max(0.0, high.work_s - low.work_s) / (_TRIED[1] - _TRIED[0])
        return Cost(operations, high.work_s + growth * (groups - _TRIED[1]))

    @property
    def grows(self) -> bool:
        """Whether a rank's work grows with their number."""
        low, high = (self._run(n * self._each) for n in _TRIED)
        return _gathers_more(low, high)

    @property
    def _each(self) -> int:
        return self.per_host if "hierarchical" in self.reducer.spec else 1

    def _groups(self, ranks: int) -> int:
        return -(-ranks // self._each)

    def _run(self, ranks: int) -> Cost:
        if ranks not in self._found:
            self._found[ranks] = _run(self.reducer, self.shapes, ranks, min(ranks, self.per_host))
        return self._found[ranks]


def _extend(low: float, high: float, n: int) -> float:
    """a + b/n through both."""
    a, b = _TRIED
    slope = (low - high) / (1 / a - 1 / b)
    return max(0.0, high + slope * (1 / n - 1 / b))


def _gathers_more(low: Cost, high: Cost) -> bool:
    """Whether what a rank gets grows with their number."""
    few, many = (
        n * sum(o.nbytes for o in cost.operations if o.op == "all_gather")
        for n, cost in zip(_TRIED, (low, high), strict=True)
    )
    return many > 1.5 * few


def _run(reducer: Reducer, shapes: Shapes, ranks: int, per_host: int) -> Cost:
    if ranks == 1:
        return Cost((), 0.0)
    world = simulate(ranks, per_host=per_host)
    generator = torch.Generator().manual_seed(1)
    named = [(str(i), torch.empty(shape)) for i, shape in enumerate(shapes)]
    bucket = Bucket(0, named, lambda count, dtype: torch.zeros(count, dtype=dtype))
    bucket.lr = [0.1] * len(named)
    state = reducer.init(bucket)
    fastest, records, threads = math.inf, list[Record](), torch.get_num_threads()
    torch.set_num_threads(1)  # so that processor time is the time of one core, whoever else is at work here
    with torch.no_grad():
        for _ in range(_REPEATS):
            bucket.flat.normal_(generator=generator)
            bucket.zero_gaps()
            before = len(world.ledger.records)
            begun = time.process_time()
            _, state = reducer.reduce(bucket, state, world)
            fastest = min(fastest, time.process_time() - begun)
            records = list(world.ledger.records)[before:]
    torch.set_num_threads(threads)
    operations = tuple(read_operation(record, world) for record in records)
    return Cost(operations, 0.0 if reducer.exact else fastest)


def read_operation(record: Record, world: World) -> Operation:
    """An entry of the ledger, by what each rank gives to it."""
    ranks = _read_ranks(record.channel, world.size)
    n, sent = len(ranks), record.bytes_sent
    given = {
        "all_reduce": sent * n / (2 * (n - 1)),
        "reduce_scatter": sent * n / (n - 1),
        "all_to_all": sent * n / (n - 1),
        "all_gather": sent / (n - 1),
        "exchange": sent / (n - 1),
    }.get(record.op, float(sent))
    hosts = {world.hosts[r] for r in ranks}
    among = "all" if n == world.size else "inside" if len(hosts) == 1 else "across"
    return Operation(record.op, round(given), among)  # type: ignore[arg-type]


def _read_ranks(channel: str, size: int) -> Sequence[int]:
    """The ranks of a world inside a world, by its name."""
    found = re.findall(r"\[([\d,]+)\]", channel)
    return [int(r) for r in found[-1].split(",")] if found else range(size)
