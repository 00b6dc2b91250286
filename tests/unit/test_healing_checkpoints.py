"""Loops of the documentation that load and save, in a run whose workers die at any operation: every worker, first or
replacement, goes through the same epochs, and the model is that of one process that saw each sample once an epoch."""

from __future__ import annotations

import gc
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_threads import Event, Life, Run
from torch import Tensor, nn

import unisono as un
from unisono import World, background
from unisono.methods.strategy import healing

pytestmark = pytest.mark.filterwarnings("ignore:the checkpoint of step .* was given up")  # ranks come and go

SAMPLES, BATCH, EPOCHS = 14, 6, 3  # the last batch of an epoch has two samples: fewer than ranks
X = torch.randn(SAMPLES, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.sin(X.sum(1, keepdim=True))
Found = dict[str, Any]


@pytest.fixture(autouse=True, scope="module")
def _few_objects() -> None:
    """Schedules are looked for among all objects: here among those of the test."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_threads_left() -> Iterator[None]:
    yield
    for queue in list(background._queues):
        queue.close(0.0)


def make() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = nn.Linear(3, 1).double()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (1 + k))


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def alone(*, by_epoch: bool) -> Tensor:
    """Plain PyTorch in one process, on the same global batches; the rate falls after each epoch, or stays."""
    model, optimizer, schedule = make()
    shard = un.shard((X, Y), BATCH, world=World())
    for _ in range(EPOCHS):
        for x, y in shard:
            take_step(model, optimizer, x, y)
        if by_epoch:
            schedule.step()
    return flatten(model)


def flatten(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def quickstart(world: World, life: Life, folder: Path) -> Found:
    """Of docs/quickstart.md: the shard is made inside the loop, with a save after every epoch."""
    model, optimizer, schedule = make()
    replica = un.parallel(model, optimizer, world=world)
    try:
        start = un.load(folder, replica).epoch
    except FileNotFoundError:
        start = 0
    life.is_armed = True
    trained = []
    for epoch in range(start, EPOCHS):
        shard = un.shard((X, Y), BATCH, world=world)
        for x, y in shard:
            loss = take_step(model, optimizer, x, y)
            shard.add(loss, 1.0)
            life.run.advance()
        mean, one = shard.mean()
        assert one == 1.0
        assert math.isfinite(mean)
        schedule.step()
        un.save(folder, replica, keep=2)
        trained.append(epoch)
    return {"start": start, "epochs": trained, "model": flatten(model), "step": replica.step}


def shard_first(world: World, life: Life, folder: Path, epochs: int = EPOCHS) -> Found:
    """The shard is made before the checkpoint is read, and the schedule is part of the checkpoint."""
    model, optimizer, schedule = make()
    replica = un.parallel(model, optimizer, world=world)
    shard = un.shard((X, Y), BATCH, world=world)
    start = 0
    try:
        loaded = un.load(folder, replica)
        start = loaded.epoch
        schedule.load_state_dict(loaded.extra["schedule"])
    except FileNotFoundError:
        pass
    life.is_armed = True
    trained = []
    for epoch in range(start, epochs):
        shard.set_epoch(epoch)
        for x, y in shard:
            take_step(model, optimizer, x, y)
            life.run.advance()
        schedule.step()
        trained.append(epoch)
        un.save(folder, replica, keep=1, extra={"schedule": schedule.state_dict()})
    return {"start": start, "epochs": trained, "model": flatten(model), "step": replica.step}


def saves_at_the_end(world: World, life: Life, folder: Path) -> Found:
    """The shard is made after the checkpoint was read; sums of a metric after each epoch, one save after all."""
    model, optimizer, schedule = make()
    replica = un.parallel(model, optimizer, world=world)
    start = 0
    with suppress(FileNotFoundError):
        start = un.load(folder, replica).epoch
    shard = un.shard((X, Y), BATCH, world=world)
    life.is_armed = True
    trained = []
    for epoch in range(start, EPOCHS):
        for x, y in shard:
            take_step(model, optimizer, x, y)
            life.run.advance()
        everyone = world.gather_objects(epoch)
        assert everyone == [epoch] * len(everyone)
        schedule.step()
        trained.append(epoch)
    un.save(folder, replica)
    return {"start": start, "epochs": trained, "model": flatten(model), "step": replica.step}


def counts_steps(world: World, life: Life, folder: Path) -> Found:
    """A loop over steps, with a save after every second: in the middle of an epoch."""
    model, optimizer, _ = make()
    replica = un.parallel(model, optimizer, world=world)
    shard = un.shard((X, Y), BATCH, world=world)
    try:
        start = un.load(folder, replica).step
    except FileNotFoundError:
        start = 0
    life.is_armed = True
    for x, y in shard.steps(EPOCHS * 3):
        take_step(model, optimizer, x, y)
        life.run.advance()
        if replica.step % 2 == 0:
            un.save(folder, replica, keep=1)
    return {"start": start, "epochs": [], "model": flatten(model), "step": replica.step}


def trainer(world: World, life: Life, folder: Path) -> Found:
    """un.Trainer with a checkpoint folder."""
    model, optimizer, schedule = make()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        life.is_armed = True  # the first batch is there
        return nn.functional.mse_loss(output, target)

    trained = un.Trainer(
        model,
        optimizer,
        loss=loss,
        scheduler=schedule,
        checkpoint=folder,
        progress=False,
        world=world,
    )
    history = trained.fit((X, Y), epochs=EPOCHS, batch_size=BATCH, validation=(X, Y))
    return {"start": 0, "epochs": list(range(len(history))), "model": flatten(model), "step": trained.replica.step}


def validates(world: World, life: Life, folder: Path) -> Found:
    """A model is evaluated before training and after each epoch, and the best one is taken up again at the end."""
    model, optimizer, schedule = make()
    replica = un.parallel(model, optimizer, "local_sgd(every=1, start=0)", world=world)
    shard = un.shard((X, Y), BATCH, world=world)

    def evaluate() -> float:
        whole, sums = replica.consolidate(), torch.zeros(2, dtype=torch.float64)
        for x, y in un.shard((X, Y), BATCH, shuffle=False, name="validation", world=world):
            if world.weight:
                sums += torch.stack([nn.functional.mse_loss(whole(x), y).detach() * len(x), torch.tensor(len(x))])
        total, count = world.all_reduce(sums, "sum").wait().tolist()
        return total / count

    history = [evaluate()]
    trained = []
    for epoch in range(EPOCHS):
        for x, y in shard:
            life.is_armed = True
            take_step(model, optimizer, x, y)
            life.run.advance()
        everyone = world.gather_objects(epoch)
        assert everyone == [epoch] * len(everyone)
        schedule.step()
        history.append(evaluate())
        trained.append(epoch)
        un.preempted(world)
        if history[-1] <= min(history[1:]):
            un.save(folder, replica)
    un.load(folder, replica)
    return {"epochs": trained, "history": history}


def reads_nothing(world: World, life: Life, folder: Path) -> Found:
    """Without un.shard: every rank has all samples, and saves by the count of steps."""
    model, optimizer, _ = make()
    replica = un.parallel(model, optimizer, world=world)
    try:
        start = un.load(folder, replica).step
    except FileNotFoundError:
        start = 0
    life.is_armed = True
    while replica.step < EPOCHS * 3:
        take_step(model, optimizer, X, Y)
        life.run.advance()
        if replica.step % 4 == 0:
            un.save(folder, replica)
    return {"start": start, "epochs": [], "model": flatten(model), "step": replica.step}


PROGRAMS: list[Callable[..., Found]] = [quickstart, shard_first, saves_at_the_end, counts_steps, trainer, validates]


def check(run: Run, expected: Tensor, *, start: int = 0) -> None:
    """Whoever ended well has been through the same epochs as the first workers."""
    assert not run.errors, f"{run.describe()}\n" + "\n".join(run.errors.values())
    assert not run.given_up, run.describe()
    assert run.results, run.describe()
    for worker, found in run.results.items():
        where = f"worker {worker}: {run.describe()}"
        if "history" in found:
            assert found["history"] == run.results[min(run.results)]["history"], where
            continue
        assert (found["start"], found["step"]) == (start, EPOCHS * 3), where
        assert found["epochs"] in (list(range(start, EPOCHS)), []), where
        torch.testing.assert_close(found["model"], expected, rtol=0, atol=1e-12, msg=lambda m, w=where: f"{w}\n{m}")


@pytest.mark.filterwarnings("ignore:.* is of another world size or strategy")
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_replacement_goes_through_the_epochs_of_the_first_workers(
    program: Callable[..., Found], tmp_path: Path
) -> None:
    """A loss in an exchange of which one rank of two has the result: in a step, in a save, in a sum after an epoch."""
    expected = alone(by_epoch=program is not counts_steps)
    for at in (1, 8, 18):
        run = Run(partial(program, folder=tmp_path / str(at)), 3, [Event("die in", at % 2 * 2, at, frozenset({1}))])
        check(run.play(), expected)
        assert run.happened


def test_a_replacement_in_a_resumed_run_begins_where_the_first_workers_began(tmp_path: Path) -> None:
    """They have loaded a checkpoint that is gone when the replacement asks for it: others were saved since."""
    expected = alone(by_epoch=True)
    Run(partial(shard_first, folder=tmp_path, epochs=1), 2).play()
    for at in (3, 9):
        shutil.copytree(tmp_path, other := tmp_path.with_name(f"from_{at}"))
        run = Run(partial(shard_first, folder=other), 3, [Event("die in", 2, at, frozenset({1}))]).play()
        assert len(run.generations) > 1
        check(run, expected, start=1)


@pytest.mark.parametrize("at", [0, 5])
def test_a_replacement_without_a_shard_goes_on_with_the_others(at: int, tmp_path: Path) -> None:
    """No batch is asked for: it is given the counters and schedules as it comes."""
    run = Run(partial(reads_nothing, folder=tmp_path), 3, [Event("die in", 0, at, frozenset({1, 2}))]).play()
    assert not run.errors, run.errors
    assert {found["step"] for found in run.results.values()} == {EPOCHS * 3}


def reads_files(world: World, life: Life) -> int:
    """Two lists of files, the second one made after the first epoch: a replacement has one of them when it comes."""
    model, optimizer, _ = make()
    replica = un.parallel(model, optimizer, world=world)
    files = [f"{i:02d}.txt" for i in range(SAMPLES)]
    for _ in range(EPOCHS):
        for names in un.shard(files, BATCH, name="train", world=world):
            life.is_armed = True
            rows = [int(name[:2]) for name in names]
            take_step(model, optimizer, X[rows], Y[rows])
            life.run.advance()
        for _ in un.shard(files[:8], BATCH, shuffle=False, name="validation", world=world):
            pass
    return replica.step


def test_a_replacement_with_fewer_lists_of_files_than_the_others_joins() -> None:
    run = Run(reads_files, 3, [Event("die in", 2, 7, frozenset({0, 1}))]).play()
    assert not run.errors, run.errors
    assert len(run.generations) > 1
    assert set(run.results.values()) == {EPOCHS * 3}


@pytest.mark.parametrize("is_ahead", [True, False])
def test_a_program_that_draws_ahead_where_workers_may_be_lost_is_told_what_a_loss_would_cost(
    is_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that accumulates over two batches, all of which it has used at each step, is not."""

    def program(world: World, life: Life) -> int:
        model, optimizer, _ = make()
        replica = un.parallel(model, optimizer, f"allreduce(accumulate={1 if is_ahead else 2})", world=world)
        batches = iter(un.shard((X[:12], Y[:12]), 3, name="train", world=world))
        following = next(batches)
        while following is not None:
            current = following
            if is_ahead:
                following = next(batches, None)
                take_step(model, optimizer, *current)
                continue
            optimizer.zero_grad()
            for x, y in (current, next(batches)):
                nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            following = next(batches, None)
        return replica.step

    told: list[str] = []
    monkeypatch.setattr(healing, "warn_user", told.append)  # threads: recorded warnings are the whole process's
    run = Run(program, 2).play()
    assert not run.errors, run.errors
    assert [" train are drawn ahead of the steps" in text for text in told] == [True] * 2 * is_ahead, (
        "once on each rank"
    )
