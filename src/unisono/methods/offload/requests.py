"""Reads and writes of a file from a few threads: cut into requests, several in flight, every length checked."""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
import threading
import time
from collections import deque
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

    def is_aligned(self) -> bool:
        t = self.transfer
        return (t.start + self.first | t.address + self.first | self.last - self.first) % ALIGNMENT == 0


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
        self._under_way = 0
        self._since = self._busy_s = 0.0
        self._failures = 0
        self._syncing = threading.Lock()

    def begin(self, kind: Kind, start: int, tensor: Tensor) -> Handle[Tensor]:
        """Queue a read or write of a tensor's bytes at byte `start` of the file."""
        if os.getpid() != self._owner:
            raise RuntimeError("this Disk belongs to the process that created it: create one in each process")
        transfer = _Transfer(kind, start, tensor)
        if transfer.memory.nbytes == 0:
            return Handle.of(tensor)
        requests = [_Request(transfer, a, b) for a, b in itertools.pairwise(self._borders(transfer))]
        transfer.left = len(requests)
        with self._signal:
            if self._closed:
                raise RuntimeError("this Disk is closed: nothing more can be read or written")
            transfer.failures = self._failures
            self._queue.extend(requests)
            if self._under_way == 0:
                self._since = time.perf_counter()
            self._under_way += 1
            if not self._threads:
                names = [f"unisono-disk-{i}" for i in range(self._wanted)]
                self._threads = [threading.Thread(target=self._serve, name=name, daemon=True) for name in names]
                for thread in self._threads:
                    thread.start()
            self._signal.notify(len(requests))
        return Handle(transfer.result, transfer.finished.is_set)

    def seconds(self) -> float:
        """Time in which at least one transfer was under way."""
        with self._signal:
            return self._busy_s + (time.perf_counter() - self._since if self._under_way else 0.0)

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

    def _borders(self, transfer: _Transfer) -> list[int]:
        """Where a transfer is cut: on borders in the file, so that no two requests share a block."""
        size, nbytes = self.request_bytes, transfer.memory.nbytes
        return [0, *range(size - transfer.start % ALIGNMENT, nbytes, size), nbytes]

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
        if not self.direct or request.is_aligned():
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
        with self._signal:
            self._under_way -= 1
            if self._under_way == 0:
                self._busy_s += time.perf_counter() - self._since
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
