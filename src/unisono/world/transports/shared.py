"""Shared memory between the workers of one host: each reduces its part where all can see it, no message is sent.

Three ways, the same on every rank:

- tensors from `World.empty` lie in memory that all ranks map: rank r reduces the r-th part in place for everyone;
- large private tensors are read where they are (`PeerMemory`): rank r reduces the r-th part of its own, and the others
  read that;
- any other tensor passes over a stage (`stage`).
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import torch
from torch import Tensor

from unisono.world.transports import (
    SMALL_BYTES,
    CallSignature,
    Mismatch,
    Op,
    Transport,
    find_group,
    gather_bytes,
)
from unisono.world.transports.arithmetic import SpareCores, combine, cut_share, cut_tiles
from unisono.world.transports.direct_messages import DirectMessages, count_outbox_bytes
from unisono.world.transports.mapped import PEER_MEMORY, MappedMemory, allow_reading, open_published, publish
from unisono.world.transports.meeting_page import (
    ITEM_LIMIT,
    PAGE_NAME,
    MeetingPage,
    check_signatures,
    meet_with_plan,
)
from unisono.world.transports.sent_sizes import WEIGHTS, describe_uneven, weigh_sizes
from unisono.world.transports.small_all_reduce import SmallAllReduce
from unisono.world.transports.stage import Stage, count_stage_bytes, cut_blocks

_READ, _READ_BY_ALL = 2 << 20, 8 << 20  # bytes of a rank that are read at a time, and of all ranks together
_BLOCK = 128 << 20  # bytes reduced before the ranks meet to read each other's results
_MOST_PIECES, _MOST_BYTES = 1024, 1 << 30  # of memory, in one call of the kernel
_WORD = struct.Struct("Q")
_LIBC = ctypes.CDLL(None, use_errno=True)
if hasattr(_LIBC, "process_vm_readv"):
    _LIBC.process_vm_readv.restype = ctypes.c_ssize_t
PRIVATE_BYTES = 256 << 10  # from this size on private memory is read from the other processes, if possible
_TILE = 256 << 10  # bytes of a rank reduced at a time in place: four ranks' fit into a core's second cache
_MARK = b"exchange"  # how an item begins: what its rank came to do
_INLINE = ITEM_LIMIT - len(_MARK) - 8  # bytes of an object that fit on the page itself

_PRIVATE = (-1, 0)  # the place of memory that others do not see
Piece = tuple[int, int]  # of memory: address and bytes


class SharedTransport(Transport):
    """One rank of a group of processes on one host."""

    name = "shared memory"

    def __init__(
        self,
        fd: int,
        rank: int,
        size: int,
        *,
        timeout_s: float,
        pids: Sequence[int] = (),
        check: Callable[[], None] | None = None,
        reads_peers: bool | None = None,
    ) -> None:
        """`fd`: a memfd that every rank of the group has open, empty when the first comes; `pids`: every rank's
        process, where that is known before; `check`: raises PeerLost where waiting is to end; `reads_peers`: whether
        each can read the private memory of all others, where that is known."""
        self.rank, self.size, self.timeout_s, self._check = rank, size, timeout_s, check
        spin = size <= len(os.sched_getaffinity(0))
        self._page = MeetingPage(fd, rank, size, timeout_s=timeout_s, spin=spin, pids=pids, check=check)
        self._small = SmallAllReduce(self._page)
        self._page.on_missing = self._check_small
        self._mapped: dict[int, tuple[int, MappedMemory]] = {}
        self._made = 0
        self._turn = 0
        stage = count_stage_bytes(size)
        self._stage = self._map(stage + count_outbox_bytes(size))
        self._direct = DirectMessages(self._page, [r[stage:] for r in self._stage.ranks])
        self._spare = SpareCores(size)
        self._peers = PeerMemory(self._page, self._spare, works=reads_peers)
        self.reads_peers = self.takes_parts = self._peers.works

    @classmethod
    def from_inherited(
        cls, fd: int, rank: int, size: int, *, timeout_s: float, pids: Sequence[int] = ()
    ) -> SharedTransport:
        """A transport over a page that the launcher left open, or sent; closes the descriptor."""
        try:
            return cls(fd, rank, size, timeout_s=timeout_s, pids=pids)
        finally:
            os.close(fd)

    def begin(self, sequence: int, signature: CallSignature | None) -> None:
        self.sequence = self._page.sequence = sequence  # the page shows both to the other ranks
        self.signature = self._page.signature = signature

    # Collectives -----------------------------------------------------------------------------------------

    def post(
        self, x: Tensor, op: Op, sequence: int, signature: CallSignature | None = None
    ) -> tuple[Callable[[], float], Callable[[], bool]] | None:
        return self._small.post(x, op, sequence, signature) if x.numel() * x.element_size() <= SMALL_BYTES else None

    def all_reduce(self, parts: Sequence[Tensor], op: Op) -> float:
        total, dtype = sum(p.numel() for p in parts), parts[0].dtype
        place, table = self._locate(parts[0]) if len(parts) == 1 else _PRIVATE, None
        if place == _PRIVATE and self.reads_peers and total * dtype.itemsize >= PRIVATE_BYTES:
            table = list_pieces(parts)  # others read it, as long as this runs
            place = (-1 - len(parts), table.data_ptr())
        if place == _PRIVATE:
            return self._pass_over_stage(parts, op)
        heads, last = self._begin("all_reduce", op, dtype, total, place)
        if table is not None and all(head[4] < -1 for head in heads):
            self._peers.all_reduce(parts, self._peers.find_all(heads), op)
        elif table is None and all(head[4:] == heads[0][4:] for head in heads):
            self._reduce_in_place(parts[0], op)
            self._page.meet(what="all_reduce")
        else:  # a peer's has to be copied: all go over the stage
            self._pass_over_stage(parts, op, last)
        return last

    def _pass_over_stage(self, parts: Sequence[Tensor], op: Op, last: float | None = None) -> float:
        """An all-reduce in blocks that are copied; `last`: when the last rank came, where all have met and this rank
        has not copied its first."""
        total, dtype = sum(p.numel() for p in parts), parts[0].dtype
        stage = Stage(self._stage.ranks, self.rank, dtype)
        early = op == "mean" and dtype in (torch.float32, torch.float64)
        scale = 1.0 / self.size if early else None
        blocks = list(cut_blocks(parts, stage.elements))
        if blocks:
            stage.put(blocks[0], self._turn, scale)
        if last is not None:
            self._page.meet(what="all_reduce")
        else:
            heads, last = self._begin("all_reduce", op, dtype, total, _PRIVATE)
            if any(tuple(head[4:]) != _PRIVATE for head in heads):
                self._page.meet(what="all_reduce")
        for i, block in enumerate(blocks):
            length = sum(p.numel() for p in block)
            stage.reduce(length, self._turn, "sum" if early else op)
            if i + 1 < len(blocks):
                stage.put(blocks[i + 1], self._turn + 1, scale)
            self._page.arrive()
            self._page.await_all("all_reduce")
            stage.take(block, length, self._turn)
            self._turn += 1
        return last

    def reduce_scatter(self, x: Tensor, counts: Sequence[int], op: Op, out: Tensor) -> float:
        parts = x.split(list(counts))
        what = f"reduce_scatter of {list(counts)}"
        heads, last = self._begin(what, op, x.dtype, x.numel(), self._locate(x))
        if heads[0][4] >= 0 and all(head[4:] == heads[0][4:] for head in heads):
            memory = self._find_mapped(heads[0][4])
            offset = heads[0][5] + sum(counts[: self.rank]) * x.element_size()
            peers = [_view_as(r, offset, out.numel(), x.dtype) for r in memory.ranks]
            step = _TILE // x.element_size()
            tiles = zip(out.split(step), *(p.split(step) for p in peers), strict=True)
            self._spare.each(lambda target, *values: combine(values, op, target), tiles)
            self._page.meet(what="reduce_scatter")
            return last
        self._pass_pieces(parts, [out] * self.size, x.dtype, lambda tiles, target: combine(tiles, op, target))
        return last

    def reduce_scatter_parts(self, parts: Sequence[Tensor], counts: Sequence[int], op: Op, out: Tensor) -> float:
        total = sum(counts)
        if not self.reads_peers:
            return super().reduce_scatter_parts(parts, counts, op, out)
        table = list_pieces(parts)
        what = f"reduce_scatter of parts {list(counts)}"
        heads, last = self._begin(what, op, out.dtype, total, (-1 - len(parts), table.data_ptr()))
        self._peers.reduce_part(parts, self._peers.find_all(heads), sum(counts[: self.rank]), op, out)
        return last

    def all_to_all(self, parts: Sequence[Tensor], outs: Sequence[Tensor]) -> float:
        longest = max(p.numel() for p in parts)
        sizes = [part.numel() for part in parts], [out.numel() for out in outs]
        place = (-1, weigh_sizes(self.rank, *sizes))
        heads, last = self._begin("all_to_all", "sum", parts[0].dtype, longest, place, same=False)
        if sum(head[5] for head in heads) % WEIGHTS:
            every = [json.loads(one) for one in self.exchange(json.dumps(sizes).encode())]
            raise Mismatch(describe_uneven(every), calls=self._page.exchange_descriptions(self.signature))
        self._pass_pieces(parts, outs, parts[0].dtype, None, longest=max(head[3] for head in heads))
        return last

    def all_gather(self, x: Tensor, outs: Sequence[Tensor]) -> float:
        place, table = self._locate(x), list_pieces([x])  # others read it, as long as this runs
        if place == _PRIVATE and self.reads_peers:
            place = (-2, table.data_ptr())
        heads, last = self._begin("all_gather", "sum", x.dtype, x.numel(), place, same=False)
        if any(out.numel() != head[3] for out, head in zip(outs, heads, strict=True)):
            each = ", ".join(f"rank {r} has {head[3]}" for r, head in enumerate(heads))
            raise Mismatch(f"all_gather: the ranks have sizes that were not expected ({each}): are they even?")
        if all(head[4] != -1 for head in heads):
            for out, head, r in zip(outs, heads, range(self.size), strict=True):
                if head[4] >= 0:
                    out.copy_(_view_as(self._find_mapped(head[4]).ranks[r], head[5], out.numel(), x.dtype))
                else:
                    self._peers.copy_all(r, head, out)
            self._page.meet(what="all_gather")
            return last
        stage = Stage(self._stage.ranks, self.rank, x.dtype)
        longest = max(head[3] for head in heads)
        for start in range(0, longest, stage.elements):
            stage.put([x[start : start + stage.elements]], self._turn)
            self._page.meet(what="all_gather")
            for r, out in enumerate(outs):
                target = out[start : start + stage.elements]
                target.copy_(stage.block_of(r, self._turn)[: target.numel()])
            self._turn += 1
        return last

    def broadcast(self, parts: Sequence[Tensor], src: int) -> float:
        total = sum(p.numel() for p in parts)
        _, last = self._begin(f"broadcast from {src}", "sum", parts[0].dtype, total, (-1, src))
        stage = Stage(self._stage.ranks, self.rank, parts[0].dtype)
        for block in cut_blocks(parts, stage.elements):
            if self.rank == src:
                stage.put(block, self._turn)
            self._page.meet(what="broadcast")
            if self.rank != src:
                source, at = stage.block_of(src, self._turn), 0
                for part in block:
                    part.copy_(source[at : at + part.numel()])
                    at += part.numel()
            self._turn += 1
        return last

    def send(self, x: Tensor, dst: int) -> None:
        self._direct.send(x, dst)

    def recv(self, x: Tensor, src: int) -> None:
        self._direct.recv(x, src)

    def send_labelled(self, x: Tensor, dst: int, label: int) -> None:
        self._direct.send(x, dst, label)

    def recv_labelled(self, src: int, find: Callable[[int, int, torch.dtype], Tensor]) -> None:
        self._direct.recv_labelled(src, find)

    def has_room(self, dst: int, nbytes: int) -> bool:
        return self._direct.has_room(dst, nbytes)

    def exchange(self, data: bytes) -> list[bytes]:
        found = self._page.meet(_MARK + struct.pack("q", len(data)) + data[:_INLINE], "an exchange of objects")
        if strays := [r for r, item in enumerate(found) if not item.startswith(_MARK)]:
            calls = self._page.exchange_descriptions(self.signature)
            raise Mismatch(f"an exchange of objects or shapes: rank {strays[0]} is in another collective", calls=calls)
        check_signatures(self._page, "an exchange of objects or shapes")
        sizes = [struct.unpack_from("q", item, len(_MARK))[0] for item in found]
        if max(sizes) <= _INLINE:
            return [item[len(_MARK) + 8 :] for item in found]
        return gather_bytes(data, sizes, self.all_gather)

    # Groups and memory -----------------------------------------------------------------------------------

    def split(self, groups: Sequence[Sequence[int]]) -> Transport:
        mine = find_group(groups, self.rank, self.size)
        fd = os.memfd_create(PAGE_NAME, os.MFD_CLOEXEC) if mine[0] == self.rank else -1
        addresses = self.exchange(publish(fd).encode() if fd >= 0 else b"")
        if fd < 0:
            fd = open_published(addresses[mine[0]].decode())
        try:
            self._page.meet()  # all have opened before the maker may close
            return SharedTransport(
                fd,
                mine.index(self.rank),
                len(mine),
                timeout_s=self.timeout_s,
                pids=[self._page.pids[r] for r in mine],  # one may die before it comes to the new page
                check=self._check,
                reads_peers=self.reads_peers,
            )
        finally:
            os.close(fd)

    def empty(self, n: int, dtype: torch.dtype) -> Tensor:
        memory = self._map(n * dtype.itemsize, huge=True)
        memory.prepare(self.rank)
        self._mapped[memory.address] = (self._made, memory)
        return memory.mine.view(dtype)

    def shared(self, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        memory = self._map(n * dtype.itemsize, huge=True, viewed=True)
        if self.rank == 0:
            memory.prepare(0)
        return memory.ranks[0].view(dtype), memory.view.view(dtype)

    def release(self, x: Tensor) -> None:
        self._mapped.pop(x.untyped_storage().data_ptr(), None)

    def call_others(self, noun: str) -> None:
        """What to call the others in errors: their numbers here may not be those of the world."""
        self._page.noun = noun

    def abandon(self, why: Exception) -> None:
        self._page.give_up(why)

    def close(self) -> None:
        self._mapped.clear()
        self._spare.close()
        self._page.on_missing = None
        self._page.close()

    def has_message(self, src: int) -> bool:
        return self._direct.has_message(src)

    def set_timeout(self, seconds: float) -> None:
        self.timeout_s = seconds
        self._page.timeout_s = seconds

    # Inside ----------------------------------------------------------------------------------------------

    def _map(self, nbytes: int, **how: bool) -> MappedMemory:
        self._made += 1
        return MappedMemory(nbytes, self.rank, lambda mine: self._page.meet(mine, "sharing memory"), **how)

    def _locate(self, x: Tensor) -> tuple[int, int]:
        """The number of the mapped memory that `x` lies in, and where in it."""
        found = self._mapped.get(x.untyped_storage().data_ptr())
        if found is None or not x.numel():
            return _PRIVATE
        return found[0], x.data_ptr() - found[1].address

    def _find_mapped(self, number: int) -> MappedMemory:
        return next(memory for n, memory in self._mapped.values() if n == number)

    def _begin(
        self, what: str, op: Op, dtype: torch.dtype, count: int, place: tuple[int, int], *, same: bool = True
    ) -> tuple[list[tuple[int, ...]], float]:
        """Meet, and compare what each rank is about to do."""
        heads, _, last = meet_with_plan(self._page, what, op, dtype, count, place, same=same)
        return heads, last

    def _check_small(self, rank: int) -> None:
        """Called for a rank that does not come: Mismatch if it has posted this collective as a small one."""
        if self.sequence and self._small.holds(rank, self.sequence):
            raise Mismatch(
                f"collective {self.sequence}: the ranks disagree; rank {rank} has a small all_reduce, "
                f"rank {self.rank} a large one or another collective",
                calls=self._page.exchange_descriptions(self.signature),
            )

    def _reduce_in_place(self, x: Tensor, op: Op) -> None:
        number, offset = self._locate(x)
        lines = [_view_as(r, offset, x.numel(), x.dtype) for r in self._find_mapped(number).ranks]
        start, stop = cut_share(x.numel(), self.rank, self.size)
        step = _TILE // x.element_size()

        def reduce(*tiles: Tensor) -> None:
            combine(tiles, op, tiles[0])
            for other in tiles[1:]:
                other.copy_(tiles[0])

        self._spare.each(reduce, zip(*(line[start:stop].split(step) for line in lines), strict=True))

    def _pass_pieces(
        self,
        parts: Sequence[Tensor],
        outs: Sequence[Tensor],
        dtype: torch.dtype,
        merge: Callable[[list[Tensor], Tensor], None] | None,
        longest: int | None = None,
    ) -> None:
        """parts[r] of every rank goes over the stage to rank r: merged into one, or kept apart."""
        stage = Stage(self._stage.ranks, self.rank, dtype)
        room = stage.elements // self.size
        for start in range(0, max(p.numel() for p in parts) if longest is None else longest, room):
            for r, part in enumerate(parts):
                piece = part[start : start + room]
                stage.block_of(self.rank, self._turn)[r * room : r * room + piece.numel()].copy_(piece)
            self._page.meet()
            sources = [
                stage.block_of(r, self._turn)[self.rank * room : (self.rank + 1) * room] for r in range(self.size)
            ]
            if merge is not None:
                target = outs[0][start : start + room]
                merge([s[: target.numel()] for s in sources], target)
            else:
                for source, out in zip(sources, outs, strict=True):
                    target = out[start : start + room]
                    target.copy_(source[: target.numel()])
            self._turn += 1


def _view_as(line: Tensor, offset: int, count: int, dtype: torch.dtype) -> Tensor:
    return line[offset : offset + count * dtype.itemsize].view(dtype)


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
        self._room = min(_READ, _READ_BY_ALL // page.size // 16 * 16)  # bytes of a tile of one rank
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
        total = sum(p.numel() for p in parts) * itemsize
        for start in range(0, total, _BLOCK):
            length = min(_BLOCK, total - start)
            shares = [cut_share(length, r, size) for r in range(size)]
            low, high = shares[page.rank]
            tiles = cut_tiles(parts, (start + low) // itemsize, (start + high) // itemsize, self._room // itemsize)
            self._spare.each(lambda tile, at: self._reduce(tile, at * itemsize, peers, op), tiles)
            page.meet(what="all_reduce")
            for rank in page.peers:
                low, high = (start + at for at in shares[rank])
                pieces = ((rank, at, min(at + _READ, high)) for at in range(low, high, _READ))
                self._spare.each(lambda r, a, b: self.read(r, mine.cut(a, b), peers[r].cut(a, b)), pieces)
        page.meet(what="all_reduce")

    def reduce_part(self, parts: Sequence[Tensor], peers: Sequence[Pieces], start: int, op: Op, out: Tensor) -> None:
        """Reduce those elements of the concatenation of `parts` into `out` that begin at `start`; all have met."""
        itemsize = out.element_size()
        room = self._room // itemsize
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

    @contextmanager
    def _gather(
        self, mine: Tensor | None, n: int, at: int, peers: Sequence[Pieces], dtype: torch.dtype
    ) -> Iterator[list[Tensor]]:
        """`n` elements of every rank, `at` bytes from the beginning, in memory of this process as long as the block
        lasts: `mine`, if that is given, and copies of the others'."""
        try:
            scratch = self._scratch.pop()
        except IndexError:
            scratch = torch.empty(len(peers), self._room, dtype=torch.uint8)
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
