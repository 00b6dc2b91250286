"""Tensors in a safetensors file, written and read as a stream: checksummed on the way, no second copy.

The `safetensors` package reads these files. It is not used here: it writes tensors only whole and from memory, refuses
those that share memory (views into one flat buffer), and neither syncs nor checksums; it reads by mapping a file by its
name, which blocks on a FIFO and crashes if the file shrinks, and knows no ranges of a flat tensor.
"""

from __future__ import annotations

import io
import json
import math
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch

from unisono.packing import count_shape_bytes, find_dtype, unpack
from unisono.training.checkpoint.remote import Place, RemoteFile, RemotePath, write_chunks
from unisono.training.checkpoint.slices import CHUNK_BYTES, Piece, Span, Stored

_DTYPES = {
    "F64": torch.float64, "I64": torch.int64, "F32": torch.float32, "I32": torch.int32, "F16": torch.float16,
    "BF16": torch.bfloat16, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MAX_HEADER_BYTES = 100 << 20  # the format's own limit


class Written(NamedTuple):
    """The size of a file, and the CRC-32 of its bytes."""

    size: int
    crc32: int


def write_bytes(path: Place, make_parts: Callable[[], Iterable[Any]]) -> Written:
    """Write buffers one after the other into a new file, and wait until the disk has them. At an address, they may have
    to be made and sent again."""
    if isinstance(path, RemotePath):
        return Written(*path.write(make_parts))
    with open(path, "xb", buffering=0) as file:

        def write(chunk: memoryview) -> None:
            while chunk:  # one write may take only a part, above all on a disk that fills up
                chunk = chunk[file.write(chunk) :]

        written = Written(*write_chunks(make_parts(), write))
        os.fsync(file.fileno())
    return written


class Entry(NamedTuple):
    """A tensor to write: its name, what it is, and what gives its elements in order, as contiguous CPU tensors."""

    name: str
    dtype: torch.dtype
    shape: Sequence[int]
    make_parts: Callable[[], Iterable[torch.Tensor]]


def write(path: Place, tensors: Mapping[str, torch.Tensor]) -> Written:
    """Write contiguous CPU tensors, as `unisono.packing.pack` gives them, into a new safetensors file."""
    return write_stream(path, [Entry(name, x.dtype, x.shape, partial(iter, [x])) for name, x in tensors.items()])


def write_stream(path: Place, entries: Iterable[Entry], *, metadata: Mapping[str, str] | None = None) -> Written:
    """Write a new safetensors file from tensors that come in parts; one part is in memory at a time."""
    ordered = sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.name))  # keeps all aligned
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, dtype, shape, _ in ordered:
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    def make_parts() -> Iterator[Any]:
        body = (_view_bytes(part) for entry in ordered for part in entry.make_parts() if part.numel())
        return chain([len(text).to_bytes(8, "little"), text], body)

    written = write_bytes(path, make_parts)
    if written.size != 8 + len(text) + end:
        raise ValueError(f"{path.name}: its tensors have {end} bytes, {written.size - 8 - len(text)} came")
    return written


def is_storable(dtype: torch.dtype) -> bool:
    """Whether the format has a name for this dtype."""
    return dtype in _NAMES


def read(path: Place) -> tuple[dict[str, torch.Tensor], Written]:
    """Read a safetensors file; every tensor gets memory of its own. ValueError for a malformed file."""
    tensors: dict[str, torch.Tensor] = {}
    with _Reader(path) as reader:
        for name, dtype, shape, _ in reader.read_layout():
            tensors[name] = torch.empty(shape, dtype=dtype)
            if tensors[name].numel():
                reader.fill(_view_bytes(tensors[name]))
        return tensors, Written(reader.size, reader.crc)


def index(path: Place) -> dict[str, Stored]:
    """The tensors of a safetensors file, to be read when they are needed; nothing is verified but the layout."""
    with _Reader(path) as reader:
        layout = reader.read_layout()
    return {name: _make_stored(path, name, dtype, shape, offset) for name, dtype, shape, offset in layout}


def checksum(path: Place) -> Written:
    """Size and CRC-32 of a file, read as a stream."""
    with _Reader(path) as reader:
        buffer = bytearray(min(CHUNK_BYTES, reader.size))
        for start in range(0, reader.size, CHUNK_BYTES):
            reader.fill(memoryview(buffer)[: reader.size - start])
        return Written(reader.size, reader.crc)


