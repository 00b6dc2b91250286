"""Sums in bounded memory, however long a run is: every rank's time and bytes by stretches of time, metrics by steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["BYTES", "COLUMNS", "PARTS", "STEPS", "Bins", "Point", "StepSeries"]

PARTS = ("compute", "compression", "communication", "waiting", "data")  # they add up to the wall time of a step
COLUMNS = (*PARTS, "bytes", "steps")
BYTES, STEPS = COLUMNS.index("bytes"), COLUMNS.index("steps")

_POINTS = 800  # of a metric
_FEW = 4  # a step that lies in more bins is divided by itself

Floats = NDArray[np.float64]


class Bins:
    """Sums by stretch of time (a bin) and by place. A step that lies in several bins is divided among them.

    Two kinds: those that slide keep the last `count` bins of `width_s`; the others keep the whole run, and each time
    that `count` bins are full, two neighbours become one.

    >>> bins = Bins(1.0, 4, slides=False)
    >>> bins.add(0, np.array([[100.5, 1.0, *[0.2] * 5, 10.0, 1.0]]))
    >>> bins.width_s, bins.sums(0)[:, 0].round(3).tolist()
    (1.0, [[0.1, 0.1, 0.1, 0.1, 0.1, 5.0, 0.5], [0.1, 0.1, 0.1, 0.1, 0.1, 5.0, 0.5]])
    """

    def __init__(self, width_s: float, count: int, *, slides: bool) -> None:
        self.width_s, self.count, self.slides = width_s, count, slides
        self.begin: float | None = None  # unix time of bin 0
        self.end = 0  # the number of the last bin, plus 1
        self.folds = 0  # how often neighbours became one: the numbers of bins are others since
        self.changed = 0  # the lowest bin that has changed since `mark_told`
        self._sums = np.zeros((count, 1, len(COLUMNS)))

    @property
    def first(self) -> int:
        """The number of the first bin that is kept."""
        return max(0, self.end - self.count)

    @property
    def places(self) -> int:
        """How many places there is room for."""
        return self._sums.shape[1]

    def mark_told(self) -> None:
        """Note that everything so far has been sent to the pages."""
        self.changed = self.end

    def bin_of(self, time: float) -> int:
        """The bin in which a unix time lies."""
        return int((time - (self.begin or 0.0)) // self.width_s)

    def sums(self, first: int, end: int | None = None) -> Floats:
        """The bins from `first` on: [bin, place, column]."""
        numbers = np.arange(max(first, self.first), self.end if end is None else min(end, self.end))
        found: Floats = self._sums[numbers % self.count]
        return found

    def add(self, place: int, rows: Floats) -> None:
        """Enter steps of a place: columns unix start, wall, then those of COLUMNS."""
        if not len(rows):
            return
        if place >= self.places:
            self._widen(place)
        if self.begin is None:
            self.begin = float(np.floor(rows[:, 0].min()))
        self._open(float((rows[:, 0] + rows[:, 1]).max()))
        starts = (rows[:, 0] - self.begin) / self.width_s
        ends = starts + rows[:, 1] / self.width_s
        spans = np.floor(ends) - np.floor(starts)
        long = spans > _FEW
        for offset in range(int(spans[~long].max(initial=-1.0)) + 1):  # the first bin of all, then the second, ...
            some = ~long & (spans >= offset)
            numbers = np.floor(starts[some]) + offset
            inside = np.clip(numbers + 1, starts[some], ends[some]) - np.clip(numbers, starts[some], ends[some])
            lengths = ends[some] - starts[some]
            shares = np.divide(inside, lengths, out=np.ones_like(inside), where=lengths > 0)
            self._enter(numbers.astype(int), place, shares[:, None] * rows[some, 2:])
        for start, end, row in zip(starts[long], ends[long], rows[long], strict=True):
            self._divide(place, float(start), float(end), row[2:])

    def _divide(self, place: int, start: float, end: float, values: Floats) -> None:
        edges = np.arange(np.floor(start), np.floor(end) + 2)
        shares = np.diff(np.clip(edges, start, end)) / (end - start)
        self._enter(edges[:-1].astype(int), place, shares[:, None] * values)

    def _enter(self, bins: NDArray[Any], place: int, values: Floats) -> None:
        kept = bins >= self.first
        bins, values = bins[kept], values[kept]
        if len(bins):
            np.add.at(self._sums[:, place], bins % self.count, values)
            self.changed = min(self.changed, int(bins.min()))

    def _open(self, until: float) -> None:
        """Make room for bins up to a time."""
        assert self.begin is not None
        while not self.slides and self.bin_of(until) >= self.count:
            self._fold()
        end = max(self.end, self.bin_of(until) + 1)
        fresh = np.arange(max(self.end, end - self.count), end)
        self._sums[fresh % self.count] = 0.0
        self.end = end

    def _fold(self) -> None:
        half = self._sums.reshape(self.count // 2, 2, *self._sums.shape[1:]).sum(1)
        self._sums = np.concatenate([half, np.zeros_like(half)])
        self.width_s *= 2
        self.end = (self.end + 1) // 2
        self.changed = 0
        self.folds += 1

    def _widen(self, place: int) -> None:
        more = np.zeros((self.count, max(place + 1, 2 * self.places) - self.places, len(COLUMNS)))
        self._sums = np.concatenate([self._sums, more], axis=1)


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
            kept.total += entry.total
            kept.count += entry.count
            kept.steps += entry.steps
            kept.low, kept.high = min(kept.low, entry.low), max(kept.high, entry.high)
            kept.last_step, kept.time = max(kept.last_step, entry.last_step), max(kept.time, entry.time)
        self.changed = 0
