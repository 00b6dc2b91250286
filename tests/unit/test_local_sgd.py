"""Local SGD against plain PyTorch: N workers simulated in one process, in float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono as un
from unisono.world import World
from unisono.world.virtual import run_threads

BATCH = 4


def make(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / 2)
    return model


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(BATCH, 4, generator=torch.Generator().manual_seed(1000 * step + rank), dtype=torch.float64)


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    dtype = next(model.parameters()).dtype
    return model(batch(step, rank).to(dtype)).square().mean()


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for t in steps:
        optimizer.zero_grad()
        loss_of(model, t, rank).backward()
        optimizer.step()


def params(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def close(a: list[Tensor], b: list[Tensor], tolerance: float = 1e-12) -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


@torch.no_grad()
def mean_of(models: list[nn.Module]) -> list[Tensor]:
    return [torch.stack(list(same)).mean(0) for same in zip(*(m.parameters() for m in models), strict=True)]


@torch.no_grad()
def put(model: nn.Module, values: list[Tensor]) -> None:
    for p, value in zip(model.parameters(), values, strict=True):
        p.copy_(value)


def reference(
    size: int,
    steps: int,
    meets: Callable[[int], bool],
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    momentum: bool = False,
) -> list[nn.Module]:
    """Every worker's model after `steps` windows; after window t (from 1) they average if `meets(t)`."""
    models = [make() for _ in range(size)]
    optimizers = [optimizer(m) for m in models]
    for t in range(steps):
        for rank, (m, o) in enumerate(zip(models, optimizers, strict=True)):
            train(m, o, rank, range(t, t + 1))
        if meets(t + 1):
            agreed = mean_of(models)
            for m in models:
                put(m, agreed)
            if momentum:
                for k, p in enumerate(models[0].parameters()):
                    for key, value in optimizers[0].state[p].items():
                        if value.shape == p.shape:
                            states = [
                                o.state[list(m.parameters())[k]][key] for m, o in zip(models, optimizers, strict=True)
                            ]
                            mean = torch.stack(states).mean(0)
                            for state in states:
                                state.copy_(mean)
    return models


def run(size: int, steps: int, spec: str, optimizer: Callable[[nn.Module], Any] = sgd) -> list[list[Tensor]]:
    """Every rank's own parameters at the end."""

    def work(world: World) -> list[Tensor]:
        model = make()
        chosen = optimizer(model)
        replica = un.parallel(model, chosen, spec, world=world)
        train(model, chosen, world.rank, range(steps))
        assert replica.step == steps
        replica.close()
        return params(model)

    return run_threads(work, size)


# The method -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [sgd, adam])
@pytest.mark.parametrize(("size", "every", "start", "steps"), [(2, 3, 0, 7), (3, 4, 3, 11), (3, 1, 0, 4), (1, 3, 0, 5)])
def test_it_is_what_workers_that_average_every_h_windows_do(
    size: int, every: int, start: int, steps: int, optimizer: Callable[[nn.Module], Any]
) -> None:
    got = run(size, steps, f"local_sgd(every={every}, start={start}, bucket_bytes=256)", optimizer)
    wanted = reference(size, steps, lambda t: t <= start or (t - start) % every == 0, optimizer)
    for mine, theirs in zip(got, wanted, strict=True):
        close(mine, params(theirs))


@pytest.mark.parametrize("size", [2, 3])
def test_h_of_one_with_plain_sgd_is_all_reduce(size: int) -> None:
    plain = lambda model: sgd(model, momentum=0.0, weight_decay=0.01)  # noqa: E731
    local = run(size, 6, "local_sgd(every=1, start=0)", plain)
    exact = run(size, 6, "allreduce", plain)
    joined = make()
    optimizer = plain(joined)
    for t in range(6):
        optimizer.zero_grad()
        joined(torch.cat([batch(t, rank) for rank in range(size)])).square().mean().backward()
        optimizer.step()
    for mine, theirs in zip(local, exact, strict=True):
        close(mine, theirs)
        close(mine, params(joined))


