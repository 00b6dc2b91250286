"""Small and private messages between the processes of one host: begun without blocking, no thread needed."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from unisono.world.transports import Mismatch, Op
from unisono.world.transports.arithmetic import combine
from unisono.world.transports.meeting_page import Board, behind

LIMIT = 4096  # bytes of a small message
DEPTH = 16  # small messages under way at once
_HEAD = 64  # time, operation, dtype, elements, number of the collective
_TOP = struct.Struct("dIIqq")
_RANK = 64 + DEPTH * (_HEAD + LIMIT)
_PAIR = 64  # chunks posted, chunks taken
_CHUNK = 1 << 20
_VIEWS = 4096  # kept for shapes that come again
OP_CODES: dict[str, int] = {"sum": 0, "mean": 1, "max": 2, "min": 3}
DTYPES: list[torch.dtype] = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)
DTYPE_CODES = {dtype: i for i, dtype in enumerate(DTYPES)}


def room(size: int) -> int:
    """Bytes that a board needs for `size` ranks' boxes."""
    return size * _RANK + size * size * _PAIR


def outbox_bytes(size: int) -> int:
    """Bytes of memory that a rank needs for its outboxes; only what is used is ever allocated."""
    return size * 2 * (_CHUNK + 16)


class Postbox:
    """All-reduces of at most `LIMIT` bytes: post mine, and sum when all have come.

    A slot is written again after `DEPTH` messages; by then its owner has ended the old one and knows that
    the others have read it, because it waits for their counters of ended messages. These are told now and
    then, ahead of need, so that ranks in step do not wait for each other twice.
    """

    def __init__(self, board: Board) -> None:
        self.board = board
        self._rows = [board.base + r * _RANK for r in range(board.size)]
        self._memory = torch.frombuffer(board.page, dtype=torch.uint8)
        self._views: dict[tuple[torch.dtype, int, int], list[Tensor]] = {}
        self._next = 0
        self._open: dict[int, Callable[[], float]] = {}  # in the order posted
        self._told = 0  # all before this one are ended, and the others know
        self._lock = threading.RLock()

    def post(self, x: Tensor, op: Op, sequence: int) -> tuple[Callable[[], float], Callable[[], bool]]:
        """Begin an all-reduce of contiguous `x`: what ends it and tells when the last rank came, and whether all have.

        `sequence` is the collective's number in its world.
        """
        with self._lock:
            k = self._next
            self._next = k + 1
            slot = k % DEPTH
            if k >= DEPTH:
                self._make_room(k - DEPTH)
            views = self._slot_views(x, slot)
            views[self.board.rank].copy_(x.detach().view(-1))
            head = self._rows[self.board.rank] + 64 + slot * (_HEAD + LIMIT)
            code = DTYPE_CODES[x.dtype]
            _TOP.pack_into(self.board.page, head, time.perf_counter(), OP_CODES[op], code, x.numel(), sequence)
            self.board.words.publish(self._rows[self.board.rank], k + 1)
            result: list[float] = []
            wrong: list[Mismatch] = []

            def finish() -> float:
                with self._lock:
                    if k in self._open:
                        try:
                            result.append(self._finish(k, x, op, views, sequence))
                        except Mismatch as error:  # it is the error of who waits for this one, at any time
                            wrong.append(error)
                        del self._open[k]
                        if next(iter(self._open), self._next) - self._told >= DEPTH // 2:
                            self._tell()
                    if wrong:
                        raise wrong[0]
                    return result[0]

            self._open[k] = finish
            words, rows = self.board.words, self._rows
            return finish, lambda: k not in self._open or not any(behind(words[row], k + 1) for row in rows)

    def _make_room(self, old: int) -> None:
        if old in self._open:
            with suppress(Mismatch):
                self._open[old]()
        if self._told <= old:
            self._tell()
        for r in range(self.board.size):
            if r != self.board.rank:
                self.board.await_word(self._rows[r] + 4, old + 1, r, "a small all_reduce")

    def _tell(self) -> None:
        self._told = next(iter(self._open), self._next - 1)  # the newest may be on its way
        self.board.words.publish(self._rows[self.board.rank] + 4, self._told)

    def _finish(self, k: int, x: Tensor, op: Op, views: list[Tensor], sequence: int) -> float:
        board, slot = self.board, k % DEPTH

        def doubt(rank: int) -> None:
            if sequence and board.sequence_of(rank) == sequence:
                raise Mismatch(
                    f"all_reduce: the ranks disagree; rank {board.rank} has a small one, of {x.numel()} x {x.dtype}, "
                    f"where rank {rank} has a large one or another collective"
                )

        for r in range(board.size):
            if r != board.rank:
                board.await_word(self._rows[r], k + 1, r, "a small all_reduce", doubt)
        offset = 64 + slot * (_HEAD + LIMIT)
        heads = [_TOP.unpack_from(board.page, row + offset) for row in self._rows]
        mine = heads[board.rank][1:]
        if any(head[1:] != mine for head in heads):
            names = list(OP_CODES)
            told = ", ".join(
                f"rank {r} has {names[o]} of {n} x {DTYPES[d]} as collective {i}"
                for r, (_, o, d, n, i) in enumerate(heads)
            )
            raise Mismatch(f"all_reduce: the ranks disagree; {told}")
        combine(views, op, x.detach().view(-1))
        return float(max(head[0] for head in heads))

    def holds(self, rank: int, sequence: int) -> bool:
        """Whether `rank` has posted the collective with this number."""
        starts = (self._rows[rank] + 64 + slot * (_HEAD + LIMIT) for slot in range(DEPTH))
        return any(_TOP.unpack_from(self.board.page, start)[4] == sequence for start in starts)

    def _slot_views(self, x: Tensor, slot: int) -> list[Tensor]:
        key = (x.dtype, x.numel(), slot)
        found = self._views.get(key)
        if found is None:
            if len(self._views) >= _VIEWS:
                self._views.clear()
            nbytes = x.numel() * x.element_size()
            starts = [row + 64 + slot * (_HEAD + LIMIT) + _HEAD for row in self._rows]
            found = [self._memory[s : s + nbytes].view(x.dtype) for s in starts]
            self._views[key] = found
        return found


