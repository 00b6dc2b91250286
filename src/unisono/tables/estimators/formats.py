"""Tables in files, read by part: CSV by records, NumPy's .npy by rows, Parquet by row groups.

A format says which columns a file has, cuts it into pieces, and reads some columns of a piece as numbers. Files have
local paths and patterns, or addresses with a scheme (hdfs://, s3://), which are opened through fsspec.
"""

from __future__ import annotations

import csv
import glob
import io
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt


def list_files(paths: str | Path | Sequence[str | Path], endings: Sequence[str]) -> list[str]:
    """List the files that the addresses name, in order; those of a pattern or a folder are sorted by name."""
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    found = [file for one in given for file in _expand(str(one), tuple(endings))]
    if not found:
        raise FileNotFoundError(f"no files at {', '.join(map(str, given)) or 'an empty list of addresses'}")
    return found


def open_file(address: str) -> IO[bytes]:
    """Open the file for reading bytes."""
    if "://" not in address:
        return open(address, "rb")
    system, path = _open_filesystem(address)
    file: IO[bytes] = system.open(path, "rb")
    return file


def read_size(address: str) -> int:
    """How many bytes the file has."""
    if "://" not in address:
        return os.path.getsize(address)
    system, path = _open_filesystem(address)
    return int(system.size(path))


def _expand(address: str, endings: tuple[str, ...]) -> list[str]:
    if "://" in address:
        system, path = _open_filesystem(address)
        scheme = address.split("://", 1)[0]
        if glob.has_magic(path):
            return [f"{scheme}://{p.lstrip('/') if scheme != 'file' else p}" for p in sorted(system.glob(path))]
        if system.isdir(path):
            inside = sorted(p for p in system.ls(path, detail=False) if p.endswith(endings))
            return [f"{scheme}://{p.lstrip('/') if scheme != 'file' else p}" for p in inside]
        if not system.exists(path):
            raise FileNotFoundError(f"no file at {address}")
        return [address]
    if glob.has_magic(address) and not os.path.exists(address):
        return sorted(glob.glob(address))
    if os.path.isdir(address):
        return sorted(os.path.join(address, name) for name in os.listdir(address) if name.endswith(endings))
    if not os.path.exists(address):
        raise FileNotFoundError(f"no file at {os.path.abspath(address)}")
    return [address]


