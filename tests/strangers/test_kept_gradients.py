"""Gradients that a program keeps over `zero_grad()`, for several tasks side by side (PCGrad, GradNorm): in one process
they are the program's own, and the next backward pass writes elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from stranger_programs import furthest, mlp, values
from torch import Tensor, nn

import unisono as un
from unisono.world import World
from unisono.world.virtual import run_threads

SIZE = 2
EXACT = ["allreduce", "allreduce(overlap=True, bucket_bytes=64)", "allreduce(order=ready)", "shared"]
KEEP: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda grad: grad,
    "detached": lambda grad: grad.detach(),
    "as a line": lambda grad: grad.view(-1),
    "data of a part": lambda grad: grad.data[:1],
}


def losses(model: nn.Module, rank: int, step: int) -> list[Tensor]:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)
    y = model(x)
    return [y.square().mean(), (y - 1).abs().mean(), y.exp().mean()]


def train(world: World | None, spec: str, keep: Callable[[Tensor], Tensor], one: bool = False) -> list[Tensor]:
    """Every step: each task's gradients are kept, then all are added up with weights of their own."""
    model = mlp()
    optimizer: Any = torch.optim.Adam if spec.startswith("qadam") else torch.optim.SGD
    optimizer = optimizer(model.parameters(), lr=0.05)
    replica = None if world is None else un.parallel(model, optimizer, spec, world=world)
    seen: list[Tensor] = []
    for step in range(3):
        kept, copies = [], []
        for task in range(3):
            optimizer.zero_grad()
            for rank in range(SIZE) if world is None else [world.rank]:
                (losses(model, rank, step)[task] / (SIZE if world is None else 1)).backward()
            kept.append([keep(p.grad) for p in list(model.parameters())[: 1 if one else None]])
            copies.append([x.clone() for x in kept[-1]])
        seen += [x for task in copies for x in task]
        assert furthest([x for task in kept for x in task], [x for task in copies for x in task]) == 0.0
        optimizer.step()
    found = [*seen, *values(model)]
    if replica is not None:
        replica.close()
    return found


@pytest.mark.parametrize("keep", KEEP.values(), ids=KEEP)
@pytest.mark.parametrize("spec", [*EXACT, "topk(k=0.5)", "powersgd(rank=1)", "qadam(warmup=2)"])
def test_gradients_that_are_kept_stay_as_they_are(spec: str, keep: Callable[[Tensor], Tensor]) -> None:
    found = run_threads(lambda world: train(world, spec, keep), SIZE, timeout_s=20.0)
    if spec in EXACT:
        assert furthest(found[0], train(None, spec, keep)) < 1e-12
