"""Another strategy in mid-run."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

import unisono as un
from unisono.world import World
from unisono.world.virtual import run_threads

MODELS = threading.Lock()


def started(world: World, strategy: str) -> tuple[nn.Module, torch.optim.Optimizer, un.Replica]:
    with MODELS:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, un.parallel(model, optimizer, strategy, world=world)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for t in steps:
        generator = torch.Generator().manual_seed(100 * t + rank)
        optimizer.zero_grad()
        model(torch.randn(3, 4, generator=generator, dtype=torch.float64)).square().mean().backward()
        optimizer.step()


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_switching_to_the_same_strategy_changes_nothing(size: int) -> None:
    def work(world: World, switch: bool) -> list[Tensor]:
        model, optimizer, replica = started(world, "topk(k=0.2)")
        train(model, optimizer, world.rank, range(3))
        if switch:
            former, replica = replica, replica.switch("topk(k=0.2)")
            assert former is not replica
            assert replica.step == 3
        train(model, optimizer, world.rank, range(3, 6))
        assert replica.step == world.ledger.step_count == 6
        replica.close()
        return values(model)

    stayed, switched = (run_threads(lambda world, s=s: work(world, s), size) for s in (False, True))
    for a, b in zip(stayed, switched, strict=True):
        assert all(map(torch.equal, a, b))


def test_what_was_still_to_be_sent_goes_over() -> None:
    def work(world: World) -> None:
        model, optimizer, replica = started(world, "topk(k=0.1)")
        train(model, optimizer, world.rank, range(3))
        kept = replica.state_dict()["local"]["reducer"]["0.weight"]["*residual"].clone()
        assert kept.abs().sum() > 0
        replica = replica.switch("powersgd(rank=1)")
        assert torch.equal(replica.state_dict()["local"]["reducer"]["0.weight"]["*residual"], kept)
        train(model, optimizer, world.rank, range(3, 5))
        replica.close()

    run_threads(work, 2)


def test_what_goes_over_stays_in_the_units_of_amps_loss_scale() -> None:
    def work(world: World, switch: bool) -> list[Tensor]:
        model, optimizer, replica = started(world, "topk(k=0.1)")
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
        replica.watch(scaler)
        for t in range(4):
            if switch and t == 2:
                replica = replica.switch("topk(k=0.1)")
            generator = torch.Generator().manual_seed(100 * t + world.rank)
            optimizer.zero_grad()
            loss = model(torch.randn(3, 4, generator=generator, dtype=torch.float64)).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        replica.close()
        return values(model)

    stayed, switched = (run_threads(lambda world, s=s: work(world, s), 2) for s in (False, True))
    for a, b in zip(stayed, switched, strict=True):
        assert all(map(torch.equal, a, b))


def test_a_refused_strategy_leaves_the_run_as_it_was() -> None:
    def work(world: World) -> list[Tensor]:
        model, optimizer, replica = started(world, "allreduce")
        train(model, optimizer, world.rank, range(2))
        with pytest.raises(ValueError, match="accumulate"):
            replica.switch("allreduce(accumulate=0)")
        train(model, optimizer, world.rank, range(2, 4))
        assert replica.step == 4
        return values(model)

    results = run_threads(work, 2)

    def plain(world: World) -> list[Tensor]:
        model, optimizer, _ = started(world, "allreduce")
        train(model, optimizer, world.rank, range(4))
        return values(model)

    assert all(map(torch.equal, results[0], run_threads(plain, 2)[0]))


def test_ranks_that_do_not_switch_alike_are_told() -> None:
    def work(world: World) -> None:
        _, _, replica = started(world, "allreduce")
        replica.switch("allreduce" if world.rank else "allreduce(accumulate=2)")

    with pytest.raises(ValueError, match="rank 1 asks for allreduce at step 0"):
        run_threads(work, 2)
