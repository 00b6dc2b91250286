"""ZeRO on one host, where all ranks have one memory for values, in worlds of threads, against plain PyTorch."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono as un
from unisono.methods.strategies.zero.gradients import ShardedGradients
from unisono.methods.strategies.zero.replica import ZeroReplica
from unisono.world import World
from unisono.world.virtual import run_threads

stages = pytest.mark.parametrize("stage", [1, 2])
torch.manual_seed(0)
START = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)).double()


def make(world: World, spec: str) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = copy.deepcopy(START)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, un.parallel(model, optimizer, spec, world=world)


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def state_of(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def trained(size: int, change: Any = None) -> list[Tensor]:
    """Three steps in one process; `change(model)` after the first."""
    model = copy.deepcopy(START)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for t in range(3):
        step(model, optimizer, torch.cat([batch(t, r) for r in range(size)]))
        if t == 0 and change is not None:
            with torch.no_grad():
                change(model)
    return state_of(model)


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@stages
def test_all_ranks_have_one_memory_and_nothing_is_gathered(stage: int) -> None:
    def work(world: World) -> tuple[list[int], list[str], list[Tensor]]:
        model, optimizer, replica = make(world, f"zero(stage={stage})")
        for t in range(3):
            step(model, optimizer, batch(t, world.rank))
        where = [unit.shard.untyped_storage().data_ptr() for unit in replica.units]
        ops = [record.op for record in world.ledger.records if record.tag.startswith("unit/")]
        return where, ops, state_of(model)

    (first, ops, found), *others = run_threads(work, 3)
    assert set(ops) == {"reduce_scatter"}
    assert_close(found, trained(3))
    for where, _, same in others:
        assert where == first
        assert all(torch.equal(x, y) for x, y in zip(same, found, strict=True))


@pytest.mark.parametrize("spec", ["zero(stage=3)", "zero(stage=2, spare=True)", "zero(stage=1, optimizer_on=cpu)"])
def test_values_are_each_ranks_own_where_one_memory_would_not_do(spec: str) -> None:
    def work(world: World) -> list[Tensor]:
        model, optimizer, replica = make(world, spec)
        for t in range(3):
            step(model, optimizer, batch(t, world.rank))
        assert isinstance(replica, ZeroReplica)
        assert replica._memory is None
        replica.restore()
        replica.close()
        return state_of(model)

    for found in run_threads(work, 2):
        assert_close(found, trained(2))


@stages
def test_after_the_end_each_rank_has_a_model_of_its_own(stage: int) -> None:
    def work(world: World) -> list[Tensor]:
        model, optimizer, replica = make(world, f"zero(stage={stage})")
        for t in range(3):
            step(model, optimizer, batch(t, world.rank))
        replica.close()
        world.barrier()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(world.rank)
        world.barrier()
        return state_of(model)

    for rank, found in enumerate(run_threads(work, 2)):
        assert_close([x - rank for x in found], trained(2))


@stages
def test_values_that_every_rank_writes_are_those_of_one_process(stage: int) -> None:
    def clamp(model: nn.Module) -> None:
        for p in model.parameters():
            p.clamp_(-0.1, 0.1)

    def halve(model: nn.Module) -> None:
        for p in model.parameters():
            p.mul_(0.5)

    def work(world: World, *, once: bool) -> list[Tensor]:
        model, optimizer, replica = make(world, f"zero(stage={stage})")
        for t in range(3):
            step(model, optimizer, batch(t, world.rank))
            if t == 0 and once:
                replica.write(lambda: halve(model))
            elif t == 0:
                with torch.no_grad():
                    clamp(model)
        return state_of(model)

    for found in run_threads(lambda world: work(world, once=False), 2):
        assert_close(found, trained(2, clamp))
    for found in run_threads(lambda world: work(world, once=True), 2):
        assert_close(found, trained(2, halve))


def test_what_one_rank_alone_writes_is_named() -> None:
    def work(world: World) -> str:
        model, optimizer, _ = make(world, "zero(stage=1)")
        step(model, optimizer, batch(0, world.rank))
        if world.rank == 1:
            with torch.no_grad():
                model[2].bias.add_(1.0)  # type: ignore[index, union-attr, operator]
        with pytest.raises(ValueError, match=r"wrote to parameter '2\.bias'") as caught:
            step(model, optimizer, batch(1, world.rank))
        return str(caught.value)

    assert all("local rank(s) 1 wrote" in text for text in run_threads(work, 2))


def test_large_finite_gradients_are_not_taken_for_infinite_ones() -> None:
    def work(world: World) -> list[bool]:
        model = nn.Linear(64, 64).requires_grad_(True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = un.parallel(model, optimizer, "zero(stage=1)", world=world)
        model(torch.randn(2, 64)).sum().backward()
        assert isinstance(replica, ZeroReplica)
        assert replica._backward is not None
        gradients: ShardedGradients = replica._backward.gradients
        found = []
        for value in (1.0, 3e38, math.inf, -math.inf, math.nan):
            for unit in gradients.units:
                assert unit.gradient is not None
                unit.gradient.fill_(3e38 if math.isfinite(value) and value > 1 else 1.0)
                unit.gradient[0] = value
            found.append(bool(gradients.find_nonfinite()))
        return found

    assert run_threads(work, 2) == [[False, False, True, True, True]] * 2
