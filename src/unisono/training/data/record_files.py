"""`un.records`: the records of Parquet, JSONL and CSV files, cut into parts that workers read apart."""

from __future__ import annotations

import csv
import glob
import json
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from unisono.training.data.parts import Part, Source, open_bytes, open_filesystem, stamp_file

_ENDINGS = (".parquet", ".jsonl", ".ndjson", ".csv", ".tsv")
_LEAST_BYTES, _MOST_BYTES = 8 << 10, 64 << 20  # of a part that is cut by bytes
_CUTS = 192  # so many parts at least, if the files are large enough
_CHUNK_BYTES, _FAR_CHUNK_BYTES = 16 << 10, 1 << 20  # read at a time: what is read ahead a resumed run reads again
_ROWS = 256  # of Parquet, turned into Python values at a time


def records(
    files: str | Path | Sequence[str | Path],
    *,
    columns: Sequence[str] | None = None,
    read: Callable[[dict[str, Any]], Any] | None = None,
    newlines_in_values: bool = False,
) -> Records:
    """The records of files, for `un.shard`: each is read by one worker only.

    Parquet is divided by row groups, JSONL and CSV by ranges of bytes. A record is a dict of its columns.

    Args:
        files: Paths, folders or patterns of .parquet, .jsonl (.ndjson), .csv or .tsv files; local, or with a scheme
            that fsspec knows (s3://, gs://, hdfs://).
        columns: Keep only these of each record; from Parquet files only these are read.
        read: A function that turns a record into a sample.
        newlines_in_values: Whether quoted values of CSV files have line breaks. Such files are divided by file only.

    >>> records(["2024.jsonl", "2025.jsonl"])
    <records of 2 files: 2024.jsonl, ...>
    """
    return Records(files, columns, read, newlines_in_values=newlines_in_values)


