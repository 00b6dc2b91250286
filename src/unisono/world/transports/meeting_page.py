"""The page of memory in which the processes of one host meet and tell each other what they are about to do.

Meeting takes a counter a rank, and a futex to sleep on: a few microseconds where each worker has a core of its own.
The page is a memfd: it has no name in any file system and the kernel frees it with its last process, also after
`kill -9`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from zlib import crc32

import torch

from unisono.background import LongWait, watch_long_waits
from unisono.launchers.runtime import debug_pause
from unisono.launchers.runtime.frames import find_current_call
from unisono.launchers.runtime.status import ENDED
from unisono.world.transports import (
    DTYPE_CODES,
    DTYPES,
    SMALL_BYTES,
    CallDescription,
    CallSignature,
    Mismatch,
    Op,
    PeerLost,
    find_group,
    tell_at_exit,
    warn_of_each_other,
)
from unisono.world.transports.mapped import open_published, publish
from unisono.world.transports.neighbour_stacks import BYTES, Neighbours
from unisono.world.transports.process_watch import ProcessWatch

PAGE_NAME = "unisono-meeting-page"  # launchers that make the page give it this name
_FUTEX = {"x86_64": 202, "aarch64": 98, "ppc64le": 221, "s390x": 238, "riscv64": 98}.get(platform.machine())
_ORDERED = platform.machine() == "x86_64"  # stores are seen in order; elsewhere a lock orders them
_CHECK_S = 0.05
_EARLY_S = 0.005  # at first: a rank that dies is mostly missed in the step under way
SPINS = 1000  # looks before sleeping, some 50 us: a wake-up costs as much

# The page: a row of meetings for each rank, a row of small all-reduces for each, a row for each pair of ranks.
# counter, process id, what neighbour_stacks.py has there, two slots of (arrival time, number and signature of the
# collective, item), why the rank left, where it waits, and what it called if the ranks disagree
ROW = 1664
_COUNT, _PID, _LATE, _SLOTS, _REASON, _WAITS, _DESCRIPTION = 0, 4, 8, 32, 512, 1024, 1280
_GAVE_UP = "gave up: "
_DISAGREES = "gave up, as the ranks disagree: "
_SLOT = 240
_TOP = struct.Struct("=dqIIH")
ITEM_LIMIT = _SLOT - _TOP.size
SMALL_DEPTH = 16  # small all-reduces under way at once
SMALL_HEAD = 64  # time, operation, dtype, elements, number of the collective, its signature
SMALL_SLOT = SMALL_HEAD + SMALL_BYTES
_SMALL_ROW = 64 + SMALL_DEPTH * SMALL_SLOT
PAIR_BYTES = 64  # chunks posted, chunks taken

_DESCRIPTION_TOP = struct.Struct("IiII")  # how often the ranks have disagreed; rank in the world, what, where
_TO_TELL_S = 1.0  # that ranks which disagree wait for each other's calls
OP_CODES: dict[str, int] = {"sum": 0, "mean": 1, "max": 2, "min": 3, "product": 4, "and": 5, "or": 6, "xor": 7}
_PLAN_HEAD = struct.Struct("BBHqiq")  # operation, dtype, which collective, elements, where they lie (two numbers)
_PLAN = b"plan"  # how an item begins: what its rank came to do
EXTRA_AT = len(_PLAN) + _PLAN_HEAD.size
_NO_PLAN = (255, 0, 0, 0, -1, 0)  # of a rank that came for something else


assert _LATE + BYTES <= _SLOTS


class _Time(ctypes.Structure):
    _fields_ = (("sec", ctypes.c_long), ("nsec", ctypes.c_long))


_TIMEOUT, _EARLY = _Time(0, int(_CHECK_S * 1e9)), _Time(0, int(_EARLY_S * 1e9))


def is_supported() -> bool:
    """Whether this system has what shared memory here needs (Linux)."""
    return hasattr(os, "memfd_create") and _FUTEX is not None and os.path.isdir("/proc/self/fd")


def fence() -> None:
    """Keep memory accesses before and after it apart: data is written before its counter, and read after it."""
    if not _ORDERED:
        for _ in range(2):
            with threading.Lock():
                pass


_futex = ctypes.CDLL(None, use_errno=True).syscall  # a function of its own: with types, each call costs half as much
_futex.argtypes = [
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_int,
]


class Counters:
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
        _futex(_FUTEX, self._base + offset, 1, 0x7FFFFFFF, None, None, 0)

    def spin(self, offset: int, target: int) -> bool:
        """Poll for a short while; whether the counter has reached `target`."""
        view, at = self._view, offset >> 2
        for _ in range(SPINS):  # noqa: SIM110 (a generator would be slower)
            if (view[at] - target) & 0xFFFFFFFF < 0x80000000:
                return True
        return False

    def sleep(self, offset: int, seen: int, timeout: _Time = _TIMEOUT) -> None:
        """Sleep until the counter is no longer `seen`, or for a short while."""
        _futex(_FUTEX, self._base + offset, 0, seen, ctypes.addressof(timeout), None, 0)

    def close(self) -> None:
        self._view.release()


def is_behind(counter: int, target: int) -> bool:
    """Whether a 32-bit counter, which may have wrapped, has yet to reach `target`."""
    return ((counter - target) & 0xFFFFFFFF) >= 0x80000000


class MeetingPage:
    """The meeting page of one group of processes on one host."""

    def __init__(
        self,
        fd: int,
        rank: int,
        size: int,
        *,
        timeout_s: float,
        spin: bool,
        pids: Sequence[int] = (),
        check: Callable[[], None] | None = None,
    ) -> None:
        """`fd` is a memfd that all share. `pids`: every rank's process, if known: one that dies before it
        comes is noticed then. `check`: raises PeerLost where waiting is to end."""
        self.rank, self.size, self.spin = rank, size, spin
        self.looks = 1  # of `SPINS` each, before this rank sleeps
        self.noun = "rank"  # what the others here are called
        self.small_rows = [size * ROW + r * _SMALL_ROW for r in range(size)]
        self.pair_rows = size * (ROW + _SMALL_ROW)
        nbytes = self.pair_rows + size * size * PAIR_BYTES
        if os.fstat(fd).st_size < nbytes:  # every rank sets the same size
            os.ftruncate(fd, nbytes)
        self.memory = mmap.mmap(fd, nbytes)
        self.counters = Counters(self.memory)
        self.sequence = 0  # the number of the collective that meets here
        self.signature: CallSignature | None = None
        self._disagreed = 0  # times
        self._check = check
        self.on_missing: Callable[[int], None] | None = None  # asked about a rank that does not come to a meeting
        self._round = 0
        self.peers = [r for r in range(size) if r != rank]
        self._pid = os.getpid()  # a forked child is not the one that others wait for
        struct.pack_into("i", self.memory, rank * ROW + _PID, self._pid)
        _pages.add(self)
        tell_at_exit(self)
        rows = [r * ROW for r in range(size)]
        self._neighbours = Neighbours(self.memory, rank, [row + _PID for row in rows], [row + _LATE for row in rows])
        self._watch: ProcessWatch | None = ProcessWatch(pids) if pids else None
        self.timeout_s = timeout_s
        self.meet(b"")
        if self._watch is None:
            pids = [int(struct.unpack_from("i", self.memory, r * ROW + _PID)[0]) for r in range(size)]
            self._watch = ProcessWatch(pids)

    @property
    def pids(self) -> list[int]:
        """Every rank's process."""
        assert self._watch is not None
        return self._watch.pids

    def arrive(self, item: bytes = b"") -> None:
        """Publish this rank's item and its arrival; does not wait."""
        self._round += 1
        at = self.rank * ROW + _SLOTS + (self._round & 1) * _SLOT
        signature = self.signature
        what, where = (signature.what, signature.where) if signature is not None else (0, 0)
        _TOP.pack_into(self.memory, at, time.perf_counter(), self.sequence, what, where, len(item))
        if item:
            self.memory[at + _TOP.size : at + _TOP.size + len(item)] = item
        self.counters.publish(self.rank * ROW + _COUNT, self._round)

    def await_all(self, what: str = "a collective") -> float:
        """Wait until every rank has arrived as often as I have; when the last one did."""
        for rank in self.peers:
            self.await_counter(rank * ROW + _COUNT, self._round, rank, what, self.on_missing)
        return max(self.read_arrivals())

    def read_arrivals(self) -> list[float]:
        """When every rank came to the meeting that just ended."""
        slot = _SLOTS + (self._round & 1) * _SLOT
        return [struct.unpack_from("d", self.memory, r * ROW + slot)[0] for r in range(self.size)]

    def _look_on(self, at: int, target: int) -> bool:
        """Look several times more whether the counter `at` has reached `target`."""
        for _ in range(1, self.looks):
            os.sched_yield()  # other threads of this process run
            if self.counters.spin(at, target):
                return True
        return False

    def await_counter(
        self, at: int, target: int, rank: int, what: str, on_missing: Callable[[int], None] | None = None
    ) -> None:
        """Wait until the counter `at`, which `rank` advances, has reached `target`."""
        counters = self.counters
        if not is_behind(counters[at], target) or (
            self.spin and (counters.spin(at, target) or self._look_on(at, target))
        ):
            fence()
            return
        began, wait, early = time.perf_counter() - debug_pause.ended_s, None, 4
        try:
            while is_behind(seen := counters[at], target):
                counters.sleep(at, seen, _EARLY if early > 0 else _TIMEOUT)
                early -= 1
                if is_behind(counters[at], target):
                    if on_missing is not None:  # first: a rank that is in another collective may leave for that
                        on_missing(rank)
                    self._check_peer(at, target, rank, what, began)
                    self._check_end()
                    wait = wait or LongWait()
                    wait.check()
                    self._compare_waits(rank)
        finally:
            if wait is not None:
                wait.end()
        fence()

    def _check_peer(self, at: int, target: int, rank: int, what: str, began: float) -> None:
        """Raise if `rank` has left or died, or has been waited for too long."""
        who = f"{self.noun} {rank}" + (f" (process {self._watch.pids[rank]})" if self._watch is not None else "")
        waited_s = time.perf_counter() - debug_pause.ended_s - began
        waited = f"waited {waited_s:.1f} s for it in {what}"
        has_died = self.has_died(rank)
        reason = self._read(rank * ROW + _REASON, rank * ROW + _WAITS)
        fence()
        if not is_behind(self.counters[at], target):  # it came before it left
            return
        if reason.startswith(_DISAGREES):
            raise Mismatch(reason.removeprefix(_DISAGREES))
        if reason.startswith(_GAVE_UP):
            raise PeerLost(f"{what}: {who} {reason}")
        if reason:
            error = PeerLost(f"{who} {reason}; {waited}")
            error.ended = rank if self.noun == "rank" and reason.startswith(ENDED) else None
            raise self.give_up(error)
        if has_died:
            raise self.give_up(PeerLost(f"{who} has died: killed, or ended by os._exit; {waited}"))
        if waited_s > self.timeout_s and debug_pause.clock() - began > self.timeout_s:  # not while people debug
            theirs = self.read_wait(rank)
            why = f"it waits in {theirs}" if theirs else "is it alive, and do all ranks call the same collectives?"
            raise self.give_up(
                PeerLost(f"{what}: waited {self.timeout_s:g} s for {who} of {self.size}, which did not come: {why}")
            )

    def has_died(self, rank: int) -> bool:
        """Whether the process of `rank` is gone."""
        return self._watch is not None and self._watch.has_died(rank)

    def has_left(self, rank: int) -> bool:
        """Whether `rank` will not come to another meeting: its process is gone, or it has said so."""
        return self.has_died(rank) or bool(self._read(rank * ROW + _REASON, rank * ROW + _WAITS))

    def lose(self, rank: int, what: str, why: str) -> Exception:
        """The error for `rank`, whose memory or messages failed: how it ended, if that shows within a moment."""
        who, until = f"{self.noun} {rank} (process {self.pids[rank]})", time.perf_counter() + 20 * _CHECK_S
        assert self._watch is not None
        while not (died := self._watch.has_died(rank)) and time.perf_counter() < until:
            if reason := self._read(rank * ROW + _REASON, rank * ROW + _WAITS):
                return self.give_up(PeerLost(f"{what}: {who} {reason}"))
            time.sleep(_CHECK_S / 5)
        return self.give_up(PeerLost(f"{who} has died: killed, or ended by os._exit" if died else f"{who}: {why}"))

    def _check_end(self) -> None:
        if self._check is not None:
            try:
                self._check()
            except PeerLost as error:
                self.give_up(error)
                raise

    def give_up(self, error: Exception) -> Exception:
        """Tell ranks that wait for this one that it will not come to another meeting; returns `error`."""
        self._leave((_DISAGREES if isinstance(error, Mismatch) else _GAVE_UP) + str(error))
        return error

    def end(self, how: str) -> None:
        """Tell ranks that wait for this one how it has ended: "has ended its program with status 0"."""
        if self._pid == os.getpid() and not self.memory[self.rank * ROW + _REASON]:
            self._leave(how)

    def _leave(self, why: str) -> None:
        room, start = _WAITS - _REASON, self.rank * ROW + _REASON
        self.memory[start : start + room] = why.encode()[:room].ljust(room, b"\0")  # it may be said twice

    def _read(self, start: int, stop: int) -> str:
        return self.memory[start:stop].rstrip(b"\0").decode("utf-8", "replace")

    def show_wait(self, where: str) -> None:
        """Show the others which call of the program I wait in; "": in none."""
        if self._pid == os.getpid():
            start = self.rank * ROW + _WAITS
            room = _DESCRIPTION - _WAITS
            self.memory[start : start + room] = where.encode()[:room].ljust(room, b"\0")

    def _compare_waits(self, rank: int) -> None:
        """Warn once if my program and that of `rank`, which I wait for, have waited for long in different calls."""
        global _has_warned
        theirs = self.read_wait(rank) if _program_waits and self.rank < rank and not _has_warned else ""
        if theirs and theirs != _program_waits:
            _has_warned = True
            warn_of_each_other(_program_waits, rank, theirs)

    def read_wait(self, rank: int) -> str:
        """Which call of the program `rank` has waited in for long; "" if it has not."""
        return self._read(rank * ROW + _WAITS, rank * ROW + _DESCRIPTION)

    def read_sequence(self, rank: int) -> int:
        """The number of the collective of the last meeting that `rank` came to."""
        at = rank * ROW + _SLOTS + (self.counters[rank * ROW + _COUNT] & 1) * _SLOT
        return int(_TOP.unpack_from(self.memory, at)[1])

    def read_sequences(self) -> list[int]:
        """Every rank's number of the collective of the meeting that just ended."""
        slot = _SLOTS + (self._round & 1) * _SLOT
        return [int(_TOP.unpack_from(self.memory, r * ROW + slot)[1]) for r in range(self.size)]

    def read_signatures(self) -> tuple[list[int], list[int]]:
        """Every rank's signature in the meeting that just ended: what, and where."""
        slot = _SLOTS + (self._round & 1) * _SLOT
        tops = [_TOP.unpack_from(self.memory, r * ROW + slot) for r in range(self.size)]
        return [top[2] for top in tops], [top[3] for top in tops]

    def exchange_descriptions(self, signature: CallSignature | None) -> list[CallDescription]:
        """Tell the others what I have called, and hear it from those that tell it within a moment: where all find that
        they disagree."""
        self._disagreed += 1
        if signature is not None:
            call = signature.description
            texts = [part.encode()[:limit] for part, limit in ((call.place, 80), (call.text, 240))]
            start = self.rank * ROW + _DESCRIPTION
            data = b"\0".join(texts).ljust(ROW - _DESCRIPTION - _DESCRIPTION_TOP.size, b"\0")
            self.memory[start + _DESCRIPTION_TOP.size : self.rank * ROW + ROW] = data
            _DESCRIPTION_TOP.pack_into(self.memory, start, 0, call.rank, call.what, call.where)
            fence()
            struct.pack_into("I", self.memory, start, self._disagreed)
        deadline = time.perf_counter() + _TO_TELL_S
        while True:
            tops = [_DESCRIPTION_TOP.unpack_from(self.memory, r * ROW + _DESCRIPTION) for r in range(self.size)]
            if all(top[0] >= self._disagreed for top in tops) or time.perf_counter() > deadline:
                break
            time.sleep(0.002)
        return [self._read_description(r, top) for r, top in enumerate(tops) if top[0] >= self._disagreed]

    def _read_description(self, rank: int, top: tuple[int, ...]) -> CallDescription:
        _, number, what, where = top
        place, _, text = self._read(rank * ROW + _DESCRIPTION + _DESCRIPTION_TOP.size, rank * ROW + ROW).partition("\0")
        return CallDescription(number, what, where, text, place)

    def read_items(self) -> list[bytes]:
        """Every rank's item of the meeting that just ended."""
        slot = _SLOTS + (self._round & 1) * _SLOT
        found = []
        for r in range(self.size):
            length = _TOP.unpack_from(self.memory, r * ROW + slot)[4]
            start = r * ROW + slot + _TOP.size
            found.append(self.memory[start : start + length])
        return found

    def meet(self, item: bytes = b"", what: str = "a collective") -> list[bytes]:
        """Arrive, wait for all, and read every rank's item."""
        self.arrive(item)
        self.await_all(what)
        return self.read_items()

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
        self.end("has closed this world")
        self.counters.close()


