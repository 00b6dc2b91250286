"""Runs with real workers, recorded and reported; also those whose worker or launcher is killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unisono as un
from unisono.cli import main
from unisono.observe.runs.reading import RunReader

STEPS = 12
SCRIPT = """
import sys
import torch
from torch import nn
import unisono as un

world = un.join(device="cpu")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
un.parallel(model, optimizer)
x = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
y = x[:, :3].argmax(1)
for inputs, labels in un.shard((x, y), batch_size=16, seed=0).steps(int(sys.argv[1])):
    optimizer.zero_grad()
    output = model(inputs)
    nn.functional.cross_entropy(output, labels).backward()
    optimizer.step()
    un.log(correct=(output.argmax(1) == labels).sum(), how="sum")
"""
PARAMETERS = 2 * (16 * 16 + 16)  # of which a bucket is made without gaps


def train_alone() -> tuple[list[float], list[int]]:
    """The same in one process, without un.parallel: losses, and how many of each batch are right."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    y = x[:, :3].argmax(1)
    losses, correct = [], []
    for inputs, labels in un.shard((x, y), batch_size=16, seed=0, world=un.World()).steps(STEPS):
        optimizer.zero_grad()
        output = model(inputs)
        loss = nn.functional.cross_entropy(output, labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        correct.append(int((output.argmax(1) == labels).sum()))
    return losses, correct


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the program, and one for runs in it."""
    monkeypatch.setenv("UNISONO_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def start(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "unisono", "run", *arguments]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, **(pipes | options))


def run(*arguments: str) -> tuple[int, str]:
    process = start(*arguments)
    out, err = process.communicate(timeout=100)
    return process.returncode, out + err


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["report", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_report_has_the_numbers_that_one_process_computes(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, said = run("-n", "2", "train.py", str(STEPS))
    assert (status, said) == (0, "")  # standard error is no terminal: not a word about the record
    found = report(capsys, "last")
    losses, correct = train_alone()
    by_name = {metric["name"]: metric for metric in found["metrics"]}
    assert by_name["loss"]["values"] == pytest.approx(losses, rel=1e-4)
    assert by_name["loss"]["steps"] == list(range(1, STEPS + 1))
    assert by_name["correct"]["values"] == correct
    assert found["outcome"] == "ok"
    assert found["missing"] == []
    about = {name: found[name] for name in ("steps", "workers", "strategy", "parameters")}
    assert about == {"steps": STEPS, "workers": 2, "strategy": "allreduce", "parameters": PARAMETERS}
    # An all-reduce sends 2 (N - 1) / N of the gradients: with two ranks, as many bytes as they have; and behind them a
    # flag for each of four tensors, and one for learning rates.
    assert found["bytes_by_kind"]["gradients"] == 2 * STEPS * 4 * (PARAMETERS + 4 + 1)
    assert [rank["samples"] for rank in found["ranks"]] == [8 * STEPS] * 2
    labels = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))[:, :3].argmax(1)
    classes = [rank["classes"] for rank in found["ranks"]]
    for name in "012":  # three epochs
        assert sum(one.get(name, 0) for one in classes) == 3 * int((labels == int(name)).sum())
    for rank in found["ranks"]:
        parts = sum(rank["cost"][part] for part in ("compute", "communication", "waiting", "data"))
        assert parts == pytest.approx(rank["cost"]["wall"], rel=1e-3)
    kinds = [event["kind"] for event in read(place).events]
    assert sorted(kinds) == ["worker ended"] * 2 + ["worker started"] * 2
    assert main(["report", "last", "--trace", "trace.json", "--html", "a.html"]) == 0
    events = json.loads(Path("trace.json").read_text())["traceEvents"]
    for rank in (0, 1):  # every collective of every step, on each rank
        assert sum(e["pid"] == rank and e["name"] == "all_reduce gradients/0" for e in events) == STEPS


def read(place: Path) -> RunReader:
    (folder,) = (place / "runs").iterdir()
    reader = RunReader(folder)
    reader.poll()
    return reader


def test_a_killed_worker_leaves_a_report(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _ = run("-n", "2", "--faults", "kill 1@8", "train.py", "1000000")
    assert status == 137
    found = report(capsys, "last")
    assert found["outcome"] == "failed"
    assert found["exit_status"] == 137
    assert "worker 1 of 2 failed: killed by SIGKILL" in found["failure"]
    assert [event["text"] for event in found["changes"]] == ["worker 1 was lost: killed by SIGKILL"]
    assert any("the end of worker" in text for text in found["missing"])


def have_trained(place: Path) -> bool:
    """Whether both workers have written steps."""
    for folder in (place / "runs").glob("*"):
        reader = RunReader(folder)
        reader.poll()
        return [rank.rows.steps > 0 for rank in reader.ranks.values()] == [True, True]
    return False


def test_a_killed_launcher_leaves_a_report(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    process = start("-n", "2", "train.py", "1000000", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 60
        while not have_trained(place) and time.monotonic() < until:
            time.sleep(0.05)
        assert report(capsys, "last")["outcome"] == "running"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    found = report(capsys, "last")
    assert found["outcome"] == "killed"
    assert found["steps"] > 0
    assert found["cost"]["wall"] > 0
    assert any("the launcher was killed" in text for text in found["missing"])


def test_a_run_that_cannot_be_recorded_is_said_and_trains(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_RUNS", str(place / "train.py" / "runs"))
    status, said = run("-n", "2", "train.py", "2")
    assert status == 0
    assert "unisono: this run is not recorded: " in said
    assert "Not a directory" in said


def test_a_program_without_training_leaves_no_folder_and_no_record_means_none(place: Path) -> None:
    (place / "hello.py").write_text("print('hello')")
    assert run("-n", "1", "hello.py") == (0, "hello\n")
    assert list((place / "runs").iterdir()) == []
    assert run("-n", "1", "--no-record", "train.py", "2") == (0, "")
    assert list((place / "runs").iterdir()) == []
    assert run("-n", "1", "--run-dir", "mine", "train.py", "2") == (0, "")
    assert sorted(path.name for path in Path("mine").iterdir()) == ["events.jsonl", "ranks", "run.json"]
    status, said = run("-n", "1", "--run-dir", "mine", "train.py", "2")
    assert status == 0
    assert "a run is recorded in mine already" in said


def test_a_program_that_python_alone_started_is_recorded(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    subprocess.run([sys.executable, "train.py", "3"], check=True)
    found = report(capsys, "last")
    assert (found["outcome"], found["steps"], found["workers"], found["missing"]) == ("ok", 3, 1, [])


def test_metrics_are_handed_on_while_it_trains(place: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert run("-n", "2", "--run-dir", "mine", "--log", "tensorboard", "train.py", str(STEPS)) == (0, "")
    shown = accumulator.EventAccumulator("mine/tensorboard")
    shown.Reload()
    assert [e.value for e in shown.Scalars("loss")] == pytest.approx(train_alone()[0], rel=1e-4)
    status, said = run("-n", "2", "--log", "tensorbord", "train.py", "2")
    assert status == 2
    assert "--log: got 'tensorbord' to log to" in said
