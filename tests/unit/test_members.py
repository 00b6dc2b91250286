"""The workers of an elastic run as its launcher sees them, with processes that are none."""

from __future__ import annotations

import os
import selectors
import signal
import struct
from collections.abc import Iterator
from typing import Any

import pytest

from unisono.launchers.child import Child
from unisono.launchers.control import Control
from unisono.launchers.elastic import Members
from unisono.launchers.failures import Failure
from unisono.launchers.job import ComeAndGo
from unisono.runtime import membership
from unisono.runtime.status import StatusPage


class Process:
    """One that does nothing; `sock` is the worker's end of its line."""

    def __init__(self, pid: int, fd: int) -> None:
        self.pid, self.sock = pid, membership.socket.socket(fileno=os.dup(fd))
        self.signals: list[int] = []

    def send(self, signum: int) -> None:
        self.signals.append(signum)


class Run:
    """What the members ask of the run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
        monkeypatch.setattr(Control, "open", lambda _: None)
        self.output: Any = self
        self.lines: list[str] = []
        self.notes: list[tuple[str, dict[str, object]]] = []
        self.page = StatusPage.create(3)
        self.selector = selectors.DefaultSelector()
        self.workers: list[Child] = []  # in the order of their start
        self.let_go = lambda _: None
        self.members = Members(ComeAndGo(1, 3), workers, self, "train.py")
        for place in range(workers):
            self.start_worker(place)
        self.members.begin()

    def say(self, line: str) -> None:
        self.lines.append(line)

    def start_worker(self, place: int) -> None:
        fd = self.members.open_line()[membership.VARIABLE]
        self.workers.append(Child(place, Process(1000 + len(self.workers), fd), -1, 0.0))
        self.members.opened(self.workers[-1])

    def note(self, kind: str, **values: object) -> None:
        self.notes.append((kind, values))

    def preempt(self) -> bool:
        return False

    def describe_activity(self, place: int, now: float) -> str:
        return ""

    def step(self, place: int, number: int) -> None:
        """As the worker of a place notes it."""
        os.pwrite(self.page.fd, struct.pack("<q", number), 64 + 256 * place)
        assert self.page.read(place).step == number

    def come(self, *workers: int) -> None:
        for worker in workers:
            membership.send(self.workers[worker].process.sock, {"kind": "come", "generation": 0, "open": False})
        for key, _ in self.selector.select(0):
            key.data()

    def end(self, worker: int, signum: signal.Signals | None = None) -> None:
        child = self.workers[worker]
        child.process.sock.close()
        child.exited = 1.0
        if signum is not None:
            child.failure = Failure(child.rank, 1.0, "signal", 128 + signum, (), signum.name)
        self.members.on_exit(child)

    def ask(self, workers: int) -> None:
        self.members._scaling.answer({"do": "scale", "workers": workers})


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Run]:
    run = Run(monkeypatch, getattr(request, "param", 3))
    yield run
    run.members.close()
    run.selector.close()
    run.page.close()
    for worker in run.workers:
        worker.process.sock.close()


def test_a_worker_that_is_lost_between_the_first_step_and_the_next_look_is_replaced(run: Run) -> None:
    run.members.act()
    run.step(0, 1)
    run.end(1, signal.SIGKILL)
    assert run.members.act()
    assert [worker.rank for worker in run.workers] == [0, 1, 2, 1]
    assert len(run.lines) == 1
    assert run.lines[0].startswith("unisono: worker 1 (process 1001) was lost: killed by SIGKILL")


def test_before_the_first_step_a_loss_is_the_end_and_nobody_is_started(run: Run) -> None:
    run.end(1, signal.SIGKILL)
    assert run.members.act()
    assert len(run.workers) == 3
    assert run.members.lines[1].child.failure is not None  # for the report


@pytest.mark.parametrize("run", [1], indirect=True)
def test_workers_that_are_asked_for_before_the_first_step_are_started_after_it(run: Run) -> None:
    """A newcomer is given the results of what the others have called before training."""
    run.ask(3)
    run.members.act()
    assert len(run.workers) == 1
    run.step(0, 1)
    run.members.act()
    run.members.act()
    assert [worker.rank for worker in run.workers] == [0, 1, 2]


def test_a_worker_that_leaves_has_its_place_until_it_has_ended(run: Run) -> None:
    run.step(0, 1)
    run.ask(1)
    run.members.act()
    run.come(0, 1, 2)
    run.members.act()
    run.ask(3)
    run.members.act()
    assert len(run.workers) == 3
    run.end(2)
    run.members.act()
    run.end(1)
    run.members.act()
    assert [worker.rank for worker in run.workers] == [0, 1, 2, 2, 1]
    assert not run.members.coordinator.ending  # that they ended well does not end the run
    assert not any("lost" in line for line in run.lines)


def test_workers_that_died_when_they_were_to_leave_are_no_loss(run: Run) -> None:
    run.step(0, 1)
    run.ask(1)
    run.members.act()
    run.come(0, 1, 2)
    run.workers[1].process.sock.close()
    assert run.members.act()
    run.end(1, signal.SIGKILL)
    run.end(2)
    assert run.members.act()
    assert run.members.coordinator.members == [0]
    assert run.lines == ["unisono: the number of workers asked for is 1, after 3", "unisono: 1 worker goes on"]


@pytest.mark.parametrize("workers", [0, 4, -1, True, "2", None, 1.0])
def test_a_number_that_cannot_be_is_refused_and_nothing_changes(run: Run, workers: Any) -> None:
    with pytest.raises(ValueError, match=r"this run takes 1 to 3|not known"):
        run.ask(workers)
    assert run.members.coordinator.wanted == 3


def test_nothing_is_taken_by_a_run_that_ends(run: Run) -> None:
    run.step(0, 1)
    run.end(0)
    with pytest.raises(ValueError, match="about to end"):
        run.ask(1)
