"""Crossbow against plain PyTorch: every learner simulated in one process, in float64, z and z_prev as in the paper."""

from __future__ import annotations

import copy
import math
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import unisono as un
from pairs import cover_pairs
from unisono.methods.spec import build
from unisono.methods.strategies.crossbow.tuning import LearnersTuner, PeriodTuner, Tuning
from unisono.training.batch_norm import sync_batch_norm
from unisono.training.checkpoint.plain import export_model
from unisono.world import World
from unisono.world.virtual import run_threads


def make(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / 2)
    return model


def batch(window: int, rank: int) -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(1000 * window + rank), dtype=torch.float64)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x.to(next(model.parameters()).dtype)).square().mean()


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.5, "weight_decay": 0.01, **options})


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def train(model: nn.Module, optimizer: Any, rank: int, windows: range) -> None:
    for t in windows:
        optimizer.zero_grad()
        loss_of(model, batch(t, rank)).backward()
        optimizer.step()


def params(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


@torch.no_grad()
def put(model: nn.Module, values: list[Tensor]) -> None:
    for p, value in zip(model.parameters(), values, strict=True):
        p.copy_(value)


def close(a: list[Tensor], b: list[Tensor], tolerance: float = 1e-12) -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


class Reference:
    """k learners, each a model of its own with an optimizer of its own, and the central model."""

    def __init__(
        self,
        size: int,
        learners: int,
        *,
        every: int = 1,
        alpha: float | None = None,
        momentum: float = 0.9,
        optimizer: Callable[[nn.Module], Any] = sgd,
    ) -> None:
        self.size, self.count, self.every, self.momentum = size, learners, every, momentum
        self.alpha = alpha if alpha is not None else 1 / (size * learners)
        self.models = {(r, j): make() for r in range(size) for j in range(learners)}
        self.optimizers = {key: optimizer(m) for key, m in self.models.items()}
        self.z = self.z_before = params(make())

    def round(self, t: int, skipped: frozenset[tuple[int, int]] = frozenset(), *, restart: bool = False) -> None:
        """Round t; learner (rank, j) takes window t * learners + j of its rank."""
        before = {key: params(m) for key, m in self.models.items()}
        for (r, j), m in self.models.items():
            if (t * self.count + j, r) not in skipped:
                train(m, self.optimizers[r, j], r, range(t * self.count + j, t * self.count + j + 1))
        if (t + 1) % self.every:
            return
        c = {key: [self.alpha * (w - z) for w, z in zip(ws, self.z, strict=True)] for key, ws in before.items()}
        for key, m in self.models.items():
            put(m, [w - x for w, x in zip(params(m), c[key], strict=True)])
        total = [torch.stack(xs).sum(0) for xs in zip(*c.values(), strict=True)]
        moved = [z + s + self.momentum * (z - b) for z, s, b in zip(self.z, total, self.z_before, strict=True)]
        self.z_before, self.z = self.z, moved
        if restart:
            self.restart()

    def restart(self) -> None:
        self.z_before = self.z
        for m in self.models.values():
            put(m, self.z)

    def rates(self, lr: float) -> None:
        for optimizer in self.optimizers.values():
            optimizer.param_groups[0]["lr"] = lr


def started(spec: str, world: World, optimizer: Callable[[nn.Module], Any] = sgd, seed: int = 0) -> Any:
    model = make(seed)
    chosen = optimizer(model)
    return model, chosen, un.parallel(model, chosen, spec, world=world)


def seen(replica: Any) -> tuple[list[Tensor], list[list[Tensor]]]:
    """The central model, and every learner here."""
    replica.meet_if_due()
    own = [[w.clone() for w in replica.learners.params(j)] for j in range(replica.learners.count)]
    return params(replica.consolidate()), own


def check_all(results: list[tuple[list[Tensor], list[list[Tensor]]]], reference: Reference) -> None:
    for rank, (z, own) in enumerate(results):
        close(z, results[0][0], 0.0)
        close(z, reference.z)
        for j, w in enumerate(own):
            close(w, params(reference.models[rank, j]))


# The method -----------------------------------------------------------------------------------------------------


SETTINGS = [("", sgd), ("every=3, ", adam), ("alpha=0.2, momentum=0.5, bucket_bytes=256, ", sgd)]


@pytest.mark.parametrize(("size", "learners", "how"), cover_pairs([1, 2, 3], [1, 2, 3], SETTINGS))
def test_twenty_rounds_are_those_of_the_equations(
    size: int, learners: int, how: tuple[str, Callable[[nn.Module], Any]]
) -> None:
    settings, optimizer = how
    rounds = 20

    def work(world: World) -> Any:
        model, chosen, replica = started(f"crossbow({settings}learners={learners})", world, optimizer)
        train(model, chosen, world.rank, range(rounds * learners))
        assert replica.step == rounds * learners
        result = seen(replica)
        replica.close()
        return result

    options = {"every=3, ": {"every": 3}, "": {}}.get(settings, {"alpha": 0.2, "momentum": 0.5})
    reference = Reference(size, learners, optimizer=optimizer, **options)  # type: ignore[arg-type]
    for t in range(rounds):
        reference.round(t)
    check_all(run_threads(work, size), reference)


def scattered(world: World, learners: int, spec: str) -> Any:
    """Learners that stand apart, with a learning rate of zero."""
    model, optimizer, replica = started(spec, world, lambda m: sgd(m, lr=0.0))
    with torch.no_grad():
        for j in range(learners):
            generator = torch.Generator().manual_seed(10 * world.rank + j)
            for w in replica.learners.params(j):
                w.add_(torch.randn(w.shape, generator=generator, dtype=w.dtype))
    replica.forget_writes()
    return model, optimizer, replica


@pytest.mark.parametrize(("size", "learners"), [(1, 3), (2, 2), (3, 1)])
def test_without_steps_and_momentum_z_plus_the_sum_of_all_learners_is_conserved(size: int, learners: int) -> None:
    def work(world: World) -> list[list[Tensor]]:
        spec = f"crossbow(learners={learners}, alpha=0.2, momentum=0)"
        model, optimizer, replica = scattered(world, learners, spec)
        totals = []
        for t in range(6):
            z, own = seen(replica)
            every = [w for ws in world.gather_objects(own) for w in ws]
            totals.append([torch.stack([a, *b]).sum(0) for a, *b in zip(z, *every, strict=True)])
            train(model, optimizer, world.rank, range(t * learners, (t + 1) * learners))
        assert not torch.equal(seen(replica)[0][0], make()[0].weight), "z moves"
        replica.close()
        return totals

    for totals in run_threads(work, size):
        for later in totals[1:]:
            close(later, totals[0])


@pytest.mark.parametrize(("size", "learners"), [(1, 2), (2, 2), (3, 1)])
def test_with_alpha_of_one_over_k_and_no_momentum_z_becomes_the_mean_of_the_learners(size: int, learners: int) -> None:
    def work(world: World) -> None:
        model, optimizer, replica = started(f"crossbow(learners={learners}, momentum=0.0)", world)
        for t in range(5):
            every = [w for ws in world.gather_objects(seen(replica)[1]) for w in ws]
            mean = [torch.stack(xs).mean(0) for xs in zip(*every, strict=True)]
            train(model, optimizer, world.rank, range(t * learners, (t + 1) * learners))
            close(seen(replica)[0], mean)
        replica.close()

    run_threads(work, size)


def test_a_trajectory_by_hand() -> None:
    """f(x) = (x - b)^2 / 2 for b = 1 and 3, lr 0.1, by hand."""

    class Point(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = nn.Parameter(torch.zeros((), dtype=torch.float64))

        def forward(self, b: float) -> Tensor:
            return (self.x - b).square() / 2

    def work(world: World) -> list[float]:
        model = Point()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = un.parallel(model, optimizer, "crossbow", world=world)
        path = []
        for _ in range(4):
            optimizer.zero_grad()
            model(1.0 if world.rank == 0 else 3.0).backward()
            optimizer.step()
            path.append(replica.consolidate().x.item())  # type: ignore[union-attr, operator]
        replica.close()
        return path

    for path in run_threads(work, 2):
        # w = 0.1, 0.3; then z = 0.2, w = 0.14, 0.42; then z = 0.28 + 0.9 * 0.2 = 0.46, w = 0.256, 0.568; ...
        assert path == pytest.approx([0.0, 0.2, 0.46, 0.646], abs=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("learners", [1, 2, 5, 16])
def test_an_alpha_that_lets_learners_swing_ever_further_is_refused(learners: int, momentum: float) -> None:
    """As the eigenvalues of the averaging alone say, for e = mean(w) - z and v = z - z_before."""

    def largest(alpha: float) -> float:
        step = torch.tensor([[1 - alpha * (1 + learners), -momentum], [alpha * learners, momentum]]).double()
        return torch.linalg.eigvals(step).abs().max().item()

    def bound(alpha: float | None) -> None:
        model = make()
        spec = f"crossbow(learners={learners}, alpha={alpha}, momentum={momentum})"
        un.parallel(model, sgd(model), spec, world=World()).close()

    assert largest(1 / learners) <= 1.0 + 1e-12
    bound(None)
    for alpha in (0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0):
        if largest(alpha) > 1.0 + 1e-6:
            with pytest.raises(ValueError, match="ever further"):
                bound(alpha)
        else:
            bound(alpha)


def test_the_exchange_runs_behind_forward_and_backward_of_training_alone() -> None:
    def work(world: World) -> None:
        model, optimizer, replica = started("crossbow(every=2)", world)
        model.eval()
        loss_of(model, batch(0, 0))
        with torch.no_grad():
            loss_of(model.train(), batch(0, 0))
        begun = []
        for t in range(4):
            optimizer.zero_grad()
            assert replica._exchange is None
            loss = loss_of(model, batch(t, world.rank))
            begun.append(replica._exchange is not None)
            loss.backward()
            optimizer.step()
        assert begun == [False, True, False, True]
        replica.close()

    run_threads(work, 2)


@pytest.mark.parametrize("learners", [1, 2])
def test_a_drop_of_the_learning_rate_on_one_rank_restarts_all(learners: int) -> None:
    rates = [0.1, 0.1, 0.1, 0.02, 0.02, 0.02]

    def work(world: World) -> Any:
        model, optimizer, replica = started(f"crossbow(learners={learners}, every=2)", world)
        for t, lr in enumerate(rates):
            if world.rank == 1:
                optimizer.param_groups[0]["lr"] = lr
            train(model, optimizer, world.rank, range(t * learners, (t + 1) * learners))
            if t == 3:  # heard in the synchronisation of round 3
                z, own = seen(replica)
                for w in own:
                    close(w, z, 0.0)
        told = [event.values["restart"] for event in world.ledger.events if event.kind == "crossbow"]
        assert told == [4 * learners]
        result = seen(replica)
        replica.close()
        return result

    reference = Reference(2, learners, every=2)
    for t, lr in enumerate(rates):
        for j in range(learners):
            reference.optimizers[1, j].param_groups[0]["lr"] = lr
        reference.round(t, restart=t == 3)
    check_all(run_threads(work, 2), reference)


def test_a_schedule_that_falls_in_every_window_restarts_seldom_and_training_goes_on() -> None:
    def work(world: World) -> tuple[int, float, float]:
        model, optimizer, replica = started("crossbow", world)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
        first = loss_of(replica.consolidate(), batch(0, 7)).item()
        for t in range(100):
            train(model, optimizer, world.rank, range(t, t + 1))
            scheduler.step()
        last = loss_of(replica.consolidate(), batch(0, 7)).item()
        replica.close()
        return sum("restart" in event.values for event in world.ledger.events), first, last

    for restarts, first, last in run_threads(work, 2):
        assert restarts == int(math.log(0.5) / math.log(0.9))  # the rate has halved
        assert last < first / 10


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("learners", [1, 2, 3])
def test_bytes_are_one_all_reduce_a_synchronisation_whatever_the_number_of_learners(learners: int, every: int) -> None:
    size, rounds = 4, 8

    def work(world: World) -> tuple[int, int]:
        model = nn.Linear(64, 32)  # 64 * 32 + 32 = 2080 numbers: no padding
        optimizer = sgd(model)
        replica = un.parallel(model, optimizer, f"crossbow(learners={learners}, every={every})", world=world)
        before = len(world.ledger.records)
        for _ in range(rounds * learners):
            optimizer.zero_grad()
            model(torch.ones(2, 64)).square().mean().backward()
            optimizer.step()
        records = list(world.ledger.records)[before:]
        replica.close()
        return sum(r.bytes_sent for r in records if r.tag not in ("drop", "stragglers")), sum(
            r.bytes_sent for r in records if r.tag == "drop"
        )

    for sent, flags in run_threads(work, size):
        assert sent == math.ceil(2 * (size - 1) / size * 4 * 2080) * (rounds // every)
        assert flags == 36 * (rounds // every)  # three numbers


# Several learners -------------------------------------------------------------------------------------------------


def noisy() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / 2)
    return model


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_side_by_side_and_in_turn_are_the_same_bit_by_bit(size: int, accumulate: int) -> None:
    """17 windows of 3 learners: the last round is cut short."""

    def work(world: World, concurrent: bool) -> Any:
        model = noisy()
        optimizer = adam(model)
        replica: Any = un.parallel(model, optimizer, f"crossbow(learners=3, accumulate={accumulate})", world=world)
        data = [batch(t, world.rank) for t in range(17 * accumulate)]
        losses, clip = [], lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if concurrent:
            for some in replica.batches(data):
                losses += replica.learn(loss_of, some, adjust=clip)
        else:
            for i, x in enumerate(data):
                loss = loss_of(model, x)
                loss.backward()
                losses.append(loss.detach())
                if (i + 1) % accumulate == 0:
                    clip()
                    optimizer.step()
                    optimizer.zero_grad()
        assert replica.step == 17
        buffers = [b.clone() for j in range(3) for b in replica.learners.buffers(j)]
        result = seen(replica), buffers, losses
        replica.close()
        return result

    concurrent = run_threads(lambda world: work(world, True), size)
    for ((z, own), buffers, losses), ((z2, own2), buffers2, losses2) in zip(
        concurrent, run_threads(lambda world: work(world, False), size), strict=True
    ):
        close(z, z2, 0.0)
        for w, w2 in zip(own, own2, strict=True):
            close(w, w2, 0.0)
        close([b.double() for b in buffers], [b.double() for b in buffers2], 0.0)
        close(losses, losses2, 0.0)


def test_learners_really_run_at_the_same_time() -> None:
    model = make()
    replica: Any = un.parallel(model, sgd(model), "crossbow(learners=3)", world=World())
    together = threading.Barrier(3, timeout=10)  # passes only if three threads are inside the loss at once

    def meeting(module: nn.Module, x: Tensor) -> Tensor:
        together.wait()
        return loss_of(module, x)

    for _ in range(2):
        assert len(replica.learn(meeting, [batch(j, 0) for j in range(3)])) == 3
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("unisono learner")]
    assert len(names) >= 2
    replica.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_side_by_side_and_in_turn_are_the_same() -> None:
    def trained(concurrent: bool) -> list[Tensor]:
        model = make().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1 / 64)  # a graph has it in float32
        replica: Any = un.parallel(model, optimizer, "crossbow(learners=3)", world=World(device=torch.device("cuda")))
        data = [batch(t, 0).cuda() for t in range(30)]
        if concurrent:
            for some in replica.batches(data):
                replica.learn(loss_of, some)
        else:
            for x in data:
                optimizer.zero_grad()
                loss_of(model, x).backward()
                optimizer.step()
        found = [x.cpu() for w in seen(replica)[1] for x in w]
        replica.close()
        return found

    close(trained(True), trained(False))


def test_learners_side_by_side_follow_the_models_modes_and_what_is_frozen_and_leave_no_gradients() -> None:
    model = make()
    replica: Any = un.parallel(model, sgd(model), "crossbow(learners=2)", world=World())
    first, *others = model.parameters()
    for is_training, is_free in [(True, True), (False, True), (False, False), (True, True)]:
        model.train(is_training)
        first.requires_grad_(is_free)
        found: list[Any] = []

        def looking(module: nn.Module, x: Tensor, found: list[Any] = found) -> Tensor:
            found.append(({m.training for m in module.modules()}, [p.requires_grad for p in module.parameters()]))
            return loss_of(module, x)

        replica.learn(looking, [batch(0, 0), batch(1, 0)])
        assert found == [({is_training}, [is_free, *[True] * len(others)])] * 2
        assert all(p.grad is None for p in model.parameters())
    replica.close()


def test_an_error_in_one_learner_comes_through_and_no_learner_steps() -> None:
    model = make()
    replica: Any = un.parallel(model, sgd(model), "crossbow(learners=2)", world=World())
    before = seen(replica)

    def failing(module: nn.Module, x: Tensor) -> Tensor:
        if x.shape[0] == 1:
            raise ArithmeticError("a bad batch")
        return loss_of(module, x)

    with pytest.raises(ArithmeticError, match="a bad batch"):
        replica.learn(failing, [batch(0, 0), batch(1, 0)[:1]])
    with pytest.raises(TypeError, match="must return a tensor"):
        replica.learn(lambda module, x: 1.0, [batch(0, 0), batch(1, 0)])
    after = seen(replica)
    close(before[0], after[0], 0.0)
    for a, b in zip(before[1], after[1], strict=True):
        close(a, b, 0.0)
    assert replica.step == 0
    replica.learn(loss_of, [batch(0, 0), batch(1, 0)])
    reference = Reference(1, 2)
    reference.round(0)
    check_all([seen(replica)], reference)
    replica.close()


@pytest.mark.parametrize("learners", [1, 2])
def test_a_window_whose_step_was_skipped_is_over_when_learners_run_side_by_side(learners: int) -> None:
    model, _, replica = started(f"crossbow(learners={learners})", World())
    reference = Reference(1, learners)
    loss_of(model, batch(0, 0)).backward()  # AMP has found an overflow, say
    reference.round(0, frozenset({(0, 0)}))
    for t in range(1, 3 * learners, learners):
        replica.learn(loss_of, [batch(w, 0) for w in range(t, min(t + learners, 3 * learners))])
    for t in range(1, 3):
        reference.round(t)
    assert replica.step == 3 * learners
    check_all([seen(replica)], reference)
    replica.close()


def test_synchronised_batch_norm_is_refused_side_by_side() -> None:
    model = sync_batch_norm(noisy(), World())
    replica: Any = un.parallel(model, sgd(model), "crossbow(learners=2)", world=World())
    with pytest.raises(ValueError, match="SyncBatchNorm"):
        replica.learn(loss_of, [batch(0, 0), batch(1, 0)])
    replica.close()


@pytest.mark.parametrize("concurrent", [True, False])
def test_a_stand_in_batch_has_no_gradient(concurrent: bool) -> None:
    class Loader(list[Tensor]):
        def __iter__(self) -> Any:
            for i, x in enumerate(list.__iter__(self)):
                world.weight = 0.0 if i == 1 else 1.0
                yield x
            world.weight = 1.0

    world = World()
    model, optimizer, replica = started("crossbow(learners=2)", world, lambda m: sgd(m, weight_decay=0.0))
    loader = Loader([batch(0, 0), batch(1, 0) * math.inf])
    if concurrent:
        for some in replica.batches(loader):
            replica.learn(loss_of, some)
    else:
        for x in loader:
            optimizer.zero_grad()
            loss_of(model, x).backward()
            optimizer.step()
    close(replica.learners.params(1), params(make()), 0.0)
    assert not torch.equal(replica.learners.params(0)[0], params(make())[0])
    replica.close()


# Tuners -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("curve", "settles"),
    [
        (lambda m: 100.0, 1),
        (lambda m: 100.0 * min(m, 4), 4),
        (lambda m: 100.0 * m / (1 + 0.1 * m * m), 3),  # 91, 143, 158, 154: worse after three
        (lambda m: 100.0 * m, 16),
    ],
    ids=["no gain", "four cores", "a hill", "no end"],
)
def test_the_number_of_learners_settles_where_one_more_does_not_pay(
    curve: Callable[[int], float], settles: int
) -> None:
    tuner = LearnersTuner()
    counts = [tuner.observe(curve(tuner.learners)) for _ in range(40)]
    assert counts[-1] == settles
    assert tuner.settled
    top = min(settles + 1, tuner.most)
    assert counts[: top - 1] == list(range(2, top + 1)), "one at a time"
    assert set(counts[top:]) == {settles}, "and it stays"


def test_a_tuner_waits_where_nothing_was_measured() -> None:
    tuner = LearnersTuner()
    assert [tuner.observe(x) for x in (math.nan, 0.0, math.inf, 10.0)] == [1, 1, 1, 2]
    assert PeriodTuner(4).observe(0.0, 0.0) == 4


@pytest.mark.parametrize(("cost", "rests"), [(0.01, 1), (0.05, 1), (0.11, 2), (0.5, 8), (3.0, 32), (1000.0, 64)])
@pytest.mark.parametrize("begins", [1, 64])
def test_the_period_comes_to_rest_in_the_band_from_both_sides(cost: float, rests: int, begins: int) -> None:
    """An exchange costs `cost` of the compute of one window."""
    tuner = PeriodTuner(begins)
    seen = [tuner.observe(cost / tuner.every, 1.0) for _ in range(12)]
    assert seen[-1] == seen[-4], "it rests"
    ratio = cost / seen[-1]
    assert ratio <= tuner.high or seen[-1] == tuner.most
    assert ratio >= tuner.low or seen[-1] == 1
    assert sorted(seen) == (seen if begins == 1 else seen[::-1]), "and never turns back"
    if begins == 1:
        assert seen[-1] == rests


def test_the_period_follows_a_network_that_becomes_slow_and_fast_again() -> None:
    tuner = PeriodTuner()
    costs = [0.02] * 3 + [0.9] * 6 + [0.02] * 6
    assert [tuner.observe(c / tuner.every, 1.0) for c in costs] == [1, 1, 1, 2, 4, 8, 16, 16, 16, 8, 4, 2, 1, 1, 1]


def test_a_band_that_would_flap_is_refused() -> None:
    with pytest.raises(ValueError, match="half of high"):
        PeriodTuner(high=0.1, low=0.05)


@pytest.mark.parametrize("concurrent", [True, False])
def test_all_ranks_tune_alike_from_the_sum_of_what_they_see(monkeypatch: pytest.MonkeyPatch, concurrent: bool) -> None:
    """Rank 0 alone would want more learners, rank 1 none; together it pays up to 2. Then the period goes to 4.

    In the plain loop, where learners take turns, the period alone is tuned.
    """
    local = threading.local()

    def observe(self: Tuning, step: int, ledger: Any) -> list[float] | None:
        if step % 12:
            return None
        rates = {0: {1: 100.0, 2: 300.0, 3: 310.0}, 1: {1: 200.0, 2: 190.0, 3: 180.0}}[local.rank]
        return [rates[self.learners], 0.3 / self.every, 1.0]

    monkeypatch.setattr(Tuning, "observe", observe)

    def work(world: World) -> list[tuple[int, int, int]]:
        local.rank = world.rank
        model, optimizer, replica = started("crossbow(learners=auto, every=auto)", world)
        if concurrent:
            for batches in replica.batches([batch(t, world.rank) for t in range(72)]):
                replica.learn(loss_of, batches)
        else:
            train(model, optimizer, world.rank, range(72))
        told = [event for event in world.ledger.events if event.kind == "crossbow"]
        z, own = seen(replica)
        assert len(own) == (2 if concurrent else 1)
        others = world.gather_objects(z)
        close(others[0], others[1], 0.0)
        assert all(event.values["why"] for event in told)
        replica.close()
        return [(event.step, event.values["learners"], event.values["every"]) for event in told]

    for told in run_threads(work, 2):
        # throughput: 300 with one learner, 490 with two, 490 with three
        if concurrent:
            assert told == [(12, 2, 1), (24, 3, 1), (36, 2, 1), (48, 2, 2), (60, 2, 4), (72, 2, 4)]
        else:
            assert told == [(12, 1, 2), (24, 1, 4), (36, 1, 4), (48, 1, 4), (60, 1, 4), (72, 1, 4)]


def test_an_interval_leaves_the_first_round_out_and_measures_what_the_ledger_has() -> None:
    tuning = Tuning("auto", "auto", 4)
    ledger = un.World().ledger
    now = [0.0]
    ledger.clock = lambda: now[0]
    ledger.restart()
    found = []
    for step in range(1, 10):
        now[0] += 0.5
        ledger.close_span("blocked", now[0] - 0.1, now[0])
        ledger.step()
        found.append(tuning.observe(step, ledger))
    assert found[:4] == found[5:] == [None] * 4
    assert found[4] == pytest.approx([2.0, 0.4, 1.6])


def test_learners_that_the_tuner_adds_begin_at_the_central_model_with_the_first_ones_momentum() -> None:
    model, optimizer, replica = started("crossbow(learners=auto)", World())
    train(model, optimizer, 0, range(3))
    momenta = [optimizer.state[p]["momentum_buffer"].clone() for p in model.parameters()]
    with torch.no_grad():
        replica.resize(2)
    z, own = seen(replica)
    close(own[1], z, 0.0)
    replica.learners.turn_to(1)
    close([optimizer.state[p]["momentum_buffer"] for p in model.parameters()], momenta, 0.0)
    replica.learners.turn_to(0)
    train(model, optimizer, 0, range(4))
    assert replica.rounds == 5
    replica.close()


# Other things that training does -----------------------------------------------------------------------------------


@pytest.mark.parametrize("watched", [True, False])
@pytest.mark.parametrize("learners", [1, 2])
def test_overflow_on_one_rank_skips_its_step_alone_and_the_correction_is_made(learners: int, watched: bool) -> None:
    size, rounds, skipped = 3, 6, frozenset({(3, 1), (4, 0), (5, 2)})

    def work(world: World) -> Any:
        model, optimizer, replica = started(f"crossbow(learners={learners})", world)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=100)
        if watched:
            replica.watch(scaler)
        for t in range(rounds * learners):
            optimizer.zero_grad()
            loss = loss_of(model, batch(t, world.rank)) * (math.inf if (t, world.rank) in skipped else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert replica.step == rounds * learners
        result = seen(replica)
        replica.close()
        return result

    reference = Reference(size, learners)
    for t in range(rounds):
        reference.round(t, skipped)
    check_all(run_threads(work, size), reference)


@pytest.mark.parametrize("learners", [1, 2])
def test_windows_of_several_passes(learners: int) -> None:
    def work(world: World) -> Any:
        model, optimizer, replica = started(f"crossbow(learners={learners}, accumulate=2)", world)
        for t in range(6 * learners):
            optimizer.zero_grad()
            for half in batch(t, world.rank).split(2):
                (loss_of(model, half) / 2).backward()
            optimizer.step()
        assert replica.step == 6 * learners
        result = seen(replica)
        replica.close()
        return result

    reference = Reference(2, learners)
    for t in range(6):
        reference.round(t)
    check_all(run_threads(work, 2), reference)


def test_a_step_with_a_closure_is_one_window() -> None:
    def lbfgs(model: nn.Module) -> Any:
        return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def stepped(model: nn.Module, optimizer: Any, t: int, rank: int) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, batch(t, rank))
            loss.backward()
            return loss

        optimizer.step(closure)

    def work(world: World) -> Any:
        model, optimizer, replica = started("crossbow(learners=2)", world, lbfgs)
        for t in range(8):
            stepped(model, optimizer, t, world.rank)
        assert replica.step == 8
        result = seen(replica)
        replica.close()
        return result

    reference = Reference(2, 2, optimizer=lbfgs)
    for t in range(4):
        before = {key: params(m) for key, m in reference.models.items()}
        for (r, j), m in reference.models.items():
            stepped(m, reference.optimizers[r, j], 2 * t + j, r)
        after = {key: params(m) for key, m in reference.models.items()}
        for key, m in reference.models.items():  # `round` takes the steps back, and makes the corrections
            put(m, before[key])
        reference.round(t, frozenset((w, r) for w in range(8) for r in range(2)))
        for key, m in reference.models.items():
            made = [x + a - b for x, a, b in zip(params(m), after[key], before[key], strict=True)]
            put(m, made)
    check_all(run_threads(work, 2), reference)


