"""Tensors that ranks give each other between steps: a model, buffers, weighted means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from unisono.world import World

Buffers = Literal["broadcast", "average", "local"]


def share(model: nn.Module, world: World, src: int = 0) -> None:
    """Give every rank rank `src`'s parameters and buffers."""
    tensors = [t.detach() for t in (*model.parameters(), *model.buffers()) if not t.is_meta]
    with torch.no_grad():
        world.broadcast(tensors, src, tag="initial state").wait()


def has_buffers(model: nn.Module) -> bool:
    """Whether a model has buffers; asked every step, so in one loop without a call for each module."""
    modules = [model]
    for module in modules:
        if module._buffers:
            return True
        modules += [child for child in module._modules.values() if child is not None]
    return False


def share_buffers(buffers: Sequence[Tensor], how: Buffers, world: World, weight: float | None = None) -> None:
    """Make buffers the same on every rank: numbers with a fraction become their mean, the others are rank 0's.

    `weight`: how much this rank counts in the mean, where ranks may count differently.
    """
    if how == "local" or not buffers:
        return
    floats = [b for b in buffers if how == "average" and (b.is_floating_point() or b.is_complex())]
    others = [b for b in buffers if not any(b is x for x in floats)]
    if weight is None:
        world.all_reduce(floats, "mean", tag="buffers").wait()
    else:
        take_weighted_mean(floats, weight, world, tag="buffers")
    world.broadcast(others, tag="buffers").wait()


@torch.no_grad()
def take_weighted_mean(tensors: Sequence[Tensor], weight: float, world: World, *, tag: str) -> None:
    """Replace tensors on every rank by (sum of weight_i x_i) / (sum of weight_i), or by their mean where all weights
    are 0. The weights travel with the tensors; where all are 1, the result has the bits of a plain mean."""
    if not tensors or world.size == 1:
        return
    before = [x.clone() for x in tensors] if weight == 0.0 else []
    for x in tensors:
        if weight == 0.0:
            x.zero_()  # also where it is not finite
        elif weight != 1.0:
            x.mul_(weight)
    wide = any(x.dtype in (torch.float64, torch.complex128) for x in tensors)
    weights = torch.tensor([weight], dtype=torch.float64 if wide else torch.float32, device=tensors[0].device)
    world.all_reduce([*tensors, weights], "mean", tag=tag).wait()
    total = float(weights)
    if total == 0.0:  # all ranks have the same total
        torch._foreach_copy_(list(tensors), before)
        world.all_reduce(list(tensors), "mean", tag=tag).wait()
    elif total != 1.0:
        for x in tensors:
            x.div_(total)
