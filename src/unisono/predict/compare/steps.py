"""A run's steps: what each rank wrote of them, and all ranks' as one curve. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "PARTS",
    "SMOOTHED",
    "STEP_FIELDS",
    "Arrival",
    "Curve",
    "RankSteps",
    "merge_ranks",
    "smooth",
]

PARTS = ("compute", "communication", "waiting", "compression", "data")
STEP_FIELDS = (
    *("step", "end", "wall", "compute", "communication", "waiting", "compression", "data", "hidden"),
    *("bytes_sent", "loss", "finite", "samples", "arrivals"),
)
Arrival = tuple[str, float, float, float]  # of a collective: its name, arrived at, the program stood still from and to
SMOOTHED = 10  # steps over which a loss is smoothed


@dataclass
class RankSteps:
    """What one rank wrote: about itself, and each field of its steps as a column."""

    about: dict[str, Any]
    columns: dict[str, list[Any]]

    def __len__(self) -> int:
        return len(self.columns["step"])


@dataclass
class Curve:
    """All ranks' steps as one, an entry a step; None where something is not known.

    A step is over when the last rank has made it; its loss and the parts of its time are means over the ranks; samples
    are those of all ranks, bytes those that one rank sends.
    """

    times: list[float] = field(default_factory=list)  # since the first step began
    losses: list[float | None] = field(default_factory=list)
    samples: list[int | None] = field(default_factory=list)  # so far
    sent: list[float] = field(default_factory=list)  # so far
    parts: dict[str, list[float]] = field(default_factory=dict)
    not_measured: frozenset[str] = frozenset()
    bytes_by_formula: bool = False
    broke_at: int | None = None  # the first step whose loss is nan or inf
    about: dict[str, Any] = field(default_factory=dict)  # what rank 0, or the first that trained, wrote of itself

    def __len__(self) -> int:
        return len(self.times)


def merge_ranks(ranks: Sequence[RankSteps]) -> Curve:
    """One curve of those ranks that trained (a server of parameters has no steps), as long as the shortest."""
    trained = [rank for rank in ranks if len(rank)]
    if not trained:
        return Curve()
    count, each = min(map(len, trained)), len(trained)
    names = frozenset(name for rank in trained for name in rank.about["not_measured"])
    curve = Curve(not_measured=names, about=trained[0].about)
    curve.bytes_by_formula = any(rank.about["bytes_by_formula"] for rank in trained)
    curve.parts = {name: [] for name in PARTS}
    sent = 0.0
    for i in range(count):
        row = {name: [rank.columns[name][i] for rank in trained] for name in STEP_FIELDS}
        curve.times.append(max(rank.columns["end"][i] - rank.about["start"] for rank in trained))
        finite = all(row["finite"])
        if not finite and curve.broke_at is None:
            curve.broke_at = i + 1
        known = finite and None not in row["loss"]
        curve.losses.append(sum(row["loss"]) / each if known else math.nan if not finite else None)
        curve.samples.append(None if None in row["samples"] else max(row["samples"]))
        sent += sum(row["bytes_sent"]) / each
        curve.sent.append(sent)
        late = _find_waits(row["arrivals"])
        for name in PARTS:
            curve.parts[name].append(sum(row[name]) / each)
        # The ledger counts a reducer's own work as a part of communication, and waits whose end it does not know.
        exchanged = curve.parts["communication"][-1] - curve.parts["compression"][-1]
        waited = min(sum(late) / each, exchanged)
        curve.parts["communication"][-1] = exchanged - waited
        curve.parts["waiting"][-1] += waited
    return curve


def _find_waits(arrivals: Sequence[Sequence[Arrival]]) -> list[float]:
    """How long each rank stood still until the last one arrived, over one step's collectives. All ranks are on one
    machine, so that their clocks are one.

    >>> _find_waits([[("gradients/1", 10.0, 10.0, 14.0)], [("gradients/1", 13.0, 13.0, 14.0)]])
    [3.0, 0.0]
    """
    last: dict[str, float] = {}
    for key, at, _, _ in (arrival for mine in arrivals for arrival in mine):
        last[key] = max(last.get(key, at), at)
    return [sum(max(0.0, min(last[key], end) - start) for key, _, start, end in mine) for mine in arrivals]


def smooth(losses: Sequence[float | None], window: int = SMOOTHED) -> list[float | None]:
    """The mean of the last `window` steps, of fewer at the beginning; None where one of them is not known.

    >>> smooth([4.0, 2.0, 0.0], window=2)
    [4.0, 3.0, 1.0]
    """
    smoothed: list[float | None] = []
    for i in range(len(losses)):
        last = [x for x in losses[max(0, i - window + 1) : i + 1] if x is not None]
        smoothed.append(sum(last) / len(last) if len(last) == min(window, i + 1) else None)
    return smoothed
