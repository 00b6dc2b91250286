"""Collectives that gradients pass through: for programs whose loss depends on what other workers have computed.

Every rank calls them, and runs the backward pass through them: that exchanges, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from unisono.world import World

Mean = Literal["mean", "sum"]
Map = Callable[[Tensor], Tensor]


def all_reduce(x: Tensor, world: World, op: Mean = "mean", *, tag: str = "") -> Tensor:
    """The mean or the sum over the ranks; so it is of their gradients."""

    def reduce(values: Tensor) -> Tensor:
        return _reduce(values, world, op, tag)

    return _differentiate(x, reduce, reduce)


def all_gather(x: Tensor, world: World, op: Mean = "sum", *, tag: str = "") -> Tensor:
    """All ranks' rows, one after the other. The gradient is the sum of all ranks' for my rows, or their mean."""
    parts = world.all_gather(x.detach(), tag=tag).wait()
    before = sum(len(part) for part in parts[: world.rank])
    mine = slice(before, before + len(x))

    def keep_mine(grad: Tensor) -> Tensor:
        return _reduce(grad, world, op, tag)[mine]

    return _differentiate(x, lambda _: torch.cat(parts), keep_mine)


def broadcast(x: Tensor, src: int, world: World, op: Mean = "sum", *, tag: str = "") -> Tensor:
    """Rank `src`'s tensor. The gradient is the sum of all ranks' there, or their mean, and zero elsewhere."""

    def send(values: Tensor) -> Tensor:
        found: Tensor = world.broadcast(values.clone(), src, tag=tag).wait()
        return found

    def send_back(grad: Tensor) -> Tensor:
        found = _reduce(grad, world, op, tag)
        return found if world.rank == src else torch.zeros_like(found)

    return _differentiate(x, send, send_back)


def all_to_all(x: Tensor, rows: list[int], world: World, *, tag: str = "") -> tuple[Tensor, list[int]]:
    """`rows[r]` of my rows to rank r; what the ranks sent to me, and how many rows each. Gradients go back."""
    counts = world.all_gather(torch.tensor(rows), even=True, tag=tag).wait()
    received = [int(count[world.rank]) for count in counts]

    def swap(values: Tensor, sizes: list[int]) -> Tensor:
        return torch.cat(world.all_to_all(list(values.split(sizes)), tag=tag).wait())

    found = _differentiate(x, lambda values: swap(values, rows), lambda grad: swap(grad.contiguous(), received))
    return found, received


def _reduce(x: Tensor, world: World, op: Mean, tag: str) -> Tensor:
    found: Tensor = world.all_reduce(x.clone(), op, tag=tag).wait()
    return found


def _differentiate(x: Tensor, forward: Map, backward: Map) -> Tensor:
    """`forward(x)`, whose gradient is what `backward` makes of the gradient of the result."""
    found: Tensor = _Exchange.apply(x, forward, backward)  # type: ignore[no-untyped-call]
    return found


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Map, backward: Map) -> Tensor:
        ctx.give_back = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.give_back(grads[0]), None, None
