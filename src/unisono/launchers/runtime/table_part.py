"""A worker's rows of a table that is divided among the workers: files that its agent writes, and the worker maps.

`un.launch(train, workers=2, args=(frame,), on=un.on.spark(...))` with a Spark DataFrame or RDD, or a Ray Dataset, gives
every worker a `TablePart` in its place. The rows come to the agent in pieces (Arrow, NumPy). Each column of numbers is
appended to an unlinked file of its own, so that the worker maps it as one array, also if it is larger than memory (an
Arrow file would give it in chunks). Text and bytes are one file of contents and one of ends.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import resource
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Any

__all__ = ["TableFiles", "TablePart", "arrow_columns", "write_listing"]


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
        import numpy as np

        found = {name: column for name, column in self.columns.items() if isinstance(column, np.ndarray)}
        return self._shape_sample(found) if found and len(found) == len(self.columns) else None

    def _shape_sample(self, columns: dict[str, Any]) -> Any:
        if self.form == "single":
            return columns["0"]
        return tuple(columns.values()) if self.form == "tuple" else columns

    def _open(self) -> None:
        """Map the files that the agent keeps open."""
        import numpy as np

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
        import numpy as np

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


# The agent's side ----------------------------------------------------------------------------------------------------


class TableFiles:
    """The files of one part. `name` is what errors call the table."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.rows = 0
        self.form = "dict"  # of a sample: dict, tuple, or single
        self._columns: dict[str, dict[str, Any]] = {}
        self._files: list[IO[bytes]] = []

    def add(self, columns: Mapping[str, Any]) -> None:
        """Append a piece: arrays of numbers (one row each first), or lists of str or bytes."""
        if not columns:
            return
        if self._columns and list(self._columns) != list(columns):
            raise ValueError(
                f"{self.name} has the columns {', '.join(columns)} in one part and {', '.join(self._columns)} in "
                "another. Expected the same in all."
            )
        lengths = {name: len(values) for name, values in columns.items()}
        assert len(set(lengths.values())) == 1, lengths
        for name, values in columns.items():
            self._append(name, values)
        self.rows += next(iter(lengths.values()))

    def add_samples(self, samples: Iterable[Any]) -> None:
        """Append the elements of an RDD: numbers, arrays, text or bytes; or tuples, lists, dicts or Rows of them."""
        samples = iter(samples)
        while chunk := list(itertools.islice(samples, 1024)):
            form, columns = _as_columns(self.name, chunk)
            if self.rows and form != self.form:
                raise TypeError(f"{self.name} has elements of different kinds: {self.form} and {form}. Expected one.")
            self.form = form
            self.add(columns)

    def describe(self) -> dict[str, Any]:
        """What the worker needs to know to read the files: all can be opened while this process lives."""
        for file in self._files:
            file.flush()
        paths = [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in self._files]
        return {"name": self.name, "rows": self.rows, "form": self.form, "columns": self._columns, "files": paths}

    def close(self) -> None:
        """Close the files, which have no name and vanish with that."""
        for file in self._files:
            file.close()

    def _append(self, name: str, values: Any) -> None:
        import numpy as np

        if isinstance(values, np.ndarray) and values.dtype.kind == "O":
            values = values.tolist()
        if not isinstance(values, np.ndarray):
            kinds = {type(value) for value in values}
            if kinds <= {str} or kinds <= {bytes}:
                kind = "bytes" if bytes in kinds else "text"
                self._append_bytes(name, kind, [v if isinstance(v, bytes) else v.encode() for v in values])
                return
            bad = next(iter(kinds - {str, bytes}), type(None)).__name__
            raise TypeError(
                f"{self.name}: column {name!r} holds {bad}, which cannot be given to workers. Expected numbers, "
                "lists of numbers of equal length, text or bytes, and no missing values: convert, fill or drop it."
            )
        if values.dtype.kind not in "biufc":
            raise TypeError(
                f"{self.name}: column {name!r} is of type {values.dtype}. Expected numbers, lists of numbers of equal "
                "length, text or bytes: convert or drop it."
            )
        layout = {"kind": "array", "dtype": values.dtype.str, "shape": list(values.shape[1:])}
        column = self._columns.setdefault(name, {**layout, "file": -1})
        if column["file"] < 0:
            column["file"] = self._new_file()
        if {key: column[key] for key in layout} != layout:
            raise ValueError(
                f"{self.name}: column {name!r} has rows of shape {tuple(layout['shape'])}, type {layout['dtype']} in "
                f"one place, {tuple(column['shape'])}, {column['dtype']} in another. Expected the same in all."
            )
        self._files[column["file"]].write(np.ascontiguousarray(values).data.cast("B") if values.size else b"")

    def _append_bytes(self, name: str, kind: str, values: list[bytes]) -> None:
        if name not in self._columns:
            self._columns[name] = {"kind": kind, "file": self._new_file(), "ends": self._new_file(), "bytes": 0}
        column = self._columns[name]
        for value in values:
            self._files[column["file"]].write(value)
            column["bytes"] += len(value)
            self._files[column["ends"]].write(int(column["bytes"]).to_bytes(8, "little"))

    def _new_file(self) -> int:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard and len(self._files) + 256 > soft:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self._files.append(tempfile.TemporaryFile(prefix="unisono-part-", buffering=1 << 20))  # noqa: SIM115
        return len(self._files) - 1


