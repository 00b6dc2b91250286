"""Units that are put together again, or split anew over the ranks of another world."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.strategies.zero.optimizer_shards import OptimizerShards
from unisono.strategies.zero.units import Unit
from unisono.world import World


def join_units(
    units: Sequence[Unit], shards: OptimizerShards, world: World, order: Sequence[int]
) -> tuple[dict[Tensor, Tensor], dict[Tensor, dict[str, Any]]]:
    """Gather the values and the optimizer's state of whole parameters from the ranks `order`, which hold the shards.

    A rank that is not among them has `units` of the same layout, and nothing in them.
    """
    holds = world.rank in order

    def join_shards(line: Tensor) -> Tensor:
        found = world.all_gather(line if holds else line[:0], tag="restore").wait()
        return torch.cat([found[r] for r in order])

    states = shards.join([unit for unit in units if unit.trainable], world, join_shards)
    values: dict[Tensor, Tensor] = {}
    for unit in units:
        dtype = unit.master_dtype if unit.trainable else unit.dtype
        empty = torch.empty(0, dtype=dtype, device=unit.params[0].device)
        full = join_shards((unit.master if unit.trainable else unit.shard) if holds else empty)
        views = zip(unit.params, unit.views(full), strict=True)
        values |= {param: view.to(unit.original_dtype, copy=True) for param, view in views}
    return values, states


def empty_parameters(units: Sequence[Unit]) -> None:
    """Give parameters whose values are out of date memory for new ones."""
    for unit in units:
        for param, shape in zip(unit.params, unit.shapes, strict=True):
            param.data = torch.empty(shape, dtype=unit.original_dtype, device=param.device)
