"""Messages from one rank of a host to another, through outboxes of the sender's that all ranks have mapped.

A message is in pieces of at most `CHUNK` bytes. `DEPTH` of them wait in an outbox until they are taken: a sender that
finds room there has sent its message when it has copied it, whatever the receiver does meanwhile.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.world.transports import DTYPE_CODES, DTYPES, Mismatch
from unisono.world.transports.meeting_page import PAIR_BYTES, MeetingPage, is_behind

__all__ = ["CHUNK", "DEPTH", "DirectMessages", "count_outbox_bytes"]

CHUNK = 1 << 20
DEPTH = 4  # a power of two: counters wrap
_HEAD = ctypes.c_int64 * 3  # of every piece: bytes of the whole message, dtype, label
_SLOT = CHUNK + 32
_Find = Callable[[int, int, torch.dtype], Tensor]


def count_outbox_bytes(size: int) -> int:
    """Bytes of memory that a rank needs for its outboxes; only what is used is ever allocated."""
    return size * DEPTH * _SLOT


class DirectMessages:
    """All messages of one rank; each direction is used by one thread at a time."""

    def __init__(self, page: MeetingPage, outboxes: Sequence[Tensor]) -> None:
        """`outboxes[r]`: `count_outbox_bytes(size)` of rank r's memory, a part for each receiver."""
        self.page = page
        self._boxes = [boxes.split(DEPTH * _SLOT) for boxes in outboxes]
        self._slots: dict[tuple[int, int, int], tuple[Any, Tensor]] = {}

    def has_room(self, dst: int, nbytes: int) -> bool:
        """Whether a message of so many bytes would be sent at once."""
        row, counters = self.row(self.page.rank, dst), self.page.counters
        pieces = max(1, -(-nbytes // CHUNK))
        return not is_behind(counters[row + 4], counters[row] + pieces - DEPTH)

    def send(self, x: Tensor, dst: int, label: int = 0) -> None:
        """Send `x`'s bytes; blocks while there is no room."""
        row = self.row(self.page.rank, dst)
        data = x.view(torch.uint8)
        counters, what = self.page.counters, f"send to rank {dst}"
        for piece in _cut(data):
            posted = counters[row]
            self.page.await_counter(row + 4, posted - DEPTH + 1, dst, what)
            head, box = self._slot(self.page.rank, dst, posted)
            head[0], head[1], head[2] = data.numel(), DTYPE_CODES[x.dtype], label
            box[: piece.numel()].copy_(piece)
            counters.publish(row, posted + 1)

    def has_message(self, src: int) -> bool:
        """Whether a piece from `src` waits to be taken."""
        row = self.row(src, self.page.rank)
        return is_behind(self.page.counters[row + 4], self.page.counters[row])

    def recv(self, x: Tensor, src: int) -> None:
        """Receive into `x`."""
        self.recv_labelled(src, lambda label, numel, dtype: x)

    def recv_labelled(self, src: int, find: _Find) -> None:
        """Receive the next message into what `find(label, numel, dtype)` gives for it."""
        row = self.row(src, self.page.rank)
        counters, what = self.page.counters, f"recv from rank {src}"
        self.page.await_counter(row, counters[row + 4] + 1, src, what)
        head, _ = self._slot(src, self.page.rank, counters[row + 4])
        nbytes, code, label = head
        x = find(label, nbytes // DTYPES[code].itemsize, DTYPES[code])
        data = x.view(torch.uint8)
        if nbytes != data.numel() or DTYPES[code] != x.dtype:
            raise Mismatch(
                f"recv from rank {src}: it sent {nbytes} bytes of {DTYPES[code]}, "
                f"I receive into {data.numel()} bytes of {x.dtype}"
            )
        for piece in _cut(data):
            taken = counters[row + 4]
            self.page.await_counter(row, taken + 1, src, what)
            piece.copy_(self._slot(src, self.page.rank, taken)[1][: piece.numel()])
            counters.publish(row + 4, taken + 1)

    def _slot(self, src: int, dst: int, number: int) -> tuple[Any, Tensor]:
        """Where a piece lies: its head and its bytes."""
        key = src, dst, number % DEPTH
        if key not in self._slots:
            box = self._boxes[src][dst][key[2] * _SLOT :]
            self._slots[key] = _HEAD.from_address(box.data_ptr()), box[32 : 32 + CHUNK]
        return self._slots[key]

    def row(self, src: int, dst: int) -> int:
        """Where the counters of messages from `src` to `dst` are: of pieces posted, and taken."""
        return self.page.pair_rows + (src * self.page.size + dst) * PAIR_BYTES


def _cut(data: Tensor) -> Sequence[Tensor]:
    """Pieces of a message; an empty message still is one."""
    return [data] if data.numel() <= CHUNK else data.split(CHUNK)
