"""Data that lies with the workers: each rank holds samples of its own, and every global batch takes some of each.

`un.launch(train, workers=2, args=(frame,), on=un.on.spark(...))` with a Spark DataFrame or RDD, or a Ray Dataset, gives
every worker a `Part` in its place: the rows of its own partitions, mapped from files that its agent wrote.
"""

from __future__ import annotations

import heapq
import json
import mmap
import os
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from unisono.data.order import Indices, index_dtype, permutation

__all__ = ["Part", "batches", "prefix"]


class Part:
    """This worker's rows of a table that is divided among the workers; `un.shard` reads it.

    `part[i]` is a row: a dict of its columns, or the sample of an RDD. `part.columns` are arrays (mapped, not read) of
    the columns of numbers, and sequences of the others. Travels as its number: each worker opens its own.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.columns: dict[str, Any] = {}
        self.name, self.rows, self.form = f"table {number}", 0, "dict"
        self._open()

    @classmethod
    def to_come(cls, number: int) -> Part:
        """What stands for table `number` on its way to the workers."""
        made = cls.of({}, name=f"table {number}")
        made.number = number
        return made

    @classmethod
    def of(cls, columns: dict[str, Any], *, name: str = "table") -> Part:
        """Columns that this process has in memory."""
        made = cls.__new__(cls)
        made.number, made.name, made.form, made.columns = -1, name, "dict", columns
        made.rows = len(next(iter(columns.values()))) if columns else 0
        return made

    def __reduce__(self) -> tuple[type[Part], tuple[int]]:
        return Part, (self.number,)

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> Any:
        return self._formed({name: column[index] for name, column in self.columns.items()})

    def __repr__(self) -> str:
        return f"<Part of {self.name}: {self.rows} rows here, columns {', '.join(self.columns)}>"

    @property
    def arrays(self) -> Any:
        """The columns in the form of a sample, where all of them are arrays; else None."""
        found = {name: column for name, column in self.columns.items() if isinstance(column, np.ndarray)}
        return self._formed(found) if found and len(found) == len(self.columns) else None

    def _formed(self, columns: dict[str, Any]) -> Any:
        if self.form == "single":
            return columns["0"]
        return tuple(columns.values()) if self.form == "tuple" else columns

    def _open(self) -> None:
        """Map the files that the agent keeps open."""
        listing = os.environ.get("UNISONO_PARTS")
        if listing is None:
            raise RuntimeError(f"{self.name} can be opened only in a worker that the engine of the table started")
        with open(listing, encoding="utf-8") as file:
            told = json.load(file)[self.number]
        self.name, self.rows, self.form, files = told["name"], told["rows"], told["form"], told["files"]
        for name, column in told["columns"].items():
            data = _mapped(files[column["file"]])
            if column["kind"] == "array":
                array = np.frombuffer(data, dtype=np.dtype(column["dtype"]))
                self.columns[name] = array.reshape(self.rows, *column["shape"])
            else:
                self.columns[name] = _Texts(data, _mapped(files[column["ends"]]), column["kind"])


class _Texts:
    """A column of text or bytes."""

    def __init__(self, data: Any, ends: Any, kind: str) -> None:
        self._data, self._ends, self._kind = data, np.frombuffer(ends, dtype="<i8"), kind

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> Any:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        start = int(self._ends[index - 1]) if index else 0
        item = bytes(self._data[start : int(self._ends[index])])
        return item.decode() if self._kind == "text" else item


def _mapped(path: str) -> Any:
    with open(path, "r+b") as file:
        size = os.fstat(file.fileno()).st_size
        # Copied on write: what the program changes in place is its own.
        return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) if size else b""


def prefix(counts: Sequence[int], total: int) -> list[int]:
    """How many of each rank's samples are among the first `total` of all, when each rank's are spread evenly.

    Rank i's sample j stands at (2 j + 1) / (2 counts[i]); equal places go to the lower rank first. So every batch has
    each rank's share of it to within one sample, all ranks end together, and each sample comes once.

    >>> prefix([6, 3], 3), prefix([6, 3], 6), prefix([6, 3], 9)
    ([2, 1], [4, 2], [6, 3])
    """
    n = sum(counts)
    if not 0 <= total <= n:
        raise ValueError(f"prefix got total={total}. Expected 0 to {n}, the sum of the counts.")
    taken = [(2 * total * m + n) // (2 * n) for m in counts]  # those at places up to total / n
    while (missing := total - sum(taken)) > 0:
        after = [(Fraction(2 * t + 1, m), r) for r, (t, m) in enumerate(zip(taken, counts, strict=True)) if t < m]
        for _, r in heapq.nsmallest(missing, after):
            taken[r] += 1
    while (excess := sum(taken) - total) > 0:
        last = [(Fraction(2 * t - 1, m), r) for r, (t, m) in enumerate(zip(taken, counts, strict=True)) if t]
        for _, r in heapq.nlargest(excess, last):
            taken[r] -= 1
    return taken


def batches(
    counts: Sequence[int], *, rank: int, batch_size: int, first: int, stop: int, seed: int, epoch: int, shuffle: bool
) -> Iterator[tuple[Indices, float]]:
    """`rank`'s own samples of the global batches `first` to `stop`, and their weight n_i N / m as in `un.shard`.

    A rank that has no sample in a batch gets its first one with weight 0.

    >>> for mine, weight in batches([4, 2], rank=1, batch_size=3, first=0, stop=2, seed=0, epoch=0, shuffle=False):
    ...     print(mine.tolist(), round(weight, 3))
    [0] 0.667
    [1] 0.667
    """
    n = counts[rank]
    # Each rank draws an order of its own; stream 0 is that of data which all ranks see.
    drawn = permutation(n, seed=seed, epoch=epoch, stream=1 + rank) if shuffle else np.arange(n, dtype=index_dtype(n))
    begin = prefix(counts, min(first * batch_size, sum(counts)))
    for batch in range(first, stop):
        end = prefix(counts, min((batch + 1) * batch_size, sum(counts)))
        held, total = end[rank] - begin[rank], sum(end) - sum(begin)
        yield (drawn[begin[rank] : end[rank]], held * len(counts) / total) if held else (drawn[:1], 0.0)
        begin = end