class Records(Source):
    """The records of files; made by `records`."""

    def __init__(
        self,
        files: str | Path | Sequence[str | Path],
        columns: Sequence[str] | None,
        read: Callable[[dict[str, Any]], Any] | None,
        *,
        newlines_in_values: bool,
    ) -> None:
        given = [files] if isinstance(files, str | os.PathLike) else list(files)
        self.given = [os.fspath(one) for one in given]
        self.columns, self.read = None if columns is None else list(columns), read
        self.newlines_in_values = newlines_in_values
        self._parts: list[Part] | None = None
        self._footers: dict[str, Any] = {}  # of Parquet files, by path

    def __repr__(self) -> str:
        more = ", ..." if len(self.given) > 1 else ""
        return f"<records of {len(self.given)} file{'s' if more else ''}: {', '.join(self.given[:1])}{more}>"

    def matches(self, other: Records) -> bool:
        """Whether both read the same of the same files."""
        names = ("given", "columns", "newlines_in_values")
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_footers": {}}

    def parts(self) -> list[Part]:
        """Row groups, ranges of bytes or whole files; the same for any number of workers."""
        if self._parts is None:
            paths = [path for one in self.given for path in _list_files(one)]
            if not paths:
                raise FileNotFoundError(f"un.records found no files at {', '.join(self.given) or 'an empty list'}")
            sizes = [stamp_file(path)[0] for path in paths]
            each = min(max(sum(sizes) // _CUTS, _LEAST_BYTES), _MOST_BYTES)
            self._parts = [
                part for path, size in zip(paths, sizes, strict=True) for part in self._cut(path, size, each)
            ]
        return self._parts

    def _cut(self, path: str, size: int, each: int) -> list[Part]:
        if path.endswith(".parquet"):
            about = self._read_footer(path)
            groups = [about.row_group(i) for i in range(about.num_row_groups)]
            rows = [(group.num_rows, group.total_byte_size) for group in groups]
            return [Part(f"{path}, row group {i}", held, n, path, i) for i, (n, held) in enumerate(rows) if n]
        if path.endswith((".csv", ".tsv")) and self.newlines_in_values:
            each = max(size, 1)
        pieces = -(-size // each)
        cuts = [size * i // pieces for i in range(pieces + 1)] if pieces else []
        return [Part(f"{path}, byte {a}", b - a, None, path, [a, b]) for a, b in pairwise(cuts)]

    def read_part(self, part: Part, at: Any) -> Iterator[tuple[Any, Any]]:
        if part.path.endswith(".parquet"):
            found = self._read_row_group(part, at or 0)
        elif part.path.endswith((".csv", ".tsv")):
            found = self._read_csv(part, at)
        else:
            found = self._read_json(part, at)
        for record, after in found:
            kept = record if self.columns is None else {name: record[name] for name in self.columns}
            yield kept if self.read is None else self.read(kept), after

    def _read_footer(self, path: str) -> Any:
        if path not in self._footers:
            with open_bytes(path) as file:
                self._footers[path] = _import_parquet(path).ParquetFile(file).metadata
        return self._footers[path]

    def _read_row_group(self, part: Part, at: int) -> Iterator[tuple[dict[str, Any], int]]:
        with open_bytes(part.path) as file:
            table = _import_parquet(part.path).ParquetFile(
                file, metadata=self._read_footer(part.path), pre_buffer=False
            )
            rows = table.iter_batches(_ROWS, [part.what], columns=self.columns, use_threads=False)
            passed = 0
            for batch in rows:
                skip = min(max(at - passed, 0), batch.num_rows)
                for i, record in enumerate(batch.slice(skip).to_pylist(), passed + skip + 1):
                    yield record, i
                passed += batch.num_rows

    def _read_json(self, part: Part, at: int | None) -> Iterator[tuple[dict[str, Any], int]]:
        for line, start, after in _read_lines(part, at):
            if line.strip():
                try:
                    yield json.loads(line), after
                except ValueError as error:
                    raise ValueError(f"{part.path}, the line at byte {start} is not JSON: {error}") from None

    def _read_csv(self, part: Part, at: int | None) -> Iterator[tuple[dict[str, Any], int]]:
        delimiter = "\t" if part.path.endswith(".tsv") else ","
        header, first = _read_header(part.path, delimiter)
        pending, begun = b"", 0
        for line, start, after in _read_lines(part, at):
            if after <= first or not (pending or line.strip()):
                continue
            begun, pending = begun if pending else start, pending + line
            if pending.count(b'"') % 2:  # a quoted value goes on
                if not self.newlines_in_values:
                    break
                continue
            fields = next(csv.reader([pending.decode("utf-8")], delimiter=delimiter), [])
            if len(fields) != len(header):
                raise ValueError(
                    f"{part.path}, the line at byte {begun} has {len(fields)} values. Expected {len(header)}, as its "
                    "first line has."
                )
            yield dict(zip(header, fields, strict=True)), after
            pending = b""
        if pending:
            raise ValueError(
                f"{part.path}, the line at byte {begun} opens a quote that it does not close. If values have line "
                "breaks, say un.records(..., newlines_in_values=True): such files are divided by file."
            )


def _read_lines(part: Part, at: int | None) -> Iterator[tuple[bytes, int, int]]:
    """The lines that begin in the part's range of bytes, from `at` on; each with its start and its end in the file.

    The rest of the last line lies behind the range: it is read in small pieces.
    """
    begin, stop = part.what
    with open_bytes(part.path) as file:
        place = begin if at is None else at
        if at is None and begin:
            place -= 1  # whether a line begins at `begin` is told by the byte before it
        file.seek(place)
        held, is_inside = b"", at is not None or not begin
        most = _FAR_CHUNK_BYTES if "://" in part.path else _CHUNK_BYTES
        while place < stop:
            wanted = stop - place - len(held)
            chunk = file.read(min(wanted, most) if wanted > 0 else 1 << 9)
            held += chunk
            *lines, held = held.split(b"\n")
            if not chunk:  # the end of the file
                lines, held = [held] if held else [], b""
            for line in lines:
                start, place = place, place + len(line) + 1
                if is_inside and start < stop:
                    yield line + b"\n", start, place
                is_inside = True
            if not chunk:
                return


def _read_header(path: str, delimiter: str) -> tuple[list[str], int]:
    """The names of the columns, and where the first record begins."""
    line = b""
    with open_bytes(path) as file:
        while b"\n" not in line and (chunk := file.read(1 << 9)):
            line += chunk
    names = line.partition(b"\n")[0]
    return next(csv.reader([names.decode("utf-8-sig")], delimiter=delimiter), []), len(names) + 1


def _list_files(address: str) -> list[str]:
    """The files at a path, in a folder or of a pattern, sorted; ValueError for one of another kind."""
    if "://" in address:
        system, inside = open_filesystem(address)
        scheme = address.split("://", 1)[0]
        found = system.glob(inside) if glob.has_magic(inside) else [inside]
        found = [p for one in found for p in (system.ls(one, detail=False) if system.isdir(one) else [one])]
        paths = [f"{scheme}://{p if scheme == 'file' else p.lstrip('/')}" for p in sorted(found)]
    else:
        found = sorted(glob.glob(address)) if glob.has_magic(address) and not os.path.exists(address) else [address]
        paths = [p for one in found for p in (_list_folder(one) if os.path.isdir(one) else [one])]
    wrong = [path for path in paths if not path.endswith(_ENDINGS)]
    if wrong:
        raise ValueError(f"un.records got {wrong[0]}. Expected files that end in {', '.join(_ENDINGS)}.")
    return paths


def _list_folder(folder: str) -> list[str]:
    names = sorted(name for name in os.listdir(folder) if name.endswith(_ENDINGS))
    return [os.path.join(folder, name) for name in names]


def _import_parquet(path: str) -> Any:
    try:
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{path} is read through pyarrow: pip install 'unisono[parquet]'") from error
    return pyarrow.parquet