def test_sixteen_bit_parameters_have_a_central_model_in_float32() -> None:
    def work(world: World) -> None:
        model = make(dtype=torch.bfloat16)
        optimizer = sgd(model, lr=0.0)
        replica: Any = un.parallel(model, optimizer, "crossbow(learners=2)", world=world)
        with torch.no_grad():
            for z in replica.center.z.values():
                z.add_(z * 1e-4)
        before = {name: z.clone() for name, z in replica.center.z.items()}
        train(model, optimizer, world.rank, range(6))
        for name, z in replica.center.z.items():
            assert z.dtype == torch.float32
            assert torch.equal(z, before[name]), "standing still changes nothing"
        optimizer.param_groups[0]["lr"] = 0.05
        train(model, optimizer, world.rank, range(6))
        assert all(torch.isfinite(p).all() for p in replica.consolidate().parameters())
        replica.close()

    run_threads(work, 2)


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("thawed_at", [5, 6])
def test_parameters_frozen_and_thawed_on_the_way(every: int, thawed_at: int) -> None:
    """Also in mid-round, and in a round that does not synchronise."""

    def schedule(model: nn.Module, window: int) -> None:
        model[0].weight.requires_grad_(window not in (4, 5, 6))
        model[2].bias.requires_grad_(window >= thawed_at)

    def work(world: World) -> Any:
        model = make()
        schedule(model, 0)
        optimizer = sgd(model, weight_decay=0.0, momentum=0.0)
        replica: Any = un.parallel(model, optimizer, f"crossbow(learners=2, every={every})", world=world)
        assert len(replica.center.z) == 3
        for t in range(14):
            schedule(model, t)
            train(model, optimizer, world.rank, range(t, t + 1))
        assert len(replica.center.z) == 4
        result = seen(replica)
        replica.close()
        return result

    reference = Reference(2, 2, every=every, optimizer=lambda m: sgd(m, weight_decay=0.0, momentum=0.0))
    for t in range(7):
        for (_, j), m in reference.models.items():
            schedule(m, 2 * t + j)
        reference.round(t)
    check_all(run_threads(work, 2), reference)


