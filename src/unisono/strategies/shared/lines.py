"""Parameters of one dtype in one line of the host's memory, the ranks' gradients beside it, and who steps what."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from unisono.buckets import FlatLayout
from unisono.strategies._host_memory import HostMemory, cut

_CACHE_LINE = 64


class Piece(NamedTuple):
    """Elements of one parameter, by their places in its line."""

    slot: int  # which parameter of the line
    start: int
    stop: int


class Line:
    """Some parameters of one dtype.

    values: those of all of them, for all ranks of the host. seen: this rank's view of them, in which its program writes
    alone; `views` are the same in the parameters' shapes and strides.
    gradients: a line for each rank of the host; `gradient_views` as above, by rank.
    """

    def __init__(self, named: Sequence[tuple[str, Parameter]], memory: HostMemory) -> None:
        self.names = [name for name, _ in named]
        self.params = [param for _, param in named]
        self.dtype = self.params[0].dtype
        self._layout = FlatLayout(self.params)
        self.numel = self._layout.numel
        self.values = memory.line(self.numel, self.dtype)
        self.seen = memory.view(self.values)
        self.views = self._layout.views(self.seen)
        self.gradients = memory.lines(self.numel, self.dtype)
        self.gradient_views = [self._layout.views(line) for line in self.gradients]

    def view(self, line: Tensor) -> list[Tensor]:
        """A line of this layout in the parameters' shapes and strides."""
        return self._layout.views(line)

    def bounds(self, slot: int) -> tuple[int, int]:
        """Where a parameter begins and ends in the line."""
        start = self._layout.starts[slot]
        return start, start + self.params[slot].numel()

    def pieces(self, rank: int, parts: int, slots: Container[int] | None = None) -> list[Piece]:
        """What is the part of `rank`, of so many: an equal share of the elements of some parameters (None: of those
        that are trainable)."""
        step = max(1, _CACHE_LINE // self.dtype.itemsize)
        chosen = [s for s, p in enumerate(self.params) if (p.requires_grad if slots is None else s in slots)]
        bounds = [(slot, *self.bounds(slot)) for slot in chosen if self.params[slot].numel()]
        padded = [-(-(stop - start) // step) * step for _, start, stop in bounds]
        low, high = cut(sum(padded), rank, parts, step=step) if rank < parts else (0, 0)
        return list(_overlaps(bounds, padded, low, high))


def _overlaps(bounds: Sequence[tuple[int, int, int]], padded: Sequence[int], low: int, high: int) -> Iterator[Piece]:
    """The pieces between two places, where the parameters stand one behind the other without those left out."""
    at = 0
    for (slot, start, stop), room in zip(bounds, padded, strict=True):
        first, last = max(low, at), min(high, at + room)
        if first < last:
            piece = Piece(slot, start + first - at, min(stop, start + last - at))
            if piece.start < piece.stop:
                yield piece
        at += room


def cut_tiles(pieces: Sequence[Piece], tile: int) -> list[Piece]:
    """The same elements, at most `tile` at a time."""
    return [Piece(slot, at, min(stop, at + tile)) for slot, start, stop in pieces for at in range(start, stop, tile)]


def group_lines(named: Sequence[tuple[str, Parameter]], memory: HostMemory) -> list[Line]:
    """The lines of some parameters: one for each dtype."""
    kinds: dict[torch.dtype, list[tuple[str, Parameter]]] = {}
    for name, param in named:
        kinds.setdefault(param.dtype, []).append((name, param))
    return [Line(some, memory) for some in kinds.values()]