def write_listing(parts: Sequence[TableFiles]) -> IO[bytes]:
    """An open file that describes them all, for UNISONO_PARTS in the worker's environment."""
    file = tempfile.TemporaryFile(prefix="unisono-parts-")  # noqa: SIM115  # open as long as the worker lives
    file.write(json.dumps([part.describe() for part in parts]).encode())
    file.flush()
    return file


def arrow_columns(name: str, batch: Any) -> dict[str, Any]:
    """The columns of an Arrow record batch as `TableFiles.add` takes them, without a copy if possible."""
    import pyarrow as pa

    return {
        field.name: _column(pa, name, field.name, column)
        for field, column in zip(batch.schema, batch.columns, strict=True)
    }


def _column(pa: Any, table: str, name: str, column: Any) -> Any:
    kind = column.type
    if column.null_count:
        raise ValueError(
            f"{table}: column {name!r} has {column.null_count} missing values among {len(column)} rows. Expected none: "
            "fill or drop them first."
        )
    if pa.types.is_decimal(kind):
        return column.cast(pa.float64()).to_numpy(zero_copy_only=False)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        lengths = column.value_lengths().unique() if len(column) else pa.array([0])
        if len(lengths) != 1:
            raise ValueError(
                f"{table}: column {name!r} has lists of different lengths ({sorted(lengths.to_pylist())[:8]}). "
                "Expected the same in all rows."
            )
        inner = _column(pa, table, name, column.flatten())
        return inner.reshape(len(column), lengths[0].as_py(), *inner.shape[1:])
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_binary(kind):
        return column.to_pylist()
    if pa.types.is_large_binary(kind):
        return column.to_pylist()
    return column.to_numpy(zero_copy_only=False)


def _as_columns(table: str, chunk: list[Any]) -> tuple[str, dict[str, Any]]:
    """Samples of one kind by columns, and their form."""
    import numpy as np

    first = chunk[0]
    if hasattr(first, "asDict"):  # Spark's Row, which is a tuple as well
        chunk = [sample.asDict() for sample in chunk]
        first = chunk[0]
    if isinstance(first, dict):
        form, rows = "dict", [list(sample.values()) for sample in chunk]
        names = [str(name) for name in first]
    elif isinstance(first, tuple | list):
        form, rows, names = "tuple", [list(sample) for sample in chunk], [str(i) for i in range(len(first))]
    else:
        form, rows, names = "single", [[sample] for sample in chunk], ["0"]
    if any(len(row) != len(names) for row in rows):
        raise ValueError(f"{table} has elements with different numbers of values. Expected {len(names)} in each.")
    columns: dict[str, Any] = {}
    for name, values in zip(names, zip(*rows, strict=True), strict=True):
        if isinstance(values[0], str | bytes):
            columns[name] = list(values)
            continue
        try:
            columns[name] = np.stack([np.asarray(value) for value in values])
        except ValueError:
            shapes = sorted({np.shape(value) for value in values})
            raise ValueError(
                f"{table}: value {name} has different shapes in different elements ({shapes[:4]}). Expected one shape."
            ) from None
    return form, columns
