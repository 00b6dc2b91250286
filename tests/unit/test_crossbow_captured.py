"""Rounds of all learners at the same time, against learners simulated one by one in float64: here on a CPU, where a
round that would be captured runs op by op each time. What a GPU adds: tests/processes/test_cuda_crossbow.py."""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono as un
from test_crossbow import Reference, batch, check_all, close, loss_of, make, noisy, params, seen
from unisono.methods.strategies.crossbow import captured, replica
from unisono.world import World
from unisono.world.virtual import run_threads

LR = 0.125  # float32 has it exactly, and the fused kernels take it as that


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": LR, "momentum": 0.5, "weight_decay": 0.01, **options})


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR / 8)


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "is_on_gpu", lambda named: True)


def started(spec: str, world: World, optimizer: Callable[[nn.Module], Any] = sgd, model: Any = None) -> Any:
    model = make() if model is None else model
    chosen = optimizer(model)
    return model, chosen, un.parallel(model, chosen, spec, world=world)


def train(made: Any, rank: int, rounds: range, learners: int, **options: Any) -> list[Tensor]:
    losses = []
    for t in rounds:
        losses += made.learn(loss_of, [batch(t * learners + j, rank) for j in range(learners)], **options)
    return losses


def replays(made: Any) -> int:
    return 0 if made._captured is None else made._captured.replayed


@pytest.mark.parametrize(
    ("size", "learners", "settings"), [(1, 1, ""), (1, 3, "every=3, "), (2, 2, ""), (2, 3, "every=2, ")]
)
@pytest.mark.parametrize("optimizer", [sgd, adam])
def test_rounds_are_those_of_the_equations(
    size: int, learners: int, settings: str, optimizer: Callable[[nn.Module], Any]
) -> None:
    def work(world: World) -> Any:
        _, _, made = started(f"crossbow({settings}learners={learners})", world, optimizer)
        train(made, world.rank, range(12), learners)
        assert replays(made) == 12 - captured.WARM_UP
        assert made.step == 12 * learners
        result = seen(made)
        made.close()
        return result

    every = int(settings[6]) if settings else 1
    reference = Reference(size, learners, every=every, optimizer=optimizer)
    for t in range(12):
        reference.round(t)
    check_all(run_threads(work, size), reference)
