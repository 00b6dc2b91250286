"""Rows in files, also more than fit into memory: each worker reads its own parts, pass after pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unisono.tables.estimators.formats import ENDINGS, FilePiece, find_format, list_files
from unisono.tables.estimators.row_blocks import BLOCK_BYTES, RowBlock

Array = npt.NDArray[np.float64]
KEEP_BYTES = 1 << 30
PIECE_BYTES = 16 << 20


class Files:
    """A table in CSV, Parquet or .npy files, local or at an fsspec address (hdfs://, s3://, ...).

    Arguments:
        paths: a file, a folder, a pattern such as "data/part-*.csv", or a list of them.
        target: the column to learn, by name (by number in files without names, negative from the end).
        columns: the columns to learn from; None: all others.
        weight: a column with the rows' weights.
        missing: "error", or "drop" to leave rows out that miss a value in a column in use.
        keep_bytes: how much a worker keeps in memory between passes; it reads the rest again each time.
        piece_bytes: how much is read at a time.

    All files have the same columns; columns with names may be in any order.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "points.csv")
    ...     _ = path.write_text("x,y\\n1,2\\n2,4\\n3,6\\n")
    ...     [block.y.ravel().tolist() for block in Files(path, target="y").plan().part(0, 1).read_blocks()]
    [[2.0, 4.0, 6.0]]
    """

    def __init__(
        self,
        paths: str | Path | Sequence[str | Path],
        *,
        target: str | int | None = None,
        columns: Sequence[str | int] | None = None,
        weight: str | int | None = None,
        missing: str = "error",
        keep_bytes: int = KEEP_BYTES,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        if missing not in ("error", "drop"):
            raise ValueError(f'Files: got missing={missing!r}; expected "error" or "drop"')
        if piece_bytes < 1 or keep_bytes < 0:
            raise ValueError(f"Files: got piece_bytes={piece_bytes}, keep_bytes={keep_bytes}; expected bytes")
        self.paths, self.target, self.columns, self.weight = paths, target, columns, weight
        self.missing, self.keep_bytes, self.piece_bytes = missing, keep_bytes, piece_bytes

    def __repr__(self) -> str:
        return f"Files({self.paths!r}, target={self.target!r})"

    def plan(self, *, columns: Sequence[str] | None = None) -> FilePlan:
        """Read the columns of all files, which must agree, and cut the files into pieces.

        `columns`: those to learn from, if they are known already.
        """
        files = list_files(self.paths, ENDINGS)
        names, named = find_format(files[0]).read_columns(files[0])
        for other in files[1:]:
            _check_columns(files[0], names, named, other)
        target = None if self.target is None else _resolve_column(self.target, names, files[0])
        weight = None if self.weight is None else _resolve_column(self.weight, names, files[0])
        chosen = columns if columns is not None else self.columns
        if chosen is not None:
            features = [_resolve_column(c, names, files[0]) for c in chosen]
        else:
            features = [n for n in names if n not in (target, weight)]
        if not features:
            raise ValueError(f"{files[0]}: no column is left to learn from (columns: {', '.join(names)})")
        if target in features:
            raise ValueError(f"the target {target!r} is among the columns to learn from")
        pieces = [p for file in files for p in find_format(file).cut_pieces(file, self.piece_bytes)]
        return FilePlan(pieces, features, target, weight, named, self.missing == "drop", self.keep_bytes)


@dataclass(frozen=True)
class FilePlan:
    """Which pieces there are, and which columns of them to read."""

    pieces: list[FilePiece]
    features: list[str]
    target: str | None
    weight: str | None
    named: bool
    drop: bool
    keep_bytes: int

    def part(self, rank: int, size: int) -> FileTable:
        """The pieces of worker `rank`: contiguous, about as many bytes for each."""
        ends = np.cumsum([0, *(p.weight for p in self.pieces)])
        middles = (ends[:-1] + ends[1:]) / 2
        mine = np.minimum(middles * size // max(1, int(ends[-1])), size - 1) == rank
        return FileTable(self, [p for p, is_mine in zip(self.pieces, mine, strict=True) if is_mine])


class FileTable:
    """A worker's pieces, as a `Table` (see row_blocks.py)."""

    def __init__(self, plan: FilePlan, pieces: Sequence[FilePiece]) -> None:
        self.plan, self.pieces = plan, pieces
        self.names: Sequence[str] | None = plan.features if plan.named else None
        self.columns, self.targets = len(plan.features), 1 if plan.target is not None else 0
        self.rows = 0
        self._kept: dict[FilePiece, tuple[Array, npt.NDArray[np.intp]]] = {}
        self._kept_bytes = 0

    def read_blocks(self) -> Iterator[RowBlock]:
        count = 0
        each = max(64, BLOCK_BYTES // (8 * max(1, self.columns)))
        for piece in self.pieces:
            data, numbers = self._read(piece)
            count += len(data)
            x, rest = data[:, : self.columns], data[:, self.columns :]
            y, weight = rest[:, : self.targets], rest[:, self.targets] if self.plan.weight is not None else None
            for start in range(0, len(data), each):
                rows = slice(start, start + each)
                yield RowBlock(
                    x[rows], y[rows], None if weight is None else weight[rows], _RowPlace(piece, numbers[rows])
                )
        self.rows = count

    def take_batch(self, index: int, of: int) -> Any:
        raise NotImplementedError("files are learned from by fit")

    def _read(self, piece: FilePiece) -> tuple[Array, npt.NDArray[np.intp]]:
        """The values, rows × (features, target, weight), and the number of each row in the piece."""
        if piece in self._kept:
            return self._kept[piece]
        wanted = [*self.plan.features, *(c for c in (self.plan.target, self.plan.weight) if c is not None)]
        data = find_format(piece.file).read(piece, wanted)
        numbers = np.arange(len(data))
        if self.plan.drop:
            whole = ~np.isnan(data).any(axis=1)
            data, numbers = data[whole], numbers[whole]
        if self._kept_bytes + data.nbytes <= self.plan.keep_bytes:
            self._kept[piece] = (data, numbers)
            self._kept_bytes += data.nbytes
        return data, numbers


@dataclass(frozen=True)
class _RowPlace:
    """Names the place of a row for errors; the file is read again only when an error needs it."""

    piece: FilePiece
    numbers: Any

    def __call__(self, row: int) -> str:
        return find_format(self.piece.file).describe_place(self.piece, int(self.numbers[row]))


def _check_columns(first: str, names: list[str], named: bool, other: str) -> None:
    theirs, also_named = find_format(other).read_columns(other)
    if also_named == named and sorted(theirs) == sorted(names):
        return
    if not named or not also_named:
        raise ValueError(f"the files' columns differ: {first} has {len(names)}, {other} has {len(theirs)}")
    lacking, extra = [n for n in names if n not in theirs], [n for n in theirs if n not in names]
    differences = [
        f"{what} {', '.join(map(repr, which))}" for what, which in (("lacks", lacking), ("adds", extra)) if which
    ]
    raise ValueError(
        f"the files' columns differ: compared with {first}, {other} {' and '.join(differences) or 'repeats some'}"
    )


def _resolve_column(column: str | int, names: list[str], file: str) -> str:
    if isinstance(column, int) and not isinstance(column, bool) and -len(names) <= column < len(names):
        return names[column]
    if str(column) in names:
        return str(column)
    raise ValueError(f"{file} has no column {column!r}: its columns are {', '.join(names)}")
