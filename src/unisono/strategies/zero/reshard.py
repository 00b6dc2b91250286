"""Units that are put together again, or split anew over the ranks of another world."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.strategies.zero.optimizer_shards import OptimizerShards
from unisono.strategies.zero.units import Unit
from unisono.strategy import share
from unisono.world import World


def find_holders(
    world: World, source: int, *, size: int, rank: int, step: int, split: bool, stage: int
) -> tuple[int, list[int]]:
    """Find the size of the world that rank `source` comes from, and who holds the shards of its ranks, in order.

    size, rank, step, split: of this rank, in the world that it comes from. Nobody holds shards where nothing was split.
    Raises ValueError if some of them are lost.
    """
    every = world.gather_objects([size, rank, step, split])
    former, _, latest, was_split = every[source]
    if not was_split:
        return former, []
    holders = {other[1]: r for r, other in enumerate(every) if (other[0], *other[2:]) == (former, latest, was_split)}
    lost = [r for r in range(former) if r not in holders]
    if lost:
        raise ValueError(
            f"rank(s) {', '.join(map(str, lost))} of the former {former} took their parts of the optimizer's state"
            + (" and of the parameters" if stage == 3 else "")
            + " with them: make the replica anew in the new world and un.load the last checkpoint"
        )
    return former, [holders[r] for r in range(former)]


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


def follow(model: nn.Module, optimizer: Optimizer, step: int, world: World, source: int) -> int:
    """Take over model, optimizer and step from a rank that has all of them; returns the step."""
    if world.size == 1:
        return step
    share(model, world, source)
    mine = {"optimizer": optimizer.state_dict(), "step": step, "steps": world.ledger.step_count}
    packed = world.broadcast_object(mine, source)
    if world.rank == source:
        return step
    optimizer.load_state_dict(packed["optimizer"])
    world.ledger.resume(packed["steps"])
    return int(packed["step"])
