"""Columns that grow with a run and stay bounded: beyond so many rows, every two neighbours become one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from unisono.launchers.runtime.run_folder import SUMMED

__all__ = ["COLUMNS", "Series", "StepTable"]

# Of some steps: the first and last, when the first began, sums over all of them, and the longest of their wall times.
COLUMNS = ("first", "last", "start", *SUMMED, "longest")
Array = npt.NDArray[np.float64]


class _Thinned:
    """Rows of numbers, at most so many. Beyond that every two become one, and from then on each row that is kept
    stands for twice as many: so all of a run is seen equally well, and its newest rows as they came."""

    def __init__(self, width: int, most: int) -> None:
        self.most = most
        self._kept = np.empty((0, width))
        self._newest: list[Array] = []  # not enough yet for a row of their own
        self._each = 1  # rows that become one
        self._held = 0  # in `_newest`

    def __len__(self) -> int:
        return len(self._kept) + self._held

    def _merge(self, blocks: Array) -> Array:
        """Blocks of neighbours, of shape (rows, several, columns), to a row for each block."""
        raise NotImplementedError

    def _append(self, rows: Sequence[Sequence[float]]) -> Array:
        """Add rows; gives them back as an array."""
        fresh = np.asarray(rows, dtype=np.float64)
        self._newest.append(fresh)
        self._held += len(fresh)
        if self._held >= max(self._each, 64):
            self._pack()
        return fresh

    def limit(self, most: int) -> None:
        """Hold at most `most` rows from now on."""
        self.most = max(2, most)
        self._pack()

    def _pack(self) -> None:
        width = self._kept.shape[1]
        rows = np.concatenate([np.empty((0, width)), *self._newest])
        while len(self._kept) + len(rows) // self._each > self.most:
            pairs = len(self._kept) // 2
            halved = self._merge(self._kept[: 2 * pairs].reshape(pairs, 2, width))
            self._kept, self._each = np.concatenate([halved, self._kept[2 * pairs :]]), 2 * self._each
        blocks = len(rows) // self._each
        whole = rows[: blocks * self._each].reshape(blocks, self._each, width)
        self._kept = np.concatenate([self._kept, self._merge(whole)])
        self._newest, self._held = [rows[blocks * self._each :]], len(rows) - blocks * self._each

    @property
    def array(self) -> Array:
        """All rows."""
        return np.concatenate([self._kept, *self._newest])


class StepTable(_Thinned):
    """Steps of one rank, a row each or a row for several, and exact sums over all that were ever added.

    >>> table = StepTable(most=2)
    >>> table.add([[s, s, s * 1.0, 1.0, 0.5, 0.2, 0.2, 0.1, 0.0, 8.0, 1.0, 0.0, 1.0] for s in range(4)])
    >>> table.limit(2)
    >>> len(table), table.column("first").tolist(), table.column("wall").tolist(), table.totals["wall"], table.steps
    (2, [0.0, 2.0], [2.0, 2.0], 4.0, 4)
    """

    def __init__(self, most: int = 8192) -> None:
        super().__init__(len(COLUMNS), most)
        self.steps = 0
        self.totals = dict.fromkeys(SUMMED, 0.0)

    def column(self, name: str) -> Array:
        """The values of one of COLUMNS."""
        return self.array[:, COLUMNS.index(name)]

    @property
    def counts(self) -> Array:
        """How many steps each row stands for."""
        return self.column("last") - self.column("first") + 1.0

    def mean(self, name: str) -> Array:
        """A summed column by step: the mean of the steps of each row."""
        return self.column(name) / np.maximum(self.counts, 1.0)

    def add(self, rows: Sequence[Sequence[float]]) -> None:
        """Add rows, in the order of COLUMNS."""
        if not len(rows):
            return
        fresh = self._append(rows)
        sums = fresh[:, 3 : 3 + len(SUMMED)].sum(axis=0)
        for name, value in zip(SUMMED, sums, strict=True):
            self.totals[name] += float(value)
        self.steps += int((fresh[:, 1] - fresh[:, 0] + 1.0).sum())

    def _merge(self, blocks: Array) -> Array:
        merged: Array = blocks.sum(axis=1)
        merged[:, 0], merged[:, 1], merged[:, 2] = blocks[:, 0, 0], blocks[:, -1, 1], blocks[:, 0, 2]
        merged[:, -1] = blocks[:, :, -1].max(axis=1, initial=0.0)
        return merged


class Series(_Thinned):
    """One metric of one rank: steps, times (of its file's clock) and values.

    >>> series = Series(most=2)
    >>> series.add([[0, 0.0, 4.0], [1, 0.1, 2.0], [2, 0.2, 1.0]])
    >>> series.limit(2)
    >>> series.steps.tolist(), series.values.tolist(), series.last
    ([1.0, 2.0], [3.0, 1.0], 1.0)
    """

    def __init__(self, how: str = "mean", most: int = 8192) -> None:
        super().__init__(3, most)
        self.how = how
        self.count = 0
        self.last = float("nan")

    @property
    def steps(self) -> Array:
        """The step of each row; the last one if a row stands for several."""
        return self.array[:, 0]

    @property
    def times(self) -> Array:
        """When each value was logged, by the clock of its file."""
        return self.array[:, 1]

    @property
    def values(self) -> Array:
        """The value; nan where it was not a finite number."""
        return self.array[:, 2]

    def add(self, rows: Sequence[Sequence[float]]) -> None:
        """Add rows of step, time and value."""
        fresh = self._append(rows)
        self.count += len(fresh)
        self.last = float(fresh[-1, 2])

    def _merge(self, blocks: Array) -> Array:
        merged: Array = blocks[:, -1].copy()
        if len(merged):
            merged[:, 2] = {"min": np.min, "max": np.max}.get(self.how, np.mean)(blocks[:, :, 2], axis=1)
        return merged
