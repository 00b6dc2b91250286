"""Where the processes of one host meet: a page of shared memory with a counter a rank, and a futex to sleep on.

The page is a memfd: it has no name in any file system and the kernel frees it with its last process, also
after `kill -9`. Meeting costs a few microseconds where each worker has a core of its own.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import struct
import time
from collections.abc import Sequence

from unisono.transports import PeerLost

ROW = 512  # bytes a rank: counter, process id, then two slots of (arrival time, item)
_SLOT = 232
ITEM_LIMIT = _SLOT - 10
_COUNT, _PID, _SLOTS = 0, 4, 32
_LIBC = ctypes.CDLL(None, use_errno=True)
_FUTEX = {"x86_64": 202, "aarch64": 98, "ppc64le": 221, "s390x": 238, "riscv64": 98}.get(platform.machine())
_ORDERED = platform.machine() == "x86_64"  # stores are seen in order; elsewhere a lock orders them
_CHECK_S = 0.05


class _Time(ctypes.Structure):
    _fields_ = (("sec", ctypes.c_long), ("nsec", ctypes.c_long))


_TIMEOUT = _Time(0, int(_CHECK_S * 1e9))


def usable() -> bool:
    """Whether this system has what shared memory here needs (Linux)."""
    return hasattr(os, "memfd_create") and _FUTEX is not None and os.path.isdir("/proc/self/fd")


def fence() -> None:
    """Make earlier stores visible before later ones."""
    if not _ORDERED:
        import threading

        for _ in range(2):
            with threading.Lock():
                pass


class Words:
    """Counters in shared memory that a process can sleep on until another changes them."""

    def __init__(self, page: mmap.mmap) -> None:
        self._view = memoryview(page).cast("I")
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(page))

    def __getitem__(self, offset: int) -> int:
        return self._view[offset >> 2]

    def publish(self, offset: int, value: int) -> None:
        """Set a counter and wake who sleeps on it."""
        fence()
        self._view[offset >> 2] = value & 0xFFFFFFFF
        _LIBC.syscall(_FUTEX, ctypes.c_void_p(self._base + offset), 1, 0x7FFFFFFF, None, None, 0)

    def sleep(self, offset: int, seen: int) -> None:
        """Sleep until the counter is no longer `seen`, or for a short while."""
        _LIBC.syscall(
            _FUTEX, ctypes.c_void_p(self._base + offset), 0, ctypes.c_uint(seen), ctypes.byref(_TIMEOUT), None, 0
        )

    def close(self) -> None:
        self._view.release()


def behind(counter: int, target: int) -> bool:
    """Whether a 32-bit counter, which may have wrapped, has yet to reach `target`."""
    return ((counter - target) & 0xFFFFFFFF) >= 0x80000000


class Watch:
    """Tells whether a peer process is still there."""

    def __init__(self, pids: Sequence[int], timeout_s: float) -> None:
        self.pids = list(pids)
        self.timeout_s = timeout_s
        self._fds = [os.pidfd_open(pid) if pid != os.getpid() else -1 for pid in self.pids]

    def check(self, ranks: Sequence[int], began: float, what: str) -> None:
        """Raise when one of `ranks` is dead or all took too long."""
        import select

        for rank in ranks:
            if self._fds[rank] >= 0 and select.select([self._fds[rank]], [], [], 0)[0]:
                raise PeerLost(f"{what}: local rank {rank} (process {self.pids[rank]}) has died")
        if time.perf_counter() - began > self.timeout_s:
            raise PeerLost(
                f"{what}: waited {self.timeout_s:g} s for local rank {ranks[0]} (process {self.pids[ranks[0]]}), "
                "which is alive but did not come: did the ranks call different collectives?"
            )

    def close(self) -> None:
        for fd in self._fds:
            if fd >= 0:
                os.close(fd)
        self._fds = [-1] * len(self._fds)


class Board:
    """The meeting page of one group of processes on one host."""

    def __init__(self, fd: int, rank: int, size: int, *, timeout_s: float, spin: bool, room: int = 0) -> None:
        """`fd` is a memfd that all share; `room` bytes after the rows, at `page[base:]`, are for others' use."""
        self.rank, self.size, self.spin = rank, size, spin
        self.base = ROW * size
        if os.fstat(fd).st_size < self.base + room:  # every rank sets the same size
            os.ftruncate(fd, self.base + room)
        self.page = mmap.mmap(fd, self.base + room)
        self.words = Words(self.page)
        self._round = 0
        self._peers = [r for r in range(size) if r != rank]
        struct.pack_into("i", self.page, rank * ROW + _PID, os.getpid())
        self.watch: Watch | None = None
        self._timeout_s = timeout_s
        self.meet(b"")
        pids = [int(struct.unpack_from("i", self.page, r * ROW + _PID)[0]) for r in range(size)]
        self.watch = Watch(pids, timeout_s)

    def arrive(self, item: bytes = b"") -> None:
        """Put my item up and count me in; does not wait."""
        self._round += 1
        at = self.rank * ROW + _SLOTS + (self._round & 1) * _SLOT
        struct.pack_into(f"dH{len(item)}s", self.page, at, time.perf_counter(), len(item), item)
        self.words.publish(self.rank * ROW + _COUNT, self._round)

    def await_all(self, what: str = "a collective") -> float:
        """Wait until every rank has arrived as often as I have; when the last one did."""
        for rank in self._peers:
            self.await_word(rank * ROW + _COUNT, self._round, rank, what)
        slot = _SLOTS + (self._round & 1) * _SLOT
        return float(max(struct.unpack_from("d", self.page, r * ROW + slot)[0] for r in range(self.size)))

    def await_word(self, word: int, target: int, rank: int, what: str) -> None:
        """Wait until the counter at `word`, which `rank` advances, has reached `target`."""
        words = self.words
        if not behind(words[word], target):
            return
        tries = 300 if self.spin else 0
        while tries and behind(words[word], target):
            tries -= 1
        began = 0.0
        while behind(seen := words[word], target):
            words.sleep(word, seen)
            began = began or time.perf_counter()
            if behind(words[word], target):
                if self.watch is not None:
                    self.watch.check([rank], began, what)
                elif time.perf_counter() - began > self._timeout_s:
                    raise PeerLost(f"local rank {rank} of {self.size} did not join within {self._timeout_s:g} s")

    def items(self) -> list[bytes]:
        """Every rank's item of the round that just ended."""
        slot = _SLOTS + (self._round & 1) * _SLOT
        found = []
        for r in range(self.size):
            (length,) = struct.unpack_from("H", self.page, r * ROW + slot + 8)
            start = r * ROW + slot + 10
            found.append(self.page[start : start + length])
        return found

    def meet(self, item: bytes = b"", what: str = "a collective") -> list[bytes]:
        """Arrive, wait for all, and read every rank's item."""
        self.arrive(item)
        self.await_all(what)
        return self.items()

    def close(self) -> None:
        if self.watch is not None:
            self.watch.close()
        self.words.close()
