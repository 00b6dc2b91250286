"""The stage: memory of every rank through which private tensors pass, block by block, small enough for the cache.

While block i is copied out, block i + 1 is reduced and i + 2 copied in, with one meeting a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from unisono.world.transports import Op
from unisono.world.transports.arithmetic import combine, cut_share

BLOCK = 4 << 20  # bytes a rank puts on the stage at a time
_SLACK = 512  # shares end on borders of cache lines


def count_stage_bytes(size: int) -> int:
    """What a stage takes of each rank's memory."""
    return -(-(2 * BLOCK + 2 * (BLOCK // size + _SLACK)) // 64) * 64


class Stage:
    """Typed views of the stage: for each rank two blocks to put, two parts of results to take."""

    def __init__(self, memory: Sequence[Tensor], rank: int, dtype: torch.dtype) -> None:
        """`memory`: every rank's part of the stage."""
        self.rank, self.size = rank, len(memory)
        self.elements = BLOCK // dtype.itemsize
        self._results = (BLOCK // self.size + _SLACK) // dtype.itemsize
        lines = [r[: r.numel() // 16 * 16].view(dtype) for r in memory]
        self._puts = [[line[t * self.elements : (t + 1) * self.elements] for t in (0, 1)] for line in lines]
        at = 2 * self.elements
        n = self._results
        self._takes = [[line[at + t * n : at + (t + 1) * n] for t in (0, 1)] for line in lines]

    def block_of(self, rank: int, turn: int) -> Tensor:
        return self._puts[rank][turn & 1]

    def put(self, block: Sequence[Tensor], turn: int, scale: float | None = None) -> None:
        mine, at = self._puts[self.rank][turn & 1], 0
        for part in block:
            target = mine[at : at + part.numel()]
            if scale is None:
                target.copy_(part)
            else:
                torch.mul(part, scale, out=target)
            at += part.numel()

    def reduce(self, length: int, turn: int, op: Op) -> None:
        start, stop = cut_share(length, self.rank, self.size)
        combine([p[turn & 1][start:stop] for p in self._puts], op, self._takes[self.rank][turn & 1][: stop - start])

    def take(self, block: Sequence[Tensor], length: int, turn: int) -> None:
        bounds = [cut_share(length, r, self.size) for r in range(self.size)]
        at = 0
        for part in block:
            for r, (start, stop) in enumerate(bounds):
                low, high = max(start, at), min(stop, at + part.numel())
                if low < high:
                    part[low - at : high - at].copy_(self._takes[r][turn & 1][low - start : high - start])
            at += part.numel()


def cut_blocks(parts: Sequence[Tensor], room: int) -> Iterator[list[Tensor]]:
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


def join_parts(parts: Sequence[Tensor]) -> Tensor:
    """The parts as one line: the only one itself, or a copy of all."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)


def copy_to_parts(line: Tensor, parts: Sequence[Tensor]) -> None:
    """Write what `join_parts` gave, as it is now, into the parts."""
    for part, source in zip(parts, line.split([part.numel() for part in parts]), strict=True):
        if part.data_ptr() != source.data_ptr():
            part.copy_(source)
