"""Where the processes of one host meet: a page of shared memory with a counter a rank, and a futex to sleep on.

The page is a memfd: it has no name in any file system and the kernel frees it with its last process, also
after `kill -9`. Meeting costs a few microseconds where each worker has a core of its own.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import select
import struct
import time
from collections.abc import Callable, Sequence

from unisono.world.transports import PeerLost

ROW = 1024  # bytes a rank: counter, process id, two slots of (arrival time, number of the collective, item), last words
_SLOT = 240
_TOP = struct.Struct("dqH")
ITEM_LIMIT = _SLOT - _TOP.size
_COUNT, _PID, _SLOTS, _WORDS = 0, 4, 32, 512
_LIBC = ctypes.CDLL(None, use_errno=True)
_FUTEX = {"x86_64": 202, "aarch64": 98, "ppc64le": 221, "s390x": 238, "riscv64": 98}.get(platform.machine())
_ORDERED = platform.machine() == "x86_64"  # stores are seen in order; elsewhere a lock orders them
_CHECK_S = 0.05
SPINS = 1000  # looks before sleeping, some 50 us: a wake-up costs as much


class _Time(ctypes.Structure):
    _fields_ = (("sec", ctypes.c_long), ("nsec", ctypes.c_long))


_TIMEOUT = _Time(0, int(_CHECK_S * 1e9))


def usable() -> bool:
    """Whether this system has what shared memory here needs (Linux)."""
    return hasattr(os, "memfd_create") and _FUTEX is not None and os.path.isdir("/proc/self/fd")


def fence() -> None:
    """Keep memory accesses before and after it apart: data is written before its counter, and read after it."""
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

    def spin(self, offset: int, target: int) -> bool:
        """Look again for a while; whether the counter has reached `target`."""
        view, at = self._view, offset >> 2
        for _ in range(SPINS):  # noqa: SIM110 (a generator would be slower)
            if (view[at] - target) & 0xFFFFFFFF < 0x80000000:
                return True
        return False

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

    def __init__(self, pids: Sequence[int]) -> None:
        self.pids = list(pids)
        self._fds = [-1] * len(self.pids)
        try:
            for rank, pid in enumerate(self.pids):
                if pid != os.getpid():
                    self._fds[rank] = os.pidfd_open(pid)
        except ProcessLookupError:
            self.close()
            raise PeerLost(f"local rank {rank} (process {pid}) has died") from None

    def died(self, rank: int) -> bool:
        """Whether the process of `rank` is gone."""
        if self._fds[rank] < 0:
            return False
        poll = select.poll()
        poll.register(self._fds[rank], select.POLLIN)
        return bool(poll.poll(0))

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
        self.sequence = 0  # the number of the collective that meets here
        self.doubt: Callable[[int], None] | None = None  # asked about a rank that does not come to a meeting
        self._round = 0
        self._peers = [r for r in range(size) if r != rank]
        struct.pack_into("i", self.page, rank * ROW + _PID, os.getpid())
        self.watch: Watch | None = None
        self._timeout_s = timeout_s
        self.meet(b"")
        pids = [int(struct.unpack_from("i", self.page, r * ROW + _PID)[0]) for r in range(size)]
        self.watch = Watch(pids)

    def arrive(self, item: bytes = b"") -> None:
        """Put my item up and count me in; does not wait."""
        self._round += 1
        at = self.rank * ROW + _SLOTS + (self._round & 1) * _SLOT
        _TOP.pack_into(self.page, at, time.perf_counter(), self.sequence, len(item))
        if item:
            self.page[at + _TOP.size : at + _TOP.size + len(item)] = item
        self.words.publish(self.rank * ROW + _COUNT, self._round)

    def await_all(self, what: str = "a collective") -> float:
        """Wait until every rank has arrived as often as I have; when the last one did."""
        for rank in self._peers:
            self.await_word(rank * ROW + _COUNT, self._round, rank, what, self.doubt)
        slot = _SLOTS + (self._round & 1) * _SLOT
        return float(max(struct.unpack_from("d", self.page, r * ROW + slot)[0] for r in range(self.size)))

    def await_word(
        self, word: int, target: int, rank: int, what: str, doubt: Callable[[int], None] | None = None
    ) -> None:
        """Wait until the counter at `word`, which `rank` advances, has reached `target`."""
        words = self.words
        if not behind(words[word], target) or (self.spin and words.spin(word, target)):
            fence()
            return
        began = 0.0
        while behind(seen := words[word], target):
            words.sleep(word, seen)
            began = began or time.perf_counter()
            if behind(words[word], target):
                self._worry(word, target, rank, what, began)
                if doubt is not None:
                    doubt(rank)
        fence()

    def _worry(self, word: int, target: int, rank: int, what: str, began: float) -> None:
        """Raise where `rank` has died, or has been waited for too long."""
        who = f"local rank {rank}" + (f" (process {self.watch.pids[rank]})" if self.watch is not None else "")
        if self.watch is not None and self.watch.died(rank) and behind(self.words[word], target):
            raise self.give_up(PeerLost(f"{what}: {who} has died"))
        if text := self.page[rank * ROW + _WORDS : rank * ROW + ROW].rstrip(b"\0"):
            raise PeerLost(f"{what}: {who} gave up: {text.decode('utf-8', 'replace')}")
        if time.perf_counter() - began > self._timeout_s:
            raise self.give_up(
                PeerLost(
                    f"{what}: waited {self._timeout_s:g} s for {who} of {self.size}, which did not come: "
                    "is it alive, and do all ranks call the same collectives?"
                )
            )

    def give_up(self, error: Exception) -> Exception:
        """Leave my last words, for those who wait for me: I shall not come to another meeting."""
        text = str(error).encode()[: ROW - _WORDS]
        start = self.rank * ROW + _WORDS
        self.page[start : start + len(text)] = text
        return error

    def sequence_of(self, rank: int) -> int:
        """The number of the collective of the last meeting that `rank` came to."""
        at = rank * ROW + _SLOTS + (self.words[rank * ROW + _COUNT] & 1) * _SLOT
        return int(_TOP.unpack_from(self.page, at)[1])

    def sequences(self) -> list[int]:
        """Every rank's number of the collective of the meeting that just ended."""
        slot = _SLOTS + (self._round & 1) * _SLOT
        return [int(_TOP.unpack_from(self.page, r * ROW + slot)[1]) for r in range(self.size)]

    def items(self) -> list[bytes]:
        """Every rank's item of the meeting that just ended."""
        slot = _SLOTS + (self._round & 1) * _SLOT
        found = []
        for r in range(self.size):
            length = _TOP.unpack_from(self.page, r * ROW + slot)[2]
            start = r * ROW + slot + _TOP.size
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
