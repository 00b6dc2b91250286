"""Methods to simulate: what a step of a method is in a world of any size, from what the method says of itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

import torch

from unisono.methods.buckets import BUCKET_BYTES, Bucket, group_into_buckets
from unisono.methods.exchange.dry_run import Cost, run_reducer
from unisono.methods.facts import Grade
from unisono.methods.reducer import Reducer
from unisono.methods.spec import build
from unisono.methods.strategies.zero.scatter import build_scattered
from unisono.methods.strategy import Pattern
from unisono.predict.costs import Anatomy, Job, Operation
from unisono.predict.costs.network import Among
from unisono.predict.planner.candidates import describe_candidate

Shapes = tuple[tuple[int, ...], ...]
Operations = tuple[Operation, ...]
_ALIGN = 16  # numbers: a line begins on a cache line, and so do its shards
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


DEFAULT_METHODS = (
    "allreduce",
    "bf16",
    "powersgd(rank=4)",
    "topk(k=0.01)",
    "bytegrad",
    "signsgd",
    "zero(stage=3)",
    "local_sgd(every=16)",
    "gossip",
    "parameter_server(servers=8, staleness=4)",
)
_BACKWARD = (1 / 3, 0.95)  # where backward begins and ends in a step: forward is half of it, the optimizer a little


@dataclass(frozen=True)
class Method:
    """A method as simulations take it. `at(workers)` is its step there, on a host with cores enough."""

    spec: str
    pattern: Pattern
    grade: Grade  # its effect on training
    at: Callable[[int], Anatomy]
    model_bytes: int
    push_bytes: int = 0
    alone_s: float | None = None  # a step of one worker alone, where it is not that of `at(1)`
    note: str = ""  # where its numbers come from, if that needs to be said


@dataclass
class Workload:
    """A model by a few numbers: so many parameters in equal square matrices, and the seconds of a step.

    compressors: how many times as fast as on this machine compressors are; inf: they take no time.
    """

    parameters: int
    compute_s: float
    per_host: int = 1
    compressors: float = 1.0
    samples_s: tuple[float, ...] = ()
    _runs: dict[tuple[str, Shapes], DryRun] = field(default_factory=dict)

    def __post_init__(self) -> None:
        count = max(8, 2 * math.ceil(4 * self.parameters / BUCKET_BYTES))
        side = max(1, round(math.sqrt(self.parameters / count)))
        matrix = torch.empty(side, side, dtype=torch.float32, device="meta")
        params = [(str(i), torch.nn.Parameter(matrix, requires_grad=False)) for i in range(count)]
        groups = group_into_buckets(params, BUCKET_BYTES)
        self.buckets: list[Shapes] = [tuple(tuple(p.shape) for _, p in group) for group in groups]

    @property
    def model_bytes(self) -> int:
        """Bytes of all parameters, in float32."""
        return sum(map(_count_bytes, self.buckets))

    def reduce(self, reducer: Reducer, ranks: int, bucket: Shapes) -> tuple[tuple[Operation, ...], float]:
        """What a reducer does to a bucket, in seconds of the imagined machines."""
        key = (reducer.spec, bucket)
        if key not in self._runs:
            self._runs[key] = DryRun(reducer, bucket, self.per_host)
        cost = self._runs[key].at(ranks)
        return cost.operations, cost.work_s / self.compressors

    def step(self, spec: str, pattern: Pattern, ranks: int) -> Anatomy:
        """A step of a method in a world of so many ranks."""
        plain = Anatomy(spec, ranks, self.compute_s, samples_s=self.samples_s, every=pattern.every, kind=pattern.kind)
        if ranks == 1 or pattern.style in ("alone", "servers", "neighbours"):
            return plain
        jobs = self._split(ranks, pattern) if pattern.gathers else self._reduce(ranks, pattern)
        return replace(plain, jobs=tuple(jobs), overlaps=pattern.overlap and pattern.style == "synchronous")

    def _reduce(self, ranks: int, pattern: Pattern) -> list[Job]:
        reducer = pattern.reducer or build("dense", "reducer")
        at_end = not pattern.overlap or pattern.style == "windows"
        jobs = []
        for ready_s, bucket in self._backward():
            operations, work_s = self.reduce(reducer, ranks, bucket)
            due_s = self.compute_s if at_end else _BACKWARD[1] * self.compute_s
            jobs.append(Job(self.compute_s if at_end else ready_s, work_s, operations, due_s=due_s))
        return jobs

    def _split(self, ranks: int, pattern: Pattern) -> list[Job]:
        """Split parameters: gradients are reduced to shards in backward; values are gathered before forward and, if
        they are gathered twice, again before backward. In groups both stay inside a host, and means pass between."""
        end, jobs, at = _BACKWARD[0] * self.compute_s, list[Job](), 0.0
        shards = ranks if pattern.keeps is None else pattern.keeps.count_shards(ranks, min(ranks, self.per_host))
        near: Among = "inside" if shards < ranks and shards <= self.per_host else "all"

        def gather(nbytes: int) -> tuple[Operation, ...]:
            return (Operation("all_gather", math.ceil(pattern.gathered * nbytes / shards), near),)

        for bucket in reversed(self.buckets):
            nbytes = _count_bytes(bucket)
            jobs.append(Job(0.0, 0.0, gather(nbytes), due_s=at))
            at += end * nbytes / self.model_bytes
        before = end
        for ready_s, bucket in self._backward():
            nbytes = _count_bytes(bucket)
            if pattern.gathers > 1:
                jobs.append(Job(end, 0.0, gather(nbytes), due_s=before))
            operations, work_s = self._scatter(nbytes, shards, near, pattern.reducer)
            if shards < ranks and pattern.keeps is not None:
                across, more_s = self._cross(bucket, ranks // shards, shards, pattern.keeps.across)
                operations, work_s = (*operations, *across), work_s + more_s
            jobs.append(Job(ready_s, work_s, operations, due_s=_BACKWARD[1] * self.compute_s))
            before = ready_s
        return jobs

    def _scatter(self, nbytes: int, shards: int, near: Among, reducer: Reducer | None) -> tuple[Operations, float]:
        """Gradients on their way to shards: as they are, or in a reducer's messages."""
        if reducer is None or reducer.exact or shards == 1:
            return (Operation("reduce_scatter", nbytes, near),), 0.0
        line = shards * _ALIGN * -(-nbytes // (4 * shards * _ALIGN))
        return self._run_among(build_scattered(reducer), ((line,),), shards, near)

    def _cross(self, bucket: Shapes, groups: int, shards: int, reducer: Reducer | None) -> tuple[Operations, float]:
        """Means of shards between groups: each rank sends its own, and its host's link carries all of them."""
        own = tuple((max(1, shape[0] // shards), *shape[1:]) for shape in bucket)
        found, work_s = self._run_among(reducer or build("dense", "reducer"), own, groups, "across")
        crowd = min(shards, self.per_host)
        return tuple(replace(operation, nbytes=operation.nbytes * crowd) for operation in found), work_s

    def _run_among(self, reducer: Reducer, shapes: Shapes, ranks: int, among: Among) -> tuple[Operations, float]:
        key = (f"{reducer.spec} {among}", shapes)
        cost = self._runs.setdefault(key, DryRun(reducer, shapes)).at(ranks)
        return tuple(replace(operation, among=among) for operation in cost.operations), cost.work_s / self.compressors

    def _backward(self) -> list[tuple[float, Shapes]]:
        """Each bucket with the time at which backward has filled it."""
        begin, end = (share * self.compute_s for share in _BACKWARD)
        done, found = 0, []
        for bucket in self.buckets:
            done += _count_bytes(bucket)
            found.append((begin + (end - begin) * done / self.model_bytes, bucket))
        return found


def make_method(spec: str, workload: Workload) -> Method:
    """A method on a model that is described by a few numbers."""
    candidate = describe_candidate(spec)
    pattern = candidate.pattern
    at = cache(lambda ranks: workload.step(spec, pattern, ranks))
    nbytes = workload.model_bytes
    return Method(spec, pattern, candidate.convergence.grade, at, nbytes, count_push(pattern, nbytes))


def count_push(pattern: Pattern, model_bytes: int) -> int:
    """Bytes of a push to servers, or of a model on its way to a neighbour."""
    numbers = model_bytes // 4
    if pattern.bits is not None:
        return numbers * pattern.bits // 8
    codec = pattern.reducer.codec if pattern.reducer is not None else None
    if pattern.style == "servers" and codec is not None and codec.nbytes is not None:
        return codec.nbytes(numbers)
    return model_bytes


def _count_bytes(shapes: Sequence[tuple[int, ...]]) -> int:
    return 4 * sum(math.prod(shape) for shape in shapes)
