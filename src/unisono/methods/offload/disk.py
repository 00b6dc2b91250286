"""A scratch file: direct I/O from a few threads, and nothing is left behind, however the process ends.

The disk tier of ZeRO-Infinity (Rajbhandari et al., 2021, arXiv:2104.07857). Requests of a few MiB, several in flight,
pass around the page cache (O_DIRECT): memory stays bounded and the disk is used at its own speed. A file system that
refuses direct I/O is used through the page cache.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import tempfile
import threading
import time
import warnings
import weakref
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from unisono.background import Handle
from unisono.methods.offload.requests import ALIGNMENT, FULL, DiskError, Kind, Requests, align, make_buffer, view_bytes

__all__ = [
    "ALIGNMENT",
    "Bandwidth",
    "Disk",
    "DiskError",
    "Region",
    "align",
    "free_bytes",
    "make_buffer",
    "map_file",
    "measure_bandwidth",
]
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)


class Region(NamedTuple):
    """A region of the scratch file: `nbytes` from byte `start`."""

    start: int
    nbytes: int

    def slice(self, start: int, nbytes: int) -> Region:
        """`nbytes` of this region, from its byte `start`; fastest where both are multiples of `ALIGNMENT`.

        >>> Region(8192, 100).slice(10, 20)
        Region(start=8202, nbytes=20)
        """
        if start < 0 or nbytes < 0 or start + nbytes > self.nbytes:
            raise ValueError(f"a region of {self.nbytes} bytes has no slice of {nbytes} bytes at {start}")
        return Region(self.start + start, nbytes)


class Bandwidth(NamedTuple):
    """Bytes per second."""

    read: float
    write: float


def free_bytes(folder: str | os.PathLike[str]) -> int:
    """The bytes that may still be written to the file system of `folder`.

    >>> free_bytes(".") > 0
    True
    """
    found = os.statvfs(_check_folder(folder))
    return found.f_bavail * found.f_frsize


class Disk:
    """Regions of bytes in an unnamed file in `folder`; its space is taken at once and is given back at the end.

    `nbytes` is the sum of `align(n)` over the regions that will be placed. Reads and writes run in the background, in
    no order among each other: wait for a write before its region is read or its buffer is filled anew.

    >>> disk = Disk(".", 1 << 20)
    >>> region, line = disk.place(10_000), disk.make_buffer(10_000)
    >>> _ = disk.write(region, line.fill_(7)).wait()
    >>> disk.read(region, line.zero_()).wait().unique().tolist()
    [7]
    >>> disk.close()
    """

    def __init__(
        self, folder: str | os.PathLike[str], nbytes: int, *, threads: int = 8, request_bytes: int = 4 << 20
    ) -> None:
        if nbytes < 0 or threads < 1 or request_bytes < ALIGNMENT:
            raise ValueError(
                f"got nbytes={nbytes}, threads={threads}, request_bytes={request_bytes}: expected at least 0, 1 and "
                f"{ALIGNMENT}"
            )
        self.folder = _check_folder(folder)
        self.nbytes = align(nbytes)
        fd = _create(self.folder, self.nbytes)
        self.direct = _go_direct(fd, self.nbytes)
        if not self.direct:
            _warn_of_page_cache(self.folder)
        self._placed = 0
        self._lock = threading.Lock()
        request_bytes -= request_bytes % ALIGNMENT
        self._requests = Requests(fd, self.folder, direct=self.direct, threads=threads, request_bytes=request_bytes)
        self._close = weakref.finalize(self, self._requests.close)

    def place(self, nbytes: int) -> Region:
        """Take a region of `nbytes` bytes, on a border of `ALIGNMENT` bytes."""
        if nbytes < 0:
            raise ValueError(f"got nbytes={nbytes}: expected a size of 0 or more")
        with self._lock:
            if self._placed + align(nbytes) > self.nbytes:
                raise ValueError(
                    f"no room for {nbytes} bytes: {self._placed} of the {self.nbytes} bytes of this scratch file are "
                    f"taken; create the Disk with the sum of align(n) over all its regions"
                )
            region = Region(self._placed, nbytes)
            self._placed += align(nbytes)
        return region

    def make_buffer(self, nbytes: int) -> Tensor:
        """Memory to read into and to write from: see `make_buffer`."""
        return make_buffer(nbytes)

    def read(self, region: Region, into: Tensor) -> Handle[Tensor]:
        """Begin to fill `into` from the start of the region; `wait()` gives it back filled, or raises `DiskError`."""
        return self._begin("read", region, into)

    def write(self, region: Region, source: Tensor) -> Handle[Tensor]:
        """Begin to write `source` to the start of the region; it must stay as it is until `wait()` has returned."""
        return self._begin("write", region, source)

    def _begin(self, kind: Kind, region: Region, tensor: Tensor) -> Handle[Tensor]:
        if tensor.nbytes > region.nbytes:
            raise ValueError(f"a tensor of {tensor.nbytes} bytes was given for a region of {region.nbytes} bytes")
        if region.start < 0 or region.start + region.nbytes > self.nbytes:
            raise ValueError(f"{region} lies outside this scratch file of {self.nbytes} bytes: place() gives regions")
        return self._requests.begin(kind, region.start, tensor)

    @property
    def bytes_read(self) -> int:
        """Bytes read so far."""
        return self._requests.moved["read"]

    @property
    def bytes_written(self) -> int:
        """Bytes written so far."""
        return self._requests.moved["write"]

    @property
    def seconds(self) -> float:
        """Time in which at least one read or write was under way."""
        return self._requests.seconds()

    def close(self) -> None:
        """End the threads and give the space back. What was begun and not waited for may not be done."""
        self._close()


def measure_bandwidth(folder: str | os.PathLike[str], nbytes: int = 1 << 30) -> Bandwidth:
    """Measure what the disk under `folder` reads and writes in a second, on a scratch file of `nbytes`.

    >>> read, write = measure_bandwidth(".", 1 << 20)
    >>> read > 0 and write > 0
    True
    """
    block = min(32 << 20, max(ALIGNMENT, align(nbytes // 4)))
    count = max(1, nbytes // block)
    disk = Disk(folder, count * block)
    regions = [disk.place(block) for _ in range(count)]
    buffers = [disk.make_buffer(block) for _ in range(min(4, count))]
    try:
        for line in buffers:
            line.random_(256)  # a disk may compress
        _seconds(disk, "write", regions, buffers)  # the first write of a block also takes it up in the file system
        write_s = _seconds(disk, "write", regions, buffers)
        if not disk.direct:
            os.posix_fadvise(disk._requests.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        read_s = _seconds(disk, "read", regions, buffers)
    finally:
        disk.close()
    return Bandwidth(count * block / read_s, count * block / write_s)


def map_file(folder: str | os.PathLike[str], n: int, dtype: torch.dtype) -> Tensor:
    """A line of `n` elements in an unnamed file of its own: the system keeps in memory what it has room for.

    >>> map_file("/tmp", 3, torch.float32)
    tensor([0., 0., 0.])
    """
    if n == 0:
        return torch.empty(0, dtype=dtype)
    fd = _create(_check_folder(folder), n * dtype.itemsize)
    try:
        return torch.frombuffer(mmap.mmap(fd, n * dtype.itemsize), dtype=dtype)
    finally:
        os.close(fd)


def _seconds(disk: Disk, kind: Kind, regions: list[Region], buffers: list[Tensor]) -> float:
    """Read or write all regions, as many at a time as there are buffers."""
    start = time.perf_counter()
    move = disk.read if kind == "read" else disk.write
    handles: list[Handle[Tensor]] = []
    for i, region in enumerate(regions):
        if i >= len(buffers):
            handles[i - len(buffers)].wait()
        handles.append(move(region, buffers[i % len(buffers)]))
    for handle in handles:
        handle.wait()
    return time.perf_counter() - start


def _check_folder(folder: str | os.PathLike[str]) -> str:
    path = Path(folder).absolute()
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder: give a folder that exists, on the disk to be used")
    return str(path)


def _create(folder: str, nbytes: int) -> int:
    """Open a file without a name, `nbytes` long, and take its space."""
    try:
        fd = _open_unnamed(folder)
    except OSError as error:
        what = f"no scratch file can be created in {folder}: {error.strerror}; use a folder that may be written to"
        raise DiskError(error.errno or errno.EIO, what) from error
    try:
        _reserve(fd, folder, nbytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _open_unnamed(folder: str) -> int:
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_EXCL, 0o600)
    except OSError as error:
        if error.errno not in _NO_TMPFILE:
            raise
    fd, name = tempfile.mkstemp(prefix="unisono-", suffix=".scratch", dir=folder)
    os.unlink(name)
    return fd


def _reserve(fd: int, folder: str, nbytes: int) -> None:
    """Take the space now, so that a full disk is found before the training starts."""
    if nbytes == 0:
        return
    try:
        if nbytes > free_bytes(folder):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        os.ftruncate(fd, 0)  # what it did take counts as free
        what = f"a scratch file of {_gib(nbytes)} in {folder} is refused: {error.strerror}"
        if error.errno in FULL:
            what += (
                f"; {_gib(free_bytes(folder))} are free there. Use a folder with more space, keep more of the state in "
                f"memory, or store the optimizer's moments in 16 bits"
            )
        raise DiskError(error.errno or errno.EIO, what) from error


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB ({nbytes} bytes)"


def _go_direct(fd: int, nbytes: int) -> bool:
    """Switch the file to direct I/O and try it; False where that is refused."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        if nbytes:
            os.preadv(fd, [view_bytes(make_buffer(ALIGNMENT))], 0)
    except (OSError, AttributeError):
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        return False
    return True


_warned: set[str] = set()


def _warn_of_page_cache(folder: str) -> None:
    if folder not in _warned:
        _warned.add(folder)
        warnings.warn(
            f"{folder} refuses direct I/O: its scratch file passes through the page cache, which is slower",
            stacklevel=3,
        )
