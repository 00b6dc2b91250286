"""Small all-reduces on the page where ranks of a host meet: each posts its numbers, and sums when all have come."""

from __future__ import annotations

import ctypes
import math
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.world.transports import DTYPE_CODES, DTYPES, CallSignature, Mismatch, Op
from unisono.world.transports.arithmetic import combine
from unisono.world.transports.meeting_page import (
    OP_CODES,
    SMALL_DEPTH,
    SMALL_HEAD,
    SMALL_SLOT,
    MeetingPage,
    is_behind,
)

__all__ = ["SmallAllReduce"]

_TOP, _TIME = struct.Struct("dIIqqII"), struct.Struct("d")
_VIEWS = 4096  # kept for shapes that come again


class SmallAllReduce:
    """All-reduces of at most `SMALL_BYTES` bytes: post mine, and sum when all have come.

    A slot is written again after `SMALL_DEPTH` messages; by then its owner has ended the old one and knows that
    the others have read it, because it waits for their counters of ended messages. These are announced now and
    then, ahead of need, so that ranks in step do not wait for each other twice.
    """

    def __init__(self, page: MeetingPage) -> None:
        self.page = page
        self._rows = page.small_rows
        self._memory = torch.frombuffer(page.memory, dtype=torch.uint8)
        self._base = self._memory.data_ptr()
        self._views: dict[tuple[torch.dtype, int, int], list[Tensor]] = {}
        self._scales: dict[torch.dtype, Tensor] = {}
        self._next = 0
        self._open: dict[int, _Posted] = {}  # in the order posted
        self._announced = 0  # all before this one are ended, and the others know
        self._lock = threading.RLock()

    def post(
        self, x: Tensor, op: Op, sequence: int, signature: CallSignature | None
    ) -> tuple[Callable[[], float], Callable[[], bool]]:
        """Begin an all-reduce of contiguous `x`: what ends it and tells when the last rank came, and whether all have.

        `sequence` and `signature` are the collective's in its world.
        """
        n = x.numel()
        with self._lock:
            k = self._next
            self._next = k + 1
            if k >= SMALL_DEPTH:
                self._make_room(k - SMALL_DEPTH)
            row = self._rows[self.page.rank]
            head = row + 64 + k % SMALL_DEPTH * SMALL_SLOT
            ctypes.memmove(self._base + head + SMALL_HEAD, x.data_ptr(), n * x.element_size())
            what, where = (signature.what, signature.where) if signature is not None else (0, 0)
            top = (OP_CODES[op], DTYPE_CODES[x.dtype], n, sequence, what, where)
            _TOP.pack_into(self.page.memory, head, time.perf_counter(), *top)
            self.page.counters.publish(row, k + 1)
            posted = self._open[k] = _Posted(self, k, x, op, sequence, signature)
            return posted.finish, posted.is_ready

    def finish(self, posted: _Posted) -> None:
        """End an all-reduce, unless it has ended."""
        with self._lock:
            if posted.k in self._open:
                try:
                    posted.last = self._finish(posted)
                except Mismatch as error:  # it is the error of who waits for this one, at any time
                    posted.wrong = error
                del self._open[posted.k]
                if next(iter(self._open), self._next) - self._announced >= SMALL_DEPTH // 2:
                    self._announce()

    def is_ready(self, k: int) -> bool:
        """Whether to finish number `k` would not have to wait."""
        counters = self.page.counters
        return k not in self._open or not any(is_behind(counters[row], k + 1) for row in self._rows)

    def _make_room(self, old: int) -> None:
        if old in self._open:
            self.finish(self._open[old])
        if self._announced <= old:
            self._announce()
        for r in range(self.page.size):
            if r != self.page.rank:
                self.page.await_counter(self._rows[r] + 4, old + 1, r, "all_reduce")

    def _announce(self) -> None:
        self._announced = next(iter(self._open), self._next - 1)  # the newest may be on its way
        self.page.counters.publish(self._rows[self.page.rank] + 4, self._announced)

    def _finish(self, posted: _Posted) -> float:
        page, k, op = self.page, posted.k, posted.op
        for r in page.peers:
            page.await_counter(self._rows[r], k + 1, r, "all_reduce", posted.check_large)
        offset, memory = 64 + k % SMALL_DEPTH * SMALL_SLOT, page.memory
        tops = [memory[row + offset : row + offset + _TOP.size] for row in self._rows]
        said = tops[page.rank][8:]  # all but the time
        if [top[8:] for top in tops].count(said) == page.size:
            if posted.signature is not None:
                posted.signature.check_places((posted.signature.where,), list)
        else:
            self._compare([_TOP.unpack(top) for top in tops], posted.signature)
        x = posted.x.detach().view(-1)
        views = self._slot_views(x, k % SMALL_DEPTH)
        if op in ("sum", "mean") and x.dtype in (torch.float32, torch.float64) and page.peers:
            torch.add(views[0], views[1], out=x)
            for view in views[2:]:
                torch.add(x, view, out=x)
            if op == "mean":
                torch.mul(x, self._find_scale(x.dtype), out=x)
        else:
            combine(views, op, x)
        return float(max([_TIME.unpack_from(top)[0] for top in tops]))

    def _compare(self, heads: Sequence[tuple[Any, ...]], signature: CallSignature | None) -> None:
        """Raise Mismatch if the ranks, whose heads differ, are not in the same collective."""
        page = self.page
        mine, whats = heads[page.rank][1:5], {head[5] for head in heads}
        if any(head[1:5] != mine for head in heads) or (len(whats) > 1 and 0 not in whats):
            names = list(OP_CODES)
            each = ", ".join(
                f"rank {r} has {names[o]} of {n} x {DTYPES[d]} as collective {i}"
                for r, (_, o, d, n, i, _, _) in enumerate(heads)
            )
            raise Mismatch(f"all_reduce: the ranks disagree; {each}", calls=page.exchange_descriptions(signature))
        if signature is not None:
            signature.check_places([head[6] for head in heads], lambda: page.exchange_descriptions(signature))

    def _find_scale(self, dtype: torch.dtype) -> Tensor:
        """What a sum is multiplied by for the mean; as a tensor, since that costs less than a number."""
        if dtype not in self._scales:
            self._scales[dtype] = torch.tensor(1.0 / self.page.size, dtype=dtype)
        return self._scales[dtype]

    def holds(self, rank: int, sequence: int) -> bool:
        """Whether `rank` has posted the collective with this number."""
        starts = (self._rows[rank] + 64 + slot * SMALL_SLOT for slot in range(SMALL_DEPTH))
        return any(_TOP.unpack_from(self.page.memory, start)[4] == sequence for start in starts)

    def _slot_views(self, x: Tensor, slot: int) -> list[Tensor]:
        key = (x.dtype, x.numel(), slot)
        found = self._views.get(key)
        if found is None:
            if len(self._views) >= _VIEWS:
                self._views.clear()
            nbytes = x.numel() * x.element_size()
            starts = [row + 64 + slot * SMALL_SLOT + SMALL_HEAD for row in self._rows]
            found = [self._memory[s : s + nbytes].view(x.dtype) for s in starts]
            self._views[key] = found
        return found


class _Posted:
    """A small all-reduce of one rank that is under way, or has ended."""

    __slots__ = ("_all", "k", "last", "op", "sequence", "signature", "wrong", "x")

    def __init__(
        self, every: SmallAllReduce, k: int, x: Tensor, op: Op, sequence: int, signature: CallSignature | None
    ) -> None:
        self._all, self.k, self.x, self.op = every, k, x, op
        self.sequence, self.signature = sequence, signature
        self.last = math.nan  # when the last rank came
        self.wrong: Mismatch | None = None

    def finish(self) -> float:
        self._all.finish(self)
        if self.wrong is not None:
            raise self.wrong
        return self.last

    def is_ready(self) -> bool:
        return self._all.is_ready(self.k)

    def check_large(self, rank: int) -> None:
        """Called for a rank that does not come: Mismatch if it is in this collective with something else."""
        page = self._all.page
        if self.sequence and page.read_sequence(rank) == self.sequence:
            raise Mismatch(
                f"all_reduce: the ranks disagree; rank {page.rank} has a small one, of {self.x.numel()} x "
                f"{self.x.dtype}, where rank {rank} has a large one or another collective",
                calls=page.exchange_descriptions(self.signature),
            )