@pytest.mark.parametrize("every", [1, 4, 7])
def test_on_quadratics_the_mean_contracts_by_its_closed_form(every: int) -> None:
    """On a/2 (x - b_i)^2: mean x <- mean b + (1 - lr a)^H (mean x - mean b), and all workers are there."""
    a, lr, targets = 0.8, 0.3, torch.tensor([[1.0, -2.0], [3.0, 5.0], [-4.0, 0.5]], dtype=torch.float64)

    class Point(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = nn.Parameter(torch.tensor([10.0, -7.0], dtype=torch.float64))

        def forward(self, target: Tensor) -> Tensor:
            return a / 2 * (self.x - target).square().sum()

    def work(world: World) -> list[Tensor]:
        model = Point()
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        replica = un.parallel(model, optimizer, f"local_sgd(every={every}, start=0)", world=world)
        seen = [model.x.detach().clone()]
        for t in range(3 * every):
            optimizer.zero_grad()
            model(targets[world.rank]).backward()
            optimizer.step()
            if (t + 1) % every == 0:
                seen.append(model.x.detach().clone())
        replica.close()
        return seen

    b = targets.mean(0)
    for seen in run_threads(work, 3):
        for before, after in itertools.pairwise(seen):
            torch.testing.assert_close(after, b + (1 - lr * a) ** every * (before - b), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("optimizer", [sgd, adam])
def test_momentum_is_averaged_with_the_parameters(optimizer: Callable[[nn.Module], Any]) -> None:
    got = run(3, 8, "local_sgd(every=3, start=0, momentum=average)", optimizer)
    for mine, theirs in zip(got, reference(3, 8, lambda t: t % 3 == 0, optimizer, momentum=True), strict=True):
        close(mine, params(theirs))


def test_momentum_that_one_rank_does_not_have_yet_stays_local() -> None:
    def work(world: World) -> list[Tensor]:
        model = nn.ModuleList([nn.Linear(2, 2).double(), nn.Linear(2, 2).double()])
        optimizer = adam(model)
        replica = un.parallel(model, optimizer, "local_sgd(every=2, start=0, momentum=average)", world=world)
        for t in range(4):
            optimizer.zero_grad()
            used = model if world.rank or t > 1 else model[:1]
            sum(part(batch(t, world.rank)[:, :2]).square().mean() for part in used).backward()
            optimizer.step()
        replica.close()
        return [optimizer.state[p]["exp_avg"].clone() for p in model.parameters()]

    first, second = run_threads(work, 2)
    close(first, second, 0.0)


def test_post_local_begins_when_a_learning_rate_falls_on_any_rank() -> None:
    def work(world: World) -> tuple[list[int], int]:
        model = make()
        optimizer = sgd(model)
        replica = un.parallel(model, optimizer, "local_sgd(every=4, start=decay)", world=world)
        met = []
        for t in range(12):
            train(model, optimizer, world.rank, range(t, t + 1))
            others = world.gather_objects(params(model))
            if all(torch.equal(x, y) for x, y in zip(others[0], others[1], strict=True)):
                met.append(t + 1)
            if t == 2 and world.rank == 1:  # seen by rank 1 after window 4
                optimizer.param_groups[0]["lr"] /= 10
        replica.close()
        told = [event.values["since"] for event in world.ledger.events if event.kind == "local phase"]
        return met, told[0]

    for met, since in run_threads(work, 2):
        assert met == [1, 2, 3, 4, 8, 12]
        assert since == 4


def test_bytes_are_those_of_an_all_reduce_every_h_windows() -> None:
    size, every, windows = 4, 5, 20

    def work(world: World) -> int:
        model = nn.Linear(64, 32)  # 64 * 32 + 32 = 2080 numbers: no padding
        optimizer = sgd(model)
        replica = un.parallel(model, optimizer, f"local_sgd(every={every}, start=0)", world=world)
        for _ in range(windows):
            optimizer.zero_grad()
            model(torch.ones(2, 64)).square().mean().backward()
            optimizer.step()
        replica.close()
        return sum(row.bytes_sent for row in world.ledger.rows) + sum(
            r.bytes_sent for r in world.ledger.records if r.step == windows and r.tag != "stragglers"
        )

    for sent in run_threads(work, size):
        assert sent == math.ceil(2 * (size - 1) / size * 4 * 2080) * windows // every


# Reducers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reducer", ["topk(k=0.2)", "powersgd(rank=1, min_saving=1.0)", "qsgd(bits=8)", "bf16", "signsgd"]
)
def test_differences_go_through_any_reducer(reducer: str) -> None:
    spec = f"local_sgd(every=2, start=2, reducer={reducer}, bucket_bytes=256)"
    results = run(3, 8, spec, lambda model: sgd(model, momentum=0.0))
    for other in results:
        close(other, results[0], 0.0)
        assert all(torch.isfinite(x).all() for x in other)


def test_what_a_reducer_keeps_back_is_not_lost() -> None:
    """x0 - mean(residual) is what exact averaging of the same differences gives."""

    class Drift(nn.Module):
        """Its gradient does not depend on where it is: so neither do the differences."""

        def __init__(self) -> None:
            super().__init__()
            self.x = nn.Parameter(torch.zeros(6, 8, dtype=torch.float64))

        def forward(self, slope: Tensor) -> Tensor:
            return (self.x * slope).sum()

    def slope(t: int, rank: int) -> Tensor:
        return torch.randn(6, 8, generator=torch.Generator().manual_seed(10 * t + rank), dtype=torch.float64)

    def work(world: World) -> tuple[Tensor, Tensor]:
        model = Drift()
        optimizer = sgd(model, lr=1.0, momentum=0.0)
        replica = un.parallel(model, optimizer, "local_sgd(every=2, start=0, reducer=topk(k=0.2))", world=world)
        for t in range(10):
            optimizer.zero_grad()
            model(slope(t, world.rank)).backward()
            optimizer.step()
        kept = replica.state_dict()["local"]["reducer"][0]["x"]["*residual"].clone()
        replica.close()
        return model.x.detach().clone(), kept

    (x, first), (same, second) = run_threads(work, 2)
    assert torch.equal(x, same)
    assert first.abs().sum() > 0
    exact = -sum(slope(t, rank) for t in range(10) for rank in range(2)) / 2
    torch.testing.assert_close(x - (first + second) / 2, exact, rtol=1e-12, atol=1e-12)


# Other things that training does -----------------------------------------------------------------------------------


@pytest.mark.parametrize("watched", [True, False])
def test_overflow_on_one_rank_skips_its_step_alone_and_the_meeting_is_on_time(watched: bool) -> None:
    size, every = 3, 2

    def work(world: World) -> tuple[list[Tensor], int]:
        model = make()
        optimizer = sgd(model)
        replica = un.parallel(model, optimizer, f"local_sgd(every={every}, start=0)", world=world)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=100)
        if watched:
            replica.watch(scaler)
        for t in range(6):
            optimizer.zero_grad()
            loss = loss_of(model, t, world.rank) * (float("inf") if (t, world.rank) in ((1, 1), (2, 0)) else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        replica.close()
        return params(model), replica.step

    models = [make() for _ in range(size)]
    optimizers = [sgd(m) for m in models]
    for t in range(6):
        for rank, (m, o) in enumerate(zip(models, optimizers, strict=True)):
            if (t, rank) not in ((1, 1), (2, 0)):
                train(m, o, rank, range(t, t + 1))
        if (t + 1) % every == 0:
            agreed = mean_of(models)
            for m in models:
                put(m, agreed)
    for (mine, steps), theirs in zip(run_threads(work, size), models, strict=True):
        close(mine, params(theirs))
        assert steps == 6


def test_windows_of_several_passes_and_a_scheduler() -> None:
    def trained(model: nn.Module, rank: int, optimizer: Any, scheduler: Any, t: int) -> None:
        optimizer.zero_grad()
        for k in range(2):
            (loss_of(model, 10 * t + k, rank) / 2).backward()
        optimizer.step()
        scheduler.step()

    def work(world: World) -> list[Tensor]:
        model = make()
        optimizer = sgd(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        replica = un.parallel(model, optimizer, "local_sgd(every=3, start=1, accumulate=2)", world=world)
        for t in range(7):
            trained(model, world.rank, optimizer, scheduler, t)
        assert replica.step == 7
        replica.close()
        return params(model)

    models = [make() for _ in range(2)]
    optimizers = [sgd(m) for m in models]
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in optimizers]
    for t in range(7):
        for rank, (m, o, s) in enumerate(zip(models, optimizers, schedulers, strict=True)):
            trained(m, rank, o, s, t)
        if t + 1 in (1, 4, 7):
            agreed = mean_of(models)
            for m in models:
                put(m, agreed)
    for mine, theirs in zip(run_threads(work, 2), models, strict=True):
        close(mine, params(theirs))


@pytest.mark.parametrize("how", ["average", "broadcast", "local"])
def test_buffers(how: str) -> None:
    def work(world: World) -> tuple[list[Tensor], list[Tensor]]:
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()
        optimizer = sgd(model)
        replica = un.parallel(model, optimizer, f"local_sgd(every=2, start=0, buffers={how})", world=world)
        train(model, optimizer, world.rank, range(1))
        model[1].running_mean.fill_(float(world.rank))
        model[1].num_batches_tracked.fill_(10 + world.rank)
        loss_of(model.eval(), 1, world.rank).backward()
        optimizer.step()
        here = [b.clone() for b in model.buffers()]
        model[1].running_mean.fill_(float(world.rank))
        there = [b.clone() for b in replica.consolidate().buffers()]
        replica.close()
        return here, there

    results = run_threads(work, 3)
    wanted = {"average": [1.0] * 3, "broadcast": [0.0] * 3, "local": [0.0, 1.0, 2.0]}[how]
    for rank, (here, there) in enumerate(results):
        assert here[0].tolist() == pytest.approx([wanted[rank]] * 3)
        assert here[2].item() == 10 + (rank if how == "local" else 0)
        assert there[0].tolist() == pytest.approx([1.0] * 3)
        close([x.double() for x in there], [x.double() for x in results[0][1]], 0.0)


def test_sixteen_bit_parameters_agree_in_float32() -> None:
    """Anchors add up small changes that bfloat16 would round away, and standing still changes nothing."""

    def work(world: World) -> tuple[list[Tensor], list[Tensor]]:
        model = make(dtype=torch.bfloat16)
        optimizer = sgd(model, lr=0.0)
        replica = un.parallel(model, optimizer, "local_sgd(every=1, start=0)", world=world)
        [fragment] = replica.fragments
        with torch.no_grad():
            for anchor in fragment.anchors.values():
                anchor.add_(anchor * 1e-4)
        before = [a.clone() for a in fragment.anchors.values()]
        train(model, optimizer, world.rank, range(3))
        after = [a.clone() for a in fragment.anchors.values()]
        replica.close()
        assert all(a.dtype == torch.float32 for a in after)
        return before, after

    for before, after in run_threads(work, 3):
        close(before, after, 0.0)


def test_parameters_frozen_and_thawed_on_the_way() -> None:
    def schedule(model: nn.Module, t: int) -> None:
        model[0].weight.requires_grad_(t not in (2, 3, 4))
        model[2].bias.requires_grad_(t >= 3)

    def work(world: World) -> tuple[list[Tensor], int]:
        model = make()
        schedule(model, 0)
        optimizer = sgd(model, momentum=0.0)
        replica = un.parallel(model, optimizer, "local_sgd(every=2, start=0)", world=world)
        for t in range(8):
            schedule(model, t)
            train(model, optimizer, world.rank, range(t, t + 1))
        laid = len([n for f in replica.fragments for n in f.live])
        replica.close()
        return params(model), laid

    models = [make() for _ in range(2)]
    optimizers = [sgd(m, momentum=0.0) for m in models]
    for t in range(8):
        for rank, (m, o) in enumerate(zip(models, optimizers, strict=True)):
            schedule(m, t)
            train(m, o, rank, range(t, t + 1))
        if (t + 1) % 2 == 0:
            agreed = mean_of(models)
            for m in models:
                put(m, agreed)
    for (mine, laid), theirs in zip(run_threads(work, 2), models, strict=True):
        close(mine, params(theirs))
        assert laid == 4


# The model to evaluate, checkpoints, other worlds ---------------------------------------------------------------------


def test_consolidate_gives_the_mean_and_leaves_training_alone() -> None:
    def work(world: World) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        model = make()
        optimizer = sgd(model)
        replica = un.parallel(model, optimizer, "local_sgd(every=4, start=0)", world=world)
        train(model, optimizer, world.rank, range(4))
        assert all(torch.equal(x, y) for x, y in zip(params(replica.consolidate()), params(model), strict=True))
        train(model, optimizer, world.rank, range(4, 6))
        own, agreed = params(model), params(replica.consolidate())
        close(params(model), own, 0.0)
        train(model, optimizer, world.rank, range(6, 8))
        replica.close()
        return own, agreed, params(model)

    results = run_threads(work, 3)
    wanted = reference(3, 8, lambda t: t % 4 == 0)
    mean = [torch.stack([r[0][k] for r in results]).mean(0) for k in range(4)]
    for rank, (_, agreed, ended) in enumerate(results):
        close(agreed, results[0][1], 0.0)
        close(agreed, mean)
        close(ended, params(wanted[rank]))


@pytest.mark.parametrize("reducer", ["dense", "topk(k=0.2)"])
@pytest.mark.parametrize("at", [4, 6])
def test_a_checkpoint_in_mid_phase_goes_on_bit_by_bit(tmp_path: Path, at: int, reducer: str) -> None:
    spec = f"local_sgd(every=4, start=0, reducer={reducer}, momentum=average)"
    optimizer_of = lambda model: sgd(model, momentum=0.0)  # noqa: E731

    def first(world: World) -> list[Tensor]:
        model = make()
        optimizer = optimizer_of(model)
        replica = un.parallel(model, optimizer, spec, world=world)
        train(model, optimizer, world.rank, range(at))
        un.save(tmp_path, replica)
        train(model, optimizer, world.rank, range(at, 10))
        replica.close()
        return params(model)

    def second(world: World) -> list[Tensor]:
        model = make(seed=3)
        optimizer = optimizer_of(model)
        replica = un.parallel(model, optimizer, spec, world=world)
        un.load(tmp_path, replica)
        assert replica.step == at
        train(model, optimizer, world.rank, range(at, 10))
        replica.close()
        return params(model)

    for a, b in zip(run_threads(first, 3), run_threads(second, 3), strict=True):
        close(a, b, 0.0)


def test_a_checkpoint_right_after_a_meeting_holds_the_model_once() -> None:
    def work(world: World) -> None:
        model = make()
        optimizer = sgd(model)
        replica = un.parallel(model, optimizer, "local_sgd(every=2, start=0)", world=world)
        train(model, optimizer, world.rank, range(2))
        assert replica.state_dict()["shared"]["anchors"] is None
        train(model, optimizer, world.rank, range(2, 3))
        assert len(replica.state_dict()["shared"]["anchors"]) == 4
        replica.close()

    run_threads(work, 2)


@pytest.mark.parametrize("new_size", [1, 2, 4])
@pytest.mark.filterwarnings("ignore:.*is of another world size")
def test_a_checkpoint_in_mid_phase_goes_on_from_the_mean_in_a_world_of_another_size(
    tmp_path: Path, new_size: int
) -> None:
    spec = "local_sgd(every=4, start=0)"

    def first(world: World) -> list[Tensor]:
        model = make()
        optimizer = sgd(model, momentum=0.0)
        replica = un.parallel(model, optimizer, spec, world=world)
        train(model, optimizer, world.rank, range(6))
        un.save(tmp_path, replica)
        replica.close()
        return params(model)

    def second(world: World) -> tuple[list[Tensor], list[Tensor]]:
        model = make(seed=3)
        optimizer = sgd(model, momentum=0.0)
        replica = un.parallel(model, optimizer, spec, world=world)
        un.load(tmp_path, replica)
        started = params(model)
        train(model, optimizer, world.rank, range(6, 8))
        replica.close()
        return started, params(model)

    saved = run_threads(first, 3)
    mean = [torch.stack([s[k] for s in saved]).mean(0) for k in range(4)]
    models = [make() for _ in range(new_size)]
    for rank, m in enumerate(models):
        put(m, mean)
        train(m, sgd(m, momentum=0.0), rank, range(6, 8))
    for started, ended in run_threads(second, new_size):
        close(started, mean)
        close(ended, mean_of(models))


@pytest.mark.parametrize("comes_back", ["as it left", "as a new process"])
def test_worlds_that_shrink_and_grow_go_on_from_the_mean_of_those_who_stayed(comes_back: str) -> None:
    """4 ranks, a meeting every 4 windows; rank 3 leaves after window 6 and is back after window 9."""
    spec = "local_sgd(every=4, start=0)"

    def work(world: World) -> tuple[list[list[Tensor]], list[str], int]:
        model = make()
        optimizer = sgd(model, momentum=0.0)
        replica = un.parallel(model, optimizer, spec, world=world)
        train(model, optimizer, world.rank, range(6))
        seen, told = [params(model)], []
        smaller = world.split([[0, 1, 2], [3]])
        if world.rank < 3:
            told.append(replica.rebind(smaller))
            seen.append(params(model))
            train(model, optimizer, world.rank, range(6, 9))
            seen.append(params(model))
        elif comes_back == "as a new process":
            replica.close()
            model = make(seed=5)
            optimizer = sgd(model, momentum=0.0)
            replica = un.parallel(model, optimizer, spec, world=World())
        told.append(replica.rebind(world.split([[0, 1, 2, 3]]), source=1))
        seen.append(params(model))
        train(model, optimizer, world.rank, range(9, 12))
        seen.append(params(model))
        replica.close()
        return seen, told, replica.step

    results = run_threads(work, 4)
    mean = lambda ranks, k: [torch.stack(x).mean(0) for x in zip(*(results[r][0][k] for r in ranks), strict=True)]  # noqa: E731
    for rank in range(3):
        close(results[rank][0][1], mean([0, 1, 2], 0))
        close(results[rank][0][3], mean([0, 1, 2], 2))
    close(results[3][0][1], results[0][0][3], 0.0)
    for seen, told, step in results:
        close(seen[-1], results[0][0][-1], 0.0)  # window 12 is a meeting
        assert step == 12
        assert all("mean of 3 of the" in text for text in told)


# Settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "word"),
    [
        ("every=0", "every"),
        ("every=True", "every"),
        ("start=-1", "start"),
        ("start=soon", "start"),
        ("momentum=both", "momentum"),
        ("buffers=sometimes", "buffers"),
        ("accumulate=0", "accumulate"),
        ("bucket_bytes=0", "bucket_bytes"),
        ("reducer=5", "reducer"),
    ],
)
def test_impossible_settings_are_refused(setting: str, word: str) -> None:
    model = make()
    with pytest.raises((ValueError, TypeError), match=word):
        un.parallel(model, sgd(model), f"local_sgd({setting})", world=World())


def test_alone_it_is_the_bare_loop() -> None:
    got = run(1, 5, "local_sgd(every=2, start=0)")
    model = make()
    train(model, sgd(model), 0, range(5))
    close(got[0], params(model), 0.0)