class Letters:
    """Messages from one rank to another, through outboxes of the sender's that all ranks have mapped."""

    def __init__(self, board: Board, outboxes: Sequence[Tensor]) -> None:
        """`outboxes[r]`: `outbox_bytes(size)` of rank r's memory, a part for each receiver."""
        self.board = board
        self._pairs = board.base + board.size * _RANK
        self._boxes = [boxes.split(2 * (_CHUNK + 16)) for boxes in outboxes]

    def send(self, x: Tensor, dst: int) -> None:
        """Send `x`'s bytes; blocks while two chunks wait to be taken."""
        row = self._row(self.board.rank, dst)
        box = self._boxes[self.board.rank][dst]
        data = x.view(torch.uint8)
        words, what = self.board.words, f"send to rank {dst}"
        for chunk in _chunks(data):
            posted = words[row]
            self.board.await_word(row + 4, posted - 1, dst, what)
            at = (posted & 1) * (_CHUNK + 16)
            box[at : at + 16].view(torch.int64).copy_(torch.tensor([data.numel(), DTYPE_CODES[x.dtype]]))
            box[at + 16 : at + 16 + chunk.numel()].copy_(chunk)
            words.publish(row, posted + 1)

    def recv(self, x: Tensor, src: int) -> None:
        """Receive into `x`."""
        row = self._row(src, self.board.rank)
        box = self._boxes[src][self.board.rank]
        data = x.view(torch.uint8)
        words, what = self.board.words, f"recv from rank {src}"
        for chunk in _chunks(data):
            taken = words[row + 4]
            self.board.await_word(row, taken + 1, src, what)
            at = (taken & 1) * (_CHUNK + 16)
            nbytes, code = box[at : at + 16].view(torch.int64).tolist()
            if nbytes != data.numel() or DTYPES[code] != x.dtype:
                raise Mismatch(
                    f"recv from rank {src}: it sent {nbytes} bytes of {DTYPES[code]}, "
                    f"I receive into {data.numel()} bytes of {x.dtype}"
                )
            chunk.copy_(box[at + 16 : at + 16 + chunk.numel()])
            words.publish(row + 4, taken + 1)

    def _row(self, src: int, dst: int) -> int:
        return self._pairs + (src * self.board.size + dst) * _PAIR


def _chunks(data: Tensor) -> list[Tensor]:
    """Pieces of at most a chunk; an empty message still is one."""
    return list(data.split(_CHUNK)) if data.numel() else [data]