def open_file(path: Place) -> tuple[io.FileIO | RemoteFile, int]:
    """A file to read, and its size. ValueError for a special file: a FIFO would block, a device may have no end."""
    if isinstance(path, RemotePath):
        return (remote := path.open()), remote.size
    file = io.FileIO(path, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    found = os.fstat(file.fileno())
    if not stat.S_ISREG(found.st_mode):
        file.close()
        raise ValueError(f"{path.name} is not a regular file")
    return file, found.st_size


class _Reader:
    """Reads a file from its start to its end, and computes its checksum on the way."""

    def __init__(self, path: Place) -> None:
        self.path, self.size, self.crc = path, 0, 0

    def __enter__(self) -> _Reader:
        self._file, self.size = open_file(self.path)
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def fill(self, buffer: Any) -> Any:
        """Fill the buffer with the next bytes."""
        view = memoryview(buffer).cast("B")
        for start in range(0, len(view), CHUNK_BYTES):
            chunk = view[start : start + CHUNK_BYTES]
            _read_into(self._file, chunk, self.path)
            self.crc = zlib.crc32(chunk, self.crc)
        return buffer

    def read_layout(self) -> list[tuple[str, torch.dtype, list[int], int]]:
        """Read the header: name, dtype, shape and offset in the file of each tensor, in the order of their bytes."""
        length = int.from_bytes(self.fill(bytearray(min(8, self.size))), "little")
        if self.size < 8 or length > min(self.size - 8, _MAX_HEADER_BYTES):
            raise ValueError(f"{self.path.name} is cut short or has a broken header")
        start = 8 + length
        found = _parse_layout(self.fill(bytearray(length)), self.size - start, self.path.name)
        return [(name, dtype, shape, start + offset) for name, dtype, shape, offset in found]


def _read_into(file: Any, rest: memoryview, path: Place) -> None:
    while rest:
        if not (count := file.readinto(rest)):
            raise ValueError(f"{path.name} is cut short")
        rest = rest[count:]


def _make_stored(path: Place, name: str, dtype: torch.dtype, shape: list[int], offset: int) -> Stored:
    def read_part(start: int, stop: int) -> torch.Tensor:
        part = torch.empty(stop - start, dtype=dtype)
        if isinstance(path, RemotePath):
            path.read_into(_view_bytes(part), offset + start * dtype.itemsize)
            return part
        with open_file(path)[0] as file:
            file.seek(offset + start * dtype.itemsize)
            _read_into(file, memoryview(_view_bytes(part)).cast("B"), path)
        return part

    return Stored(shape, dtype, [Span(0, math.prod(shape), read_part)], name)


def _parse_layout(header: bytes, body_bytes: int, name: str) -> list[tuple[str, torch.dtype, list[int], int]]:
    """Each tensor's name, dtype, shape and offset, in the order of their bytes, which fill the body without a hole."""
    try:
        entries = json.loads(header)
        if not isinstance(entries, dict):
            raise ValueError("expected an object")
        entries.pop("__metadata__", None)
        found = [_judge_entry(key, entry, body_bytes) for key, entry in entries.items()]
        position = 0
        layout = []
        for start, end, key, dtype, shape in sorted(found, key=lambda one: one[:2]):
            if start != position:
                raise ValueError(f"tensor {key[:200]!r} does not fit its place")
            position = end
            layout.append((key, dtype, shape, start))
        if position != body_bytes:
            raise ValueError(f"{body_bytes} bytes of tensors, {position} described")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} has a broken header: {error}") from None
    return layout


def _judge_entry(key: str, entry: Any, body_bytes: int) -> tuple[int, int, str, torch.dtype, list[int]]:
    """A tensor's entry in the header; every number is checked for type, sign and size before it is used."""
    what = f"tensor {key[:200]!r}"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise ValueError(f"{what} has no dtype, shape and data_offsets")
    dtype = _DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise ValueError(f"{what} has a dtype that is not known")
    place = entry["data_offsets"]
    if not isinstance(place, list) or len(place) != 2 or not all(type(n) is int for n in place):
        raise ValueError(f"{what} has no place")
    start, end = place
    if not 0 <= start <= end <= body_bytes or end - start != count_shape_bytes(entry["shape"], dtype.itemsize):
        raise ValueError(f"{what} does not fit its place")
    return start, end, key, dtype, entry["shape"]


def _view_bytes(tensor: torch.Tensor) -> Any:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


SPLIT = ("model", "optimizer", "average")  # the parts of the state that may hold pieces

Spans = dict[str, list[list[int]]]  # name -> [start, stop] of each span


def name_file(rank: int) -> str:
    """The file of a rank's pieces."""
    return f"pieces-{rank:05d}.safetensors"


# Writing --------------------------------------------------------------------------------------------------


def write_pieces(folder: Place, rank: int, pieces: Mapping[str, Piece]) -> tuple[Written | None, Spans]:
    """Write a rank's elements as a stream; returns size and checksum (None: no elements, no file) and the spans."""
    spans = {name: held for name, piece in pieces.items() if (held := piece.describe()[2])}
    if not spans:
        return None, {}
    return write_stream(folder / name_file(rank), _list_entries(pieces)), spans


