"""What every strategy must do, in worlds of threads. A new file adds its own tests: see conftest.py."""

from __future__ import annotations

import contextlib
import copy
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono as un
from method_cases import Case
from unisono import packing
from unisono.methods.spec import build, describe
from unisono.world import World
from unisono.world.virtual import run_threads

KIND = "strategy"
TIGHT = 1e-12
EACH = 3  # samples a rank and step
sizes = pytest.mark.parametrize("size", [1, 3])  # two ranks are in the tests of ends and of checkpoints


def make(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def optimizer_of(case: Case | None, model: nn.Module) -> torch.optim.Optimizer:
    if case is not None and case.facts.needs_adam:
        return torch.optim.AdamW(model.parameters(), lr=0.01)
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


MODELS = threading.Lock()  # torch.manual_seed is the process's: one thread makes a model at a time


def started(case: Case, world: World, seed: int = 0, **settings: Any) -> tuple[nn.Module, Any, un.Replica]:
    with MODELS:
        model = make(seed)
    optimizer = optimizer_of(case, model)
    return model, optimizer, un.parallel(model, optimizer, case.spec, world=world, **settings)


def batch(step: int, rank: int, n: int = EACH) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(n, 4, generator=generator, dtype=torch.float64)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def train(model: nn.Module, optimizer: Any, rank: int, steps: range, clip: float | None = None) -> None:
    for t in steps:
        optimizer.zero_grad()
        loss_of(model, batch(t, rank)).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


def values(model: nn.Module) -> list[Tensor]:
    return [x.detach().clone() for x in model.state_dict().values()]


def assert_same(a: list[Tensor], b: list[Tensor], *, tolerance: float = 0.0) -> None:
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


def one_process(ranks_at: Callable[[int], list[int]], steps: int, clip: float | None = None) -> nn.Module:
    """The reference: plain PyTorch on the joined batches."""
    with MODELS:
        model = make()
    optimizer = optimizer_of(None, model)
    for t in range(steps):
        optimizer.zero_grad()
        loss_of(model, torch.cat([batch(t, rank) for rank in ranks_at(t)])).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model


# Training ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "clip"), [(1, 0.05), (2, 0.05), (3, None)])
def test_all_ranks_end_alike_and_as_one_process_would(case: Case, size: int, clip: float | None) -> None:
    def work(world: World) -> tuple[list[Tensor], int]:
        model, optimizer, replica = started(case, world, seed=world.rank)  # rank 0's start counts
        train(model, optimizer, world.rank, range(6), clip)
        ended = values(replica.consolidate()), replica.step
        replica.close()
        return ended

    results = run_threads(work, size)
    for result, steps in results:
        assert_same(result, results[0][0])
        assert steps == 6
    if case.example.exact:
        reference = one_process(lambda t: list(range(size)), 6, clip)
        assert_same(results[0][0], values(reference), tolerance=TIGHT)


def test_a_world_of_one_is_the_bare_loop(case: Case) -> None:
    if not case.example.exact:
        pytest.skip("compresses also where it is alone")
    model, optimizer, replica = started(case, World())
    bare = one_process(lambda t: [0], 5)
    train(model, optimizer, 0, range(5))
    assert_same(values(replica.consolidate()), values(bare))


@pytest.mark.parametrize(
    ("size", "windows"),
    [(1, [2, 2, 1]), (2, [2, 2, 2]), (3, [2, 2, 1])],
    ids=["1-short last window", "2-even", "3-short last window"],
)
def test_accumulation(case: Case, size: int, windows: list[int]) -> None:
    def work(world: World) -> list[Tensor]:
        model, optimizer, replica = started(case, world)
        for w, passes in enumerate(windows):
            optimizer.zero_grad()
            for k in range(passes):
                with replica.no_sync() if k < passes - 1 else contextlib.nullcontext():
                    loss_of(model, batch(10 * w + k, world.rank)).backward()
            optimizer.step()
        ended = values(replica.consolidate())
        replica.close()
        return ended

    results = run_threads(work, size)
    for result in results:
        assert_same(result, results[0])
    if case.example.exact:
        with MODELS:
            model = make()
        optimizer = optimizer_of(case, model)
        for w, passes in enumerate(windows):
            optimizer.zero_grad()
            for k in range(passes):
                loss_of(model, torch.cat([batch(10 * w + k, rank) for rank in range(size)])).backward()
            optimizer.step()
        assert_same(results[0], values(model), tolerance=TIGHT)


@sizes
def test_overflow_on_one_rank_skips_the_step_on_all_that_share_gradients(case: Case, size: int) -> None:
    def work(world: World) -> tuple[list[Tensor], list[float], int]:
        model, optimizer, replica = started(case, world)
        assert replica.own_gradients == case.facts.own_gradients
        scaler, scales = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=100), []
        replica.watch(scaler)
        for t in range(4):
            optimizer.zero_grad()
            x = batch(t, world.rank) * (float("inf") if t == 1 and world.rank == size - 1 else 1.0)
            scaler.scale(loss_of(model, x)).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        ended = values(replica.consolidate()), scales, replica.step
        replica.close()
        return ended

    results = run_threads(work, size)
    for rank, (parameters, scales, _) in enumerate(results):
        assert_same(parameters, results[0][0])
        assert all(torch.isfinite(x).all() for x in parameters)
        alone = case.facts.own_gradients and rank != size - 1
        assert scales == ([64.0] * 4 if alone else [64.0, 32.0, 32.0, 32.0])
    if size > 1:  # alone, nothing sees a backward pass whose step is skipped
        assert results[0][2] == 4, "a window counts, also where its optimizer step was skipped"


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList([nn.Linear(4, 2) for _ in range(3)])
        self.never = nn.Linear(4, 2)

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.ways[which](x)


