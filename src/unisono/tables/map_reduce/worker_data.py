"""Data on its way to the workers: split by rows, and for local workers shared instead of copied.

Large arrays lie in memory that the launching process keeps open and every worker maps.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from unisono.training.data.tables import TablePart

MAPPED_BYTES = 1 << 20  # smaller arrays travel with the function
_ALIGN = 4096
_COPY_BYTES = 1 << 24


def find_bounds(rows: int, rank: int, size: int) -> tuple[int, int]:
    """The rows of part `rank` of `size` contiguous parts, which differ by one row at most.

    >>> [find_bounds(10, rank, 3) for rank in range(3)]
    [(0, 3), (3, 6), (6, 10)]
    """
    return rows * rank // size, rows * (rank + 1) // size


def split(data: Any, rank: int, size: int) -> Any:
    """Part `rank` of `size` of the rows of an array, a tensor, a sparse matrix, a frame or a list.

    Of a tuple, the same rows of each item; of an object with a method `part(rank, size)`, what that returns. What an
    engine has divided already stays as it is.

    >>> split(([1, 2, 3, 4], None), 1, 2)
    ([3, 4], None)
    """
    if data is None or isinstance(data, TablePart):
        return data
    if hasattr(data, "part") and callable(data.part):
        return data.part(rank, size)
    if isinstance(data, tuple):
        lengths = {count_rows(item) for item in data if item is not None}
        if len(lengths) > 1:
            raise ValueError(f"a tuple of tables is split by rows: expected equal lengths, got {sorted(lengths)}")
        return _rebuild_tuple(data, [split(item, rank, size) for item in data])
    first, last = find_bounds(count_rows(data), rank, size)
    return data.iloc[first:last] if hasattr(data, "iloc") else data[first:last]


def count_rows(data: Any) -> int:
    """How many rows a table has, or items a list."""
    if hasattr(data, "shape") and len(data.shape):
        return int(data.shape[0])
    if isinstance(data, Sequence) and not isinstance(data, str | bytes):
        return len(data)
    raise TypeError(
        f"got {type(data).__name__} as data: expected arrays, sparse matrices, tensors, lists, a tuple of them, "
        "or files"
    )


def join_batches(name: str, batches: Iterable[Mapping[str, Any]]) -> TablePart:
    """Batches of columns, which are arrays or lists, as one table; errors call it `name`."""
    columns: dict[str, list[Any]] = {}
    for batch in batches:
        for column, values in batch.items():
            columns.setdefault(column, []).append(values)
    whole = {
        column: np.concatenate(parts) if isinstance(parts[0], np.ndarray) else [item for part in parts for item in part]
        for column, parts in columns.items()
    }
    return TablePart.from_columns(whole, name=name)


@dataclass(frozen=True)
class SharedArray:
    """An array in a file, or in memory that another process holds open under `path`."""

    path: str
    offset: int
    shape: tuple[int, ...]
    dtype: str
    order: Literal["C", "F"]

    def open(self) -> np.ndarray[Any, Any]:
        """The array, read-only, without copying it."""
        return np.asarray(np.memmap(self.path, self.dtype, "r", self.offset, self.shape, self.order))


@dataclass(frozen=True)
class SharedSparse:
    """A compressed sparse matrix (scipy's) whose arrays travel as `SharedArray` or as they are."""

    form: str
    shape: tuple[int, int]
    arrays: tuple[Any, Any, Any]

    def open(self) -> Any:
        """The matrix."""
        import scipy.sparse

        kind = getattr(scipy.sparse, self.form)
        return kind(tuple(open_shared(a) for a in self.arrays), shape=self.shape, copy=False)


@contextlib.contextmanager
def share_arrays(data: Any) -> Iterator[Any]:
    """`data` with a `SharedArray` in place of each large array; valid inside the block, and on this host only.

    The memory has no name in a file system, so nothing is left behind, however this process ends.
    """
    arrays: list[np.ndarray[Any, Any]] = []
    _collect_arrays(data, arrays)
    offsets, total = [], 0
    for array in arrays:
        offsets.append(total)
        total += -(-array.nbytes // _ALIGN) * _ALIGN
    if not arrays or sys.platform != "linux":
        yield _replace_arrays(data, {})
        return
    fd = os.memfd_create("unisono-data")
    try:
        os.ftruncate(fd, total)
        _fill(fd, arrays, offsets)
        path = f"/proc/{os.getpid()}/fd/{fd}"
        places = {
            id(a): SharedArray(path, offset, a.shape, a.dtype.str, _memory_order(a))
            for a, offset in zip(arrays, offsets, strict=True)
        }
        yield _replace_arrays(data, places)
    finally:
        os.close(fd)


def open_shared(data: Any) -> Any:
    """`data` with arrays again in place of what `share_arrays` put there."""
    if isinstance(data, SharedArray | SharedSparse):
        return data.open()
    return _rebuild_tuple(data, [open_shared(item) for item in data]) if isinstance(data, tuple) else data


def _rebuild_tuple(data: tuple[Any, ...], items: Sequence[Any]) -> tuple[Any, ...]:
    """A tuple of the same kind, named or not."""
    return type(data)(*items) if hasattr(data, "_fields") else tuple(items)


def _memory_order(array: np.ndarray[Any, Any]) -> Literal["C", "F"]:
    return "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"


def _collect_arrays(data: Any, found: list[np.ndarray[Any, Any]]) -> None:
    if isinstance(data, tuple):
        for item in data:
            _collect_arrays(item, found)
    elif isinstance(data, np.ndarray) and data.nbytes >= MAPPED_BYTES and not data.dtype.hasobject:
        if _locate_in_file(data) is None:
            found.append(data)
    elif _is_compressed(data):
        for item in (data.data, data.indices, data.indptr):
            _collect_arrays(item, found)


def _replace_arrays(data: Any, places: dict[int, SharedArray]) -> Any:
    if isinstance(data, tuple):
        return _rebuild_tuple(data, [_replace_arrays(item, places) for item in data])
    if id(data) in places:
        return places[id(data)]
    if isinstance(data, np.ndarray) and (place := _locate_in_file(data)) is not None:
        return place
    if _is_compressed(data):
        arrays = tuple(_replace_arrays(item, places) for item in (data.data, data.indices, data.indptr))
        return SharedSparse(type(data).__name__, tuple(data.shape), arrays)
    return data


def _is_compressed(data: Any) -> bool:
    return type(data).__name__ in ("csr_matrix", "csr_array")


def _locate_in_file(data: np.ndarray[Any, Any]) -> SharedArray | None:
    """The place in its file of an array of `numpy.load(..., mmap_mode="r")`, or of contiguous rows of one."""
    whole = data if isinstance(data, np.memmap) else data.base
    memory = getattr(whole, "_mmap", None)
    if not (isinstance(whole, np.memmap) and isinstance(memory, mmap.mmap) and whole.filename is not None):
        return None
    if whole.mode != "r" or not (data.flags.c_contiguous or data.flags.f_contiguous):
        return None
    begin = whole.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY  # where the mapping starts
    offset = data.ctypes.data - np.frombuffer(memory, dtype=np.uint8).ctypes.data + begin
    return SharedArray(os.path.abspath(whole.filename), offset, data.shape, data.dtype.str, _memory_order(data))


def _fill(fd: int, arrays: Sequence[np.ndarray[Any, Any]], offsets: Sequence[int]) -> None:
    """Copy the arrays' bytes, on every core: most of the time goes into the first touch of fresh memory."""
    jobs: list[tuple[npt.NDArray[np.uint8], int]] = []
    for array, offset in zip(arrays, offsets, strict=True):
        line = array.reshape(-1, order=_memory_order(array)).view(np.uint8)
        starts = range(0, line.size, _COPY_BYTES)
        jobs += [(line[start : start + _COPY_BYTES], offset + start) for start in starts]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(lambda job: _write(fd, *job), jobs))


def _write(fd: int, line: npt.NDArray[np.uint8], offset: int) -> None:
    view = memoryview(line.data)
    while view:
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done
