"""Shared memory between the workers of one host: each reduces its part where all can see it, no message is sent.

Two ways, the same on every rank. Tensors from `World.empty` lie in memory that all ranks map: rank r reduces
the r-th part in place for everyone. Any other tensor passes block by block through a stage small enough to
stay in the processor's cache: while block i is copied out, block i + 1 is reduced and i + 2 copied in, with
one meeting a block. Only what other ranks need goes there: each reduces its part of a block where it lies, with what
the others have put of theirs. Both ways read and write each byte of memory once.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Sequence
from zlib import crc32

import torch
from torch import Tensor

from unisono.world.transports import SMALL_BYTES, Mismatch, Op, Transport, find_group
from unisono.world.transports.adopted import AdoptedMemory, Offers
from unisono.world.transports.arithmetic import combine
from unisono.world.transports.mapped import MappedMemory, open_published, publish
from unisono.world.transports.meeting_page import (
    DTYPE_CODES,
    DTYPES,
    ITEM_LIMIT,
    OP_CODES,
    PAGE_NAME,
    DirectMessages,
    MeetingPage,
    SmallAllReduce,
    count_outbox_bytes,
)

BLOCK = 4 << 20  # bytes a rank puts on the stage at a time
_TILE = 1 << 20  # bytes reduced at a time in place: large enough for Python, small enough for the cache
_SLACK = 512  # shares end on borders of cache lines
_HEAD = struct.Struct("BBHqiq")
_MOVES = (-2, 0)  # instead of a place: the memory may be moved to where all see it
_PLAN, _MARK = b"plan", b"exchange"  # how an item begins: what its rank came to do
_INLINE = ITEM_LIMIT - len(_MARK) - 8  # bytes of an object that fit on the page itself


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
    ) -> None:
        """`fd`: a memfd that every rank of the group has open, empty when the first comes; `pids`: every rank's
        process, where that is known before; `check`: raises PeerLost where waiting is to end."""
        self.rank, self.size, self._timeout_s, self._check = rank, size, timeout_s, check
        spin = size <= len(os.sched_getaffinity(0))
        self._page = MeetingPage(fd, rank, size, timeout_s=timeout_s, spin=spin, pids=pids, check=check)
        self._small = SmallAllReduce(self._page)
        self._page.on_missing = self._check_small
        self._mapped: dict[int, tuple[int, MappedMemory | AdoptedMemory]] = {}
        self._offers = Offers()
        self._stages: dict[torch.dtype, _Stage] = {}
        self._made = 0
        self._turn = 0
        stage = -(-(2 * BLOCK + 2 * (BLOCK // size + _SLACK)) // 64) * 64
        self._stage = self._map(stage + count_outbox_bytes(size))
        self._direct = DirectMessages(self._page, [r[stage:] for r in self._stage.ranks])

    @classmethod
    def from_inherited(
        cls, fd: int, rank: int, size: int, *, timeout_s: float, pids: Sequence[int] = ()
    ) -> SharedTransport:
        """From a descriptor that the launcher left open, or sent."""
        try:
            return cls(fd, rank, size, timeout_s=timeout_s, pids=pids)
        finally:
            os.close(fd)

    @property
    def sequence(self) -> int:
        """The number of the collective now running: the page shows it to the others."""
        return self._page.sequence

    @sequence.setter
    def sequence(self, value: int) -> None:
        self._page.sequence = value

    # Collectives -----------------------------------------------------------------------------------------

    def post(self, x: Tensor, op: Op, sequence: int) -> tuple[Callable[[], float], Callable[[], bool]] | None:
        return self._small.post(x, op, sequence) if x.numel() * x.element_size() <= SMALL_BYTES else None

    def all_reduce(self, parts: Sequence[Tensor], op: Op) -> float:
        total = sum(p.numel() for p in parts)
        place = self._locate(parts[0]) if len(parts) == 1 else (-1, 0)
        if place == (-1, 0) and len(parts) == 1 and self._offers.is_due(parts[0]):
            place = _MOVES
        dtype = parts[0].dtype
        stage = self._stage_of(dtype)
        early = op == "mean" and dtype in (torch.float32, torch.float64)
        scale = 1.0 / self.size if early else None
        blocks = list(_cut_blocks(parts, stage.elements))
        if place[0] < 0 and blocks:
            stage.put(blocks[0], self._turn, scale)
        heads, last = self._begin("all_reduce", op, dtype, total, place)
        if place == _MOVES and all(head[4:] == _MOVES for head in heads):
            heads = self._adopt(parts[0], heads)
            place = heads[0][4], heads[0][5]
        if all(head[4:] == heads[0][4:] for head in heads) and place[0] >= 0:
            self._reduce_in_place(parts[0], op)
            self._page.meet(what="all_reduce")
            return last
        if place[0] >= 0 and blocks:  # mine is in place but a peer's is not: all go over the stage
            stage.put(blocks[0], self._turn, scale)
        if any(head[4] >= 0 for head in heads):
            self._page.meet(what="all_reduce")
        for i, block in enumerate(blocks):
            length = sum(p.numel() for p in block)
            stage.reduce(block, length, self._turn, "sum" if early else op, scale)
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
            for tiles in zip(out.split(step), *(p.split(step) for p in peers), strict=True):
                combine(tiles[1:], op, tiles[0])
            self._page.meet(what="reduce_scatter")
            return last
        self._pass_pieces(parts, [out] * self.size, x.dtype, op)
        return last

    def all_to_all(self, parts: Sequence[Tensor], outs: Sequence[Tensor]) -> float:
        longest = max(p.numel() for p in parts)
        heads, last = self._begin("all_to_all", "sum", parts[0].dtype, longest, (-1, 0), same=False)
        self._pass_pieces(parts, outs, parts[0].dtype, None, max(head[3] for head in heads))
        return last

    def all_gather(self, x: Tensor, outs: Sequence[Tensor]) -> float:
        heads, last = self._begin("all_gather", "sum", x.dtype, x.numel(), self._locate(x), same=False)
        if any(out.numel() != head[3] for out, head in zip(outs, heads, strict=True)):
            each = ", ".join(f"rank {r} has {head[3]}" for r, head in enumerate(heads))
            raise Mismatch(f"all_gather: the ranks have sizes that were not expected ({each}): are they even?")
        if all(head[4] >= 0 for head in heads):
            for out, head, r in zip(outs, heads, range(self.size), strict=True):
                out.copy_(_view_as(self._find_mapped(head[4]).ranks[r], head[5], out.numel(), x.dtype))
            self._page.meet(what="all_gather")
            return last
        stage = self._stage_of(x.dtype)
        longest = max(head[3] for head in heads)
        for start in range(0, longest, stage.elements):
            stage.put_whole(x[start : start + stage.elements], self._turn)
            self._page.meet(what="all_gather")
            for r, out in enumerate(outs):
                target = out[start : start + stage.elements]
                if r != self.rank:
                    target.copy_(stage.block_of(r, self._turn)[: target.numel()])
            self._turn += 1
        if outs[self.rank].data_ptr() != x.data_ptr():
            outs[self.rank].copy_(x)
        return last

    def broadcast(self, parts: Sequence[Tensor], src: int) -> float:
        total = sum(p.numel() for p in parts)
        _, last = self._begin(f"broadcast from {src}", "sum", parts[0].dtype, total, (-1, src))
        stage = self._stage_of(parts[0].dtype)
        for block in _cut_blocks(parts, stage.elements):
            if self.rank == src:
                at = 0
                for part in block:
                    stage.block_of(src, self._turn)[at : at + part.numel()].copy_(part)
                    at += part.numel()
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

    def has_message(self, src: int) -> bool:
        return self._direct.has_message(src)

    def set_timeout(self, seconds: float) -> None:
        self._timeout_s = seconds
        self._page.set_timeout(seconds)

    def exchange(self, data: bytes) -> list[bytes]:
        found = self._page.meet(_MARK + struct.pack("q", len(data)) + data[:_INLINE], "an exchange of objects")
        if strays := [r for r, item in enumerate(found) if not item.startswith(_MARK)]:
            raise Mismatch(f"an exchange of objects or shapes: rank {strays[0]} is in another collective")
        sizes = [struct.unpack_from("q", item, len(_MARK))[0] for item in found]
        if max(sizes) <= _INLINE:
            return [item[len(_MARK) + 8 :] for item in found]
        x = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        outs = [torch.empty(n, dtype=torch.uint8) for n in sizes]
        self.all_gather(x, outs)
        return [out.numpy().tobytes() for out in outs]

    # Groups and memory -----------------------------------------------------------------------------------

    def split(self, groups: Sequence[Sequence[int]]) -> Transport:
        mine = find_group(groups, self.rank, self.size)
        fd = os.memfd_create(PAGE_NAME, os.MFD_CLOEXEC) if mine[0] == self.rank else -1
        addresses = self.exchange(publish(fd).encode() if fd >= 0 else b"")
        if fd < 0:
            fd = open_published(addresses[mine[0]].decode())
        try:
            self._page.meet()  # all have opened before the maker may close
            return SharedTransport(fd, mine.index(self.rank), len(mine), timeout_s=self._timeout_s, check=self._check)
        finally:
            os.close(fd)

    def empty(self, n: int, dtype: torch.dtype) -> Tensor:
        memory = self._map(n * dtype.itemsize)
        self._mapped[memory.address] = (self._made, memory)
        return memory.mine.view(dtype)

    def shared(self, n: int, dtype: torch.dtype) -> Tensor:
        return self._map(n * dtype.itemsize).ranks[0].view(dtype)

    def release(self, x: Tensor) -> None:
        self._mapped.pop(x.untyped_storage().data_ptr(), None)

    def offer(self, x: Tensor) -> None:
        self._offers.add(x)
        gone = [a for a, (_, memory) in self._mapped.items() if isinstance(memory, AdoptedMemory) and memory.is_gone()]
        for address in gone:
            del self._mapped[address]

    def call_others(self, noun: str) -> None:
        """What to call the others in errors: their numbers here may not be those of the world."""
        self._page.noun = noun

    def abandon(self, why: Exception) -> None:
        self._page.give_up(why)

    def close(self) -> None:
        self._mapped.clear()
        self._page.on_missing = None
        self._page.close()

    # Inside ----------------------------------------------------------------------------------------------

    def _map(self, nbytes: int) -> MappedMemory:
        self._made += 1
        return MappedMemory(nbytes, self.rank, lambda mine: self._page.meet(mine, "sharing memory"))

    def _locate(self, x: Tensor) -> tuple[int, int]:
        """The number of the mapped memory that `x` lies in, and where in it; (-1, 0) for private memory."""
        found = self._mapped.get(x.untyped_storage().data_ptr())
        if found is None or not x.numel():
            return -1, 0
        if isinstance(found[1], AdoptedMemory) and not found[1].holds(x):
            del self._mapped[found[1].address]
            return -1, 0
        return found[0], x.data_ptr() - found[1].address

    def _adopt(self, x: Tensor, heads: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Move `x`'s memory to where all ranks see it; where it lies now, for every rank alike."""
        self._made += 1
        memory = self._offers.move(x, self.rank, lambda mine: self._page.meet(mine, "sharing memory"))
        if memory is None:
            return [(*head[:4], -1, 0) for head in heads]
        self._mapped[memory.address] = (self._made, memory)
        return [(*head[:4], self._made, 0) for head in heads]

    def _find_mapped(self, number: int) -> MappedMemory | AdoptedMemory:
        return next(memory for n, memory in self._mapped.values() if n == number)

    def _begin(
        self, what: str, op: Op, dtype: torch.dtype, count: int, place: tuple[int, int], *, same: bool = True
    ) -> tuple[list[tuple[int, ...]], float]:
        """Meet, and compare what each rank is about to do."""
        kind = crc32(what.encode()) & 0xFFFF
        mine = (OP_CODES[op], DTYPE_CODES[dtype], kind, count, *place)
        self._page.arrive(_PLAN + _HEAD.pack(*mine))
        last = self._page.await_all(what)
        if self._page.all_agree():
            return [mine] * self.size, last
        items = self._page.read_items()
        heads = [_HEAD.unpack(i[4:]) if i.startswith(_PLAN) else (255, 0, 0, 0, -1, 0) for i in items]
        keep = 4 if same else 3
        numbers = self._page.read_sequences()
        if any(head[:keep] != heads[0][:keep] for head in heads) or len(set(numbers)) > 1:
            ops = list(OP_CODES)
            each = [
                f"rank {r} has {ops[h[0]] if h[0] < len(ops) else 'another operation'} of {h[3]} x {DTYPES[h[1]]}"
                + ("" if h[2] == kind else " in another collective")
                + ("" if len(set(numbers)) == 1 else f" as collective {numbers[r]}")
                for r, h in enumerate(heads)
            ]
            raise Mismatch(f"{what}: the ranks disagree; " + "; ".join(each))
        return heads, last

    def _check_small(self, rank: int) -> None:
        """A rank that does not come may have posted this very collective as a small one."""
        if self.sequence and self._small.holds(rank, self.sequence):
            raise Mismatch(
                f"collective {self.sequence}: the ranks disagree; rank {rank} has a small all_reduce, "
                f"rank {self.rank} a large one or another collective"
            )

    def _reduce_in_place(self, x: Tensor, op: Op) -> None:
        number, offset = self._locate(x)
        lines = [_view_as(r, offset, x.numel(), x.dtype) for r in self._find_mapped(number).ranks]
        start, stop = _cut_share(x.numel(), self.rank, self.size)
        step = _TILE // x.element_size()
        for tiles in zip(*(line[start:stop].split(step) for line in lines), strict=True):
            combine(tiles, op, tiles[0])
            for other in tiles[1:]:
                other.copy_(tiles[0])

    def _stage_of(self, dtype: torch.dtype) -> _Stage:
        found = self._stages.get(dtype)
        if found is None:
            found = self._stages[dtype] = _Stage(self, dtype)
        return found

    def _pass_pieces(
        self,
        parts: Sequence[Tensor],
        outs: Sequence[Tensor],
        dtype: torch.dtype,
        op: Op | None,
        longest: int | None = None,
    ) -> None:
        """parts[r] of every rank goes over the stage to rank r: reduced by `op`, or kept apart."""
        stage, mine = self._stage_of(dtype), self.rank
        room = stage.elements // self.size
        for start in range(0, max(p.numel() for p in parts) if longest is None else longest, room):
            for r, part in enumerate(parts):
                piece = part[start : start + room]
                if r != mine and piece.numel():
                    stage.block_of(mine, self._turn)[r * room : r * room + piece.numel()].copy_(piece)
            self._page.meet()
            sources = [stage.block_of(r, self._turn)[mine * room : (mine + 1) * room] for r in range(self.size)]
            if op is not None:
                target = outs[0][start : start + room]
                sources[mine] = parts[mine][start : start + room]
                combine([s[: target.numel()] for s in sources], op, target)
            else:
                for r, (source, out) in enumerate(zip(sources, outs, strict=True)):
                    target = out[start : start + room]
                    if r != mine and target.numel():
                        target.copy_(source[: target.numel()])
            self._turn += 1
        if op is None and outs[mine].data_ptr() != parts[mine].data_ptr():
            outs[mine].copy_(parts[mine])