def _list_entries(pieces: Mapping[str, Piece]) -> Iterator[Entry]:
    for name, piece in pieces.items():
        for start, stop, read in piece.spans:
            count, dtype, chunks = stop - start, piece.dtype, partial(piece.chunks, start, stop, read)
            if not is_storable(dtype):
                count, dtype, chunks = count * dtype.itemsize, torch.uint8, partial(_view_all, chunks)
            yield Entry(_name_line(name, start, stop), dtype, [count], chunks)


def _view_all(make_chunks: Callable[[], Iterable[torch.Tensor]]) -> Iterator[torch.Tensor]:
    return (x.view(torch.uint8) for x in make_chunks())


def _name_line(name: str, start: int, stop: int) -> str:
    return f"{name}[{start}:{stop}]"


def merge_trees(trees: Sequence[Any]) -> Any:
    """The union of packed trees: a rank may leave out the state of parameters of which it holds nothing.

    If two trees have a value in the same place, the first one's is taken.
    """
    whole = trees[0]
    for tree in trees[1:]:
        whole = _union(whole, tree)
    return whole


def _union(a: Any, b: Any) -> Any:
    first, second = _read_items(a), _read_items(b)
    if first is None or second is None:
        return a
    both = {key: _union(first[key], second[key]) if key in second else first[key] for key in first}
    both |= {key: value for key, value in second.items() if key not in first}
    tag = _read_tag(a) or _read_tag(b)
    if not tag:
        return both
    numbered = all(type(key) is int for key in both)
    return {tag: [[key, both[key]] for key in (sorted(both) if numbered else both)]}


def _read_items(tree: Any) -> dict[Any, Any] | None:
    """The items of a packed dict; None for everything else."""
    if not isinstance(tree, dict) or _read_tag(tree) not in ("", "!dict", "!ordered"):
        return None
    return dict(tree[_read_tag(tree)]) if _read_tag(tree) else tree


def _read_tag(tree: dict[str, Any]) -> str:
    first = next(iter(tree), "")
    return first if first.startswith("!") else ""


# Reading --------------------------------------------------------------------------------------------------


def find_pieces(folder: Place, wholes: Mapping[str, Sequence[Any]], ranks: Sequence[Spans]) -> dict[str, Stored]:
    """The split tensors (`wholes`: dtype and shape by name) in the files of all ranks; ValueError if one lacks."""
    spans: dict[str, list[Span]] = {name: [] for name in wholes}
    kinds = {name: find_dtype(dtype) for name, (dtype, _) in wholes.items()}
    for name, (_, shape) in wholes.items():
        count_shape_bytes(shape, kinds[name].itemsize)
    for rank, held in enumerate(ranks):
        lines = index(folder / name_file(rank)) if held else {}
        for name, places in held.items():
            for start, stop in places:
                line = lines.get(_name_line(name, start, stop))
                if name not in wholes or line is None:
                    raise ValueError(f"{name_file(rank)} has no elements {start} to {stop} of {name[:200]!r}")
                spans[name].append(_make_span(line, start, stop, kinds[name]))
    return {name: Stored(shape, kinds[name], spans[name], name) for name, (_, shape) in wholes.items()}


def _make_span(line: Stored, start: int, stop: int, dtype: torch.dtype) -> Span:
    if line.dtype != dtype:
        line = line.view_as(dtype, [stop - start])
    if line.shape != (stop - start,):
        raise ValueError(f"{line!r} should have {stop - start} elements")
    return Span(start, stop, lambda a, b: line.read(a - start, b - start))


def unpack_lazily(tree: Any, stored: Mapping[str, Stored]) -> Any:
    """What `unisono.packing.unpack` gives, with a Stored in place of every tensor."""
    found: dict[str, Any] = {}

    def walk(node: Any) -> Any:
        if isinstance(node, list):
            return [walk(x) for x in node]
        if not isinstance(node, dict):
            return node
        tag = _read_tag(node)
        if tag == "!tensor":
            return {tag: place(node[tag], node)}
        if tag in ("!array", "!blob"):
            found[node[tag]] = stored[node[tag]].full()
            return node
        return {key: walk(x) for key, x in node.items()}

    def place(name: str, node: dict[str, Any]) -> str:
        if "dtype" not in node:
            found.setdefault(name, stored[name])
            return name
        key = f"{name} as {node['dtype']}"
        dtype = find_dtype(node["dtype"])
        count_shape_bytes(node["shape"], dtype.itemsize)
        found.setdefault(key, stored[name].view_as(dtype, node["shape"]))
        return key

    return unpack(walk(tree), found)