# The model to evaluate, checkpoints, other worlds ---------------------------------------------------------------------


def test_consolidate_gives_the_central_model_and_the_mean_of_all_buffers_and_leaves_training_alone() -> None:
    def work(world: World) -> list[Tensor]:
        model = noisy()
        optimizer = sgd(model)
        replica: Any = un.parallel(model, optimizer, "crossbow(learners=2)", world=world)
        for t in range(5):  # in mid-round
            train(model, optimizer, world.rank, range(t, t + 1))
        own = [params(model), [b.clone() for b in model.buffers()]]
        made = replica.consolidate()
        close(params(made), list(replica.center.z.values()), 0.0)
        running = [replica.learners.buffers(j)[0] for j in range(2)]
        mean = torch.stack([x for some in world.gather_objects(running) for x in some]).mean(0)
        torch.testing.assert_close(made[1].running_mean, mean)
        made(batch(0, 0)).sum().backward()  # no hook of the replica is on it
        close(own[0], params(model), 0.0)
        assert all(torch.equal(a, b) for a, b in zip(own[1], model.buffers(), strict=True))
        assert replica.step == 5
        replica.close()
        return [x.double() for x in made.state_dict().values()]

    first, second = run_threads(work, 2)
    close(first, second, 0.0)


@pytest.mark.parametrize("optimizer", [sgd, adam])
@pytest.mark.parametrize(("learners", "at"), [(1, 4), (1, 5), (3, 12), (3, 14), (3, 17)])
def test_a_checkpoint_in_mid_phase_goes_on_bit_by_bit(
    tmp_path: Path, learners: int, at: int, optimizer: Callable[[nn.Module], Any]
) -> None:
    spec = f"crossbow(learners={learners}, every=2)"

    def first(world: World) -> Any:
        model, chosen, replica = started(spec, world, optimizer)
        train(model, chosen, world.rank, range(at))
        un.save(tmp_path, replica)
        train(model, chosen, world.rank, range(at, at + 9))
        result = seen(replica)
        replica.close()
        return result

    def second(world: World) -> Any:
        model, chosen, replica = started(spec, world, optimizer, seed=3)
        train(model, chosen, world.rank, range(4 if learners > 1 else 3))  # it was somewhere else
        un.load(tmp_path, replica)
        assert replica.step == at
        train(model, chosen, world.rank, range(at, at + 9))
        result = seen(replica)
        replica.close()
        return result

    for (z, own), (z2, own2) in zip(run_threads(first, 3), run_threads(second, 3), strict=True):
        close(z, z2, 0.0)
        for a, b in zip(own, own2, strict=True):
            close(a, b, 0.0)


