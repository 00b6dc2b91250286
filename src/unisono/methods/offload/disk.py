"""A scratch file: direct I/O from a few threads, and nothing is left behind, however the process ends.

The disk tier of ZeRO-Infinity (Rajbhandari et al., 2021, arXiv:2104.07857). Requests of a few MiB, several in flight,
pass around the page cache (O_DIRECT): memory stays bounded and the disk is used at its own speed. A file system that
refuses direct I/O is used through the page cache.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import mmap
import os
import tempfile
import threading
import time
import warnings
import weakref
from collections import deque
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from unisono.background import Handle
from unisono.launchers.runtime.faults import before_write

ALIGNMENT = 4096  # bytes: what direct I/O asks of file offsets, lengths and addresses on the devices in use
FULL = (errno.ENOSPC, errno.EDQUOT)
_HUGE = 2 << 20
_CLOSE_S = 5.0
Kind = Literal["read", "write"]
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)


class DiskError(OSError):
    """The disk failed or is full; the message says what was done, where, and what the system said."""


def align(nbytes: int) -> int:
    """The bytes that a region of `nbytes` takes up in the file.

    >>> align(1), align(4096), align(0)
    (4096, 4096, 0)
    """
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def make_buffer(nbytes: int) -> Tensor:
    """Memory for direct I/O: `nbytes` bytes that begin on a page border, all zero, to be used again and again.

    >>> line = make_buffer(10_000)
    >>> line.numel(), line.dtype, line.data_ptr() % ALIGNMENT
    (10000, torch.uint8, 0)
    """
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    pages = mmap.mmap(-1, align(nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)[:nbytes]


def view_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, to read into or to write from."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(
            f"got a {'contiguous' if tensor.is_contiguous() else 'strided'} tensor on {tensor.device}: expected a "
            f"contiguous one on the CPU; Disk.make_buffer() gives memory that needs no copy"
        )
    return tensor.detach().view(-1).view(torch.uint8).numpy().data


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
        self.moved = self._requests.moved  # bytes so far: "read" and "write"
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

    def close(self) -> None:
        """End the threads and give the space back. What was begun and not waited for may not be done."""
        self._close()


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


# Reads and writes, from a few threads: cut into requests, several in flight, every length checked --------------------


class _Transfer:
    """One read or write; it ends with the last of its requests, so that its memory is then free for other use."""

    __slots__ = ("address", "error", "failures", "finished", "kind", "left", "memory", "start", "tensor")

    def __init__(self, kind: Kind, start: int, tensor: Tensor) -> None:
        self.kind: Kind = kind
        self.start = start  # in the file
        self.tensor = tensor
        self.memory = view_bytes(tensor)
        self.address = tensor.data_ptr()
        self.left = 0
        self.failures = 0  # of the whole file, as this one began
        self.error: Exception | None = None
        self.finished = threading.Event()

    def result(self) -> Tensor:
        self.finished.wait()
        if self.error is not None:
            raise self.error
        return self.tensor


class _Request(NamedTuple):
    transfer: _Transfer
    first: int  # bytes of the transfer
    last: int


class Requests:
    """The queue of a file's requests and the threads that serve it, started at the first one."""

    def __init__(self, fd: int, folder: str, *, direct: bool, threads: int, request_bytes: int) -> None:
        self.fd, self.folder, self.direct = fd, folder, direct
        self.request_bytes = request_bytes
        self.moved = {"read": 0, "write": 0}
        self._queue: deque[_Request] = deque()
        self._signal = threading.Condition()
        self._wanted = threads
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._owner = os.getpid()
        self._failures = 0
        self._syncing = threading.Lock()

    def begin(self, kind: Kind, start: int, tensor: Tensor) -> Handle[Tensor]:
        """Queue a read or write of a tensor's bytes at byte `start` of the file."""
        if os.getpid() != self._owner:
            raise RuntimeError("this Disk belongs to the process that created it: create one in each process")
        transfer = _Transfer(kind, start, tensor)
        if transfer.memory.nbytes == 0:
            return Handle.of(tensor)
        size, nbytes = self.request_bytes, transfer.memory.nbytes
        # Cut on borders in the file, so that no two requests share a block.
        borders = [0, *range(size - start % ALIGNMENT, nbytes, size), nbytes]
        requests = [_Request(transfer, a, b) for a, b in itertools.pairwise(borders)]
        transfer.left = len(requests)
        with self._signal:
            if self._closed:
                raise RuntimeError("this Disk is closed: nothing more can be read or written")
            transfer.failures = self._failures
            self._queue.extend(requests)
            if not self._threads:
                names = [f"unisono-disk-{i}" for i in range(self._wanted)]
                self._threads = [threading.Thread(target=self._serve, name=name, daemon=True) for name in names]
                for thread in self._threads:
                    thread.start()
            self._signal.notify(len(requests))
        return Handle(transfer.result, transfer.finished.is_set)

    def close(self) -> None:
        """End the threads and close the file; what is still in the queue is dropped, and waiting for it raises."""
        if os.getpid() != self._owner:  # a forked child: it has no such threads, and the lock may be held forever
            return
        with self._signal:
            if self._closed:
                return
            self._closed = True
            dropped, self._queue = self._queue, deque()
            self._signal.notify_all()
        for request in dropped:
            request.transfer.error = RuntimeError("this Disk was closed before the transfer was done")
            self._finish(request)
        deadline = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            os.close(self.fd)  # else a request hangs: were its file closed, its number could be given to another file

    def _serve(self) -> None:
        while True:
            with self._signal:
                while not self._queue and not self._closed:
                    self._signal.wait()
                if not self._queue:
                    return
                request = self._queue.popleft()
            if request.transfer.error is None:
                try:
                    self._do(request)
                except Exception as error:
                    request.transfer.error = error
            self._finish(request)
            del request  # it holds the caller's memory

    def _do(self, request: _Request) -> None:
        transfer, first, last = request
        start, memory = transfer.start + first, transfer.memory[first:last]
        aligned = (start | transfer.address + first | last - first) % ALIGNMENT == 0
        if not self.direct or aligned:
            self._move(transfer.kind, start, memory)
        else:
            self._move_by_blocks(transfer.kind, start, memory)

    def _move(self, kind: Kind, start: int, memory: memoryview) -> None:
        """Read or write all of `memory`, however much the system does at a time."""
        call = os.preadv if kind == "read" else os.pwritev
        step = ALIGNMENT if self.direct else 1
        done = 0
        while done < memory.nbytes:
            left = memory.nbytes - done
            try:
                if kind == "write":
                    before_write("scratch")
                moved = call(self.fd, [memory[done:]], start + done)
            except OSError as error:
                raise self._error(kind, start + done, left, error) from error
            if moved < left:
                moved -= moved % step  # direct I/O goes on at a border
            if moved <= 0:
                raise self._error(kind, start + done, left, OSError(errno.EIO, "the system stopped short of the end"))
            done += moved

    def _move_by_blocks(self, kind: Kind, start: int, memory: memoryview) -> None:
        """Do a request that direct I/O would refuse, by way of the whole disk blocks around it."""
        low, high = start // ALIGNMENT * ALIGNMENT, align(start + memory.nbytes)
        blocks = view_bytes(make_buffer(high - low))
        inside = slice(start - low, start - low + memory.nbytes)
        if kind == "read":
            self._move("read", low, blocks)
            memory[:] = blocks[inside]
            return
        if start != low:
            self._move("read", low, blocks[:ALIGNMENT])
        if start + memory.nbytes != high:
            self._move("read", high - ALIGNMENT, blocks[-ALIGNMENT:])
        blocks[inside] = memory
        self._move("write", low, blocks)

    def _finish(self, request: _Request) -> None:
        transfer = request.transfer
        with self._signal:
            if transfer.error is None:
                self.moved[transfer.kind] += request.last - request.first
            transfer.left -= 1
            if transfer.left:
                return
        if transfer.kind == "write" and not self.direct and transfer.error is None:
            self._sync(transfer)
        transfer.finished.set()

    def _sync(self, transfer: _Transfer) -> None:
        """Through the page cache a write fails only as it reaches the disk, and the system reports it only once."""
        with self._syncing:
            found: OSError | None = None
            try:
                os.fdatasync(self.fd)
            except OSError as error:
                self._failures += 1
                found = error
            if found is None and self._failures != transfer.failures:
                found = OSError(errno.EIO, "a write that was under way with it did not reach the disk")
        if found is not None:
            transfer.error = self._error("write", transfer.start, transfer.memory.nbytes, found)

    def _error(self, kind: Kind, start: int, nbytes: int, error: OSError) -> DiskError:
        doing = "reading" if kind == "read" else "writing"
        hint = "; free some space there" if error.errno in FULL else ""
        where = f"{nbytes} bytes at byte {start} of the scratch file in {self.folder}"
        return DiskError(error.errno or errno.EIO, f"{doing} {where} failed: {error.strerror}{hint}")
