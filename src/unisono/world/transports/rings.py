"""Which bytes go to whom, in rings, chains and from each rank to each: operations as flows (flows.py)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from unisono.world.transports import Op
from unisono.world.transports.arithmetic import STEPS, count_bytes, cut_tiles
from unisono.world.transports.flows import Copy, Flow, Piece, as_bytes
from unisono.world.transports.socket_links import Links

__all__ = ["IN_RINGS", "PIECE", "Rings", "cut_evenly"]

PIECE = 512 << 10  # bytes of a chain that are passed on at a time: the last rank waits for the first piece
# Of a ring: each piece costs some 50 us of Python, in which no other lane of this process can run.
_LEAST_PIECE, _MOST_PIECE = 512 << 10, 2 << 20
_PIECES = 2  # of a chunk: one is sent while the next one comes
_WHOLE = 64  # bytes: elements of every dtype, and a cache line
_LANE_BYTES = 2 << 20  # that each connection of an operation moves at least, to each rank
_MORE = 2  # pieces of a reduce-scatter that may be under way, besides one chunk's
IN_RINGS = {  # dtypes that are added at each hop; others are added by one rank, and rounded once
    torch.float32,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
}


class Rings:
    """The flows of one rank. An operation is spread over lanes, each with a range of its elements for itself."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self.rank, self.size = links.rank, links.size

    def all_reduce(self, parts: Sequence[Tensor], op: Op) -> list[Flow]:
        """A ring around which sums grow, in place, and then pass around once more.

        The sums that a rank has sent are written over only by what follows from them: so the next rank has them by
        then, and needs them no more if its connection breaks.
        """
        total = sum(p.numel() for p in parts)
        return [
            self._reduce_range(parts, start, stop, lane, op)
            for lane, (start, stop) in enumerate(cut_evenly(total, self._count_lanes(count_bytes(parts))))
        ]

    def _reduce_range(self, parts: Sequence[Tensor], start: int, stop: int, lane: int, op: Op) -> Flow:
        edges = [(start + a, start + b) for a, b in cut_evenly(stop - start, self.size)]
        room = _size_piece((edges[0][1] - edges[0][0]) * parts[0].element_size()) // parts[0].element_size()
        scratch = torch.empty(room, dtype=parts[0].dtype)

        def tiles(chunk: int) -> Iterator[Tensor]:
            return (tile for tile, _ in cut_tiles(parts, *edges[chunk % self.size], scratch.numel()))

        def pieces() -> Iterator[Piece]:
            for step in range(1, self.size):  # sums grow
                for tile in tiles(self.rank - 1 - step):
                    came = scratch[: tile.numel()]
                    yield Piece(as_bytes(came), partial(self._add, came, tile, op, tile), as_bytes(tile))
            for step in range(self.size - 1):  # and pass around; the last chunk is kept
                for view in map(as_bytes, tiles(self.rank - 1 - step)):
                    yield Piece(view, None, view if step < self.size - 2 else None)

        first = (self._divide(tile, op) for tile in tiles(self.rank - 1))
        return self._flow(lane, first, pieces())

    def reduce_scatter(self, chunks: Sequence[Tensor], op: Op, out: Tensor) -> list[Flow]:
        """A ring: what arrives has come through all ranks before me; I add mine, in memory apart, and pass it on."""
        lanes = self._count_lanes(count_bytes(chunks))
        return [self._scatter_lane(chunks, lane, lanes, op, out) for lane in range(lanes)]

    def _scatter_lane(self, chunks: Sequence[Tensor], lane: int, lanes: int, op: Op, out: Tensor) -> Flow:
        lines = [_take_part(chunk, lane, lanes) for chunk in chunks]
        target = _take_part(out, lane, lanes)
        longest = max(line.numel() for line in lines)
        room = _size_piece(longest * out.element_size()) // out.element_size()
        # A rank sends a chunk of its own first, while another one's comes: with no room for that, all would wait in a
        # circle.
        count = -(-longest // room) + _MORE
        spare = list(torch.empty(count if self.size > 2 else 0, room, dtype=out.dtype))
        last = torch.empty(room, dtype=out.dtype)

        def first() -> Iterator[memoryview]:
            for tile in _cut_tiles(lines[(self.rank - 1) % self.size], room):
                yield as_bytes(tile if op != "mean" else tile * (1.0 / self.size))

        def pieces() -> Iterator[Piece]:
            number = 0
            for step in range(1, self.size):
                chunk = (self.rank - 1 - step) % self.size
                if chunk == self.rank:
                    for tile, end in zip(_cut_tiles(lines[chunk], room), _cut_tiles(target, room), strict=True):
                        came = last[: tile.numel()]
                        yield Piece(as_bytes(came), partial(self._add, came, tile, op, end))
                    return
                for tile in _cut_tiles(lines[chunk], room):
                    came = spare[number % len(spare)][: tile.numel()]
                    number += 1
                    yield Piece(view := as_bytes(came), partial(self._add, came, tile, op, came), view, reused=True)

        return self._flow(lane, first(), pieces(), spare=len(spare))

    def all_gather(self, x: Tensor, outs: Sequence[Tensor]) -> list[Flow]:
        """A ring: each rank passes on what it receives, piece by piece."""
        outs[self.rank].copy_(x)
        lanes = self._count_lanes(count_bytes(outs))
        return [self._gather_lane(outs, lane, lanes) for lane in range(lanes)]

    def _gather_lane(self, outs: Sequence[Tensor], lane: int, lanes: int) -> Flow:
        lines = [_take_part(out, lane, lanes) for out in outs]
        pieces = (
            Piece(view, None, view if step < self.size - 1 else None)
            for step in range(1, self.size)
            for view in _cut_views(lines[(self.rank - step) % self.size])
        )
        return self._flow(lane, _cut_views(lines[self.rank]), pieces)

    def broadcast(self, parts: Sequence[Tensor], place: int) -> list[Flow]:
        """A chain: each rank passes on what it receives, as it comes. `place`: mine in it, 0 is the source."""
        lines, nbytes, flows = [part.view(torch.uint8) for part in parts], count_bytes(parts), []
        passes_on = place < self.size - 1
        for lane, (start, stop) in enumerate(cut_evenly(nbytes, self._count_lanes(nbytes))):
            tiles = [as_bytes(tile) for tile, _ in cut_tiles(lines, start, stop, nbytes if place else PIECE)]
            pieces = [Piece(tile, None, tile if passes_on else None, passed=PIECE) for tile in tiles] if place else []
            flows.append(self._flow(lane, [] if place else tiles, pieces, sends=passes_on, receives=place > 0))
        return flows

    def swap(self, parts: Sequence[Tensor], outs: Sequence[Tensor], *, least: int = 0) -> list[Flow | Copy]:
        """From each rank to each: `parts[r]` to rank r, what it sends to `outs[r]`. Up to `least` bytes do not go."""
        flows: list[Flow | Copy] = []
        for distance in range(
            1, self.size
        ):  # in the same order on every rank, so that none waits for another in a circle
            to, source = (self.rank + distance) % self.size, (self.rank - distance) % self.size
            given, came = self._cut_lanes(parts[to], least), self._cut_lanes(outs[source], least)
            for lane in range(max(len(given), len(came))):
                out = self._links.open_out(to, f"swap{lane}") if lane < len(given) else None
                taken = self._links.open_in(source, f"swap{lane}") if lane < len(came) else None
                first = _cut_views(given[lane]) if out is not None else iter(())
                pieces = map(Piece, _cut_views(came[lane])) if taken is not None else iter(())
                flows.append(Flow(out, taken, first, pieces))
        mine, kept = parts[self.rank], outs[self.rank]
        copies = self._count_lanes(count_bytes([mine]) * self.size) if mine.numel() else 0
        return flows + [Copy(_take_part(mine, i, copies), _take_part(kept, i, copies)) for i in range(copies)]

    def _cut_lanes(self, x: Tensor, least: int) -> list[Tensor]:
        """A message to one rank of several in parts, one for each connection; both ends cut it alike."""
        nbytes = count_bytes([x])
        lanes = max(1, min(self._links.lanes // max(1, self.size - 1), nbytes // _LANE_BYTES))
        return [x[start:stop] for start, stop in cut_evenly(x.numel(), lanes)] if nbytes > least else []

    def _count_lanes(self, nbytes: int) -> int:
        """Over how many connections an operation of so many bytes goes; the same on every rank."""
        return max(1, min(self._links.lanes, nbytes // (self.size * _LANE_BYTES)))

    def _flow(
        self,
        lane: int,
        first: Iterable[memoryview],
        pieces: Iterable[Piece],
        *,
        sends: bool = True,
        receives: bool = True,
        spare: int = 0,
    ) -> Flow:
        """A flow to the next rank and from the previous one."""
        out = self._links.open_out((self.rank + 1) % self.size, f"ring{lane}") if sends else None
        source = self._links.open_in((self.rank - 1) % self.size, f"ring{lane}") if receives else None
        return Flow(out, source, first, pieces, spare=spare)

    def _divide(self, tile: Tensor, op: Op) -> memoryview:
        """A mean is divided first, so that nothing overflows."""
        return as_bytes(tile.mul_(1.0 / self.size) if op == "mean" else tile)

    def _add(self, came: Tensor, own: Tensor, op: Op, out: Tensor) -> None:
        if op == "mean":
            torch.add(came, own, alpha=1.0 / self.size, out=out)
        else:
            STEPS[op](came, own, out=out)


def cut_evenly(length: int, parts: int) -> list[tuple[int, int]]:
    """The borders of `length` elements in parts that differ by one at most.

    >>> cut_evenly(7, 3)
    [(0, 3), (3, 5), (5, 7)]
    """
    each, more = divmod(length, parts)
    starts = [r * each + min(r, more) for r in range(parts + 1)]
    return list(pairwise(starts))


def _take_part(x: Tensor, part: int, parts: int) -> Tensor:
    start, stop = cut_evenly(x.numel(), parts)[part]
    return x[start:stop]


def _size_piece(nbytes: int) -> int:
    """Bytes of a chunk of so many that are received, worked on and sent on at a time: even parts, of whole elements.

    >>> _size_piece(1_100_000), _size_piece(6_250_000), _size_piece(1000)
    (550016, 2083392, 1024)
    """
    best = max(_LEAST_PIECE, min(_MOST_PIECE, nbytes // _PIECES))
    count = max(1, round(nbytes / best))
    return max(1, -(-nbytes // (count * _WHOLE))) * _WHOLE


def _cut_tiles(x: Tensor, room: int) -> Iterator[Tensor]:
    return iter(x.split(room)) if x.numel() else iter(())


def _cut_views(x: Tensor) -> Iterator[memoryview]:
    return map(as_bytes, _cut_tiles(x, _size_piece(count_bytes([x])) // x.element_size()))
