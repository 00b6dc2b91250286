"""Which elements of a block belong to which group of the optimizer, and how often each of them was stepped.

PyTorch counts steps per parameter, and a parameter without a gradient is skipped: so a block is a row of segments, each
with its own scalars, and segments that agree are stepped together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from unisono.offload.optimizers import Rule, Scalars


class Run(NamedTuple):
    """Elements [start, stop) of a block: they belong to group `group` of the optimizer's param_groups."""

    start: int
    stop: int
    group: int


@dataclass
class Segment:
    """Elements that have always been stepped together; `scalars` is None before the first step."""

    start: int
    stop: int
    group: int
    scalars: Scalars | None = None


@dataclass
class Batch:
    """Segments that one call can step."""

    group: int
    fresh: bool
    scalars: Scalars  # as every call of this step gets them
    after: Scalars  # as they are when the step is done
    segments: list[Segment]

    def spans(self) -> list[tuple[int, int]]:
        """The elements of the segments, neighbours as one."""
        found: list[tuple[int, int]] = []
        for segment in self.segments:
            if found and found[-1][1] == segment.start:
                found[-1] = (found[-1][0], segment.stop)
            else:
                found.append((segment.start, segment.stop))
        return found


IDLE = -1


class Portion(NamedTuple):
    """Elements [start, stop) of a block, stepped as part of batch number `batch`; IDLE if they have no gradient."""

    batch: int
    start: int
    stop: int


Cell = list[Portion]  # what is worked on together


class Segments:
    """The segments of one block, in order."""

    def __init__(self, runs: Sequence[Run], length: int, groups: int) -> None:
        self.runs = _checked(runs, length, groups)
        self._segments = [Segment(*run) for run in self.runs]
        self._plans: dict[tuple[int, int, int], tuple[object, list[Cell]]] = {}

    def batches(self, absent: Iterable[tuple[int, int]], rule: Rule) -> list[Batch]:
        """The segments outside the `absent` ranges, put together where they agree."""
        holes = list(absent)
        for start, stop in holes:
            self._cut(start)
            self._cut(stop)
        found: dict[object, Batch] = {}
        keys: dict[int, object] = {}  # most segments share their scalars
        for segment in self._segments:
            if any(start <= segment.start and segment.stop <= stop for start, stop in holes):
                continue
            if id(segment.scalars) not in keys:
                keys[id(segment.scalars)] = _key(segment.scalars)
            key = (segment.group, keys[id(segment.scalars)])
            if key not in found:
                scalars = rule.advance(segment.scalars)
                found[key] = Batch(segment.group, segment.scalars is None, scalars, scalars, [])
            found[key].segments.append(segment)
        return list(found.values())

    def advance(self, batches: Iterable[Batch]) -> None:
        """A step is done: its segments keep the scalars it left."""
        for batch in batches:
            for segment in batch.segments:
                segment.scalars = batch.after
        self._join()

    def cells(self, batches: Sequence[Batch], start: int, stop: int, size: int) -> list[Cell]:
        """Elements [start, stop) in cells of `size`, each with what is to be stepped in it."""
        number = {id(s): i for i, batch in enumerate(batches) for s in batch.segments}
        shape = [Portion(number.get(id(s), IDLE), s.start, s.stop) for s in self._segments]
        known, cells = self._plans.get((start, stop, size), (None, []))
        if known != shape:
            cells = _planned(shape, start, stop, size)
            self._plans[start, stop, size] = (shape, cells)
        return cells

    def scalars(self, at: int) -> Scalars | None:
        """The scalars of the segment that holds element `at`; None before its first step."""
        for segment in self._segments:
            if segment.start <= at < segment.stop:
                return segment.scalars
        raise ValueError(f"element {at} is padding: the runs of this block are {[tuple(run) for run in self.runs]}")

    def mark(self, start: int, stop: int, scalars: Scalars | None) -> None:
        """Give all segments within [start, stop) these scalars."""
        self._cut(start)
        self._cut(stop)
        for segment in self._segments:
            if start <= segment.start and segment.stop <= stop:
                segment.scalars = scalars
        self._join()

    def groups(self, start: int, stop: int) -> set[int]:
        """The groups that have elements within [start, stop)."""
        return {run.group for run in self.runs if run.start < stop and start < run.stop}

    def _join(self) -> None:
        """Put neighbours together that were cut and agree again: they step as they did before."""
        if len(self._segments) == len(self.runs):
            return
        starts = {run.start for run in self.runs}
        joined: list[Segment] = []
        for segment in self._segments:
            if segment.start not in starts and _key(joined[-1].scalars) == _key(segment.scalars):
                joined[-1].stop = segment.stop
            else:
                joined.append(segment)
        self._segments = joined

    def _cut(self, at: int) -> None:
        """Make `at` a border between segments."""
        for i, segment in enumerate(self._segments):
            if segment.start < at < segment.stop:
                rest = Segment(at, segment.stop, segment.group, segment.scalars)
                segment.stop = at
                self._segments.insert(i + 1, rest)
                return


def _checked(runs: Sequence[Run], length: int, groups: int) -> list[Run]:
    found = sorted(Run(*run) for run in runs)
    end = 0
    for run in found:
        if not end <= run.start <= run.stop <= length:
            raise ValueError(
                f"got runs {[tuple(r) for r in found]} for a block of {length} elements: expected ranges within it "
                f"that do not overlap"
            )
        if not 0 <= run.group < groups:
            raise ValueError(f"a run belongs to group {run.group}, but the optimizer has {groups} param groups")
        end = run.stop
    return [run for run in found if run.start < run.stop]


def _planned(shape: list[Portion], start: int, stop: int, size: int) -> list[Cell]:
    """Elements [start, stop) cut after every `size` of them."""
    cells: dict[int, Cell] = {}
    for batch, first, last in shape:
        low, high = max(first, start), min(last, stop)
        while low < high:
            at = (low - start) // size
            end = min(high, start + (at + 1) * size)
            cells.setdefault(at, []).append(Portion(batch, low, end))
            low = end
    return list(cells.values())


def _key(scalars: Scalars | None) -> object:
    if scalars is None:
        return None
    return tuple((k, v.dtype, v.tolist()) if isinstance(v, Tensor) else (k, v) for k, v in sorted(scalars.items()))
