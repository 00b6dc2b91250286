"""Fault scripts in real runs: each fault fires at its step, what comes after it is right, and one that does not fire
fails the run."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unisono as un

STEPS = 5


def make() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, torch.randn(8, 4, dtype=torch.float64)


def train(folder: str, *, every: int = 1) -> tuple[list[torch.Tensor], list[str]]:
    """To step STEPS, from a checkpoint where there is one; what it does goes to a file that outlives it."""
    world = un.join(device="cpu")
    model, optimizer, x = make()
    replica = un.parallel(model, optimizer)
    if any(Path(folder).glob("step-*")):
        un.load(folder, replica)
    mine = x[world.rank :: world.size]
    marks = Path(f"{folder}-marks-{world.rank}")
    marks.write_text("")

    def mark(text: str) -> None:
        with marks.open("a") as file:
            file.write(f"{text}\n")

    model.register_forward_hook(lambda *_: mark("forward"))
    next(model.parameters()).register_hook(lambda _: mark("gradient"))
    while replica.step < STEPS:
        mark(f"step {replica.step + 1}")
        optimizer.zero_grad()
        nn.functional.mse_loss(model(mine), mine.sum(1, keepdim=True)).backward()
        optimizer.step()
        mark("save")
        if replica.step % every == 0:
            un.save(folder, replica)
    return [p.detach() for p in model.parameters()], world.ledger.format_events(kind="fault").splitlines()


def alone() -> list[torch.Tensor]:
    """The same in plain PyTorch: the mean of the ranks' losses is that over all rows."""
    model, optimizer, x = make()
    for _ in range(STEPS):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def assert_trained(ranks: list[Any]) -> None:
    for found, _ in ranks:
        for mine, right in zip(found, alone(), strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-10, atol=1e-12)


def newest(folder: Path) -> str:
    return max(path.name for path in folder.glob("step-*"))


@pytest.mark.parametrize(
    ("where", "before", "step"),
    [
        ("", ["step 4", "forward", "gradient"], 4),
        (" in forward", ["step 4"], 3),
        (" in backward", ["step 4", "forward"], 3),
        (" in exchange", ["step 4", "forward", "gradient"], 3),
        (" in save", ["step 4", "forward", "gradient", "save"], 4),
    ],
)
def test_a_rank_is_killed_at_its_step_and_the_run_goes_on_from_the_checkpoint_before(
    where: str, before: list[str], step: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    with pytest.raises(un.WorkerError, match=f"The fault script asked for it: kill 1@4{where}") as caught:
        un.launch(train, workers=2, args=(str(folder),), faults=f"kill 1@4{where}")
    assert (caught.value.rank, caught.value.exit_status) == (1, 128 + signal.SIGKILL)
    assert caught.value.step == step
    assert f"[1] unisono: fault: rank 1 kills itself{where} at step 4\n" in capfd.readouterr().err
    marks = Path(f"{folder}-marks-1").read_text().splitlines()
    assert marks[marks.index("step 4") :] == before
    assert newest(folder) == "step-0000000003"
    if where in ("", " in save"):
        assert_trained(un.launch(train, workers=2, args=(str(folder),)))


def test_a_rank_that_was_stopped_goes_on_and_the_ledger_has_the_event(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = "stop 1@2 for 0.1s; slow 0 x1.5@3-4"
    ranks = un.launch(train, workers=2, args=(str(tmp_path / "run"),), kwargs={"every": STEPS}, faults=script)
    assert_trained(ranks)
    assert [events for _, events in ranks] == [
        ["step 2: fault: fault=slow 0 x1.5@3-4, at=3"],
        ["step 2: fault: fault=stop 1@2 for 0.1s, at=2"],
    ]
    told = capfd.readouterr().err.splitlines()
    assert sorted(told) == [
        "[0] unisono: fault: rank 0 is 1.5 times as slow until step 4, beginning at step 3",
        "[1] unisono: fault: rank 1 stops for 0.1 s at step 2",
    ]


PROGRAM = f"""
import sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
from test_fault_runs import train
train("run")
"""


def test_a_full_disk_leaves_the_former_checkpoint_and_is_reported(run_script: Any, tmp_path: Path) -> None:
    status, _, err = run_script(PROGRAM, "-n", "2", "--faults", "full-disk@3").finish()
    assert status == 1
    assert "rank 0 finds the disk full at step 3" in err
    assert "no checkpoint was written to run, earlier checkpoints are unchanged: every rank: OSError: [Errno 28]" in err
    # A hidden folder may be left where the launcher ended rank 0 after rank 1 had failed: the next save removes it.
    assert sorted(path.name for path in (tmp_path / "run").glob("[!.]*")) == ["step-0000000001", "step-0000000002"]
    assert_trained(un.launch(train, workers=2, args=(str(tmp_path / "run"),)))


def test_a_fault_that_does_not_fire_fails_the_run(run_script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_FAULTS", "kill 1@6; slow 0 x2@1")
    status, _, err = run_script(PROGRAM, "-n", "2").finish()
    assert status == 1
    assert err.splitlines()[-2:] == [
        "unisono: the program ended well, but 1 of 2 faults did not fire",
        "  kill 1@6: rank 1 came to step 5 only",
    ]


def test_an_error_of_the_script_is_found_before_anything_starts() -> None:
    with pytest.raises(ValueError, match=r"expected a step, as in .*; got the end\n  kill 1@\n         \^"):
        un.launch(train, workers=2, args=("run",), faults="kill 1@")
