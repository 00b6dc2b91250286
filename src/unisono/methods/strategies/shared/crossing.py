"""Between hosts: the r-th rank of every host exchanges the r-th part of the gradients with those of the others.

So each byte crosses the network once a host, whatever the number of its workers, and all of them send. Inside a host
nothing is left to be sent: the mean of a part is written where all ranks of the host read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.optim import Optimizer

from unisono.methods.buckets import BUCKET_BYTES, Bucket, on_device
from unisono.methods.exchange.reduction import Reduction
from unisono.methods.reducer import Reducer
from unisono.methods.strategies.shared.lines import Line, Piece
from unisono.world import World


class Crossing:
    """This rank's part, on its way between hosts.

    place: which part is mine, and how many there are: as many as the host with the fewest ranks has. A rank that comes
    after them has none.
    """

    def __init__(self, world: World, reducer: Reducer, optimizer: Optimizer) -> None:
        hosts = list(dict.fromkeys(world.hosts))
        by_host = [[r for r in range(world.size) if world.hosts[r] == host] for host in hosts]
        count = min(map(len, by_host))
        groups = [[ranks[k] for ranks in by_host] for k in range(count)]
        groups += [[r] for ranks in by_host for r in ranks[count:]]
        self._world = world.split(groups, inline=True)
        self.place = (world.local_rank, count)
        self._weight = world.local_size * len(hosts) / world.size  # hosts differ in size: theirs in the mean
        self._owners: dict[Tensor, Tensor] = {}  # of each piece, the parameter
        self.reduction = Reduction(reducer, optimizer, lambda _: None, "gradients", self._owners)
        self._buckets: list[tuple[Bucket, int, list[Piece]]] = []  # with the number of their line

    def set_pieces(self, lines: Sequence[Line], parts: Sequence[Sequence[Piece]]) -> None:
        """Exchange these pieces from now on."""
        self._buckets = []
        self._owners.clear()
        for number, (line, pieces) in enumerate(zip(lines, parts, strict=True)):
            cut = [one for piece in pieces for one in _split_rows(line, piece)]
            for some in _group(cut, BUCKET_BYTES // line.dtype.itemsize):
                named = [(_name(line, piece), _shape(line, piece)) for piece in some]
                bucket = Bucket(len(self._buckets), named, partial(on_device, torch.device("cpu")))
                self._owners |= dict(zip(bucket.params, [line.params[piece.slot] for piece in some], strict=True))
                self._buckets.append((bucket, number, some))
        self.reduction.set_buckets([bucket for bucket, _, _ in self._buckets])

    def exchange(self, lines: Sequence[Line]) -> None:
        """Replace the means of my host by those over all hosts."""
        if self._world.size == 1:
            return
        for bucket, number, pieces in self._buckets:
            mean = lines[number].gradients[0]
            for view, (_, start, stop) in zip(bucket.tensors, pieces, strict=True):
                torch.mul(mean[start:stop], self._weight, out=view.view(-1))
            self.reduction.begin(bucket, self._world)
            self.reduction.drain()
            for view, (_, start, stop) in zip(bucket.tensors, pieces, strict=True):
                mean[start:stop].copy_(view.view(-1))

    def learning_rate_fell(self) -> bool:
        """Whether a learning rate fell on this rank."""
        return self.reduction.learning_rate_fell()

    def set_decayed(self, decayed: bool) -> None:
        """Tell the reducer whether a learning rate fell on any rank."""
        self.reduction.set_decayed(decayed)

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


def _name(line: Line, piece: Piece) -> str:
    first = line.bounds(piece.slot)[0]
    return f"{line.names[piece.slot]}[{piece.start - first}:{piece.stop - first}]"


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
    return torch.zeros((), dtype=param.dtype).expand(shape)