def _open_filesystem(address: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{address} is read through fsspec: pip install 'unisono[parquet]'") from error
    scheme = address.split("://", 1)[0]
    try:
        system, path = url_to_fs(address)
    except ImportError as error:
        raise ImportError(f"{address}: fsspec has no driver for {scheme}:// here: {error}") from error
    return system, path


Array = npt.NDArray[np.float64]
_MAX_COLUMNS_OF_NONE = 1 << 20  # the most columns that a file without rows may claim
_MAX_RECORD_BYTES = 64 << 20  # of CSV: more is a quote that nobody closed
MISSING = {"", "na", "n/a", "nan", "null", "none"}


class FilePiece(NamedTuple):
    """Part of a file, from `start` to `stop` in the format's own units; `weight` is its length in bytes."""

    file: str
    start: int
    stop: int
    weight: int


class Format(Protocol):
    """How a kind of file stores a table."""

    def read_columns(self, file: str) -> tuple[list[str], bool]:
        """The columns, and whether they have names (numbers from 0 otherwise)."""

    def cut_pieces(self, file: str, piece_bytes: int) -> list[FilePiece]:
        """Cut the file into pieces of about `piece_bytes` each."""

    def read(self, piece: FilePiece, columns: Sequence[str]) -> Array:
        """These columns of the piece: rows × columns."""

    def describe_place(self, piece: FilePiece, row: int) -> str:
        """The place of row `row` of the piece in its file, in words."""


class _Csv:
    """Text, a record a line; the first one names the columns, unless all its fields are numbers.

    A quoted field may hold delimiters, line breaks and doubled quotes. A quote inside an unquoted field is a character
    like any other, as it is for `csv.reader` and `numpy.loadtxt`.
    """

    def __init__(self, delimiter: str) -> None:
        self.delimiter = delimiter
        self._quoted = re.compile(
            rb'(?:\A(?:\xef\xbb\xbf)?|(?<=[%s\n]))"[^"]*(?:""[^"]*)*(?:"|\Z)' % delimiter.encode()
        )

    def read_columns(self, file: str) -> tuple[list[str], bool]:
        return self._read_header(file)[:2]

    def cut_pieces(self, file: str, piece_bytes: int) -> list[FilePiece]:
        """Cut between records. Only a look at all of the file tells which line breaks are inside quotes."""
        pieces: list[FilePiece] = []
        start, rest = 0, b""  # where the next piece begins, and what has been read of it
        with open_file(file) as source:
            while chunk := source.read(piece_bytes):
                rest += chunk
                if length := self._find_last_end(rest):
                    pieces.append(FilePiece(file, start, start + length, length))
                    start, rest = start + length, rest[length:]
                elif len(rest) > _MAX_RECORD_BYTES:
                    raise ValueError(
                        f"{self._name_line(file, start, 1)} continues for {len(rest)} bytes: a quote is not closed"
                    )
        return [*pieces, FilePiece(file, start, start + len(rest), len(rest))] if rest else pieces

    def read(self, piece: FilePiece, columns: Sequence[str]) -> Array:
        names, _, header_lines = self._read_header(piece.file)
        use = [names.index(c) for c in columns]
        data = _read_bytes(piece)
        if piece.start == 0 and header_lines:
            data = (data.split(b"\n", header_lines)[header_lines:] or [b""])[0]
        if not data.strip():
            return np.empty((0, len(use)))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return np.loadtxt(
                    io.BytesIO(data), delimiter=self.delimiter, usecols=use, ndmin=2, quotechar='"', comments=None
                )
        except ValueError:  # a missing value, text, a short line: slower, and says which
            return self._read_carefully(piece, names, use)

    def describe_place(self, piece: FilePiece, row: int) -> str:
        line, _ = next(islice(self._read_records(piece), row, None))
        return self._name_line(piece.file, piece.start, line)

    def _name_line(self, file: str, start: int, line: int) -> str:
        """Line `line` (from 1 on) of what begins at byte `start`, as a line of the file."""
        before = 0
        with open_file(file) as source:
            while start > 0 and (chunk := source.read(min(start, 1 << 20))):
                before, start = before + chunk.count(b"\n"), start - len(chunk)
        return f"{file}, line {before + line}"

    def _read_header(self, file: str) -> tuple[list[str], bool, int]:
        """The columns, whether the file names them, and how many lines these names take."""
        with open_file(file) as source:
            lines = csv.reader(io.TextIOWrapper(source, "utf-8-sig", newline="\n"), delimiter=self.delimiter)
            try:
                fields = [f.strip() for f in next(lines, [])]
            except csv.Error as error:
                raise ValueError(f"{file}, line 1 is not CSV: {error}") from None
        if not fields:
            raise ValueError(f"{file} is empty: expected a line with the names of the columns")
        if all(_is_number(field) for field in fields):
            return [str(i) for i in range(len(fields))], False, 0
        return fields, True, lines.line_num

    def _find_last_end(self, text: bytes) -> int:
        """Where the last whole record of `text` ends, which begins with a record; 0 if none ends."""
        if b'"' not in text:
            return text.rfind(b"\n") + 1
        line = np.frombuffer(text, dtype=np.uint8)
        quotes = np.flatnonzero(line == ord('"'))
        opening = quotes[::2][int(quotes[0] == 0) :]
        if np.isin(line[opening - 1], list(f'{self.delimiter}\n"'.encode())).all():  # the usual case, and fast
            ends = np.flatnonzero(line == ord("\n"))
            outside = ends[np.searchsorted(quotes, ends) % 2 == 0]
            return int(outside[-1]) + 1 if len(outside) else 0
        return self._quoted.sub(lambda found: bytes(len(found[0])), text).rfind(b"\n") + 1

    def _read_records(self, piece: FilePiece) -> Iterator[tuple[int, list[str]]]:
        """The rows of a piece, and the line of the piece in which each begins; empty lines are no rows."""
        text = io.TextIOWrapper(io.BytesIO(_read_bytes(piece)), "utf-8-sig", newline="\n")
        lines = csv.reader(text, delimiter=self.delimiter)
        skip = self._read_header(piece.file)[2] if piece.start == 0 else 0
        begin = 1
        try:
            for fields in lines:
                if fields and begin > skip:
                    yield begin, fields
                begin = lines.line_num + 1
        except csv.Error as error:
            raise ValueError(f"{self._name_line(piece.file, piece.start, begin)} is not CSV: {error}") from None

    def _read_carefully(self, piece: FilePiece, names: list[str], use: list[int]) -> Array:
        rows = []
        for i, (_, fields) in enumerate(self._read_records(piece)):
            if len(fields) != len(names):
                raise ValueError(f"{self.describe_place(piece, i)} has {len(fields)} fields, expected {len(names)}")
            row = []
            for column in use:
                text = fields[column].strip()
                if text.lower() not in MISSING and not _is_number(text):
                    raise ValueError(
                        f"{self.describe_place(piece, i)}: column {names[column]!r} has {text!r}, expected a number; "
                        "leave the column out (Files(..., columns=[...])), or turn it into numbers first"
                    )
                row.append(np.nan if text.lower() in MISSING else float(text))
            rows.append(row)
        return np.array(rows, dtype=np.float64).reshape(len(rows), len(use))


class _Npy:
    """One two-dimensional array a file."""

    def read_columns(self, file: str) -> tuple[list[str], bool]:
        shape, _, _, _ = self._read_header(file)
        return [str(i) for i in range(shape[1])], False

    def cut_pieces(self, file: str, piece_bytes: int) -> list[FilePiece]:
        (rows, columns), dtype, _, _ = self._read_header(file)
        width = max(1, columns * dtype.itemsize)
        each = max(1, piece_bytes // width)
        return [
            FilePiece(file, s, min(s + each, rows), (min(s + each, rows) - s) * width) for s in range(0, rows, each)
        ]

    def read(self, piece: FilePiece, columns: Sequence[str]) -> Array:
        shape, dtype, fortran, offset = self._read_header(piece.file)
        use = [int(c) for c in columns]
        rows = piece.stop - piece.start
        with open_file(piece.file) as source:
            if not fortran:
                source.seek(offset + piece.start * shape[1] * dtype.itemsize)
                line = np.frombuffer(source.read(rows * shape[1] * dtype.itemsize), dtype=dtype)
                return np.asarray(line.reshape(rows, shape[1])[:, use], dtype=np.float64)
            found = np.empty((rows, len(use)))
            for i, column in enumerate(use):
                source.seek(offset + (column * shape[0] + piece.start) * dtype.itemsize)
                found[:, i] = np.frombuffer(source.read(rows * dtype.itemsize), dtype=dtype)
            return found

    def describe_place(self, piece: FilePiece, row: int) -> str:
        return f"{piece.file}, row {piece.start + row}"

    def _read_header(self, file: str) -> tuple[tuple[int, int], np.dtype[Any], bool, int]:
        with open_file(file) as source:
            try:
                version = np.lib.format.read_magic(source)
                read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                shape, fortran, dtype = read(source)
            except (ValueError, TypeError, SyntaxError, OverflowError, RecursionError, TokenError) as error:
                raise ValueError(f"{file} has a broken header: {str(error)[:200]}") from None
            offset = source.tell()
        if len(shape) != 2 or dtype.kind not in "fiub":
            raise ValueError(f"{file} holds {dtype} of shape {str(shape)[:200]}: expected numbers in rows and columns")
        held, (rows, columns) = read_size(file) - offset, shape
        if min(shape) < 0 or rows * columns * dtype.itemsize > held or columns > max(held, _MAX_COLUMNS_OF_NONE):
            raise ValueError(
                f"{file} is cut short or has a broken header: {held} bytes for {dtype} of shape {str(shape)[:200]}"
            )
        return shape, dtype, fortran, offset


class _Parquet:
    """Row groups of columns; through pyarrow."""

    def read_columns(self, file: str) -> tuple[list[str], bool]:
        with open_file(file) as source:
            return list(_import_parquet(file).ParquetFile(source).schema_arrow.names), True

    def cut_pieces(self, file: str, piece_bytes: int) -> list[FilePiece]:
        """Join row groups until they have at least `piece_bytes`, as the metadata counts them."""
        with open_file(file) as source:
            about = _import_parquet(file).ParquetFile(source).metadata
            sizes = [about.row_group(i).total_byte_size for i in range(about.num_row_groups)]
        found: list[FilePiece] = []
        start = held = 0
        for i, size in enumerate(sizes):
            held += size
            if held >= piece_bytes or i == len(sizes) - 1:
                found.append(FilePiece(file, start, i + 1, held))
                start, held = i + 1, 0
        return found

    def read(self, piece: FilePiece, columns: Sequence[str]) -> Array:
        with open_file(piece.file) as source:
            groups = list(range(piece.start, piece.stop))
            file = _import_parquet(piece.file).ParquetFile(source)
            table = file.read_row_groups(groups, columns=list(columns), use_threads=False)
        found = np.empty((table.num_rows, len(columns)))
        for i, name in enumerate(columns):
            column = table.column(name)
            try:
                found[:, i] = column.to_numpy()  # a missing value becomes NaN
            except (TypeError, ValueError):
                raise ValueError(
                    f"{piece.file}: column {name!r} is {column.type}, expected numbers; leave the column out "
                    "(Files(..., columns=[...])), or turn it into numbers first"
                ) from None
        return found

    def describe_place(self, piece: FilePiece, row: int) -> str:
        with open_file(piece.file) as source:
            about = _import_parquet(piece.file).ParquetFile(source).metadata
            before = sum(about.row_group(i).num_rows for i in range(piece.start))
        return f"{piece.file}, row {before + row}"


def _import_parquet(file: str) -> Any:
    try:
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{file} is read by pyarrow: pip install 'unisono[parquet]'") from error
    return pyarrow.parquet


_FORMATS: dict[str, Format] = {
    ".csv": _Csv(","),
    ".tsv": _Csv("\t"),
    ".npy": _Npy(),
    ".parquet": _Parquet(),
    ".pq": _Parquet(),
}
ENDINGS = tuple(_FORMATS)


def find_format(file: str) -> Format:
    """Find the format by the ending of the file's name."""
    for ending, kind in _FORMATS.items():
        if file.lower().endswith(ending):
            return kind
    raise ValueError(f"{file}: expected a name that ends in {', '.join(ENDINGS)}")


def _read_bytes(piece: FilePiece) -> bytes:
    with open_file(piece.file) as source:
        source.seek(piece.start)
        return source.read(piece.stop - piece.start)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
