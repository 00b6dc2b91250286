"""The private memory of the other processes of a host, read through the kernel."""

from __future__ import annotations

import ctypes
import os
import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import torch
from torch import Tensor

from unisono.world.transports import Op
from unisono.world.transports.arithmetic import combine, cut_share, cut_tiles
from unisono.world.transports.mapped import allow_reading
from unisono.world.transports.meeting_page import MeetingPage
from unisono.world.transports.spare_cores import SpareCores

PEER_MEMORY = "UNISONO_PEER_MEMORY"  # "0": never
_READ, _READ_BY_ALL = 2 << 20, 8 << 20  # bytes of a rank that are read at a time, and of all ranks together
_BLOCK = 128 << 20  # bytes reduced before the ranks meet to read each other's results
_MOST_PIECES, _MOST_BYTES = 1024, 1 << 30  # of memory, in one call of the kernel
_WORD = struct.Struct("Q")
_LIBC = ctypes.CDLL(None, use_errno=True)
if hasattr(_LIBC, "process_vm_readv"):
    _LIBC.process_vm_readv.restype = ctypes.c_ssize_t

Piece = tuple[int, int]  # of memory: address and bytes


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
    """The private memory of the other ranks, read through the kernel. `works`: every rank can read all others.

    `process_vm_readv` copies from one process to another. The kernel allows it between processes of one user, unless it
    was told to be stricter (Yama, containers), so the ranks try it once. Nobody writes to another's memory: a rank that
    has given up may be using that for something else.
    """

    def __init__(self, page: MeetingPage, spare: SpareCores, *, works: bool | None = None) -> None:
        """All ranks make it together. `works`: what was found out before."""
        self._page, self._spare, self._pids = page, spare, page.pids
        self._scratch: list[Tensor] = []  # each has a tile of each rank; a thread takes one
        self.works = self._find_out() if works is None else works

    def _find_out(self) -> bool:
        """Find out whether each rank can read the memory of all others, by one word."""
        tries = hasattr(_LIBC, "process_vm_readv") and os.environ.get(PEER_MEMORY, "1") != "0"
        if tries:
            allow_reading()
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
        """One call; the bytes that were copied, -1 if none could be."""
        mine = (_Vector * len(here))(*(_Vector(*piece) for piece in here))
        theirs = (_Vector * len(there))(*(_Vector(*piece) for piece in there))
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
                why = f"its memory cannot be read ({os.strerror(ctypes.get_errno())})"
                raise self._page.lose(rank, "reading memory", why)

    def find_all(self, heads: Sequence[tuple[int, ...]]) -> list[Pieces]:
        """Every rank's memory, by what it has announced: how many pieces, and where a table of them is."""
        return [self._find(r, head[5], -1 - head[4]) for r, head in enumerate(heads)]

    def copy_all(self, rank: int, head: tuple[int, ...], out: Tensor) -> None:
        """Fill `out` with all that a rank has announced."""
        nbytes = out.numel() * out.element_size()
        self.read(rank, [(out.data_ptr(), nbytes)], self._find(rank, head[5], -1 - head[4]).cut(0, nbytes))

    def _find(self, rank: int, address: int, count: int) -> Pieces:
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
        mine = peers[page.rank]
        total, room = sum(p.numel() for p in parts) * itemsize, self._find_room(size)
        for start in range(0, total, _BLOCK):
            length = min(_BLOCK, total - start)
            shares = [cut_share(length, r, size) for r in range(size)]
            low, high = shares[page.rank]
            tiles = cut_tiles(parts, (start + low) // itemsize, (start + high) // itemsize, room // itemsize)
            self._spare.each(lambda tile, at: self._reduce(tile, at * itemsize, peers, op), tiles)
            page.meet(what="all_reduce")
            others = [
                (rank, at, min(at + _READ, start + high))
                for rank, (low, high) in enumerate(shares)
                for at in range(start + low, start + high, _READ)
                if rank != page.rank
            ]
            self._spare.each(
                lambda rank, low, high: self.read(rank, mine.cut(low, high), peers[rank].cut(low, high)), others
            )
        page.meet(what="all_reduce")

    def reduce_part(self, parts: Sequence[Tensor], peers: Sequence[Pieces], start: int, op: Op, out: Tensor) -> None:
        """Reduce those elements of the concatenation of `parts` into `out` that begin at `start`; all have met."""
        itemsize = out.element_size()
        room = self._find_room(len(peers)) // itemsize
        ends = list(accumulate(p.numel() for p in parts))

        def reduce(at: int) -> None:
            n = min(room, start + out.numel() - at)
            i = bisect_right(ends, at)
            first = at - ends[i] + parts[i].numel()
            mine = parts[i][first : first + n] if at + n <= ends[i] else None  # all of it in one of my parts
            with self._gather(mine, n, at * itemsize, peers, out.dtype) as values:
                combine(values, op, out[at - start : at - start + n])

        self._spare.each(reduce, ((at,) for at in range(start, start + out.numel(), room)))
        self._page.meet(what="reduce_scatter")

    def _reduce(self, tile: Tensor, at: int, peers: Sequence[Pieces], op: Op) -> None:
        """Reduce a tile of mine, `at` bytes from the beginning, in rank order."""
        with self._gather(tile, tile.numel(), at, peers, tile.dtype) as values:
            combine(values, op, values[0])
            if values[0] is not tile:
                tile.copy_(values[0])

    def _find_room(self, size: int) -> int:
        """Bytes of a tile of one rank."""
        return min(_READ, _READ_BY_ALL // size // 16 * 16)

    @contextmanager
    def _gather(
        self, mine: Tensor | None, n: int, at: int, peers: Sequence[Pieces], dtype: torch.dtype
    ) -> Iterator[list[Tensor]]:
        """`n` elements of every rank, `at` bytes from the beginning, in memory of this process as long as the block
        lasts: `mine`, if that is given, and copies of the others'."""
        try:
            scratch = self._scratch.pop()
        except IndexError:
            scratch = torch.empty(len(peers), self._find_room(len(peers)), dtype=torch.uint8)
        try:
            values = [line[:n] for line in scratch.view(dtype)]
            nbytes = n * dtype.itemsize
            if mine is not None:
                values[self._page.rank] = mine
            for rank, pieces in enumerate(peers):
                if rank != self._page.rank or mine is None:
                    self.read(rank, [(values[rank].data_ptr(), nbytes)], pieces.cut(at, at + nbytes))
            yield values
        finally:
            self._scratch.append(scratch)


def list_pieces(parts: Sequence[Tensor]) -> Tensor:
    """Where lines of memory are, for others: a row of addresses, and one of bytes."""
    return torch.tensor([[p.data_ptr() for p in parts], [p.numel() * p.element_size() for p in parts]])


def _take(here: list[Piece], there: list[Piece]) -> tuple[list[Piece], list[Piece], list[Piece], list[Piece]]:
    """Split both lists into what one call of the kernel takes, and the rest."""
    end = sum(n for _, n in here)
    if len(here) <= _MOST_PIECES and len(there) <= _MOST_PIECES and end <= _MOST_BYTES:
        return here, there, [], []
    some = min(_MOST_BYTES, *(sum(n for _, n in pieces[:_MOST_PIECES]) for pieces in (here, there)))
    mine, theirs = Pieces(here), Pieces(there)
    return mine.cut(0, some), theirs.cut(0, some), mine.cut(some, end), theirs.cut(some, end)