@pytest.mark.parametrize(("new_size", "learners"), [(1, 2), (2, 2), (4, 2), (3, 1), (3, 3)])
@pytest.mark.filterwarnings("ignore:.*is of another world size")
def test_in_another_world_or_with_other_learners_a_checkpoint_goes_on_from_the_central_model(
    tmp_path: Path, new_size: int, learners: int
) -> None:
    plain = lambda m: sgd(m, momentum=0.0)  # noqa: E731

    def first(world: World) -> list[Tensor]:
        model, optimizer, replica = started("crossbow(learners=2)", world, plain)
        train(model, optimizer, world.rank, range(9))
        un.save(tmp_path, replica)
        z = params(replica.consolidate())
        replica.close()
        return z

    def second(world: World) -> Any:
        model, optimizer, replica = started(f"crossbow(learners={learners})", world, plain, seed=3)
        un.load(tmp_path, replica)
        start = seen(replica)
        assert replica.step == 9
        for t in range(3):
            train(model, optimizer, world.rank, range(t * learners, (t + 1) * learners))
        result = seen(replica)
        replica.close()
        return start, result

    z = run_threads(first, 3)[0]
    reference = Reference(new_size, learners, optimizer=plain)
    reference.z = z
    reference.restart()
    for t in range(3):
        reference.round(t)
    results = run_threads(second, new_size)
    for (begun, own), _ in results:
        close(begun, z, 0.0)
        for w in own:
            close(w, z, 0.0)
    check_all([result for _, result in results], reference)


