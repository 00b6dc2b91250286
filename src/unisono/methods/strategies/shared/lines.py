"""Parameters of one dtype in one line of the host's memory, the ranks' gradients beside it, and who steps what."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from unisono.methods.buckets import FlatLayout, alignment
from unisono.methods.strategies._host_memory import HostMemory, cut


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
        """Views of a line of this layout, in the parameters' shapes and strides."""
        return self._layout.views(line)

    def bounds(self, slot: int) -> tuple[int, int]:
        """Where a parameter begins and ends in the line."""
        start = self._layout.starts[slot]
        return start, start + self._layout.lengths[slot]

    def pieces(self, rank: int, parts: int, slots: Container[int] | None = None) -> list[Piece]:
        """What is the part of `rank`, of so many: an equal share of the elements of some parameters (None: of those
        that are trainable)."""
        chosen = [s for s, p in enumerate(self.params) if (p.requires_grad if slots is None else s in slots)]
        # The chosen parameters one behind the other, without those that nobody steps.
        together = FlatLayout([self.params[s] for s in chosen], self.dtype, contiguous=True)
        low, high = cut(together.numel, rank, parts, step=alignment(self.dtype)) if rank < parts else (0, 0)
        moved = [self._layout.starts[s] - at for s, at in zip(chosen, together.starts, strict=True)]
        found = together.overlaps(low, high)
        return [Piece(chosen[k], first + moved[k], last + moved[k]) for k, first, last in found]


def cut_tiles(pieces: Sequence[Piece], tile: int) -> list[Piece]:
    """Cut pieces into tiles of at most `tile` elements."""
    return [Piece(slot, at, min(stop, at + tile)) for slot, start, stop in pieces for at in range(start, stop, tile)]


def group_lines(named: Sequence[tuple[str, Parameter]], memory: HostMemory) -> list[Line]:
    """Lay parameters out in lines of the host's memory: one line for each dtype."""
    kinds: dict[torch.dtype, list[tuple[str, Parameter]]] = {}
    for name, param in named:
        kinds.setdefault(param.dtype, []).append((name, param))
    return [Line(some, memory) for some in kinds.values()]
