"""What a reducer does to a bucket in a world of any size, from what it does in small ones."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from unisono.methods.buckets import Bucket
from unisono.methods.exchange.dry_run import Cost, run_reducer
from unisono.methods.reducer import Reducer

__all__ = ["DryRun"]

Shapes = tuple[tuple[int, ...], ...]
_TRIED = (8, 16)  # ranks (hosts, in two levels); up to the larger each number is tried by itself


@dataclass
class DryRun:
    """A reducer and a bucket's shapes; `at(ranks)` runs it for few ranks, and goes on from there for many.

    What is sent for many ranks: the same operations, each with a + b/n bytes for n ranks, as found with 8 and 16
    (exchanges of objects: a + b n). Work grows by as much for each rank as it did from 8 to 16 where every rank's bytes
    come to all, and not at all where means are taken on the way. per_host: ranks a host, for reducers in two levels.
    """

    reducer: Reducer
    shapes: Shapes
    per_host: int = 1
    _found: dict[int, Cost] = field(default_factory=dict)

    def at(self, ranks: int) -> Cost:
        """What the reducer does in a world of so many ranks."""
        groups = -(-ranks // self._each)
        if groups <= _TRIED[-1]:
            return self._run(ranks)
        low, high = (self._run(n * self._each) for n in _TRIED)
        if [o.op for o in low.operations] != [o.op for o in high.operations]:
            return high
        pairs = zip(low.operations, high.operations, strict=True)
        operations = tuple(replace(b, nbytes=round(_extend(b.op, a.nbytes, b.nbytes, groups))) for a, b in pairs)
        if not _gathers_more(low, high):
            return Cost(operations, min(low.work_s, high.work_s))
        growth = max(0.0, high.work_s - low.work_s) / (_TRIED[1] - _TRIED[0])
        return Cost(operations, high.work_s + growth * (groups - _TRIED[1]))

    @property
    def grows(self) -> bool:
        """Whether a rank's work grows with their number."""
        low, high = (self._run(n * self._each) for n in _TRIED)
        return _gathers_more(low, high)

    @cached_property
    def _each(self) -> int:
        """Ranks that one rank speaks for between hosts: a host's, if the reducer works in two levels."""
        two_hosts = self._run(2 * self.per_host).operations if self.per_host > 1 else ()
        return self.per_host if any(operation.among != "all" for operation in two_hosts) else 1

    def _run(self, ranks: int) -> Cost:
        if ranks not in self._found:
            self._found[ranks] = _run(self.reducer, self.shapes, ranks, min(ranks, self.per_host))
        return self._found[ranks]


def _extend(op: str, low: float, high: float, n: int) -> float:
    """a + b/n through both; a + b n where ranks tell each other of something for each rank."""
    a, b = _TRIED
    if op == "exchange":
        return max(0.0, high + (high - low) / (b - a) * (n - b))
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
    named = [(str(i), torch.empty(shape, dtype=torch.float32)) for i, shape in enumerate(shapes)]
    bucket = Bucket(0, named, lambda count, dtype: torch.zeros(count, dtype=dtype))
    bucket.lr = [0.1] * len(named)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so that processor time is the time of one core, whoever else is at work here
    try:
        hosts = [f"host{rank // per_host}" for rank in range(ranks)]
        return run_reducer(reducer, bucket, hosts, by_messages=per_host == 1)
    finally:
        torch.set_num_threads(threads)