@pytest.mark.parametrize("learners", [1, 2])
@pytest.mark.parametrize("comes_back", ["as it left", "as a new process"])
def test_worlds_that_shrink_and_grow_go_on_from_the_central_model(comes_back: str, learners: int) -> None:
    """4 ranks; rank 3 leaves in round 3 and is back in round 6, with source 1."""
    spec, plain = f"crossbow(learners={learners})", lambda m: sgd(m, momentum=0.0)
    windows = 3 * learners

    def work(world: World) -> Any:
        model, optimizer, replica = started(spec, world, plain)
        train(model, optimizer, world.rank, range(windows))
        found, told = [seen(replica)], []
        smaller = world.split([[0, 1, 2], [3]])
        if world.rank < 3:
            told.append(replica.rebind(smaller))
            train(model, optimizer, world.rank, range(windows, 2 * windows))
            found.append(seen(replica))
        elif comes_back == "as a new process":
            replica.close()
            model, optimizer, replica = started(spec, World(), plain, seed=5)
        told.append(replica.rebind(world.split([[0, 1, 2, 3]]), source=1))
        train(model, optimizer, world.rank, range(2 * windows, 3 * windows))
        found.append(seen(replica))
        replica.close()
        return found, told, replica.step

    results = run_threads(work, 4)
    z = params(make())
    for phase, (size, first) in enumerate([(4, 0), (3, 3), (4, 6)]):
        reference = Reference(size, learners, optimizer=plain)
        reference.z = z
        reference.restart()
        for t in range(first, first + 3):
            reference.round(t)
        z = reference.z
        of_phase = [found[phase if len(found) == 3 else min(phase, 1)] for found, _, _ in results[:size]]
        check_all(of_phase, reference)
    for _, told, step in results:
        assert step == 3 * windows
        assert all("central model of rank" in text for text in told)


