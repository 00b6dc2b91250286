"""Steps that one rank alone would spoil are skipped by all, and named; nothing else is."""

from __future__ import annotations

import math
import threading
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import unisono as un
from unisono.observe.reports.verdicts import find_changes
from unisono.observe.runs.reading import RunReader
from unisono.observe.runs.recorder import Facts, Recorder
from unisono.observe.runs.recording import FileWriter
from unisono.world import World
from unisono.world.virtual import run_threads

SEED = threading.Lock()  # torch.manual_seed is the process's
STEPS, BAD = 16, 11  # the step that is spoilt, counted from 0
SPECS = ["allreduce", "shared", "zero(stage=1)", "zero(stage=2)", "zero(stage=3)", "zero(stage=2, optimizer_on=cpu)"]
SPECS += ["zero(stage=2, optimizer_on=cpu, step_ahead=True)"]


def make_data() -> tuple[Tensor, Tensor]:
    x = torch.randn(STEPS * 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return x, x.sum(1, keepdim=True)


def train(world: World, spec: str, *, spoil: float, ranks: tuple[int, ...] = (1,), size: float | None = 10.0) -> object:
    with SEED:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    replica = un.parallel(model, optimizer, spec, world=world, skip_outliers=size)
    average = un.average(replica, decay=0.5)
    for step, (x, y) in enumerate(un.shard(make_data(), batch_size=6, world=world, seed=0, shuffle=False)):
        if step == BAD and spoil == 0.0:  # one process leaves it out
            continue
        factor = spoil if step == BAD and world.rank in ranks else 1.0
        (nn.functional.mse_loss(model(x), y) * factor).backward()
        optimizer.step()
        optimizer.zero_grad()
    kept = [p.detach().clone() for p in (model.state_dict().values())]
    found = replica.outliers
    replica.restore()
    replica.close()
    return kept, [] if found is None else found.skipped, average.updates


@pytest.mark.parametrize("spoil", [1e4, math.inf])
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.filterwarnings("ignore:the step of window")
def test_a_step_that_one_rank_spoils_is_left_out_by_all(spec: str, spoil: float) -> None:
    expected, _, _ = run_threads(lambda world: train(world, "allreduce", spoil=0.0, size=None), 2)[0]
    for kept, skipped, updates in run_threads(lambda world: train(world, spec, spoil=spoil), 2):
        torch.testing.assert_close(kept, expected, rtol=1e-9, atol=1e-11)
        (one,) = skipped
        assert (one["rank"], one["window"]) == (1, BAD + 1)
        assert one["samples"].startswith(f"{6 * BAD + 3}, {6 * BAD + 4}, {6 * BAD + 5} (batch {BAD} of epoch 0")
        assert updates == STEPS - 1


@pytest.mark.parametrize(("spoil", "ranks"), [(3.0, (1,)), (1e4, (0, 1))])
def test_what_is_not_far_off_or_not_of_one_rank_alone_is_stepped(spoil: float, ranks: tuple[int, ...]) -> None:
    plain = run_threads(lambda world: train(world, "allreduce", spoil=spoil, ranks=ranks, size=None), 2)
    for (kept, skipped, updates), (expected, _, _) in zip(
        run_threads(lambda world: train(world, "allreduce", spoil=spoil, ranks=ranks), 2), plain, strict=True
    ):
        assert skipped == []
        assert updates == STEPS
        assert all(torch.equal(a, b) for a, b in zip(kept, expected, strict=True))


def test_it_is_said_once_and_stands_in_the_record(tmp_path: Path) -> None:
    def run(world: World) -> None:
        recorder = Recorder(world, FileWriter(tmp_path, world.rank), Facts("allreduce", 10))
        train(world, "allreduce", spoil=1e4)
        recorder.close("ok")

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run_threads(run, 2)
    texts = [str(one.message) for one in said if "is skipped on all ranks" in str(one.message)]
    assert len(texts) == 1
    assert "of rank 1 is" in texts[0]
    assert f"Its samples: {6 * BAD + 3}, " in texts[0]
    reader = RunReader(tmp_path)
    reader.poll()
    assert [event["text"] for event in find_changes(reader)] == texts


def test_a_loss_that_is_off_counts_too() -> None:
    """A constant makes the loss large, and leaves the gradient as it is."""

    def run(world: World) -> list[str]:
        model = nn.Linear(5, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        replica = un.parallel(model, optimizer, "allreduce", world=world, skip_outliers=10)
        for step, (x, y) in enumerate(un.shard(make_data(), batch_size=6, world=world, seed=0)):
            (nn.functional.mse_loss(model(x), y) + (1e4 if step == BAD and world.rank == 0 else 0.0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert replica.outliers is not None
        replica.close()
        return [f"{one['what']} of {one['rank']}" for one in replica.outliers.skipped]

    with pytest.warns(UserWarning, match="the loss of rank 0 is"):
        assert run_threads(run, 2) == [["loss of 0"]] * 2


@pytest.mark.parametrize(
    ("spec", "times", "match"),
    [
        ("allreduce", 1.0, "how many times the usual"),
        ("allreduce", True, "how many times the usual"),
        ("allreduce", math.nan, "how many times the usual"),
        ("powersgd(rank=1)", 10.0, "without a reducer that compresses"),
        ("local_sgd", 10.0, "local_sgd has none such"),
    ],
)
def test_bad_settings_are_refused_by_name(spec: str, times: float, match: str) -> None:
    def run(world: World) -> None:
        model = nn.Linear(8, 8)
        with pytest.raises(ValueError, match=match):
            un.parallel(model, torch.optim.SGD(model.parameters(), lr=0.1), spec, world=world, skip_outliers=times)

    run_threads(run, 2)
