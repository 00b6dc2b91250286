"""What counts as a step: windows of backward passes, alike in a world of one and of several."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import unisono as un
from unisono.world import World


def overflow(model: torch.nn.Module, optimizer: torch.optim.Optimizer, replica: un.Replica) -> None:
    """Five windows, two of which AMP does not step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for i in range(5):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).sum() * (float("inf") if i in (1, 2) else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def no_sync(model: torch.nn.Module, optimizer: torch.optim.Optimizer, replica: un.Replica) -> None:
    for _ in range(5):
        with replica.no_sync():
            model(torch.ones(2, 3)).sum().backward()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()


def unused_last(model: torch.nn.Module, optimizer: torch.optim.Optimizer, replica: un.Replica) -> None:
    for _ in range(5):
        optimizer.zero_grad()
        model[0](torch.ones(2, 3)).sum().backward()
        optimizer.step()


def unused_first(model: torch.nn.Module, optimizer: torch.optim.Optimizer, replica: un.Replica) -> None:
    for _ in range(5):
        optimizer.zero_grad()
        model[1](torch.ones(2, 3)).sum().backward()
        optimizer.step()


def short_windows(model: torch.nn.Module, optimizer: torch.optim.Optimizer, replica: un.Replica) -> None:
    """Nine passes in windows of two, a step after each and at the end: 2 2 2 2 1."""
    for i in range(9):
        model(torch.ones(2, 3)).sum().backward()
        if i % 2 or i == 8:
            optimizer.step()
            optimizer.zero_grad()


def overflow_at_the_end(model: torch.nn.Module, optimizer: torch.optim.Optimizer, replica: un.Replica) -> None:
    """Four windows that are stepped, and one that AMP does not step; a checkpoint knows of all."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for i in range(5):
        loss = model(torch.ones(2, 3)).sum() * (float("inf") if i == 4 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert replica.state_dict()["shared"]["step"] == 5


@pytest.mark.parametrize("size", [1, 2, "1 on a GPU"])
@pytest.mark.parametrize("program", [overflow, overflow_at_the_end, no_sync, unused_last, unused_first, short_windows])
def test_five_windows_are_five_steps(
    program: Callable[..., None], size: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isinstance(size, str):
        monkeypatch.setattr(torch.nn.Parameter, "is_cuda", True, raising=False)  # windows are counted late
        size = 1

    def run(world: World) -> tuple[int, int]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        accumulate = 2 if program is short_windows else 1
        replica = un.parallel(model, optimizer, "allreduce", world=world, accumulate=accumulate)
        program(model, optimizer, replica)
        return replica.step, world.ledger.step_count

    assert un.run_threads(run, size) == [(5, 5)] * size
