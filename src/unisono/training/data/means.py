"""Means over the samples of all ranks, of numbers that a program has for each batch (a loss, a share of hits)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from unisono.world import World

__all__ = ["Means"]


class Means:
    """This rank's sums of one shard since `take` was last called: each number times the samples of its batch.

    In elastic runs a batch may be given out twice: the later numbers then replace the earlier ones.
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[int, ...], Tensor] = {}  # by epoch and batch in elastic runs, else under ()

    def add(self, values: tuple[Any, ...], samples: int, place: tuple[int, ...]) -> None:
        """Add the numbers of a batch of so many samples. Numbers on a GPU stay there."""
        numbers = [torch.as_tensor(value).detach().to(torch.float64).reshape(()) for value in values]
        before = self._sums.pop(place, None)
        if samples:  # else the batch is a stand-in, whose samples are other ranks'
            sums = torch.stack([*numbers, numbers[0].new_tensor(1.0)]) * samples
            self._sums[place] = sums if place or before is None else before + sums
        elif not place and before is not None:
            self._sums[place] = before

    def take(self, world: World) -> float | tuple[float, ...]:
        """The means over all samples of all ranks; every rank calls it. NaN if nothing was added."""
        mine = torch.stack(list(self._sums.values())).sum(0).tolist() if self._sums else []
        self._sums = {}
        every = [sums for sums in world.gather_objects(mine) if sums]  # a rank that has come may have had no batch
        if not every:
            return math.nan
        *totals, samples = (sum(column) for column in zip(*every, strict=True))
        return totals[0] / samples if len(totals) == 1 else tuple(total / samples for total in totals)
