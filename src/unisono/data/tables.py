"""Data that lies with the workers: each rank holds samples of its own, and every global batch takes some of each.

`un.launch(train, workers=2, args=(frame,), on=un.on.spark(...))` with a Spark DataFrame or RDD, or a Ray Dataset, gives
every worker a `TablePart` in its place: the rows of its own partitions, mapped from files that its agent wrote.
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

from unisono.data.order import Indices, choose_index_dtype, draw_permutation

__all__ = ["TablePart", "count_prefix", "select_batches"]


class TablePart:
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
    def placeholder(cls, number: int) -> TablePart:
        """What stands for table `number` on its way to the workers."""
        made = cls.from_columns({}, name=f"table {number}")
        made.number = number
        return made

    @classmethod
    def from_columns(cls, columns: dict[str, Any], *, name: str = "table") -> TablePart:
        """Columns that this process has in memory."""
        made = cls.__new__(cls)
        made.number, made.name, made.form, made.columns = -1, name, "dict", columns
        made.rows = len(next(iter(columns.values()))) if columns else 0
        return made

    def __reduce__(self) -> tuple[type[TablePart], tuple[int]]:
        return TablePart, (self.number,)

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> Any:
        return self._shape_sample({name: column[index] for name, column in self.columns.items()})

    def __repr__(self) -> str:
        return f"<TablePart of {self.name}: {self.rows} rows here, columns {', '.join(self.columns)}>"

    @property
    def arrays(self) -> Any:
        """The columns in the form of a sample, where all of them are arrays; else None."""
        found = {name: column for name, column in self.columns.items() if isinstance(column, np.ndarray)}
        return self._shape_sample(found) if found and len(found) == len(self.columns) else None

    def _shape_sample(self, columns: dict[str, Any]) -> Any:
        if self.form == "single":
            return columns["0"]
        return tuple(columns.values()) if self.form == "tuple" else columns

    def _open(self) -> None:
        """Map the files that the agent keeps open."""
        listing = os.environ.get("UNISONO_PARTS")
        if listing is None:
            raise RuntimeError(f"{self.name} can be opened only in a worker that the engine of the table started")
        with open(listing, encoding="utf-8") as file:
            table = json.load(file)[self.number]
        self.name, self.rows, self.form, files = table["name"], table["rows"], table["form"], table["files"]
        for name, column in table["columns"].items():
            data = _map_file(files[column["file"]])
            if column["kind"] == "array":
                array = np.frombuffer(data, dtype=np.dtype(column["dtype"]))
                self.columns[name] = array.reshape(self.rows, *column["shape"])
            else:
                self.columns[name] = _TextColumn(data, _map_file(files[column["ends"]]), column["kind"])


class _TextColumn:
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


def _map_file(path: str) -> Any:
    with open(path, "r+b") as file:
        size = os.fstat(file.fileno()).st_size
        # Copied on write: what the program changes in place is its own.
        return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) if size else b""


def count_prefix(counts: Sequence[int], total: int) -> list[int]:
    """How many of each rank's samples are among the first `total` of all, when each rank's are spread evenly.

    Rank i's sample j stands at (2 j + 1) / (2 counts[i]); equal places go to the lower rank first. So every batch has
    each rank's share of it to within one sample, all ranks end together, and each sample comes once.

    >>> [count_prefix([6, 3], total) for total in (3, 6, 9)]
    [[2, 1], [4, 2], [6, 3]]
    """
    n = sum(counts)
    if not 0 <= total <= n:
        raise ValueError(f"count_prefix got total={total}. Expected 0 to {n}, the sum of the counts.")
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


def select_batches(
    counts: Sequence[int], *, rank: int, batch_size: int, first: int, stop: int, seed: int, epoch: int, shuffle: bool
) -> Iterator[tuple[Indices, float]]:
    """`rank`'s own samples of the global batches `first` to `stop`, and their weight n_i N / m as in `un.shard`.

    A rank that has no sample in a batch gets its first one with weight 0.

    >>> place = {"rank": 1, "batch_size": 3, "first": 0, "stop": 2}
    >>> for mine, weight in select_batches([4, 2], **place, seed=0, epoch=0, shuffle=False):
    ...     print(mine.tolist(), round(weight, 3))
    [0] 0.667
    [1] 0.667
    """
    n = counts[rank]
    # Each rank draws an order of its own; stream 0 is that of data which all ranks see.
    drawn = (
        draw_permutation(n, seed=seed, epoch=epoch, stream=1 + rank)
        if shuffle
        else np.arange(n, dtype=choose_index_dtype(n))
    )
    begin = count_prefix(counts, min(first * batch_size, sum(counts)))
    for batch in range(first, stop):
        end = count_prefix(counts, min((batch + 1) * batch_size, sum(counts)))
        held, total = end[rank] - begin[rank], sum(end) - sum(begin)
        yield (drawn[begin[rank] : end[rank]], held * len(counts) / total) if held else (drawn[:1], 0.0)
        begin = end
