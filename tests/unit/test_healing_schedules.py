"""Workers die at any operation of a run, several too, and while the world is formed anew: the model is that of one
process, each batch once.

The code under test is the library's own, in threads (elastic_threads.py); only processes and their connection to the
launcher are stood in for. `UNISONO_SCHEDULES=50` tries so many times as many random schedules.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from elastic_threads import Event, Life, Run
from torch import Tensor, nn
from torch.optim import swa_utils

import unisono as un
from unisono import World, background
from unisono.methods.strategy.healing import Healing
from unisono.world import probe

MORE = int(os.environ.get("UNISONO_SCHEDULES", "1"))
DECAY = 0.7  # of the average
SAMPLES, BATCH, EPOCHS = 20, 6, 2  # the last batch of an epoch has two samples: fewer than ranks


@pytest.fixture(autouse=True, scope="module")
def _few_objects() -> None:
    """Schedules are looked for among all objects: here among those of the test."""
    gc.collect()
    gc.freeze()  # to the end, as those of conftest.py are


@pytest.fixture(autouse=True)
def _no_threads_left() -> Iterator[None]:
    """Those of workers that died: every later test of worlds in this process would look through them."""
    yield
    for queue in list(background._queues):
        queue.close(0.0)


class Counting(nn.Module):
    """A regression, and a parameter that counts how often each sample was used: each use adds 1/m to it, in a batch of
    m samples."""

    def __init__(self) -> None:
        super().__init__()
        self.uses = nn.Parameter(torch.zeros(SAMPLES, dtype=torch.float64))
        self.weight = nn.Parameter(torch.linspace(-1.0, 1.0, 3, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros(1, dtype=torch.float64))

    def forward(self, x: Tensor, y: Tensor, numbers: Tensor) -> Tensor:
        return ((torch.tanh(x @ self.weight) - y) ** 2).mean() - self.uses[numbers].sum() / len(numbers)


def make_data() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 3, dtype=torch.float64, generator=generator)
    return x, torch.sin(x.sum(1)), torch.arange(SAMPLES)


def make_training(model: Counting, momentum: float = 0.9) -> tuple[torch.optim.SGD, Any]:
    groups = [{"params": [model.uses], "lr": 1.0}, {"params": [model.weight], "lr": 0.3, "momentum": momentum}]
    optimizer = torch.optim.SGD(groups)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda k: 1.0, lambda k: 1.0 / (1.0 + 0.2 * k)])


def make_several(model: Counting) -> tuple[list[torch.optim.SGD], list[Any]]:
    """The same, with an optimizer and a schedule for each of the parameters."""
    optimizers = [torch.optim.SGD([model.uses], lr=1.0), torch.optim.SGD([model.weight], lr=0.3, momentum=0.9)]
    rates = [lambda k: 1.0, lambda k: 1.0 / (1.0 + 0.2 * k)]
    pairs = zip(optimizers, rates, strict=True)
    return optimizers, [torch.optim.lr_scheduler.LambdaLR(one, rate) for one, rate in pairs]


DATA = make_data()


def reference(batches: int, momentum: float = 0.9) -> tuple[Counting, list[Tensor], Counting]:
    """Plain PyTorch in one process, on the same global batches; so many of them a step. And torch's own average."""
    model = Counting()
    optimizer, schedule = make_training(model, momentum)
    averaged = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(DECAY))
    sums = []
    shard = un.shard(DATA, BATCH, seed=3, world=World())
    for _ in range(EPOCHS):
        for i, (x, y, numbers) in enumerate(shard):
            model(x, y, numbers).backward()
            if (i + 1) % batches == 0:
                optimizer.step()
                averaged.update_parameters(model)
                optimizer.zero_grad()
                schedule.step()
        sums.append(model.uses.detach().clone())
    return model, sums, averaged.module


EXPECTED = {**{batches: reference(batches) for batches in (1, 2)}, "cleared": reference(1, momentum=0.0)}


