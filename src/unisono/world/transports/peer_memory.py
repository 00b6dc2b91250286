"""The private memory of the other processes of a host, read through the kernel: nothing has to be copied for them first.

`process_vm_readv` copies from one process to another. The kernel allows it between processes of one user, unless it was
told to be stricter (Yama, containers); so the ranks try it once, and use it if each can read all others. Nobody writes
to another's memory: a rank that has given up may be using that for something else.
"""

from __future__ import annotations

import ctypes
import os
import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from unisono.world.transports import Op, PeerLost
from unisono.world.transports.arithmetic import combine
from unisono.world.transports.meeting_page import MeetingPage

_LIBC = ctypes.CDLL(None, use_errno=True)
VARIABLE = "UNISONO_PEER_MEMORY"  # "0": do without it
_MOST_PIECES = 1024  # in one call, of the kernel
_BLOCK = 16 << 20  # bytes reduced before the ranks read each other's results: these are still in the cache then
_TILE, _TILES = 1 << 20, 8 << 20  # bytes read at a time, of each rank and of all together; a multiple of 16
_PR_SET_PTRACER = 0x59616D61
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_WORD = struct.Struct("Q")

Piece = tuple[int, int]  # address and bytes


class _Vector(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


class Pieces:
    """Memory in several pieces that stand for one line."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = [piece for piece in pieces if piece[1]]
        self._ends = list(accumulate(nbytes for _, nbytes in self._pieces))

    def cut(self, start: int, stop: int) -> list[Piece]:
        """The pieces of the bytes from `start` to `stop`."""
        found = []
        for i in range(bisect_right(self._ends, start), len(self._pieces)):
            address, nbytes = self._pieces[i]
            at = self._ends[i] - nbytes
            if at >= stop:
                break
            low, high = max(start, at), min(stop, at + nbytes)
            found.append((address + low - at, high - low))
        return found


class PeerMemory:
    """What one rank reads of the others. `works`: every rank can read all others."""

    def __init__(self, page: MeetingPage, *, works: bool | None = None) -> None:
        """All ranks make it together. `works`: what was found out before."""
        self._page, self._pids = page, page.pids
        self._scratch: Tensor | None = None  # a tile of each rank
        self.works = self._find_out() if works is None else works

    def _find_out(self) -> bool:
        """Let each rank read a word of all others."""
        tries = hasattr(_LIBC, "process_vm_readv") and os.environ.get(VARIABLE, "1") != "0"
        if tries:
            _allow_reading()
        word = ctypes.create_string_buffer(os.urandom(_WORD.size), _WORD.size)
        told = self._page.meet(_WORD.pack(ctypes.addressof(word)) + word.raw, "reading a word")
        tries = tries and all(self._can_read(rank, item) for rank, item in enumerate(told))
        return all(item == b"1" for item in self._page.meet(b"1" if tries else b"0", "reading a word"))

    def _can_read(self, rank: int, told: bytes) -> bool:
        found = ctypes.create_string_buffer(_WORD.size)
        there = [(_WORD.unpack(told[: _WORD.size])[0], _WORD.size)]
        here = [(ctypes.addressof(found), _WORD.size)]
        return self._copy(rank, here, there) == _WORD.size and found.raw == told[_WORD.size :]

    def _copy(self, rank: int, here: Sequence[Piece], there: Sequence[Piece]) -> int:
        """One call; the bytes that were copied, -1 where none could be."""
        mine, theirs = (_Vector * len(here))(*here), (_Vector * len(there))(*there)
        copied: int = _LIBC.process_vm_readv(
            self._pids[rank], mine, ctypes.c_ulong(len(here)), theirs, ctypes.c_ulong(len(there)), ctypes.c_ulong(0)
        )
        return copied

    def read(self, rank: int, here: list[Piece], there: list[Piece]) -> None:
        """Fill pieces of my memory from those of `rank`, which are as long together."""
        while here:
            some, others, here, there = _take(here, there)
            wanted = sum(nbytes for _, nbytes in some)
            if self._copy(rank, some, others) != wanted:
                why = os.strerror(ctypes.get_errno())
                raise self._page.give_up(PeerLost(f"the memory of rank {rank} cannot be read ({why}): has it left?"))

    def find(self, rank: int, address: int, count: int) -> Pieces:
        """The pieces that another rank has told of, by the address of a table (`list_pieces`)."""
        table = torch.empty(2 * count, dtype=torch.int64)
        self.read(rank, [(table.data_ptr(), 16 * count)], [(address, 16 * count)])
        addresses, sizes = table.view(2, count).tolist()
        return Pieces(list(zip(addresses, sizes, strict=True)))

    def all_reduce(self, parts: Sequence[Tensor], peers: Sequence[Pieces], op: Op) -> None:
        """Reduce the concatenation of `parts` over all ranks; `peers[r]`: where those of rank r are. All have met.

        Block by block: rank r reduces the r-th share of it in its own memory, the ranks meet, and read each other's.
        """
        page, size = self._page, len(peers)
        itemsize = parts[0].element_size()
        mine = Pieces([(p.data_ptr(), p.numel() * itemsize) for p in parts])
        total = sum(p.numel() for p in parts) * itemsize
        if self._scratch is None:
            self._scratch = torch.empty(size, min(_TILE, _TILES // size // 16 * 16), dtype=torch.uint8)
        scratch = self._scratch.view(parts[0].dtype)
        room = scratch.shape[1]
        for start in range(0, total, _BLOCK):
            length = min(_BLOCK, total - start)
            shares = [_cut_share(length, r, size) for r in range(size)]
            low, high = shares[page.rank]
            for tile, at in _cut_tiles(parts, (start + low) // itemsize, (start + high) // itemsize, room):
                self._reduce(tile, at * itemsize, peers, op, scratch)
            page.meet(what="all_reduce")
            for rank, (low, high) in enumerate(shares):
                if rank != page.rank and high > low:
                    self.read(
                        rank, mine.cut(start + low, start + high), peers[rank].cut(start + low, start + high)
                    )
        page.meet(what="all_reduce")

    def _reduce(self, tile: Tensor, at: int, peers: Sequence[Pieces], op: Op, scratch: Tensor) -> None:
        """Reduce a tile of mine, `at` bytes from the beginning, in rank order."""
        nbytes = tile.numel() * tile.element_size()
        values = [line[: tile.numel()] for line in scratch]
        values[self._page.rank] = tile
        for rank, pieces in enumerate(peers):
            if rank != self._page.rank:
                self.read(rank, [(values[rank].data_ptr(), nbytes)], pieces.cut(at, at + nbytes))
        combine(values, op, values[0])
        if values[0] is not tile:
            tile.copy_(values[0])


def list_pieces(parts: Sequence[Tensor]) -> Tensor:
    """Where lines of memory are, for others: a row of addresses, and one of bytes."""
    return torch.tensor([[p.data_ptr() for p in parts], [p.numel() * p.element_size() for p in parts]])


def _take(here: list[Piece], there: list[Piece]) -> tuple[list[Piece], list[Piece], list[Piece], list[Piece]]:
    """As much of both as one call takes, and the rest."""
    if len(here) <= _MOST_PIECES and len(there) <= _MOST_PIECES:
        return here, there, [], []
    end = sum(n for _, n in here)
    some = min(sum(n for _, n in pieces[:_MOST_PIECES]) for pieces in (here, there))
    mine, theirs = Pieces(here), Pieces(there)
    return mine.cut(0, some), theirs.cut(0, some), mine.cut(some, end), theirs.cut(some, end)


def _cut_share(length: int, rank: int, size: int) -> tuple[int, int]:
    """The bytes of `length` that `rank` reduces, on borders of cache lines."""
    each = -(-length // size)
    each = -(-each // 64) * 64
    return min(rank * each, length), min((rank + 1) * each, length)


def _cut_tiles(parts: Sequence[Tensor], start: int, stop: int, room: int) -> Iterator[tuple[Tensor, int]]:
    """Views of the elements from `start` to `stop` of a concatenation, each inside one part and of at most `room`, with
    their places."""
    at = 0
    for part in parts:
        low, high = max(start, at), min(stop, at + part.numel())
        for place in range(low, high, room):
            yield part[place - at : min(place + room, high) - at], place
        at += part.numel()
        if at >= stop:
            return


def _allow_reading() -> None:
    """Let the processes of this run read my memory, where only parents may: those that the launcher has started."""
    launcher = os.environ.get("UNISONO_LAUNCHER_PID", "")
    if _YAMA.is_file() and _YAMA.read_text(encoding="ascii").strip() == "1" and launcher.isdecimal():
        _LIBC.prctl(_PR_SET_PTRACER, ctypes.c_ulong(int(launcher)), 0, 0, 0)
