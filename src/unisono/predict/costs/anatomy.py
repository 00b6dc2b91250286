"""A step of a method, taken apart: what the program computes, and which pieces of exchange go on beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

OPS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "send", "exchange")
Among = Literal["all", "inside", "across"]
Kind = Literal["synchronous", "delayed", "asynchronous"]


@dataclass(frozen=True)
class Operation:
    """One collective, and the bytes that each rank gives to it.

    nbytes: the whole tensor for all_reduce, reduce_scatter and broadcast; a rank's own part for all_gather, send and
        exchange; the sum of a rank's parts for all_to_all.
    among: all ranks, those inside a host, or one of each host.
    """

    op: str
    nbytes: int
    among: Among = "all"

    def __post_init__(self) -> None:
        if self.op not in OPS:
            raise ValueError(f"an operation is one of {', '.join(OPS)}, got {self.op!r}")


@dataclass(frozen=True)
class Job:
    """A piece of exchange. Jobs are done in order on the exchange lane: first the work, then the operations.

    Times are on the program's own clock, which begins with the step and stands still while the program waits.

    ready_s: when the program hands it over.
    work_s: how long it keeps a core busy.
    due_s: when the program needs its result and waits for it; inf: at the end of the step.
    behind: the lane goes on with the next job while its operations are under way.
    awaits: it begins when the operations of that job (its number) have ended too.
    """

    ready_s: float
    work_s: float
    operations: tuple[Operation, ...] = ()
    due_s: float = math.inf
    behind: bool = False
    awaits: int | None = None


@dataclass(frozen=True)
class Anatomy:
    """A step of a method as measured on `ranks` ranks, with communication that costs nothing.

    spec: the method.
    compute_s: the program's own work in a step: forward, backward, the optimizer, data.
    jobs: what is exchanged.
    overlaps: whether jobs are done beside the program; otherwise a job is due when it is ready.
    every: the jobs are those of one step in so many.
    kind: "delayed": no step waits for its own exchange, but for an earlier one's; "asynchronous": no rank waits for
        another.
    samples_s: compute_s of several steps and ranks, for intervals and stragglers.
    """

    spec: str
    ranks: int
    compute_s: float
    jobs: tuple[Job, ...] = ()
    overlaps: bool = True
    every: int = 1
    kind: Kind = "synchronous"
    samples_s: tuple[float, ...] = ()

    @property
    def work_s(self) -> float:
        """Seconds of all jobs' work: compression."""
        return sum(job.work_s for job in self.jobs)

    @property
    def operations(self) -> list[Operation]:
        """The operations of all jobs, in order."""
        return [operation for job in self.jobs for operation in job.operations]

    def quantile(self, q: float) -> float:
        """A quantile of compute_s over steps and ranks."""
        return quantile(self.samples_s or (self.compute_s,), q)

    def slowed(self, times: float, *, work: float | None = None) -> Anatomy:
        """The same step where compute takes `times` as long, and the jobs' own work `work` times (None: as compute)."""
        if times == 1.0:
            return self
        own = times if work is None else work
        jobs = tuple(
            replace(job, ready_s=job.ready_s * times, work_s=job.work_s * own, due_s=job.due_s * times)
            for job in self.jobs
        )
        return replace(self, compute_s=self.compute_s * times, jobs=jobs)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON holds them."""
        plain = asdict(self)
        for job in plain["jobs"]:
            job["due_s"] = None if math.isinf(job["due_s"]) else job["due_s"]
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Anatomy:
        """Read what `to_dict` wrote.

        >>> step = Anatomy("allreduce", 2, 0.5, (Job(0.4, 0.0, (Operation("all_reduce", 8),)),))
        >>> Anatomy.from_dict(step.to_dict()) == step
        True
        """
        jobs = tuple(
            Job(
                **{
                    **job,
                    "due_s": math.inf if job["due_s"] is None else job["due_s"],
                    "operations": tuple(Operation(**each) for each in job["operations"]),
                }
            )
            for job in plain["jobs"]
        )
        return cls(**{**plain, "jobs": jobs, "samples_s": tuple(plain["samples_s"])})


def quantile(values: Sequence[float], q: float) -> float:
    """A quantile of some values, interpolated linearly.

    >>> quantile([1.0, 2.0, 4.0], 0.75)
    3.0
    """
    ordered = sorted(values)
    at = q * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])