_has_warned = False
_program_waits = ""  # the call of the program that has waited for long
_pages: weakref.WeakSet[MeetingPage] = weakref.WeakSet()


@watch_long_waits
def _show_wait(is_waiting: bool) -> None:
    """Show a long wait on all pages: ranks may wait for each other on different ones."""
    global _program_waits
    pages = list(_pages)
    _program_waits = str(find_current_call() or "") if is_waiting and pages else ""
    for page in pages:
        page.show_wait(_program_waits)


@contextmanager
def open_part(
    page: MeetingPage, groups: Sequence[Sequence[int]], exchange: Callable[[bytes], Sequence[bytes]]
) -> Iterator[tuple[int, int, list[int]]]:
    """A new page for my group of the ranks of `page`: its descriptor, my rank there, and every rank's process."""
    mine = find_group(groups, page.rank, page.size)
    fd = os.memfd_create(PAGE_NAME, os.MFD_CLOEXEC) if mine[0] == page.rank else -1
    try:
        addresses = exchange(publish(fd).encode() if fd >= 0 else b"")
        if fd < 0:
            fd = open_published(addresses[mine[0]].decode())
        page.meet()  # all have opened before the maker may close
        yield fd, mine.index(page.rank), [page.pids[r] for r in mine]
    finally:
        if fd >= 0:
            os.close(fd)


