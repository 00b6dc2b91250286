"""Collectives that gradients pass through: for programs whose loss depends on what other workers have computed.

Every rank calls them, and runs the backward pass through them: that exchanges, too.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from unisono.world import World

__all__ = ["all_gather", "all_reduce", "all_to_all", "broadcast"]

Mean = Literal["mean", "sum"]


def all_reduce(x: Tensor, world: World, op: Mean = "mean", *, tag: str = "") -> Tensor:
    """The mean or the sum over the ranks; so it is of their gradients."""
    found: Tensor = _Reduce.apply(x, world, op, tag)  # type: ignore[no-untyped-call]
    return found


def all_gather(x: Tensor, world: World, op: Mean = "sum", *, tag: str = "") -> Tensor:
    """All ranks' rows, one after the other. The gradient is the sum of all ranks' for my rows, or their mean."""
    found: Tensor = _Gather.apply(x, world, op, tag)  # type: ignore[no-untyped-call]
    return found


def broadcast(x: Tensor, src: int, world: World, op: Mean = "sum", *, tag: str = "") -> Tensor:
    """Rank `src`'s tensor. The gradient is the sum of all ranks' there, or their mean, and zero elsewhere."""
    found: Tensor = _Broadcast.apply(x, src, world, op, tag)  # type: ignore[no-untyped-call]
    return found


def all_to_all(x: Tensor, rows: list[int], world: World, *, tag: str = "") -> tuple[Tensor, list[int]]:
    """`rows[r]` of my rows to rank r; what the ranks sent to me, and how many rows each. Gradients go back."""
    counts = world.all_gather(torch.tensor(rows), even=True, tag=tag).wait()
    received = [int(count[world.rank]) for count in counts]
    found: Tensor = _Exchange.apply(x, rows, received, world, tag)  # type: ignore[no-untyped-call]
    return found, received


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, world: World, op: Mean, tag: str) -> Tensor:
        ctx.world, ctx.op, ctx.tag = world, op, tag
        found: Tensor = world.all_reduce(x.clone(), op, tag=tag).wait()
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.world.all_reduce(grads[0].clone(), ctx.op, tag=ctx.tag).wait(), None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, world: World, op: Mean, tag: str) -> Tensor:
        parts = world.all_gather(x, tag=tag).wait()
        before = sum(len(part) for part in parts[: world.rank])
        ctx.world, ctx.op, ctx.tag, ctx.mine = world, op, tag, slice(before, before + len(x))
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        found = ctx.world.all_reduce(grads[0].clone(), ctx.op, tag=ctx.tag).wait()
        return found[ctx.mine], None, None, None


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, src: int, world: World, op: Mean, tag: str) -> Tensor:
        ctx.world, ctx.op, ctx.tag, ctx.src = world, op, tag, src
        found: Tensor = world.broadcast(x.clone(), src, tag=tag).wait()
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        found = ctx.world.all_reduce(grads[0].clone(), ctx.op, tag=ctx.tag).wait()
        return found if ctx.world.rank == ctx.src else torch.zeros_like(found), None, None, None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: list[int], received: list[int], world: World, tag: str) -> Tensor:
        ctx.received, ctx.world, ctx.tag = received, world, tag
        return torch.cat(world.all_to_all(list(x.split(rows)), tag=tag).wait())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        parts = list(grads[0].contiguous().split(ctx.received))
        return torch.cat(ctx.world.all_to_all(parts, tag=ctx.tag).wait()), None, None, None, None
