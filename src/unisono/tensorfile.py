"""Tensors in a safetensors file, written and read as a stream: checksummed on the way, no second copy.

The `safetensors` library reads these files; it refuses to write tensors that share memory, as views into one
flat buffer do, and it neither syncs nor checksums what it writes.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

__all__ = ["Written", "read", "write", "write_bytes"]

_DTYPES = {
    "F64": torch.float64, "I64": torch.int64, "F32": torch.float32, "I32": torch.int32, "F16": torch.float16,
    "BF16": torch.bfloat16, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_CHUNK_BYTES = 16 << 20
_MAX_HEADER_BYTES = 100 << 20  # the format's own limit


class Written(NamedTuple):
    """What a file holds: its size, and the CRC-32 of its bytes."""

    size: int
    crc32: int


def write_bytes(path: Path, parts: Iterable[Any]) -> Written:
    """Write buffers one after the other into a new file, and wait until the disk has them."""
    size = crc = 0
    with open(path, "xb", buffering=0) as file:
        for part in parts:
            view = memoryview(part).cast("B")
            for start in range(0, len(view), _CHUNK_BYTES):
                chunk = view[start : start + _CHUNK_BYTES]
                crc = zlib.crc32(chunk, crc)
                size += len(chunk)
                while chunk:  # one write may take only a part, above all on a disk that fills up
                    chunk = chunk[file.write(chunk) :]
        os.fsync(file.fileno())
    return Written(size, crc)


def write(path: Path, tensors: Mapping[str, torch.Tensor]) -> Written:
    """Write contiguous CPU tensors, as `unisono.state.pack` gives them, into a new safetensors file."""
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))  # keeps all aligned
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.numel() * tensor.itemsize
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    filled = [tensor for _, tensor in ordered if tensor.numel()]
    return write_bytes(path, [len(text).to_bytes(8, "little"), text, *map(_bytes_of, filled)])


def read(path: Path) -> tuple[dict[str, torch.Tensor], Written]:
    """Read a safetensors file; every tensor gets memory of its own. ValueError for a malformed file."""
    tensors: dict[str, torch.Tensor] = {}
    size = os.path.getsize(path)
    with open(path, "rb", buffering=0) as file:
        crc = 0

        def fill(buffer: Any) -> Any:
            nonlocal crc
            view = memoryview(buffer).cast("B")
            for start in range(0, len(view), _CHUNK_BYTES):
                chunk = rest = view[start : start + _CHUNK_BYTES]
                while rest:
                    if not (count := file.readinto(rest)):
                        raise ValueError(f"{path.name} is cut short")
                    rest = rest[count:]
                crc = zlib.crc32(chunk, crc)
            return buffer

        length = int.from_bytes(fill(bytearray(min(8, size))), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise ValueError(f"{path.name} is cut short or has a broken header")
        for name, dtype, shape in _layout(fill(bytearray(length)), size - 8 - length, path.name):
            tensors[name] = torch.empty(shape, dtype=dtype)
            if tensors[name].numel():
                fill(_bytes_of(tensors[name]))
    return tensors, Written(size, crc)


def _layout(header: bytes, body_bytes: int, name: str) -> list[tuple[str, torch.dtype, list[int]]]:
    """Each tensor's name, dtype and shape, in the order of their bytes; they fill the body without a hole."""
    try:
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        ordered = sorted(entries.items(), key=lambda item: item[1]["data_offsets"])
        position = 0
        layout = []
        for key, entry in ordered:
            dtype, shape, (start, end) = _DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
            if start != position or end - start != math.prod(shape) * dtype.itemsize or min(shape, default=0) < 0:
                raise ValueError(f"tensor {key!r} does not fit its place")
            position = end
            layout.append((key, dtype, shape))
        if position != body_bytes:
            raise ValueError(f"{body_bytes} bytes of tensors, {position} described")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{name} has a broken header: {error!r}") from None
    return layout


def _bytes_of(tensor: torch.Tensor) -> Any:
    return tensor.reshape(-1).view(torch.uint8).numpy().data