class _Stage:
    """Typed views of the stage: for each rank two blocks to put, two parts of results to take."""

    def __init__(self, transport: SharedTransport, dtype: torch.dtype) -> None:
        self.rank, self.size = transport.rank, transport.size
        self.elements = BLOCK // dtype.itemsize
        self._results = (BLOCK // self.size + _SLACK) // dtype.itemsize
        lines = [r[: r.numel() // 16 * 16].view(dtype) for r in transport._stage.ranks]
        self._puts = [[line[t * self.elements : (t + 1) * self.elements] for t in (0, 1)] for line in lines]
        at = 2 * self.elements
        n = self._results
        self._takes = [[line[at + t * n : at + (t + 1) * n] for t in (0, 1)] for line in lines]

    def block_of(self, rank: int, turn: int) -> Tensor:
        return self._puts[rank][turn & 1]

    def put_whole(self, x: Tensor, turn: int) -> None:
        """All of it: others read it as it is."""
        self._puts[self.rank][turn & 1][: x.numel()].copy_(x)

    def put(self, block: Sequence[Tensor], turn: int, scale: float | None = None) -> None:
        """What other ranks reduce, times `scale`."""
        length = sum(p.numel() for p in block)
        start, stop = _cut_share(length, self.rank, self.size)
        mine = self._puts[self.rank][turn & 1]
        for low, high, piece in (*_cut_range(block, 0, start), *_cut_range(block, stop, length)):
            if scale is None:
                mine[low:high].copy_(piece)
            else:
                torch.mul(piece, scale, out=mine[low:high])

    def reduce(self, block: Sequence[Tensor], length: int, turn: int, op: Op, scale: float | None) -> None:
        """My share: from my own memory and what the others have put, into it and to where they take it."""
        start, stop = _cut_share(length, self.rank, self.size)
        result = self._takes[self.rank][turn & 1]
        for low, high, piece in _cut_range(block, start, stop):
            target = result[low - start : high - start]
            parts = [p[turn & 1][low:high] for p in self._puts]
            parts[self.rank] = piece
            if scale is not None:  # the others' are scaled already
                parts[self.rank] = torch.mul(piece, scale, out=self._puts[self.rank][turn & 1][low:high])
            combine(parts, op, target)
            piece.copy_(target)

    def take(self, block: Sequence[Tensor], length: int, turn: int) -> None:
        """What the others have reduced."""
        for r in range(self.size):
            start, stop = _cut_share(length, r, self.size)
            if r != self.rank:
                for low, high, piece in _cut_range(block, start, stop):
                    piece.copy_(self._takes[r][turn & 1][low - start : high - start])


def _cut_range(block: Sequence[Tensor], start: int, stop: int) -> Iterator[tuple[int, int, Tensor]]:
    """The parts of `block`'s concatenation from `start` to `stop`: from where to where, and the memory there."""
    at = 0
    for part in block:
        low, high = max(start, at), min(stop, at + part.numel())
        if low < high:
            yield low, high, part[low - at : high - at]
        at += part.numel()


def _cut_share(length: int, rank: int, size: int) -> tuple[int, int]:
    """The part of `length` elements that `rank` reduces, on borders of cache lines."""
    each = -(-length // size)
    each = -(-each // 16) * 16
    return min(rank * each, length), min((rank + 1) * each, length)


def _view_as(line: Tensor, offset: int, count: int, dtype: torch.dtype) -> Tensor:
    return line[offset : offset + count * dtype.itemsize].view(dtype)


def _cut_blocks(parts: Sequence[Tensor], room: int) -> Iterator[list[Tensor]]:
    """The concatenation of `parts` cut into blocks of `room` elements, as lists of views."""
    block: list[Tensor] = []
    left = room
    for part in parts:
        at = 0
        while at < part.numel():
            piece = part[at : at + left]
            block.append(piece)
            at += piece.numel()
            left -= piece.numel()
            if not left:
                yield block
                block, left = [], room
    if block:
        yield block