def test_after_close_the_model_is_an_ordinary_one_that_holds_the_central_model() -> None:
    def work(world: World) -> None:
        model, optimizer, replica = started("crossbow(learners=2)", world)
        train(model, optimizer, world.rank, range(5))
        z = params(replica.consolidate())
        replica.close()
        close(params(model), z, 0.0)
        twin = copy.deepcopy(model)
        train(model, optimizer, world.rank, range(5, 6))
        loss_of(twin, batch(5, world.rank)).backward()
        close([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()], 0.0)
        assert replica.step == 5

    run_threads(work, 2)


def test_a_replica_that_is_closed_leaves_a_model_alone_that_another_trains_by_now() -> None:
    model, optimizer, replica = started("crossbow(learners=2)", World())
    train(model, optimizer, 0, range(3))
    new = build("allreduce").bind(model, optimizer, replica.world)  # as `switch` does
    put(model, params(make(seed=4)))
    replica.close()
    close(params(model), params(make(seed=4)), 0.0)
    new.close()


@pytest.mark.parametrize("other", ["allreduce", "hogwild", "local_sgd(every=2, start=0)", "crossbow(every=2)"])
def test_switching_from_and_to_crossbow(other: str) -> None:
    def work(world: World) -> None:
        model, optimizer, replica = started("crossbow(learners=2)", world)
        train(model, optimizer, world.rank, range(5))
        z = params(replica.consolidate())
        replica = replica.switch(other)
        close(params(replica.consolidate()), z, 0.0)
        train(model, optimizer, world.rank, range(5, 8))
        model_then = params(replica.consolidate())
        replica = replica.switch("crossbow(learners=2)")
        close(params(replica.consolidate()), model_then, 0.0)
        train(model, optimizer, world.rank, range(8, 13))
        others = world.gather_objects(params(replica.consolidate()))
        close(others[0], others[1], 0.0)
        assert replica.step == 13
        replica.close()

    run_threads(work, 2)