def train(
    world: World,
    life: Life,
    *,
    batches: int = 1,
    calls: bool = False,
    validates: bool = False,
    several: bool = False,
    clamps: bool = False,
    clears: bool = False,
    strategy: str = "allreduce",
    grows: int = 0,
) -> dict[str, Any]:
    """The same with other workers. `calls`: the program asks the others for something after each batch, too;
    `validates`: in another pass after each; `several`: with two optimizers; `clamps`: it writes to
    parameters after each step; `clears`: it clears the optimizer's state there, so that momentum never counts;
    `grows`: to so many workers, of which one waits before the first batch."""
    model = Counting()
    optimizers, schedules = make_several(model) if several else [[one] for one in make_training(model)]
    average = un.average(un.parallel(model, optimizers, strategy, world=world), decay=DECAY)
    shard = un.shard(DATA, BATCH, seed=3, world=world)
    counters = un.follow({"batches": 0}, world=world)
    told = world.broadcast_object({"epochs": EPOCHS})
    life.is_armed = True
    if grows and life.number == 0:  # which has noted the results of the calls above for who comes
        life.run.scale(grows)
    if life.number + 1 < grows:
        life.run.wait_for_newcomer()
    sums = []
    for _ in range(told["epochs"]):
        for x, y, numbers in shard:
            model(x, y, numbers).backward()
            counters["batches"] += 1
            if counters["batches"] % batches == 0:
                for optimizer, schedule in zip(optimizers, schedules, strict=True):
                    optimizer.step()
                    optimizer.zero_grad()
                    schedule.step()
                    if clears:
                        optimizer.state.clear()
                life.run.advance()
            for p in model.parameters() if clamps else ():
                p.data.clamp_(-1e9, 1e9)
            if calls:
                everyone = world.gather_objects(counters["batches"])
                assert len(set(everyone)) == 1, everyone
        for _, _, numbers in un.shard(DATA, 10, shuffle=False, name="validation", world=world) if validates else ():
            world.all_reduce(numbers.sum(), "sum").wait()
        sums.append(world.all_reduce(model.uses.detach().clone(), "mean").wait())
    assert world.elastic is not None
    late = isinstance(world.elastic.healer, Healing) and world.elastic.healer._is_late  # it came after the last batch
    batches_seen = None if late else counters["batches"]
    each = "cleared" if clears else batches
    return {"model": model, "sums": sums, "batches": batches_seen, "each": each, "average": average.state()}


