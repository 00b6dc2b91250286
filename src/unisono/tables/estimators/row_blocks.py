"""A worker's rows, block by block: arrays cut into pieces that stay in the cache, sparse matrices whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from unisono.tables.map_reduce.worker_data import find_bounds
from unisono.training.data.tables import TablePart

Array = npt.NDArray[np.float64]
BLOCK_BYTES = 1 << 20  # the two products of a gradient then read a block once from memory and once from the cache


class RowBlock(NamedTuple):
    """Some rows. x: rows × columns (dense or sparse); y: rows × targets; weight: rows, or None for all 1."""

    x: Any
    y: Array
    weight: Array | None
    where: Callable[[int], str]  # names the place of a row, for errors


@runtime_checkable
class Table(Protocol):
    """A worker's rows, which can be read as often as needed."""

    names: Sequence[str] | None  # of the columns, if they have names
    columns: int
    targets: int
    rows: int  # of files: as counted in the last whole pass

    def read_blocks(self) -> Iterator[RowBlock]:
        """All rows, in blocks of some rows each."""

    def take_batch(self, index: int, of: int) -> Table:
        """Part `index` of `of` equal parts of the rows."""


class Rows(NamedTuple):
    """Arrays to be split by rows: x, y (rows × targets), weight or None, and the names of the columns.

    `first` is the number of the first row, as errors count it.
    """

    x: Any
    y: Array
    weight: Array | None
    names: Sequence[str] | None = None
    first: int = 0

    def part(self, rank: int, size: int) -> Rows:
        """Part `rank` of `size` contiguous ones."""
        start, stop = find_bounds(self.x.shape[0], rank, size)
        weight = None if self.weight is None else self.weight[start:stop]
        return Rows(self.x[start:stop], self.y[start:stop], weight, self.names, self.first + start)


class ArrayTable:
    """A table of arrays in memory."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.names, self.columns, self.targets = rows.names, int(rows.x.shape[1]), int(rows.y.shape[1])
        self.rows = int(rows.x.shape[0])

    def take_batch(self, index: int, of: int) -> ArrayTable:
        return ArrayTable(self._rows.part(index, of))

    def read_blocks(self) -> Iterator[RowBlock]:
        x, y, weight, _, first = self._rows
        total = x.shape[0]
        each = total if is_sparse(x) else max(64, BLOCK_BYTES // (8 * max(1, self.columns)))
        for start in range(0, total, max(1, each)):
            stop = min(start + each, total)
            whole = stop - start == total
            yield RowBlock(
                x if whole else x[start:stop],
                y[start:stop],
                None if weight is None else weight[start:stop],
                lambda row, at=first + start: f"row {at + row}",  # type: ignore[misc]
            )


def make_table(data: Any, target: str | None = None) -> Table:
    """A worker's data as a table: `Rows`, a part of files, a tuple (x, y) of arrays, or a part of an engine's table.

    target: the column to learn, of an engine's table.
    """
    if isinstance(data, Rows):
        return ArrayTable(data)
    if isinstance(data, Table):
        return data
    if isinstance(data, TablePart):
        return _make_from_columns(data.columns, target)
    x, y, *rest = data
    x = x if is_sparse(x) else np.asarray(x, dtype=np.float64)
    y = np.asarray(y, dtype=np.float64)
    weight = None if not rest or rest[0] is None else np.asarray(rest[0], dtype=np.float64)
    return ArrayTable(Rows(x, y.reshape(len(y), -1), weight))


def _make_from_columns(columns: dict[str, Any], target: str | None) -> ArrayTable:
    """The table of an engine's columns, each of which holds numbers or vectors of numbers."""
    if target not in columns:
        raise ValueError(f"the table has no column {target!r} to learn: its columns are {', '.join(columns)}")
    parts: list[Array] = []
    names: list[str] = []
    for name, column in columns.items():
        if not isinstance(column, np.ndarray) or column.dtype.kind not in "fiub" or column.ndim > 2:
            raise ValueError(f"column {name!r} does not hold numbers: select the columns to learn from before fit")
        wide = np.asarray(column, dtype=np.float64).reshape(len(column), -1)
        if name == target:
            y = wide
            continue
        parts.append(wide)
        names += [name] if column.ndim == 1 else [f"{name}[{i}]" for i in range(wide.shape[1])]
    if not parts:
        raise ValueError(f"the table has no column to learn from beside {target!r}")
    return ArrayTable(Rows(np.hstack(parts), y, None, names))


def is_sparse(x: Any) -> bool:
    """Whether it is one of scipy's sparse matrices or arrays."""
    return hasattr(x, "tocsr")


def format_column(names: Sequence[str] | None, column: int) -> str:
    """How errors name a column."""
    return f"column {names[column]!r}" if names is not None else f"column {column}"


def find_problem(block: RowBlock, names: Sequence[str] | None) -> str:
    """The first value that is not a finite number, named by column and place; empty if all are."""
    found = _find_bad(block.x)
    if found is not None:
        row, column, value = found
        return f"Input X contains {_describe_value(value)} in {format_column(names, column)} ({block.where(row)})"
    found = _find_bad(block.y)
    if found is not None:
        row, column, value = found
        several = f" {column}" if block.y.shape[1] > 1 else ""
        return f"Input y contains {_describe_value(value)} in target{several} ({block.where(row)})"
    if block.weight is not None and (found := _find_bad(block.weight[:, None])) is not None:
        return f"sample_weight contains {_describe_value(found[2])} ({block.where(found[0])})"
    return ""


def is_finite(block: RowBlock) -> bool:
    """Whether all numbers are finite. A sum is fast, and settles almost every case."""
    values = [block.x.data if is_sparse(block.x) else block.x, block.y, block.weight]
    with np.errstate(all="ignore"):
        return all(v is None or bool(np.isfinite(v.sum())) or bool(np.isfinite(v).all()) for v in values)


def _find_bad(x: Any) -> tuple[int, int, float] | None:
    if is_sparse(x):
        coo = x.tocoo()
        bad = np.flatnonzero(~np.isfinite(coo.data))
        return (int(coo.row[bad[0]]), int(coo.col[bad[0]]), float(coo.data[bad[0]])) if len(bad) else None
    places = np.argwhere(~np.isfinite(x))
    if not len(places):
        return None
    row, column = (int(i) for i in places[0])
    return row, column, float(x[row, column])


def _describe_value(value: float) -> str:
    return "NaN (a missing value)" if np.isnan(value) else "infinity (inf)"
