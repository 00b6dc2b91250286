"""Workers die at any operation of a run that reads a divided stream: each sample is part of one step an epoch.

As in test_healing_schedules.py the code is the library's own, in threads. `UNISONO_SCHEDULES=50` tries so many times as
many random schedules.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_threads import Event, Life, Run
from stream_data import take_ids, write_jsonl, write_parquet
from torch import Tensor, nn

import unisono as un
from unisono import World, background

MORE = int(os.environ.get("UNISONO_SCHEDULES", "1"))
COUNTS = [23, 31, 9, 20, 28]  # of samples in each file
SAMPLES, BATCH, EPOCHS = sum(COUNTS), 10, 2


@pytest.fixture(autouse=True)
def _no_threads_left() -> Iterator[None]:
    yield
    for queue in list(background._queues):
        queue.close(0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five files, whose lengths are known (Parquet) or not (JSONL)."""
    made = tmp_path_factory.mktemp("stream")
    write_jsonl(made / "jsonl", COUNTS)
    write_parquet(made / "parquet", COUNTS, rows=12)
    return made


class Uses(nn.Module):
    """Counts how often each sample was used: each use adds 1/m to it, in a batch of m samples."""

    def __init__(self) -> None:
        super().__init__()
        self.uses = nn.Parameter(torch.zeros(SAMPLES, dtype=torch.float64))

    def forward(self, numbers: Tensor) -> Tensor:
        return -self.uses[numbers].sum() / len(numbers)


def collate(samples: list[Any]) -> Tensor:
    return torch.tensor(take_ids(samples))


def train(world: World, life: Life, *, folder: Path, kind: str, validates: bool = False) -> Tensor:
    model = Uses()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    un.parallel(model, optimizer, "allreduce", world=world)
    shard = un.shard(un.records(folder / kind), BATCH, buffer=30, collate_fn=collate, name="train", world=world)
    held = un.shard(un.records(folder / kind), BATCH, collate_fn=collate, name="held", buffer=30, world=world)
    life.is_armed = True
    for _ in range(EPOCHS):
        for numbers in shard:
            optimizer.zero_grad()
            model(numbers).backward()
            optimizer.step()
            life.run.advance()
        for _ in held if validates else ():
            pass
    return model.uses.detach().clone()


def reference(folder: Path, kind: str) -> Tensor:
    """What one process counts, on the same batches."""
    uses = torch.zeros(SAMPLES, dtype=torch.float64)
    shard = un.shard(un.records(folder / kind), BATCH, buffer=30, collate_fn=collate, name="train", world=World())
    for _ in range(EPOCHS):
        for numbers in shard:
            uses[numbers] += 1 / len(numbers)
    return uses


def check(run: Run, expected: Tensor) -> None:
    bad = [error for error in run.errors.values() if "StateLost" not in error]  # all that had the model have died
    assert not bad, f"{run.describe()}\n" + "\n".join(bad)
    assert run.given_up or run.results or run.errors, run.describe()
    for worker, uses in run.results.items():
        assert torch.allclose(uses, expected, rtol=0, atol=1e-12), f"worker {worker}: {run.describe()}"


def draw_events(draw: random.Random, workers: int) -> list[Event]:
    events = []
    for _ in range(draw.randint(1, 4)):
        what = draw.choice(["die before", "die in", "die in", "die coming", "scale"])
        lucky = frozenset(w for w in range(workers + 4) if draw.random() < 0.5)
        at = draw.randint(0, 2) if what == "die coming" else draw.randint(0, 60)
        events.append(Event(what, draw.randrange(workers + 2), at, lucky, draw.randint(1, 4)))
    return events


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("validates", [False, True])
def test_each_sample_counts_once_whoever_dies(kind: str, validates: bool, folder: Path) -> None:
    expected, fired = reference(folder, kind), 0
    for seed in range(3 * MORE):
        draw = random.Random(f"{kind} {seed}")
        workers = draw.choice([2, 3, 4])
        program = partial(train, folder=folder, kind=kind, validates=validates)
        run = Run(program, workers, draw_events(draw, workers)).play()
        check(run, expected)
        fired += len(run.happened)
    assert fired


@pytest.mark.parametrize("at", range(0, 24, 5))
def test_a_death_in_the_exchange_of_a_window(at: int, folder: Path) -> None:
    """Operations of a run are exchanges of windows and of gradients, in turn: one has the result, the other not."""
    program = partial(train, folder=folder, kind="jsonl")
    run = Run(program, 3, [Event("die in", 2, at, lucky=frozenset({0}))]).play()
    check(run, reference(folder, "jsonl"))
    assert len(run.generations) > 1