def check(run: Run) -> None:
    """All that ended well have the model of one process."""
    bad = [error for error in run.errors.values() if not (run.given_up and "StateLost" in error)]
    assert not bad, f"{run.describe()}\n" + "\n".join(bad)
    if run.given_up:
        return
    assert run.results, run.describe()
    for worker, found in run.results.items():
        model, sums, averaged = EXPECTED[found["each"]]
        for name, p in found["model"].named_parameters():
            same = torch.allclose(p, model.get_parameter(name), rtol=0, atol=1e-12)
            assert same, f"worker {worker}, {name}: {run.describe()}\n{p}"
            mine, expected = found["average"]["values"].get(name), averaged.get_parameter(name)
            same = not isinstance(mine, Tensor) or torch.allclose(mine, expected, rtol=0, atol=1e-12)  # else in shards
            assert same, f"worker {worker}, average of {name}: {found['average']} {run.describe()}\n{expected}"
        assert found["batches"] in (EPOCHS * -(-SAMPLES // BATCH), None), run.describe()
        assert len(found["sums"]) == EPOCHS, run.describe()
        for mine, expected in zip(found["sums"], sums, strict=True):
            assert torch.allclose(mine, expected, rtol=0, atol=1e-12), f"worker {worker}: {run.describe()}"


def test_a_run_without_deaths() -> None:
    run = Run(train, 3).play()
    check(run)
    assert len(run.results) == 3
    assert len(run.generations) == 1


@pytest.mark.parametrize("strategy", ["allreduce", "local_sgd(every=1, start=0)"])
def test_a_worker_comes_before_the_first_batch(strategy: str) -> None:
    """It has a part of each."""
    run = Run(partial(train, grows=3, strategy=strategy), 2).play()
    assert run.generations == [(0, 1), (0, 1, 2)]
    assert [found["batches"] for found in run.results.values()] == [EPOCHS * -(-SAMPLES // BATCH)] * 3, run.describe()
    if strategy == "allreduce":
        check(run)


@pytest.mark.parametrize(("victim", "strategy"), [(0, "allreduce"), (2, "allreduce"), (2, "zero(stage=1, spare=True)")])
def test_a_death_in_each_operation_of_an_epoch(victim: int, strategy: str) -> None:
    """Of the two that are left, one has the result of that operation."""
    for at in range(14):
        check(Run(partial(train, strategy=strategy), 3, [Event("die in", victim, at, lucky=frozenset({1}))]).play())


def test_values_that_a_death_has_torn_do_not_pass_for_writes_of_the_program() -> None:
    program = partial(train, strategy="zero(stage=3, spare=True)", clamps=True)
    for at in range(14):
        check(Run(program, 3, [Event("die in", 2, at, lucky=frozenset({1}))]).play())


@pytest.mark.parametrize("stage", [1, 3])
def test_a_death_while_the_optimizers_state_is_cleared(stage: int) -> None:
    program = partial(train, strategy=f"zero(stage={stage}, spare=True)", clears=True)
    for at in range(14):
        check(Run(program, 3, [Event("die in", 2, at, lucky=frozenset({1}))]).play())


def test_a_replacement_that_comes_before_the_next_reduction_has_the_model_of_the_others() -> None:
    """What a reducer knows of all ranks' gradients is not that of these, though there are as many again."""
    for at in (3, 6, 9):
        run = Run(partial(train, strategy="ef21(topk(k=0.3, feedback=False))"), 3, [Event("die in", 1, at)]).play()
        assert not run.errors, run.describe()
        first, *others = (torch.cat([p.detach() for p in f["model"].parameters()]) for f in run.results.values())
        assert all(other.equal(first) for other in others), run.describe()


def test_two_losses_leave_the_outer_model_of_async_diloco() -> None:
    """The second comes as the world is formed without the first: its server has been let go of."""
    for after in (2, 3, 4):
        losses = [Event("die in", 2, 1, lucky=frozenset({1})), Event("die in", 0, after, lucky=frozenset({1}))]
        run = Run(partial(train_apart, strategy="async_diloco(every=2)"), 3, losses).play()
        assert not run.errors, "\n".join(run.errors.values())


@pytest.mark.parametrize("stage", [1, 3])
def test_a_newcomer_dies_while_the_parts_of_zero_are_divided_anew(stage: int) -> None:
    """Those that were there have all of them among themselves, however far each has come with it."""
    program = partial(train, strategy=f"zero(stage={stage}, spare=True)", clamps=True)
    for at in range(11, 18):  # from the second of its calls in which the model is brought together, to the last
        for lucky in ({0}, {0, 1}):
            losses = [Event("die in", 2, 4, lucky=frozenset({0, 1})), Event("die in", 3, at, lucky=frozenset(lucky))]
            check(Run(program, 3, losses).play())


@pytest.mark.parametrize("strategy", ["allreduce", "shared", "zero(stage=1, spare=True)"])
def test_a_death_between_the_steps_of_two_optimizers(strategy: str) -> None:
    """Who is left ends the step of both: a model of which one part has stepped is that of no step."""
    program = partial(train, several=True, strategy=strategy)
    for at in range(14):
        check(Run(program, 3, [Event("die in", 2, at, lucky=frozenset({1}))]).play())


@pytest.mark.parametrize("what", ["die before", "die in"])
def test_the_furthest_dies_while_the_others_are_brought_up_to_date(what: str) -> None:
    """Worker 0 alone has done the step in whose last operation worker 2 is lost."""
    formed = 0
    for at in range(3, 14):
        events = [Event("die in", 2, 2, lucky=frozenset({0})), Event(what, 0, at)]
        run = Run(train, 3, events).play()
        assert not run.given_up
        check(run)
        formed = max(formed, len(run.generations))
    assert formed > 2


def draw_events(draw: random.Random, workers: int) -> list[Event]:
    """One to four deaths, some at the same time, some of newcomers or while the world is formed anew."""
    events, at = [], draw.randint(0, 40)
    for _ in range(draw.randint(1, 4)):
        worker = draw.randrange(workers + 2)
        what = draw.choice(["die before", "die in", "die in", "die coming", "scale"])
        lucky = frozenset(w for w in range(workers + 4) if draw.random() < 0.5)
        if what == "die coming":
            events.append(Event(what, worker, draw.randint(0, 2)))
        else:
            events.append(Event(what, worker, at, lucky, draw.randint(1, workers + 1)))
        at += draw.choice([0, 1, 2, 3, draw.randint(0, 30)])
    return events


PROGRAMS = {
    "plain": {},
    "two batches a step": {"batches": 2},
    "calls in a pass": {"calls": True},
    "validation": {"validates": True},
    "two optimizers": {"several": True},
}


SEEDS = (0, 1, 2, 17, 24, 52, 57, 61, 88, 94, 101, 140)  # most of them have found something
# Each with two of the programs, so each program with four or five; all with all where UNISONO_SCHEDULES asks.
DRAWN = [(list(PROGRAMS)[(i + more) % 5], seed) for i, seed in enumerate(SEEDS) for more in (0, 1)]
ALL = [(program, seed) for program in PROGRAMS for seed in [*SEEDS, *range(200, 200 + 20 * (MORE - 1))]]


@pytest.mark.parametrize(("program", "seed"), DRAWN if MORE == 1 else ALL)
def test_random_deaths(program: str, seed: int) -> None:
    draw = random.Random(seed)
    workers = draw.randint(2, 4)
    events = draw_events(draw, workers)
    check(Run(partial(train, **PROGRAMS[program]), workers, events).play())


@pytest.mark.parametrize("victim", [0, 1])
def test_deaths_while_the_strategy_changes(victim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among measurements, switches and steps: those that are left go on with one strategy."""
    monkeypatch.setattr(probe, "_LARGE_BYTES", [256])
    spec = "auto(among=[allreduce, allreduce(overlap=False, bucket_bytes=64)], check_every=1, trial_steps=1)"
    for at in range(3, 38, 5):  # at 18 a channel of the next strategy is made: one rank has it, the other has not
        check(Run(partial(train, strategy=spec), 3, [Event("die in", victim, at, lucky=frozenset({2}))]).play())


def train_apart(world: World, life: Life, *, strategy: str) -> tuple[int, float]:
    """Ranks that exchange now and then may be several steps apart when one is lost."""
    model = Counting()
    optimizer, schedule = make_training(model)
    replica = un.parallel(model, optimizer, strategy, world=world)
    shard = un.shard(DATA, BATCH, seed=3, world=world)
    life.is_armed = True
    for _ in range(3):
        for x, y, numbers in shard:
            model(x, y, numbers).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            life.run.advance()
    return replica.step, optimizer.param_groups[1]["lr"]


@pytest.mark.parametrize("strategy", ["diloco(every=3)", "local_sgd(every=3, start=0)"])
def test_all_ranks_end_with_the_steps_and_the_rate_of_the_others(strategy: str) -> None:
    """Also those that were moved forward to where another was, from an earlier epoch perhaps."""
    steps = 3 * -(-SAMPLES // BATCH)
    for seed in (4, 12, 15, 26, 39, 43):
        draw = random.Random(seed)
        victims = draw.sample(range(5), draw.randint(1, 3))
        deaths = [
            Event(
                draw.choice(["die in", "die before"]), victim, draw.randint(0, 6), frozenset(draw.sample(range(9), 4))
            )
            for victim in victims
        ]
        run = Run(partial(train_apart, strategy=strategy), 3, deaths).play()
        assert not run.errors, f"{run.describe()}\n" + "\n".join(run.errors.values())
        for found in run.results.values():
            assert found == (steps, pytest.approx(0.3 / (1.0 + 0.2 * steps))), f"{run.results} {run.describe()}"


TOKENS = torch.tensor([1, 29, 5, 17, 11, 3]).repeat(4)[:SAMPLES]  # each batch has as many as any other
PULLS = torch.linspace(-2.0, 1.0, SAMPLES, dtype=torch.float64)  # of each sample, on the one parameter
Window = tuple[int, int, int, float, float]  # worker, step, generation, tokens, and the mean pull of a token


def train_by_tokens(world: World, life: Life, *, strategy: str, trace: list[Window]) -> float:
    """A parameter that each token pulls by a constant, under SGD; a batch is divided by tokens."""
    model = nn.ParameterList([torch.zeros((), dtype=torch.float64)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replica = un.parallel(model, optimizer, strategy, world=world)
    data = (PULLS, TOKENS)
    options: dict[str, Any] = {"cost": TOKENS.tolist(), "weigh_by": "cost", "shuffle": False, "drop_last": True}
    shard = un.shard(data, BATCH, world=world, **options)
    life.is_armed = True
    for _ in range(6):
        for pulls, tokens in shard:
            pull, before = float((pulls * tokens).sum() / tokens.sum()), replica.step
            assert world.elastic is not None
            generation = world.elastic.membership.generation
            (model[0] * pull).backward()
            optimizer.step()
            optimizer.zero_grad()
            if replica.step > before:
                trace.append((life.number, replica.step, generation, float(tokens.sum()), pull))
                life.run.advance()
    replica.meet_if_due()
    return float(replica.consolidate()[0].detach())


def average_by_tokens(trace: list[Window], every: int, generations: Sequence[Sequence[int]]) -> float:
    """The same without the library: the models become one after every so many steps, and in each generation that of
    those who stay (one may be some steps behind); each counts by its tokens since then."""
    models, tokens = dict.fromkeys(generations[0], 0.0), dict.fromkeys(generations[0], 0.0)
    now, before = 0, set(generations[0])

    def meet(workers: set[int], then: Sequence[int]) -> None:
        nonlocal models, tokens
        total = sum(tokens[worker] for worker in workers)
        mean = sum(tokens[w] * models[w] for w in workers) / total if total else models[min(workers)]
        models, tokens = dict.fromkeys(then, mean), dict.fromkeys(then, 0.0)

    def pass_to(generation: int) -> None:
        nonlocal now
        while now < generation:
            now += 1
            meet(models.keys() & set(generations[now]), generations[now])

    for step in sorted({window[1] for window in trace}):
        generation = max(window[2] for window in trace if window[1] == step)  # one lost later may have been ahead
        here = {window[0]: window for window in trace if window[1:3] == (step, generation)}
        if (step - 1) % every == 0:
            meet(before | (models.keys() & set(generations[generation])), generations[now])
        pass_to(generation)
        for worker, (*_, mine, pull) in here.items():
            models[worker] -= 0.1 * pull
            tokens[worker] += mine
        before = set(here)
    pass_to(len(generations) - 1)
    meet(set(models), generations[-1])
    return models[generations[-1][0]]


@pytest.mark.parametrize(
    "strategy", ["local_sgd(every=3, start=0)", "diloco(every=3, outer_lr=1.0, outer_momentum=0.0)"]
)
@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_worker_that_returns_counts_by_its_tokens_since(strategy: str, at: int) -> None:
    """The others train on while it is away."""
    trace: list[Window] = []
    program = partial(train_by_tokens, strategy=strategy, trace=trace)
    run = Run(program, 3, [Event("die before", 2, at)]).play()
    assert not run.errors, f"{run.describe()}\n" + "\n".join(run.errors.values())
    for found in run.results.values():
        assert found == pytest.approx(average_by_tokens(trace, 3, run.generations), abs=1e-12)