@sizes
def test_parameters_unused_on_some_ranks_or_all(case: Case, size: int) -> None:
    def work(world: World) -> list[Tensor]:
        with MODELS:
            torch.manual_seed(0)
            model = Branches().double()
        before = model.state_dict()["never.weight"].detach().clone()
        optimizer = optimizer_of(case, model)
        replica = un.parallel(model, optimizer, case.spec, world=world)
        for t in range(4):
            optimizer.zero_grad()
            model(batch(t, world.rank), (world.rank + t) % 3).square().mean().backward()
            optimizer.step()
        assert model.never.weight.grad is None
        assert_same([model.state_dict()["never.weight"]], [before], tolerance=1e-6 if case.example.rounds_mean else 0.0)
        ended = values(replica.consolidate())
        replica.close()
        return ended

    results = run_threads(work, size)
    for result in results:
        assert_same(result, results[0])


# State ---------------------------------------------------------------------------------------------------------


@sizes
def test_a_saved_run_goes_on_bit_by_bit(case: Case, size: int) -> None:
    if case.example.varies and size > 1:
        pytest.skip("two runs differ")

    def work(world: World) -> None:
        model, optimizer, replica = started(case, world)
        train(model, optimizer, world.rank, range(3))
        saved = packing.to_bytes(
            {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict(), "replica": replica.state_dict()}
        )
        train(model, optimizer, world.rank, range(3, 6))
        other, other_optimizer, other_replica = started(case, world, seed=5)
        loaded = packing.from_bytes(saved)
        other.load_state_dict(loaded["model"])
        other_optimizer.load_state_dict(loaded["optimizer"])
        other_replica.load_state_dict(loaded["replica"], same_world=True)
        assert other_replica.step == 3
        train(other, other_optimizer, world.rank, range(3, 6))
        assert_same(values(other), values(model))
        assert_same(values(other_replica.consolidate()), values(replica.consolidate()))
        assert other_replica.step == replica.step == 6
        first, second = packing.to_bytes(replica.state_dict()), packing.to_bytes(other_replica.state_dict())
        assert first == second
        replica.close()
        other_replica.close()

    run_threads(work, size)


class Normalised(nn.Module):
    """Has buffers that differ from rank to rank, and a parameter with two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.again = self.first.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x)))) + self.again.sum()


@pytest.mark.parametrize("size", [1, 2])
def test_a_checkpoint_gives_others_what_consolidate_gives(case: Case, size: int, tmp_path: Path) -> None:
    """Plain PyTorch, and another strategy in another world; where the ranks' parts of a batch differ in size, too."""

    def work(world: World) -> list[dict[str, Tensor]]:
        with MODELS:
            torch.manual_seed(0)
            model = Normalised().double()
        optimizer = optimizer_of(case, model)
        replica, found = un.parallel(model, optimizer, case.spec, world=world), []
        for t in range(4):
            parts = [2 + (t + rank) % size for rank in range(size)]
            world.weight = parts[world.rank] * size / sum(parts)
            optimizer.zero_grad()
            loss_of(model, batch(t, world.rank, parts[world.rank])).backward()
            optimizer.step()
            if t >= 2:  # after an exchange, and between two
                un.save(tmp_path / str(t), replica)
                consolidated = replica.consolidate()
                replica.restore()
                found.append({name: x.clone() for name, x in consolidated.state_dict().items()})
                replica.split_again()
        world.weight = 1.0
        replica.close()
        return found

    for t, wanted in enumerate(run_threads(work, size)[0], 2):
        model = Normalised().double()
        other = un.parallel(model, optimizer_of(case, model), "allreduce", world=World())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says what became a mean
            read = un.read_checkpoint(tmp_path / str(t))["model"]
            un.load(tmp_path / str(t), other)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(read[name], wanted[name], rtol=TIGHT, atol=TIGHT)
            torch.testing.assert_close(value, wanted[name], rtol=TIGHT, atol=TIGHT)


