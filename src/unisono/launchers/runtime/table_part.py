"""A worker's rows of a table that is divided among the workers, mapped from the files that its agent wrote.

`un.launch(train, workers=2, args=(frame,), on=un.on.spark(...))` with a Spark DataFrame or RDD, or a Ray Dataset, gives
every worker a `TablePart` in its place. launchers/table_files.py writes the files.
"""

from __future__ import annotations

import json
import mmap
import os
from typing import Any

import numpy as np

__all__ = ["TablePart"]


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
        """The columns in the form of a sample, if all of them are arrays; else None."""
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
