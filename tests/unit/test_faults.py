"""Faults in one process: a slow rank, a disk that is full, a stop; and what happens without a script or a launcher."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import unisono as un
from unisono.launchers.runtime import faults, status
from unisono.launchers.runtime.faults import parse_script
from unisono.methods.offload.disk import Disk
from unisono.methods.strategy import watches
from unisono.methods.strategy.watches import FaultWatch


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The launcher's end of a pipe for reports; what is armed is forgotten afterwards."""
    ours, theirs = os.pipe()
    monkeypatch.setenv("UNISONO_REPORT_FD", str(theirs))
    monkeypatch.setattr(faults, "_listener", None)
    monkeypatch.setattr(faults, "_writes", [])
    yield ours
    os.close(ours)
    os.close(theirs)


def arm(text: str, rank: int = 0) -> list[faults.Armed]:
    return [faults.Armed(number, fault, rank) for number, fault in enumerate(parse_script(text))]


def bind(world: un.World, text: str = "") -> un.Replica:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    replica = un.parallel(model, torch.optim.SGD(model.parameters(), lr=0.1), world=world)
    if text:
        replica._faults = FaultWatch(model, world, arm(text, world.rank))
    return replica


def step(replica: un.Replica) -> None:
    replica.optimizer.zero_grad()
    replica.model(torch.ones(2, 3)).sum().backward()
    replica.optimizer.step()


