"""Gossip and asynchronous averaging between real processes: shared memory, a slow worker, one that just ends."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono as un
from unisono.world import World
from unisono.world.virtual import run_threads


class Slow(nn.Module):
    """A linear layer that takes its time in the forward pass, without a core."""

    def __init__(self, width: int, takes_s: float = 0.0) -> None:
        super().__init__()
        self.layer, self.takes_s = nn.Linear(width, width).double(), takes_s

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.takes_s)
        result: Tensor = self.layer(x)
        return result


def steps(model: Slow, optimizer: Any, rank: int, count: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(count):
        optimizer.zero_grad()
        x = torch.randn(4, model.layer.in_features, generator=generator, dtype=torch.float64)
        (model(x) - x).square().mean().backward()
        optimizer.step()


def gossiped(spec: str, world: World) -> Tensor:
    model = Slow(8)
    with torch.no_grad():
        model.layer.weight.fill_(0.1)
        model.layer.bias.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    replica = un.parallel(model, optimizer, spec, world=world)
    steps(model, optimizer, world.rank, 8)
    ended = model.layer.weight.detach().clone()
    replica.close()
    return ended


SPECS = ["gossip", "gossip(shift_one)", "gossip(exponential)", "gossip(all)", "gossip(bits=8)"]


def test_processes_and_threads_give_the_same_bits() -> None:
    torch.set_num_threads(1)

    def work() -> list[Tensor]:
        torch.set_num_threads(1)
        return [gossiped(spec, un.join()) for spec in SPECS]

    threads = run_threads(lambda world: [gossiped(spec, world) for spec in SPECS], 4)
    for rank, (ones, others) in enumerate(zip(un.launch(work, 4), threads, strict=True)):
        for spec, one, other in zip(SPECS, ones, others, strict=True):
            assert torch.equal(one, other), f"{spec} on rank {rank}"


@pytest.mark.alone
def test_gossip_hides_behind_compute() -> None:
    def work() -> tuple[float, float]:
        torch.set_num_threads(1)
        world = un.join()
        model = Slow(300, takes_s=0.05)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        replica = un.parallel(model, optimizer, "gossip(exponential)", world=world)
        steps(model, optimizer, world.rank, 15)
        replica.close()
        sums = world.ledger.totals(last=10)
        return sums.hidden, sums.communication + sums.waiting

    for hidden, shown in un.launch(work, 2):
        assert hidden > 0.8 * (hidden + shown)


def fast_and_slow(slow_s: float) -> list[tuple[float, int]]:
    def work() -> tuple[float, int]:
        torch.set_num_threads(1)
        world = un.join()
        model = Slow(32, takes_s=slow_s if world.rank == 2 else 0.02)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        replica: Any = un.parallel(model, optimizer, "async_average(every_s=0.05)", world=world)
        steps(model, optimizer, world.rank, 5)
        world.barrier()
        began = time.perf_counter()
        steps(model, optimizer, world.rank, 30)
        took = time.perf_counter() - began
        rounds = replica.rounds
        world.barrier()  # and no close(): the process just ends
        return took, rounds

    return un.launch(work, 3)


@pytest.mark.alone
def test_a_slow_worker_does_not_slow_the_others() -> None:
    even, uneven = fast_and_slow(0.02), fast_and_slow(0.08)
    for (alone, _), (beside, rounds) in zip(even[:2], uneven[:2], strict=True):
        assert beside < 1.5 * alone, "0.9 of the speed on a quiet machine; a slow one would take 4 times as long"
        assert rounds >= 2


def test_a_worker_that_ends_early_leaves_the_others_training() -> None:
    def work() -> int:
        torch.set_num_threads(1)
        world = un.join()
        model = Slow(8, takes_s=0.005)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        replica: Any = un.parallel(model, optimizer, "async_average(every_s=0.01)", world=world)
        steps(model, optimizer, world.rank, 5 if world.rank == 0 else 60)
        if world.rank == 0:
            replica.close()
        return int(replica.step)

    assert un.launch(work, 3) == [5, 60, 60]
