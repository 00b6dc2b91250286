"""The pipeline of a recorded run: who computes and who waits, its bubble beside the schedule's formula, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unisono.observe.runs.reading import RankLog, say_mesh_place
from unisono.units import show_ms, show_s

__all__ = [
    "HEADS",
    "PipelineRank",
    "PipelineSummary",
    "describe_mesh",
    "describe_pipeline",
    "list_pipeline_rows",
    "summarise_pipeline",
]

HEADS = ("rank", "mesh", "stages", "computes", "waits", "forward ms", "backward ms")


@dataclass
class PipelineRank:
    """One rank: the part of the schedule's time in which it computes, and of a microbatch the seconds of its stages."""

    rank: int
    place: str  # on the mesh
    stages: list[int]
    busy: float
    forward_s: float
    backward_s: float


@dataclass
class PipelineSummary:
    """All pipelines of a run together. `bubble` is `ideal` + `imbalance` + `uneven` + `messages`, each a part of the
    schedule's time."""

    schedule: str
    ranks: int
    microbatches: int
    formula: str
    ideal: float  # of equal stages, and messages that take no time
    bubble: float
    imbalance: float  # stages that differ
    uneven: float  # microbatches that take differently long
    messages: float  # waiting for what was sent, and for a core
    schedule_s: float
    outside_s: float  # of a step, beside its schedule
    members: list[PipelineRank]


def summarise_pipeline(logs: Sequence[RankLog]) -> PipelineSummary | None:
    """What the ranks have written of it; None where there is no pipeline, or what was written cannot be read."""
    found = [log for log in logs if log.pipeline.get("steps")]
    if not found:
        return None
    try:
        return _summarise(found)
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


def _summarise(logs: Sequence[RankLog]) -> PipelineSummary:
    about = logs[0].pipeline

    def mean(name: str) -> float:
        return sum(float(log.pipeline[name]) for log in logs) / len(logs)

    members = []
    for log in sorted(logs, key=lambda log: log.rank):
        own = log.pipeline
        here = [int(stage) for stage in own["here"]]
        times = [own["stages"].get(str(stage), [0.0, 0.0]) for stage in here]
        busy = 1.0 - float(own["fraction"])
        forward, backward = (sum(float(pair[i]) for pair in times) for i in (0, 1))
        members.append(PipelineRank(log.rank, say_mesh_place(log.header), here, busy, forward, backward))
    return PipelineSummary(
        schedule=str(about["schedule"]),
        ranks=int(about["ranks"]),
        microbatches=int(about["microbatches"]),
        formula=str(about["formula"]),
        ideal=float(about["ideal"]),
        bubble=mean("bubble"),
        imbalance=mean("imbalance"),
        uneven=mean("uneven"),
        messages=mean("messages"),
        schedule_s=mean("schedule_s"),
        outside_s=mean("outside_s"),
        members=members,
    )


def describe_pipeline(found: PipelineSummary) -> list[str]:
    """The pipeline's schedule and waiting times in words."""
    parts = {
        "stages that differ": found.imbalance,
        "microbatches that take differently long": found.uneven,
        "messages and waiting for a core": found.messages,
    }
    why = ", ".join(f"{name} {100 * part:+.1f}" for name, part in parts.items())
    return [
        f"{found.schedule}, {found.ranks} ranks, {found.microbatches} microbatches: {100 * found.bubble:.1f} % of the "
        f"schedule's time is bubble; {found.formula} is {100 * found.ideal:.1f} %",
        f"the difference of {100 * (found.bubble - found.ideal):+.1f} points: {why}",
        f"the schedule, from the first computation to the last, takes {show_s(found.schedule_s)}; "
        f"{show_s(found.outside_s)} of a step lie around it: until all have begun, and until all know the loss",
    ]


def list_pipeline_rows(found: PipelineSummary) -> list[list[str]]:
    """Rows of a table, in the order of HEADS."""
    return [
        [
            str(one.rank),
            one.place,
            ", ".join(map(str, one.stages)),
            f"{100 * one.busy:.1f} %",
            f"{100 * (1 - one.busy):.1f} %",
            show_ms(one.forward_s),
            show_ms(one.backward_s),
        ]
        for one in found.members
    ]


def describe_mesh(header: Mapping[str, Any]) -> str:
    """The mesh of a run; "" without one.

    >>> describe_mesh({"mesh": [2, 1, 2]})
    'data=2, tensor=1, pipeline=2'
    """
    sizes = header.get("mesh")
    return "data={}, tensor={}, pipeline={}".format(*sizes) if sizes else ""