def test_a_checkpoint_of_another_strategy_is_refused() -> None:
    _, _, replica = started("crossbow", World())
    with pytest.raises(ValueError, match="central model"):
        replica.load_state_dict({"shared": {"step": 3}, "local": {}})
    replica.close()


@pytest.mark.parametrize(
    ("setting", "word"),
    [
        ("learners=0", "learners"),
        ("learners=True", "learners"),
        ("learners=many", "learners"),
        ("every=0", "every"),
        ("every=sometimes", "every"),
        ("alpha=0.0", "alpha"),
        ("alpha=1.5", "alpha"),
        ("alpha=nan", "alpha"),
        ("momentum=1.0", "momentum"),
        ("momentum=-0.1", "momentum"),
        ("momentum=False", "momentum"),
        ("drop=0.0", "drop"),
        ("drop=1.1", "drop"),
        ("tune_every=0", "tune_every"),
        ("accumulate=0", "accumulate"),
        ("bucket_bytes=0", "bucket_bytes"),
    ],
)
def test_impossible_settings_are_refused(setting: str, word: str) -> None:
    model = make()
    with pytest.raises((ValueError, TypeError), match=word):
        un.parallel(model, sgd(model), f"crossbow({setting})", world=World())


@pytest.mark.parametrize("windows", [4, 5])  # between rounds, and in mid-round
def test_a_checkpoint_gives_others_the_central_model(tmp_path: Path, windows: int) -> None:
    """Plain PyTorch, a file for other programs, and another strategy in a world of the same size."""

    def work(world: World) -> list[Tensor]:
        model, optimizer, replica = started("crossbow(learners=2)", world)
        train(model, optimizer, world.rank, range(windows))
        un.save(tmp_path / "checkpoint", replica)
        center, learners = seen(replica)
        assert all(not torch.equal(center[0], learner[0]) for learner in learners)
        replica.close()
        return center

    def load_elsewhere(world: World) -> list[Tensor]:
        model = make(seed=3)
        replica = un.parallel(model, sgd(model), "allreduce", world=world)
        un.load(tmp_path / "checkpoint", replica)
        return params(model)

    center = run_threads(work, 2)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the optimizer's states became a mean
        read = un.read_checkpoint(tmp_path / "checkpoint")
        export_model(tmp_path / "checkpoint", tmp_path / "model.safetensors")
        loaded = run_threads(load_elsewhere, 2)
    exported = load_file(tmp_path / "model.safetensors")
    assert list(exported) == sorted(read["model"])
    for found in (list(read["model"].values()), [exported[name] for name in read["model"]], *loaded):
        close(found, center, 0.0)


def test_parameters_that_lie_in_one_memory_are_refused_by_name() -> None:
    model: Any = make()
    model[2].weight.data = model[0].weight.data.view(-1)[:16].view(2, 8)
    with pytest.raises(ValueError, match="lie in one memory, and crossbow moves"):
        un.parallel(model, sgd(model), "crossbow", world=World())


@pytest.mark.filterwarnings("ignore:.*each became their mean")
@pytest.mark.parametrize("ways", ["clamp", "swap"])
def test_a_checkpoint_has_the_central_model_whatever_one_learner_was_written(tmp_path: Path, ways: str) -> None:
    """A clamp is each rank's own training; weights that were put in to evaluate, and out again, are nothing."""

    def work(world: World) -> list[Tensor]:
        model, optimizer, replica = started("crossbow", world)
        train(model, optimizer, world.rank, range(3))
        central = [z.clone() for z in replica.center.z.values()]
        kept = params(model)
        put(model, [x.clamp(-0.1, 0.1) for x in kept])
        if ways == "swap":
            put(model, kept)
        un.save(tmp_path, replica)
        replica.close()
        return central

    central, _ = un.run_threads(work, 2)
    close(list(un.read_checkpoint(tmp_path)["model"].values()), central)
