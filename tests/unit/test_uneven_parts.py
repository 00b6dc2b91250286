"""Ranks whose parts of a batch differ in size: every sample counts once, whatever is averaged."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono as un
from unisono.methods.strategy import take_weighted_mean
from unisono.world import World
from unisono.world.virtual import run_threads

MODELS = threading.Lock()  # torch.manual_seed is the process's
SAMPLES = torch.randn(44, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
TARGETS = SAMPLES.sum(1, keepdim=True).sin()
VARYING = [[3, 1, 1], [1, 2, 3], [2, 0, 1], [5, 1, 2], [0, 1, 0], [1, 1, 4]]  # samples of each rank, window by window
CONSTANT = [[4, 1, 2]] * 6


def make(norm: bool = False) -> nn.Module:
    with MODELS:
        torch.manual_seed(0)
        middle = nn.BatchNorm1d(8) if norm else nn.Tanh()
        return nn.Sequential(nn.Linear(4, 8), middle, nn.Linear(8, 1)).double()


def plain(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, weight_decay=0.01)


def with_momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def places(parts: Sequence[Sequence[int]], window: int, rank: int) -> range:
    before = sum(map(sum, parts[:window])) + sum(parts[window][:rank])
    return range(before, before + parts[window][rank])


def step(model: nn.Module, optimizer: Any, mine: Sequence[int]) -> None:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(SAMPLES[list(mine)]), TARGETS[list(mine)]).backward()
    optimizer.step()


def train_rank(
    world: World, model: nn.Module, optimizer: Any, parts: Sequence[Sequence[int]], windows: range | None = None
) -> None:
    """As `un.shard` does it: the weight is n_i N / m, and who has no sample computes one that does not count."""
    for t in windows or range(len(parts)):
        world.weight = parts[t][world.rank] * world.size / sum(parts[t])
        step(model, optimizer, places(parts, t, world.rank) or [0])
    world.weight = 1.0


def values(model: nn.Module) -> list[Tensor]:
    return [x.detach().clone() for x in model.state_dict().values()]


def train(
    spec: str, parts: Sequence[Sequence[int]], optimizer_of: Callable[[nn.Module], Any], norm: bool = False
) -> list[Tensor]:
    def work(world: World) -> list[Tensor]:
        model = make(norm)
        optimizer = optimizer_of(model)
        replica = un.parallel(model, optimizer, spec, world=world)
        train_rank(world, model, optimizer, parts)
        ended = values(replica.consolidate())
        replica.close()
        return ended

    first, *others = run_threads(work, len(parts[0]))
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0)
    return first


def one_process(parts: Sequence[Sequence[int]], optimizer_of: Callable[[nn.Module], Any]) -> list[Tensor]:
    model = make()
    optimizer = optimizer_of(model)
    for t in range(len(parts)):
        step(model, optimizer, [i for rank in range(len(parts[t])) for i in places(parts, t, rank)])
    return values(model)


def averaged_by_samples(
    parts: Sequence[Sequence[int]], every: int, optimizer_of: Callable[[nn.Module], Any], norm: bool = False
) -> list[Tensor]:
    """Plain PyTorch: models that train alone; every so often all become their mean, each counted by its samples."""
    models = [make(norm) for _ in parts[0]]
    optimizers, seen = [optimizer_of(model) for model in models], [0.0] * len(models)
    for t in range(len(parts)):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            step(model, optimizer, places(parts, t, rank))
            seen[rank] += parts[t][rank] / sum(parts[t])
        if (t + 1) % every == 0 or t + 1 == len(parts):
            states = [model.state_dict() for model in models]
            for name in states[0]:
                if states[0][name].is_floating_point():
                    mean = sum(s[name] * n for s, n in zip(states, seen, strict=True)) / sum(seen)
                    for state in states:
                        state[name].copy_(mean)
            seen = [0.0] * len(models)
    return values(models[0])


def assert_close(a: list[Tensor], b: list[Tensor]) -> None:
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


# One process on the joined batch ---------------------------------------------------------------------------------

EXACT = ["allreduce", "local_sgd(every=1, start=0)", "diloco(every=1, outer_lr=1.0, outer_momentum=0.0)"]


@pytest.mark.parametrize("spec", EXACT)
def test_with_sgd_the_exchange_of_every_window_is_one_process(spec: str) -> None:
    assert_close(train(spec, VARYING, plain), one_process(VARYING, plain))


@pytest.mark.parametrize("spec", EXACT)
def test_with_momentum_too_where_parts_stay_as_large(spec: str) -> None:
    assert_close(train(spec, CONSTANT, with_momentum), one_process(CONSTANT, with_momentum))


def test_with_averaged_momentum_whatever_the_parts() -> None:
    spec = "local_sgd(every=1, start=0, momentum=average)"
    assert_close(train(spec, VARYING, with_momentum), one_process(VARYING, with_momentum))


def test_a_shard_brings_the_weights() -> None:
    def work(world: World) -> list[Tensor]:
        model = make()
        optimizer = plain(model)
        replica = un.parallel(model, optimizer, "local_sgd(every=1, start=0)", world=world)
        data = un.shard((SAMPLES, TARGETS), 7, shuffle=False, world=world)
        for x, y in data:  # 7 samples are 3, 2 and 2; at the end 2 are 1, 1 and none
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        return values(replica.consolidate())

    model = make()
    optimizer = plain(model)
    for at in range(0, 44, 7):
        step(model, optimizer, range(at, min(at + 7, 44)))
    assert_close(run_threads(work, 3)[0], values(model))


# The mean of models that trained alone ---------------------------------------------------------------------------

UNEVEN = [[3, 2, 4], [2, 2, 3], [2, 4, 3], [5, 3, 2], [2, 3, 2]]  # BatchNorm needs two samples


@pytest.mark.parametrize("every", [2, 3])
@pytest.mark.parametrize(("optimizer_of", "norm"), [(with_momentum, True), (adam, False)])
def test_models_count_by_the_samples_since_the_last_exchange(
    optimizer_of: Callable[[nn.Module], Any], norm: bool, every: int
) -> None:
    wanted = averaged_by_samples(UNEVEN, every, optimizer_of, norm)
    for spec in (f"local_sgd(every={every}, start=0)", f"diloco(every={every}, outer_lr=1.0, outer_momentum=0.0)"):
        assert_close(train(spec, UNEVEN, optimizer_of, norm), wanted)


def test_each_fragment_counts_the_windows_since_its_own_exchange(tmp_path: Path) -> None:
    """Two fragments are exchanged in turn: after window 3, the first has seen one window, the second none."""

    def work(world: World) -> tuple[list[Tensor], list[Tensor]]:
        model = make()
        optimizer = plain(model)
        replica = un.parallel(
            model, optimizer, "diloco(every=2, fragments=2, outer_lr=1.0, outer_momentum=0.0)", world=world
        )
        train_rank(world, model, optimizer, VARYING, range(3))
        return values(replica.consolidate()), values(model)

    results = run_threads(work, 3)
    seen = torch.tensor(VARYING[2]) / sum(VARYING[2])
    for i, mean in enumerate(results[0][0]):
        mine = [own[i] for _, own in results]
        apart = not all(torch.equal(x, mine[0]) for x in mine)
        wanted = sum(n * x for n, x in zip(seen, mine, strict=True)) if apart else mine[0]
        torch.testing.assert_close(mean, wanted, rtol=1e-6, atol=1e-6)
    assert any(not torch.equal(results[0][1][i], results[1][1][i]) for i in range(4)), "some were still apart"


def test_a_rank_that_saw_nothing_does_not_count_and_nobody_seeing_anything_is_a_plain_mean() -> None:
    def work(world: World) -> list[Tensor]:
        alone, x = [], torch.full((2,), float("nan") if world.rank == 1 else world.rank + 1.0)
        take_weighted_mean([x], 0.0 if world.rank == 1 else 0.5, world, tag="test")
        alone.append(x)
        y = torch.full((2,), world.rank + 1.0)
        take_weighted_mean([y], 0.0, world, tag="test")
        return [*alone, y]

    for one, other in run_threads(work, 3):
        assert one.tolist() == [2.0, 2.0]  # of 1 and 3
        assert other.tolist() == [2.0, 2.0]  # of 1, 2 and 3


# A run that is cut ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["local_sgd(every=4, start=0)", "diloco(every=4, fragments=2, delay=1)"])
def test_a_saved_run_goes_on_bit_by_bit(spec: str, tmp_path: Path) -> None:
    def work(world: World) -> None:
        ended = []
        for loads in (False, True):
            model = make(norm=True)
            optimizer = with_momentum(model)
            replica = un.parallel(model, optimizer, spec, world=world)
            if loads:
                un.load(tmp_path, replica)
            else:
                train_rank(world, model, optimizer, UNEVEN, range(2))
                un.save(tmp_path, replica)
            train_rank(world, model, optimizer, UNEVEN, range(2, 5))
            ended.append(values(replica.consolidate()))
            replica.close()
        torch.testing.assert_close(ended[0], ended[1], rtol=0, atol=0)

    run_threads(work, 3)


def test_a_checkpoint_between_two_exchanges_gives_others_the_mean_by_samples(tmp_path: Path) -> None:
    """Against models that plain PyTorch trains, each on a rank's samples, and their mean by how many these were."""
    parts, windows = CONSTANT, range(3)

    def work(world: World) -> None:
        model = make()
        optimizer = plain(model)
        replica = un.parallel(model, optimizer, "local_sgd(every=6, start=0)", world=world)
        train_rank(world, model, optimizer, parts, windows)
        un.save(tmp_path, replica)

    run_threads(work, 3)
    sums = [torch.zeros_like(x) for x in values(make())]
    for rank, count in enumerate(parts[0]):
        model = make()
        optimizer = plain(model)
        for t in windows:
            step(model, optimizer, places(parts, t, rank))
        for total, x in zip(sums, values(model), strict=True):
            total += x * count / sum(parts[0])
    with pytest.warns(UserWarning, match="4 tensors differed between its ranks .* each became their mean"):
        read = un.read_checkpoint(tmp_path)["model"]
    for found, wanted in zip(read.values(), sums, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_in_a_new_world_those_who_stayed_count_by_their_samples() -> None:
    def work(world: World) -> tuple[list[Tensor], list[Tensor]]:
        model = make()
        optimizer = plain(model)
        replica = un.parallel(model, optimizer, "local_sgd(every=9, start=0)", world=world)
        train_rank(world, model, optimizer, VARYING, range(2))
        before, smaller = values(model), world.split([[0, 1], [2]])
        if world.rank < 2:
            replica.rebind(smaller)
        return before, values(model)

    (first, now), (second, _), _ = run_threads(work, 3)
    weights = [3 / 5 + 1 / 6, 1 / 5 + 2 / 6]
    wanted = [(weights[0] * a + weights[1] * b) / sum(weights) for a, b in zip(first, second, strict=True)]
    assert_close(now, wanted)


# Methods whose models have no exchange to count from: gradients are weighed -----------------------------------------


@pytest.mark.parametrize("spec", ["gossip(every=9)", "async_average(every_s=600.0)", "crossbow", "hogwild"])
def test_elsewhere_a_gradient_counts_by_its_part_of_the_batch(spec: str) -> None:
    """One window: every rank's own gradient, times its weight."""

    def work(world: World) -> tuple[list[Tensor], list[Tensor]]:
        model = make()
        replica = un.parallel(model, plain(model), spec, world=world)
        world.weight = VARYING[0][world.rank] * world.size / sum(VARYING[0])
        mine = list(places(VARYING, 0, world.rank))
        alone = copy.deepcopy(make())
        nn.functional.mse_loss(alone(SAMPLES[mine]), TARGETS[mine]).backward()
        nn.functional.mse_loss(model(SAMPLES[mine]), TARGETS[mine]).backward()
        found = [p.grad.clone() for p in model.parameters()]
        wanted = [p.grad * world.weight for p in alone.parameters()]
        world.weight = 1.0
        replica.close()
        return found, wanted

    for found, wanted in run_threads(work, 3):
        assert_close(found, wanted)


def test_learners_side_by_side_count_so_too() -> None:
    def work(world: World) -> list[list[Tensor]]:
        ended = []
        for side_by_side in (False, True):
            model = make()
            optimizer = plain(model)
            replica = un.parallel(model, optimizer, "crossbow", world=world)
            if side_by_side:
                for t in range(2):
                    world.weight = VARYING[t][world.rank] * world.size / sum(VARYING[t])
                    mine = list(places(VARYING, t, world.rank))
                    replica.learn(lambda m, at: nn.functional.mse_loss(m(SAMPLES[at]), TARGETS[at]), [mine])
                world.weight = 1.0
            else:
                train_rank(world, model, optimizer, VARYING, range(2))
            ended.append(values(replica.consolidate()))
            replica.close()
        return ended

    for one, other in run_threads(work, 3):
        assert_close(one, other)


@pytest.mark.parametrize("warmup", [0, 9])
def test_async_average_weighs_a_gradient_once(warmup: int) -> None:
    """In its warm-up the exchange of gradients does it."""
    parts = [VARYING[0]]
    spec = f"async_average(every_s=600.0, warmup={warmup})"
    assert_close(train(spec, parts, plain), one_process(parts, plain))