def test_a_world_that_shrinks_and_grows(case: Case) -> None:
    """4 ranks for 2 steps, 2 for 2, 4 again for 3; of those that leave, rank 1 comes back as it left, and rank 3 as a
    new process: both are brought up to date."""
    if case.example.splits_state:
        pytest.skip("a rank that leaves takes its part along: see tests/unit/test_zero.py")

    def work(world: World) -> tuple[list[Tensor], list[Any], list[str], int, int]:
        model, optimizer, replica = started(case, world)
        train(model, optimizer, world.rank, range(2))
        smaller = world.split([[0, 2], [1], [3]])
        told = []
        if world.rank == 3:
            replica.close()
        world.barrier()  # it has left before the others go on: what it closes may need them
        if world.rank in (0, 2):
            told.append(replica.rebind(smaller))
            train(model, optimizer, world.rank, range(2, 4))
        elif world.rank == 3:
            model, optimizer, replica = started(case, World(), seed=9)
        elif not case.example.one_model:
            with torch.no_grad():
                for x in model.parameters():
                    if type(x) is nn.Parameter:  # to write to one that is split takes all ranks
                        x.add_(1.0)
        again = world.split([[0, 1, 2, 3]])
        told.append(replica.rebind(again, source=0))
        train(model, optimizer, world.rank, range(4, 7))
        replica.restore()
        model_now = replica.consolidate()
        kind = "exp_avg" if case.facts.needs_adam else "momentum_buffer"
        momenta = [optimizer.state[p][kind].clone() for p in model.parameters()]
        ended = values(model_now), momenta, told, replica.step, again.ledger.step_count
        replica.close()
        return ended

    results = run_threads(work, 4)
    for parameters, momenta, told, step, steps in results:
        assert_same(parameters, results[0][0])
        if not case.facts.own_gradients:
            assert_same(momenta, results[0][1])
        assert step == steps == 7
        for text in told:
            assert isinstance(text, str)
            assert len(text.split()) > 3, f"rebind must say what it did, got {text!r}"
    if case.example.exact:
        reference = one_process(lambda t: [0, 2] if t in (2, 3) else [0, 1, 2, 3], 7)
        assert_same(results[0][0], values(reference), tolerance=TIGHT)


def test_a_world_that_shrinks_to_one(case: Case) -> None:
    if case.example.splits_state:
        pytest.skip("a rank that leaves takes its part along: see tests/unit/test_zero.py")

    def work(world: World) -> list[Tensor] | None:
        model, optimizer, replica = started(case, world)
        train(model, optimizer, world.rank, range(2))
        alone = world.split([[0], [1]])
        if world.rank == 1:
            return None
        replica.rebind(alone)
        train(model, optimizer, 0, range(2, 4))
        return values(replica.consolidate())

    result = run_threads(work, 2)[0]
    assert result is not None
    if case.example.exact:
        assert_same(result, values(one_process(lambda t: [0, 1] if t < 2 else [0], 4)), tolerance=TIGHT)


def test_gradients_of_the_former_world_are_not_stepped(case: Case) -> None:
    """A rank that comes has none: a step with what others still have would count it as zero."""

    def work(world: World) -> list[Tensor]:
        model, optimizer, replica = started(case, world)
        loss_of(model, batch(0, world.rank)).backward()
        replica.rebind(world.split([[0, 1]]))
        optimizer.step()
        train(model, optimizer, world.rank, range(2))
        return values(replica.consolidate())

    results = run_threads(work, 2)
    assert_same(results[0], results[1])
    if case.example.exact:
        assert_same(results[0], values(one_process(lambda t: [0, 1], 2)), tolerance=TIGHT)


# Settings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2])  # settings are checked before anything is said to other ranks
def test_bad_settings_are_refused_with_the_reason(refusal: tuple[Case, str], size: int) -> None:
    case, setting = refusal

    def work(world: World) -> None:
        model = make()
        with pytest.raises((ValueError, TypeError), match=case.facts.refuses[setting]):
            un.parallel(model, optimizer_of(case, model), f"{case.name}({setting})", world=world)
        replica = un.parallel(model, optimizer_of(case, model), case.spec, world=world)  # nothing of it was left behind
        replica.close()

    run_threads(work, size)


def test_its_spec_builds_it_again_and_it_cannot_be_changed(case: Case) -> None:
    strategy = build(case.spec)
    assert build(describe(strategy)) == strategy
    assert copy.copy(strategy) == strategy
    with pytest.raises(AttributeError):
        strategy.something = 1


def test_after_close_the_model_is_an_ordinary_one(case: Case) -> None:
    def work(world: World) -> None:
        model, optimizer, replica = started(case, world)
        train(model, optimizer, world.rank, range(2))
        replica.restore()
        replica.close()
        twin = copy.deepcopy(model)
        optimizer.zero_grad()
        loss_of(model, batch(9, world.rank)).backward()
        loss_of(twin, batch(9, world.rank)).backward()
        assert_same([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
        optimizer.step()

    run_threads(work, 2)
