"""Seconds of a step: its anatomy replayed on a network, with one lane for the program and one for the exchange."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from unisono.predict.costs.anatomy import Anatomy
from unisono.predict.costs.network import Network


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
        times = anatomy.quantile(q) / anatomy.quantile(0.5) if anatomy.samples_s else 1.0
        slower = 1 + sign * network.spread
        ends.append(middle.compute * times + middle.exposed * slower + middle.compression * times)
    return Prediction(middle, min(ends[0], middle.total), max(ends[1], middle.total))