def meet_with_plan(
    page: MeetingPage,
    what: str,
    op: Op,
    dtype: torch.dtype,
    count: int,
    place: tuple[int, int] = (-1, 0),
    *,
    same: bool = True,
    extra: bytes = b"",
) -> tuple[list[tuple[int, ...]], float]:
    """Meet, and compare what each rank is about to do. `same`: with as many elements on each; `extra`: what else the
    others are told, in their items from `EXTRA_AT` on.

    Returns every rank's (operation, dtype, collective, elements, place), and when the last came.
    """
    kind = crc32(what.encode()) & 0xFFFF
    page.arrive(_PLAN + _PLAN_HEAD.pack(OP_CODES[op], DTYPE_CODES[dtype], kind, count, *place) + extra)
    last = page.await_all(what)
    items, start = page.read_items(), len(_PLAN)
    heads = [_PLAN_HEAD.unpack_from(item, start) if item.startswith(_PLAN) else _NO_PLAN for item in items]
    keep = 4 if same else 3
    numbers = page.read_sequences()
    if any(head[:keep] != heads[0][:keep] for head in heads) or len(set(numbers)) > 1:
        ops = list(OP_CODES)
        each = [
            f"rank {r} has {ops[h[0]] if h[0] < len(ops) else 'another operation'} of {h[3]} x {DTYPES[h[1]]}"
            + ("" if h[2] == kind else " in another collective")
            + ("" if len(set(numbers)) == 1 else f" as collective {numbers[r]}")
            for r, h in enumerate(heads)
        ]
        calls = page.exchange_descriptions(page.signature)
        raise Mismatch(f"{what}: the ranks disagree; " + "; ".join(each), calls=calls)
    check_signatures(page, what)
    return heads, last


def check_signatures(page: MeetingPage, what: str) -> None:
    """Compare what the ranks of the meeting that just ended called, beyond its size, and where."""
    signature = page.signature
    if signature is None:
        return
    whats, wheres = page.read_signatures()
    if whats.count(signature.what) != page.size and 0 not in whats:
        calls = page.exchange_descriptions(signature)
        each = "; ".join(f"rank {call.rank} has {call.text}" for call in calls)
        raise Mismatch(f"{what}: the ranks disagree; {each}", calls=calls)
    signature.check_places(wheres, lambda: page.exchange_descriptions(signature))
