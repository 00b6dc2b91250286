"""A step of a method: what the program computes, which pieces of exchange go on beside it, and the seconds of it on a
network, replayed with one lane for the program and one for the exchange."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

from unisono.predict.costs.network import Network, Operation

Kind = Literal["synchronous", "delayed", "asynchronous"]


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


@dataclass(frozen=True)
class Timing:
    """A step in seconds. total = compute + exposed + compression: what the program did, and what it waited for.

    exposed: communication that the program waited for, or that took cores away from it; hidden: that which went on
        behind its compute.
    compression: work of the exchange that the program waited for.
    """

    total: float
    compute: float
    exposed: float
    hidden: float
    compression: float


class Prediction(NamedTuple):
    """A step, and the interval in which four of five steps are expected."""

    timing: Timing
    low: float
    high: float


def replay(anatomy: Anatomy, network: Network) -> Timing:
    """The step's times where communication costs what `network` says.

    In the order of the program's clock: a job handed over begins when the lane is free; where the program needs a
    result that is not there, it waits, and all that it does later is later by as much.
    """
    communication = sum(network.seconds(operation) for operation in anatomy.operations)
    if anatomy.kind == "asynchronous" or not anatomy.jobs:
        return Timing(anatomy.compute_s, anatomy.compute_s, 0.0, communication / anatomy.every, 0.0)
    waited = _replay_waits(anatomy, network)
    if anatomy.kind == "delayed":  # behind the steps until the next exchange; what does not fit there is waited for
        room = anatomy.compute_s * anatomy.every
        waited = max(0.0, communication + anatomy.work_s - room)
    exposed_s = min(communication, max(0.0, waited))
    steals = sum(network.steals.get(o.op, 0.0) * network.seconds(o) for o in anatomy.operations)  # if all were hidden
    stolen = steals * (1 - exposed_s / communication) if communication else 0.0
    free = replace(anatomy, jobs=tuple(replace(job, operations=()) for job in anatomy.jobs))
    for_work = min(waited, _replay_waits(free, network))
    every = anatomy.every
    exposed = (waited - for_work + stolen) / every
    return Timing(
        total=anatomy.compute_s + (waited + stolen) / every,
        compute=anatomy.compute_s,
        exposed=exposed,
        hidden=max(0.0, (communication - waited + for_work) / every),
        compression=for_work / every,
    )


def _replay_waits(anatomy: Anatomy, network: Network) -> float:
    """How long the program stands still in the step that has the jobs."""
    waited = lane = wire = 0.0
    done: list[float] = []  # when each job's operations have ended
    due = {
        i: min(job.due_s, anatomy.compute_s) if anatomy.overlaps else job.ready_s for i, job in enumerate(anatomy.jobs)
    }
    for job in anatomy.jobs:
        for i in [i for i, at in due.items() if i < len(done) and at < job.ready_s]:
            waited = max(waited, done[i] - due.pop(i))
        start = max(lane, job.ready_s + waited, done[job.awaits] if job.awaits is not None else 0.0)
        lane = start + job.work_s
        for operation in job.operations:
            wire = max(wire, lane) + network.seconds(operation)
        done.append(max(wire, lane) if job.operations else lane)
        if not job.behind:
            lane = done[-1]
    for i, at in sorted(due.items(), key=lambda item: item[1]):
        waited = max(waited, done[i] - at)
    return waited


def predict(anatomy: Anatomy, network: Network) -> Prediction:
    """The step, and an interval from the spread of compute and of the network's times."""
    middle = replay(anatomy, network)
    ends = []
    for q, sign in ((0.1, -1), (0.9, 1)):
        samples = anatomy.samples_s or (1.0,)
        times = quantile(samples, q) / quantile(samples, 0.5)
        slower = 1 + sign * network.spread
        ends.append(middle.compute * times + middle.exposed * slower + middle.compression * times)
    return Prediction(middle, min(ends[0], middle.total), max(ends[1], middle.total))
