"""Units that are put together again, or split anew over the ranks of another world."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.methods.strategies.zero.optimizer_shards import OptimizerShards
from unisono.methods.strategies.zero.units import Unit
from unisono.world import World

Holder = tuple[int, int]  # of the shards of one former rank: a rank, and 0 for its own or 1 for the copy that it keeps


def join_units(
    units: Sequence[Unit], shards: OptimizerShards, world: World, order: Sequence[Holder]
) -> tuple[dict[Tensor, Tensor], dict[Tensor, dict[str, Any]]]:
    """Gather the values and the optimizer's state of whole parameters from those who hold the shards, in `order`.

    A rank that is not among them has `units` of the same layout, and nothing in them.
    """
    gives = [which for which in (0, 1) if (world.rank, which) in order]

    def given(unit: Unit) -> list[Unit]:
        return [unit.held[which] for which in gives]

    def join_shards(lines: list[Tensor], empty: Tensor) -> Tensor:
        found = world.all_gather(torch.cat([empty, *lines]), tag="restore").wait()
        return torch.cat([_pick(found[r], which, r, order) for r, which in order])

    states = shards.join([unit for unit in units if unit.trainable], given, world, join_shards)
    values: dict[Tensor, Tensor] = {}
    for unit in units:
        dtype = unit.master_dtype if unit.trainable else unit.dtype
        empty = torch.empty(0, dtype=dtype, device=unit.params[0].device)
        full = join_shards([one.master if unit.trainable else one.shard for one in given(unit)], empty)
        views = zip(unit.params, unit.views(full), strict=True)
        values |= {param: view.to(unit.original_dtype, copy=True) for param, view in views}
    return values, states


def _pick(lines: Tensor, which: int, rank: int, order: Sequence[Holder]) -> Tensor:
    """One of the lines that a rank gave, its own before the copy."""
    if (rank, 1 - which) not in order:
        return lines
    return lines.chunk(2)[which]


def empty_parameters(units: Sequence[Unit]) -> None:
    """Give parameters whose values are out of date memory for new ones."""
    for unit in units:
        for param, shape in zip(unit.params, unit.shapes, strict=True):
            param.data = torch.empty(shape, dtype=unit.original_dtype, device=param.device)
