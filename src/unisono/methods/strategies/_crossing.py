"""A rank's part of the gradients, on its way between hosts or between groups of ranks, through a reducer: for methods
that split gradients inside a host or a group, each rank having a part of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from unisono.methods.buckets import BUCKET_BYTES, Bucket, on_device
from unisono.methods.exchange.reduction import Reduction
from unisono.methods.reducer import Reducer
from unisono.world import World
from unisono.world.operations import list_groups


class Piece(NamedTuple):
    """Elements of one parameter, by their places in its line."""

    slot: int  # which parameter of the line
    start: int
    stop: int


class Line(Protocol):
    """Parameters of one dtype that lie one behind the other."""

    names: list[str]
    params: list[Parameter]
    dtype: torch.dtype

    def bounds(self, slot: int) -> tuple[int, int]:
        """Where a parameter begins and ends in the line."""


class Crossing:
    """This rank's part, on its way between hosts: the r-th rank of every host exchanges the r-th part of the gradients
    with those of the others. So each byte crosses the network once a host, whatever the number of its workers, and all
    of them send. Inside a host nothing is left to be sent: the mean of a part is there for all its ranks.

    world: the ranks that have my part, one a host (or group of ranks).
    place: which part is mine, and how many there are.
    weight: of this host's mean in that over all.
    """

    def __init__(
        self, world: World, reducer: Reducer, optimizer: Optimizer, *, place: tuple[int, int], weight: float = 1.0
    ) -> None:
        self._world, self.place, self._weight = world, place, weight
        self._owners: dict[Tensor, Tensor] = {}  # of each piece, the parameter
        self.reduction = Reduction(reducer, optimizer, lambda _: None, "gradients", self._owners)
        self._buckets: list[list[tuple[Bucket, list[Piece]]]] = []  # by line

    def set_pieces(self, lines: Sequence[Line], parts: Sequence[Sequence[Piece]]) -> None:
        """Exchange these pieces of each line from now on."""
        self._buckets, number = [], 0
        self._owners.clear()
        for line, pieces in zip(lines, parts, strict=True):
            cut = [one for piece in pieces for one in _split_rows(line, piece)]
            self._buckets.append([])
            for some in _group(cut, BUCKET_BYTES // line.dtype.itemsize):
                named = [(f"{line.names[p.slot]}{find_span(line, p)}", _shape(line, p)) for p in some]
                bucket = Bucket(number, named, partial(on_device, line.params[0].device))
                number += 1
                self._owners |= dict(zip(bucket.params, [line.params[piece.slot] for piece in some], strict=True))
                self._buckets[-1].append((bucket, some))
        self.reduction.set_buckets([bucket for some in self._buckets for bucket, _ in some])

    @classmethod
    def between_hosts(cls, world: World, reducer: Reducer, optimizer: Optimizer) -> Crossing:
        """One between the hosts of a world. There are as many parts as the host with the fewest ranks has: a rank that
        comes after them has none."""
        by_host = list_groups("host", world.hosts)
        count = min(map(len, by_host))
        groups = [[ranks[k] for ranks in by_host] for k in range(count)]
        groups += [[r] for ranks in by_host for r in ranks[count:]]
        weight = world.local_size * len(by_host) / world.size  # hosts differ in size: theirs in the mean
        place = (world.local_rank, count)
        return cls(world.split(groups, inline=True), reducer, optimizer, place=place, weight=weight)

    def exchange(self, number: int, mean: Tensor, first: int = 0) -> None:
        """Replace the means of my pieces of a line, inside my host, by those over all hosts. `mean` holds the line's
        elements from `first` on."""
        if self._world.size == 1:
            return
        for bucket, pieces in self._buckets[number]:
            for view, (_, start, stop) in zip(bucket.tensors, pieces, strict=True):
                torch.mul(mean[start - first : stop - first], self._weight, out=view.view(-1))
            self.reduction.begin(bucket, self._world)
            self.reduction.drain()
            for view, (_, start, stop) in zip(bucket.tensors, pieces, strict=True):
                mean[start - first : stop - first].copy_(view.view(-1))

    def end_window(self, every: World, others: Sequence[Tensor]) -> None:
        """All means are there: what is still to be sent stays as it was on all ranks if a number of any part, or of
        `others`, is not finite."""
        overflow = torch.zeros((), dtype=torch.uint8)
        if self.reduction.keeps:
            overflow.copy_(self.reduction.find_overflow(others).isnan())
            every.all_reduce(overflow, "max", tag="overflow").wait()
        self.reduction.end_window(void=bool(overflow))

    def close(self) -> None:
        """Close the world between hosts."""
        self._world.close()


def find_span(line: Line, piece: Piece) -> str:
    """Which elements of its parameter a piece has, in words: "[0:16]"."""
    first = line.bounds(piece.slot)[0]
    return f"[{piece.start - first}:{piece.stop - first}]"


def _group(pieces: Sequence[Piece], most: int) -> list[list[Piece]]:
    """Group pieces that travel together, of about `most` elements in all."""
    groups: list[list[Piece]] = []
    room = 0
    for piece in pieces:
        if room <= 0:
            groups.append([])
            room = most
        groups[-1].append(piece)
        room -= piece.stop - piece.start
    return groups


def _find_rows(line: Line, slot: int) -> int:
    """Elements in a row of a parameter that is a matrix; 0 for any other."""
    param = line.params[slot]
    return param.numel() // param.shape[0] if param.dim() > 1 and param.is_contiguous() else 0


def _split_rows(line: Line, piece: Piece) -> list[Piece]:
    """Whole rows by themselves, and what lies before and behind them: reducers look for matrices."""
    first, row = line.bounds(piece.slot)[0], _find_rows(line, piece.slot)
    if not row:
        return [piece]
    low = first + -(-(piece.start - first) // row) * row
    high = first + (piece.stop - first) // row * row
    borders = [piece.start, low, high, piece.stop] if low < high else [piece.start, piece.stop]
    return [Piece(piece.slot, a, b) for a, b in pairwise(borders) if a < b]


def _shape(line: Line, piece: Piece) -> Tensor:
    """A tensor of the shape of a piece, without memory: a matrix where it is in whole rows."""
    param, count = line.params[piece.slot], piece.stop - piece.start
    row, first = _find_rows(line, piece.slot), line.bounds(piece.slot)[0]
    is_matrix = row and (piece.start - first) % row == 0 and count % row == 0
    shape = (count // row, *param.shape[1:]) if is_matrix else (count,)
    return torch.zeros((), dtype=param.dtype, device=param.device).expand(shape)
