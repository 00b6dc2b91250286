"""Hogwild in worlds of threads: one model, steps without locks."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono as un
from unisono.world import World
from unisono.world.virtual import run_threads

MODELS = threading.Lock()


class SparseLeastSquares(nn.Module):
    """y = sum of a few rows of w: each sample touches `few` of `n` weights, and its gradient is sparse."""

    def __init__(self, n: int, sparse: bool) -> None:
        super().__init__()
        self.w = nn.Embedding(n, 1, sparse=sparse, dtype=torch.float64)
        nn.init.zeros_(self.w.weight)

    def forward(self, rows: Tensor) -> Tensor:
        return self.w(rows).sum(1).squeeze(1)


def task(n: int = 60, samples: int = 180, few: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    truth = torch.randn(n, 1, generator=generator, dtype=torch.float64)
    rows = torch.randint(n, (samples, few), generator=generator)
    return rows, truth[rows].sum(1).squeeze(1), truth


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("size", [1, 3])
def test_sparse_least_squares_converges(sparse: bool, size: int) -> None:
    rows, y, _ = task()

    def work(world: World) -> tuple[float, Tensor]:
        model = SparseLeastSquares(60, sparse)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        replica = un.parallel(model, optimizer, "hogwild", world=world)
        for _ in range(15):
            for a, b in un.shard((rows, y), batch_size=3 * size, seed=2, world=world):
                optimizer.zero_grad()
                (model(a) - b).square().sum().mul(0.5).backward()
                optimizer.step()
        whole = replica.consolidate()
        with torch.no_grad():
            loss = (whole(rows) - y).square().mean().item()
        replica.close()
        return loss, whole.w.weight.detach()

    results = run_threads(work, size)
    for loss, weights in results:
        assert loss < 1e-3 * y.square().mean().item()
        assert torch.equal(weights, results[0][1])


def make(seed: int) -> nn.Module:
    with MODELS:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 2)).double()


def started(world: World, seed: int = 0) -> tuple[nn.Module, Any, Any]:
    model = make(seed).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, optimizer, un.parallel(model, optimizer, "hogwild", world=world)


def step(model: nn.Module, optimizer: Any, t: int) -> None:
    x = torch.randn(4, 2, 3, 3, generator=torch.Generator().manual_seed(t), dtype=torch.float64)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def values(model: nn.Module) -> list[Tensor]:
    return [x.detach().clone() for x in model.state_dict().values()]


@pytest.mark.filterwarnings("ignore:another optimizer")  # its steps would be exchanges
def test_one_worker_at_a_time_is_one_process() -> None:
    """Steps that take turns are those of one process: what one worker writes, the next one reads."""

    def work(world: World) -> list[Tensor]:
        model, _, replica = started(world, seed=world.rank)
        plain = torch.optim.SGD(model.parameters(), lr=0.05)
        for t in range(6):
            if t % world.size == world.rank:
                step(model, plain, t)
            world.barrier()
        ended = [p.detach().clone() for p in model.parameters()]
        replica.close()
        return ended

    reference = make(0)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.05)
    for t in range(6):
        step(reference, optimizer, t)
    for found in run_threads(work, 3):
        for x, y in zip(found, reference.parameters(), strict=True):
            torch.testing.assert_close(x, y.detach(), rtol=1e-12, atol=1e-12)


def test_consolidated_models_are_equal_and_apart_from_training() -> None:
    def work(world: World) -> list[Tensor]:
        model, optimizer, replica = started(world)
        for t in range(4):
            step(model, optimizer, 10 * t + world.rank)
        whole = replica.consolidate()
        kept = values(whole)
        step(model, optimizer, 99)
        assert all(torch.equal(a, b) for a, b in zip(kept, values(whole), strict=True))
        replica.close()
        step(model, optimizer, 98)  # an ordinary model again
        return kept

    results = run_threads(work, 3)
    for kept in results:
        assert all(torch.equal(a, b) for a, b in zip(kept, results[0], strict=True))


@pytest.mark.parametrize("size", [3, 2])
def test_a_checkpoint_has_one_model_and_every_workers_momenta(tmp_path: Path, size: int) -> None:
    def before(world: World) -> tuple[list[Tensor], list[Tensor]]:
        model, optimizer, replica = started(world)
        for t in range(4):
            step(model, optimizer, 10 * t + world.rank)
        un.save(tmp_path, replica)
        momenta = [optimizer.state[p]["momentum_buffer"].clone() for p in model.parameters()]
        ended = [p.detach().clone() for p in model.parameters()]
        replica.close()
        return ended, momenta

    def after(world: World) -> tuple[list[Tensor], list[Tensor], int]:
        model, optimizer, replica = started(world, seed=4)
        un.load(tmp_path, replica)
        momenta = [optimizer.state[p]["momentum_buffer"].clone() for p in model.parameters()]
        ended = [p.detach().clone() for p in model.parameters()], momenta, replica.step
        world.barrier()
        step(model, optimizer, world.rank)
        replica.close()
        return ended

    saved = run_threads(before, 3)
    context = pytest.warns(UserWarning, match="mean") if size == 2 else None
    if context is None:
        loaded = run_threads(after, size)
    else:
        with context:
            loaded = run_threads(after, size)
    for rank, (params, momenta, steps) in enumerate(loaded):
        assert steps == 4
        assert all(torch.equal(a, b) for a, b in zip(params, saved[0][0], strict=True))
        if size == 3:
            assert all(torch.equal(a, b) for a, b in zip(momenta, saved[rank][1], strict=True))


def test_a_world_that_shrinks_and_grows_shares_one_model() -> None:
    def work(world: World) -> tuple[list[Tensor], int]:
        model, optimizer, replica = started(world)
        step(model, optimizer, world.rank)
        smaller = world.split([[0, 1, 2], [3]])
        if world.rank < 3:
            assert "rank 0 of 3" in replica.rebind(smaller)
            step(model, optimizer, 10 + world.rank)
        told = replica.rebind(world.split([[0, 1, 2, 3]]))
        assert "rank 0 of 4" in told
        step(model, optimizer, 20 + world.rank)
        ended = values(replica.consolidate()), replica.step
        replica.close()
        return ended

    results = run_threads(work, 4)
    for params, steps in results:
        assert steps == 3
        assert all(torch.equal(a, b) for a, b in zip(params, results[0][0], strict=True))


def test_an_overflow_skips_the_step_of_its_worker_only() -> None:
    def work(world: World) -> tuple[float, int]:
        model, optimizer, replica = started(world)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=100)
        for t in range(3):
            optimizer.zero_grad()
            x = torch.ones(4, 2, 3, 3, dtype=torch.float64) * (float("inf") if (t, world.rank) == (1, 1) else 1.0)
            scaler.scale(model(x).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        assert all(torch.isfinite(p).all() for p in replica.consolidate().parameters())
        ended = scaler.get_scale(), replica.step
        replica.close()
        return ended

    assert run_threads(work, 2) == [(64.0, 3), (32.0, 3)]


def test_several_hosts_devices_and_bad_settings_are_refused() -> None:
    def work(world: World) -> None:
        model = nn.Linear(2, 1)
        with pytest.raises(ValueError, match="one host"):
            un.parallel(model, torch.optim.SGD(model.parameters(), lr=0.1), "hogwild", world=world)

    run_threads(work, 2, hosts=["a", "b"])
    for setting in ("accumulate=0", "accumulate=-1"):
        model = nn.Linear(2, 1)
        with pytest.raises(ValueError, match="accumulate"):
            un.parallel(model, torch.optim.SGD(model.parameters(), lr=0.1), f"hogwild({setting})", world=World())
    model = nn.Linear(2, 1, device="meta")
    with pytest.raises(ValueError, match="memory of the host"):
        un.parallel(model, torch.optim.SGD(model.parameters(), lr=0.1), "hogwild", world=World())