class Clock:
    """A clock that stands where it is put."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_slow_steps_take_so_many_times_their_own_compute(
    reports: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()

    def sleep(seconds: float) -> None:
        clock.now += seconds

    monkeypatch.setattr(watches, "sleep", sleep)

    def train(world: un.World) -> tuple[list[float], list[tuple[int, dict[str, object]]]]:
        replica = bind(world, "slow 1 x4@2-3" if world.rank == 1 else "")
        if world.rank == 1:
            world.ledger.clock = clock
            world.ledger.restart()
        for number in range(1, 6):
            with world.ledger.span("data"):
                clock.now += 5.0 if world.rank == 1 else 0.0  # of this, nothing is made longer
            clock.now += number if world.rank == 1 else 0.0
            step(replica)
        events = [(event.step, event.values) for event in world.ledger.events]
        return [round(row.wall, 6) for row in world.ledger.rows], events

    (_, others), (walls, events) = un.run_threads(train, 2)
    assert walls == [5 + 1, 5 + 4 * 2, 5 + 4 * 3, 5 + 4, 5 + 5]
    assert others == []
    assert events == [(1, {"fault": "slow 1 x4@2-3", "at": 2})]
    told = capsys.readouterr().err
    assert told == "unisono: fault: rank 1 is 4 times as slow until step 3, beginning at step 2\n"
    assert json.loads(os.read(reports, 1000))["number"] == 0


def test_only_the_replica_that_counts_the_steps_is_slowed(reports: int, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(watches, "sleep", slept.append)
    world = un.World()
    generator, critic = bind(world, "slow 0 x2@1-2"), bind(world, "slow 0 x2@1-2")
    for _ in range(2):
        step(generator)
        step(critic)
    assert len(slept) == 2


@pytest.mark.parametrize("phase", ["forward", "backward", "exchange"])
def test_faults_inside_a_step_find_their_step_once(
    phase: str, reports: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[list[str]] = []

    def train(world: un.World) -> None:
        replica = bind(world, f"stop 1@3 in {phase} for 0.001s" if world.rank == 1 else "")
        marks: list[str] = []
        replica.model.register_forward_hook(lambda *_: marks.append("forward"))
        first = next(replica.model.parameters())
        first.register_hook(lambda _: marks.append("gradient"))  # as its gradient comes, before it is kept
        if world.rank == 1:
            monkeypatch.setattr(faults.subprocess, "run", lambda *_, **__: seen.append(list(marks)))
        for _ in range(4):
            with torch.no_grad():
                replica.model(torch.ones(1, 3))  # evaluation is no step
            marks[:] = ["evaluated"]
            step(replica)

    un.run_threads(train, 2)
    assert len(seen) == 1
    if phase == "backward":  # no matter which of two gradients comes first
        seen[0] = [mark for mark in seen[0] if mark != "gradient"]
    expected = {"forward": [], "backward": ["forward"], "exchange": ["forward", "gradient"]}
    assert seen[0] == ["evaluated", *expected[phase]]
    assert capsys.readouterr().err == f"unisono: fault: rank 1 stops for 0.001 s in {phase} at step 3\n"


def test_a_full_disk_is_one_write_that_fails_from_that_step_on(
    reports: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "_writes", arm("full-disk@2"))
    replica = bind(un.World())
    step(replica)
    un.save(tmp_path, replica)
    step(replica)
    with pytest.raises(un.CheckpointError, match=r"earlier checkpoints are unchanged.*No space left") as caught:
        un.save(tmp_path, replica)
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.ENOSPC
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000000001"]  # whole, and nothing beside it
    assert un.load(tmp_path, replica).step == 1
    step(replica)
    un.save(tmp_path, replica)
    assert json.loads(os.read(reports, 1000))["number"] == 0


def test_a_full_disk_is_one_for_the_scratch_file_of_an_offload_too(
    reports: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    armed = arm("stop 0@1 in save for 0.01s; full-disk@1")
    monkeypatch.setattr(faults, "_writes", armed)
    monkeypatch.setattr(status, "_step", 1)
    disk = Disk(tmp_path, 4096)
    region, line = disk.place(4096), disk.make_buffer(4096)
    with pytest.raises(OSError, match=r"scratch file.*No space left on device; free some space there") as caught:
        disk.write(region, line.fill_(7)).wait()
    assert caught.value.errno == errno.ENOSPC
    disk.write(region, line).wait()
    assert disk.read(region, line.zero_()).wait().eq(7).all()
    assert [one.fired for one in armed] == [False, True]  # it is no checkpoint
    disk.close()


def test_without_a_script_nothing_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "_armed", None)
    replica = bind(un.World())
    assert replica._faults is None
    assert replica.world.ledger.on_record is None
    assert faults._writes == []


def test_a_script_without_a_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "_armed", None)
    monkeypatch.setenv("UNISONO_FAULTS", "kill 0@1")
    with pytest.raises(RuntimeError, match="started without Unisono's launcher"):
        bind(un.World())
    monkeypatch.setenv("UNISONO_FAULTS", "")
    monkeypatch.setenv("UNISONO_WORKER_FAULTS", '{"0": "kill 0@1"}')  # a program that a worker has started
    step(bind(un.World()))


# A stop ----------------------------------------------------------------------------------------------------------

STOPS = """
import os, sys
from unisono.launchers.runtime import faults
from unisono.launchers.runtime.faults import parse_script
(fault,) = parse_script(sys.argv[1])
faults.Armed(0, fault, 1).fire(fault.step)
print("went on")
"""


def start_stop(text: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "UNISONO_REPORT_FD": "1"}
    command = [sys.executable, "-c", STOPS, text]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_stopped_process_is_stopped_and_its_helper_goes_with_it() -> None:
    with start_stop("stop 1@6 for 600s") as process:
        try:
            _, found = os.waitpid(process.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(found)
            assert os.WSTOPSIG(found) == signal.SIGSTOP
            helper = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
        finally:
            process.kill()
    deadline = time.monotonic() + 60
    while Path(f"/proc/{helper}").exists() and "(zombie)" not in Path(f"/proc/{helper}/status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_stopped_process_goes_on() -> None:
    with start_stop("stop 1@6 for 0.05s") as process:
        try:
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    report, *rest = out.splitlines()
    assert (process.returncode, rest) == (0, ["went on"])
    assert json.loads(report)["kind"] == "fault"
    assert err == "unisono: fault: rank 1 stops for 0.05 s at step 6\n"
