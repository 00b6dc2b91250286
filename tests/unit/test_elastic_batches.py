"""A loop as libraries have it, which counts batches itself, in runs whose workers die at any operation: the model is
that of one process, each batch once, and every worker ends with the same counts."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch
from elastic_threads import Event, Life, Run
from test_healing_schedules import (
    BATCH,
    DATA,
    EPOCHS,
    EXPECTED,
    MORE,
    SAMPLES,
    SEEDS,
    Counting,
    _few_objects,  # noqa: F401
    _no_threads_left,  # noqa: F401
    draw_events,
    make_training,
)
from torch.utils.data import DataLoader, IterableDataset

import unisono as un
from unisono import World
from unisono.plugs.elastic_batches import ElasticBatches, deal_loader


def fit(world: World, life: Life, *, window: int = 1) -> dict[str, Any]:
    """A library's loop: it asks for as many batches as there are in an epoch, and never for one more."""
    model = Counting()
    optimizer, schedule = make_training(model)
    un.parallel(model, optimizer, world=world)
    shard = un.shard(DATA, BATCH, seed=3, name="library", world=world)
    counts = {"epochs": 0, "steps": 0}
    batches = ElasticBatches(shard, window=window, read=lambda: dict(counts), load=counts.update)
    life.is_armed = True
    while counts["epochs"] < EPOCHS:
        reading = iter(batches)
        for number in range(len(batches)):
            if (batch := next(reading, None)) is None:
                break
            model(*batch).backward()
            if (number + 1) % window:
                continue
            optimizer.step()
            while (again := batches.redraw()) is not None:
                optimizer.zero_grad()
                for batch in again:
                    model(*batch).backward()
                optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            counts["steps"] += 1
            life.run.advance()
        counts["epochs"] += 1
    return {"model": model, "counts": counts, "window": window}


def check(run: Run) -> None:
    bad = [error for error in run.errors.values() if not (run.given_up and "StateLost" in error)]
    assert not bad, f"{run.describe()}\n" + "\n".join(bad)
    if run.given_up:
        return
    assert run.results, run.describe()
    for worker, found in run.results.items():
        model = EXPECTED[found["window"]][0]
        for name, p in found["model"].named_parameters():
            same = torch.allclose(p, model.get_parameter(name), rtol=0, atol=1e-12)
            assert same, f"worker {worker}, {name}: {run.describe()}\n{p}"
        steps = EPOCHS * -(-SAMPLES // BATCH) // found["window"]
        assert found["counts"] == {"epochs": EPOCHS, "steps": steps}, f"worker {worker}: {found} {run.describe()}"


@pytest.mark.parametrize("victim", [0, 2])
def test_a_death_in_each_operation_of_a_run(victim: int) -> None:
    """Of the two that are left, one has the result of that operation."""
    for at in range(0, 30, 2):
        check(Run(fit, 3, [Event("die in", victim, at, lucky=frozenset({1}))]).play())


@pytest.mark.parametrize("seed", [*SEEDS, *range(300, 300 + 40 * (MORE - 1))])
@pytest.mark.parametrize("window", [1, 2])
def test_random_deaths(window: int, seed: int) -> None:
    draw = random.Random(seed)
    workers = draw.randint(2, 4)
    check(Run(partial(fit, window=window), workers, draw_events(draw, workers)).play())


class _Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(4))


@pytest.mark.parametrize("loader", [DataLoader(_Stream(), batch_size=2), DataLoader([1, 2, 3], batch_size=None)])  # type: ignore[arg-type]
def test_data_that_cannot_be_dealt_anew_is_named(loader: Any) -> None:
    with pytest.raises(ValueError, match=r"in an elastic run .* cannot be"):
        deal_loader(loader, World(), name="keras")
