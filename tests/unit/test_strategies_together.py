"""Strategies in the situations between them: skipped steps, closures, switching, checkpoints of another strategy."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono as un
from unisono.world import World
from unisono.world.virtual import run_threads

MODELS = threading.Lock()
MEETING = ["local_sgd(every=2, start=0)", "diloco(every=2)", "gossip", "gossip(bits=8)", "crossbow", "parameter_server"]


def net() -> nn.Module:
    with MODELS:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def batch(t: int, rank: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * t + rank), dtype=torch.float64)


def train(model: nn.Module, optimizer: Any, rank: int, steps: range, *, closure: str = "", passes: int = 1) -> None:
    """`closure`: how much of the window's last pass a closure does, "" for none; `passes`: of a step."""
    for t in steps:

        def loss(t: int = t) -> Tensor:
            if t % passes == 0:
                optimizer.zero_grad()
            value: Tensor = model(batch(t, rank)).square().mean()
            value.backward()
            return value

        if t % passes < passes - 1:
            loss()
        elif closure == "the pass":
            optimizer.step(loss)
        else:
            value = loss()
            optimizer.step(*([lambda value=value: value] if closure else []))


def started(world: World, strategy: str) -> tuple[nn.Module, torch.optim.Optimizer, un.Replica]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, un.parallel(model, optimizer, strategy, world=world)


def line(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()])


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("watched", [True, False])
@pytest.mark.parametrize("spec", MEETING)
def test_a_skipped_step_is_a_window_also_where_the_last_parameter_is_unused(spec: str, watched: bool) -> None:
    def work(world: World) -> tuple[int, Tensor]:
        model = net()
        model.unused = nn.Linear(2, 2).double()
        forward = nn.Sequential(*list(model)[:3])
        model.forward = lambda x: forward(x)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = un.parallel(model, optimizer, spec, world=world)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        if watched:
            replica.watch(scaler)
        for t in range(5):
            optimizer.zero_grad()
            loss = model(batch(t, world.rank)).square().mean()
            scaler.scale(loss * float("inf") if t == 2 and world.rank else loss).backward()
            scaler.step(optimizer)
            scaler.update()
        ended = line(replica.consolidate())
        steps = replica.step
        replica.close()
        return steps, ended

    results = run_threads(work, 2, timeout_s=20)
    assert [steps for steps, _ in results] == [5, 5]
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize(("closure", "passes"), [("the pass", 1), ("the pass", 2), ("the loss alone", 1)])
@pytest.mark.parametrize(
    "spec", ["gossip", "gossip(all)", "gossip(overlap=False)", "gossip(exponential, every=2)", "crossbow"]
)
def test_a_closure_changes_nothing(spec: str, closure: str, passes: int) -> None:
    def work(world: World, closure: str) -> Tensor:
        model, optimizer, replica = started(world, spec)
        train(model, optimizer, world.rank, range(6), closure=closure, passes=passes)
        assert replica.step == 6
        ended = line(model)
        replica.consolidate()
        replica.close()
        return ended

    plain, closed = (run_threads(lambda world, c=c: work(world, c), 3) for c in ("", closure))
    for a, b in zip(plain, closed, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-14)


@pytest.mark.parametrize("before", ["parameter_server", "allreduce(bucket_bytes=64)"])
def test_a_replica_that_was_switched_from_weighs_no_gradients(before: str, no_collection: None) -> None:
    def work(world: World) -> None:
        model, optimizer, replica = started(world, before)
        train(model, optimizer, world.rank, range(2))
        former = replica
        replica = replica.switch("allreduce")
        weight, x = 1.5 if world.rank == 0 else 0.5, batch(9, world.rank)
        right = [g * weight for g in torch.autograd.grad(model(x).square().mean(), list(model.parameters()))]
        world.weight = weight
        world.all_reduce(right, "mean").wait()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        for p, g in zip(model.parameters(), right, strict=True):
            torch.testing.assert_close(p.grad, g)
        world.weight = 1.0
        replica.close()
        del former

    run_threads(work, 2)


@pytest.mark.parametrize("after", ["hogwild(accumulate=1)", "parameter_server", "parameter_server(staleness=1)"])
def test_from_hogwild_to_a_strategy_that_keeps_track_of_memory(after: str) -> None:
    def work(world: World) -> tuple[Tensor, Tensor]:
        model, optimizer, replica = started(world, "hogwild")
        train(model, optimizer, world.rank, range(2))
        replica = replica.switch(after)
        world.barrier()
        start = line(model)
        world.barrier()
        train(model, optimizer, world.rank, range(2, 6))
        world.barrier()
        ended = line(replica.consolidate())
        assert (line(model) - start).abs().max() > 1e-3
        if "hogwild" in after:
            assert torch.equal(line(model), ended), "the memory is that of all"
        replica.close()
        return start, ended

    results = run_threads(work, 2, timeout_s=20)
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_the_scaler_goes_over_to_the_next_replica() -> None:
    def work(world: World) -> None:
        _, _, replica = started(world, "topk(k=0.5)")
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        replica.watch(scaler)
        replica = replica.switch("powersgd(rank=1)")
        assert replica.scaler is scaler
        assert replica.reduction.scale() == 64.0
        replica.close()

    run_threads(work, 2)


AFTER = ["allreduce", "shared", "parameter_server", "hogwild", "gossip(bits=8)", "qadam(warmup=2)", "zero(stage=2)"]


@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("before", ["allreduce", "shared", "local_sgd(every=3, start=0)", "hogwild"])
@pytest.mark.parametrize("size", [1, 3])
def test_a_checkpoint_of_another_strategy(before: str, after: str, size: int, tmp_path: Path) -> None:
    def run(world: World, spec: str, *, load: bool) -> Tensor:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        replica = un.parallel(model, optimizer, spec, world=world)
        if load:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                un.load(tmp_path, replica)
            ended = line(replica.consolidate())
            train(model, optimizer, world.rank, range(4, 6))
            every = [torch.tensor(x) for x in world.gather_objects(line(replica.consolidate()).tolist())]
            assert all(torch.equal(x, every[0]) for x in every)
        else:
            train(model, optimizer, world.rank, range(4))
            ended = line(replica.consolidate())
            un.save(tmp_path, replica)
        replica.close()
        return ended

    saved = run_threads(lambda world: run(world, before, load=False), 2)
    for found in run_threads(lambda world: run(world, after, load=True), size):
        torch.testing.assert_close(found, saved[0], rtol=0, atol=1e-9)
