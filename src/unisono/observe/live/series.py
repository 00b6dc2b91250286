"""A metric against steps, joined over the ranks that logged it, in a bounded number of points."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Point", "StepSeries"]

_POINTS = 800


@dataclass(slots=True)
class _Sum:
    total: float = 0.0
    count: int = 0
    steps: int = 0
    low: float = float("inf")
    high: float = float("-inf")
    last_step: int = 0
    time: float = 0.0


Point = tuple[int, float, float, float, float]  # step, unix time, value, lowest and highest of a rank


class StepSeries:
    """One metric. Steps that are neighbours share a point when there are more than a screen shows.

    >>> series = StepSeries("mean")
    >>> for rank in range(2):
    ...     for step in range(3):
    ...         series.add(step, 100.0 + step, float(step + rank))
    >>> [point[2] for point in series.since(0)]
    [0.5, 1.5, 2.5]
    """

    def __init__(self, how: str) -> None:
        self.how = how
        self.width = 1  # steps in a point
        self.changed = 0  # the lowest point that has changed since `mark_told`
        self._sums: dict[int, _Sum] = {}
        self._newest = -1

    def add(self, step: int, time: float, value: float) -> None:
        """Add a rank's value at a step."""
        if not math.isfinite(value) or step < 0:
            return
        number = step // self.width
        entry = self._sums.setdefault(number, _Sum())
        entry.total += value
        entry.count += 1
        if step > self._newest or not entry.steps:
            self._newest = max(step, self._newest)
            entry.steps += 1
        entry.low, entry.high = min(entry.low, value), max(entry.high, value)
        entry.last_step, entry.time = max(entry.last_step, step), max(entry.time, time)
        self.changed = min(self.changed, number)
        if len(self._sums) > _POINTS:
            self._fold()

    def since(self, number: int) -> list[Point]:
        """The points from a number on, in order."""
        return [self._point(self._sums[n]) for n in sorted(self._sums) if n >= number]

    def mark_told(self) -> None:
        """Note that everything so far has been sent to the pages."""
        self.changed = max(self._sums, default=-1) + 1

    @property
    def last(self) -> Point | None:
        """The newest point."""
        return self._point(self._sums[max(self._sums)]) if self._sums else None

    def _point(self, entry: _Sum) -> Point:
        if self.how == "min":
            value = entry.low
        elif self.how == "max":
            value = entry.high
        else:
            value = entry.total / (entry.steps if self.how == "sum" else entry.count)
        return entry.last_step, entry.time, value, entry.low, entry.high

    def _fold(self) -> None:
        """Merge neighbouring points, so that each stands for twice as many steps."""
        old, self._sums = self._sums, {}
        self.width *= 2
        for number, entry in old.items():
            kept = self._sums.setdefault(number // 2, _Sum())
            kept.total, kept.count, kept.steps = (
                kept.total + entry.total,
                kept.count + entry.count,
                kept.steps + entry.steps,
            )
            kept.low, kept.high = min(kept.low, entry.low), max(kept.high, entry.high)
            kept.last_step, kept.time = max(kept.last_step, entry.last_step), max(kept.time, entry.time)
        self.changed = 0
