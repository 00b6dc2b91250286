"""The workers of an elastic run as its launcher sees them, with processes that are none."""

from __future__ import annotations

import os
import signal
import struct
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from unisono.launchers.elastic import LocalElastic
from unisono.launchers.failures import Failure
from unisono.launchers.job import ElasticSettings, Job
from unisono.launchers.runtime import membership
from unisono.launchers.runtime.local_channel import EventLoop, LocalChannel
from unisono.launchers.runtime.status import StatusPage
from unisono.launchers.supervisor import Supervisor
from unisono.launchers.workers import LocalWorker


class Process:
    """One that does nothing; `channel` is the worker's end of its connection."""

    def __init__(self, pid: int, fd: int) -> None:
        self.pid, self.channel = pid, LocalChannel(os.dup(fd))
        self.signals: list[int] = []

    def send(self, signum: int) -> None:
        self.signals.append(signum)


class Run:
    """What the members ask of the run."""

    def __init__(self, workers: int) -> None:
        self.output: Any = self
        self.lines: list[str] = []
        self.page = StatusPage.create(3)
        self.loop = EventLoop()
        self.workers: list[LocalWorker] = []  # in the order of their start
        self.let_go = lambda _: None
        self.debugger: Any = SimpleNamespace(is_paused=False)
        self.job = Job(["train.py"], workers)
        self.members = self.elastic = LocalElastic(ElasticSettings(1, 3), self)
        for place in range(workers):
            self.start_worker(place)
        self.members.coordinator.begin(list(self.members.connections))

    def say(self, line: str) -> None:
        self.lines.append(line)

    def start_worker(self, place: int) -> None:
        fd = self.members.open_connection()[membership.VARIABLE]
        process = Process(1000 + len(self.workers), fd)
        self.workers.append(LocalWorker(rank=place, host="", pid=process.pid, process=process, page=self.page))
        self.members.add_started(self.workers[-1])

    def act(self) -> bool:
        """One turn of the run; False where it has failed."""
        self.members.act(time.monotonic())
        self.members.look(time.monotonic())
        return self.members.given_up is None

    def preempt(self) -> bool:
        return False

    def step(self, place: int, number: int) -> None:
        """As the worker of a place notes it."""
        os.pwrite(self.page.fd, struct.pack("<q", number), 64 + 256 * place)
        assert self.page.read(place).step == number

    def come(self, *workers: int) -> None:
        for worker in workers:
            self.workers[worker].process.channel.send({"kind": "come", "generation": 0, "open": False})
        self.loop.pump(0)

    def end(self, worker: int, signum: signal.Signals | None = None) -> None:
        child = self.workers[worker]
        child.process.channel.close()
        child.ended = 1.0
        if signum is not None:
            child.failure = Failure(child.rank, 1.0, "signal", 128 + signum, (), signum.name)
        self.members.on_end(child)

    def ask(self, workers: int) -> None:
        Supervisor.answer(self, {"do": "scale", "workers": workers})


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    run = Run(getattr(request, "param", 3))
    yield run
    run.members.close()
    run.loop.close()
    run.page.close()
    for worker in run.workers:
        worker.process.channel.close()


def test_a_worker_that_is_lost_between_the_first_step_and_the_next_look_is_replaced(run: Run) -> None:
    run.act()
    run.step(0, 1)
    run.end(1, signal.SIGKILL)
    assert run.act()
    assert [worker.rank for worker in run.workers] == [0, 1, 2, 1]
    assert len(run.lines) == 1
    assert run.lines[0].startswith("unisono: worker 1 (process 1001) was lost: killed by SIGKILL")


def test_before_the_first_step_a_loss_is_the_end_and_nobody_is_started(run: Run) -> None:
    run.end(1, signal.SIGKILL)
    assert run.act()
    assert len(run.workers) == 3
    assert run.members.connections[1].worker.failure is not None  # for the report


@pytest.mark.parametrize("run", [1], indirect=True)
def test_workers_that_are_asked_for_before_the_first_step_are_started_after_it(run: Run) -> None:
    """A newcomer is given the results of what the others have called before training."""
    run.ask(3)
    run.act()
    assert len(run.workers) == 1
    run.step(0, 1)
    run.act()
    run.act()
    assert [worker.rank for worker in run.workers] == [0, 1, 2]


def test_a_worker_that_leaves_has_its_place_until_it_has_ended(run: Run) -> None:
    run.step(0, 1)
    run.ask(1)
    run.act()
    run.come(0, 1, 2)
    run.act()
    run.ask(3)
    run.act()
    assert len(run.workers) == 3
    run.end(2)
    run.act()
    run.end(1)
    run.act()
    assert [worker.rank for worker in run.workers] == [0, 1, 2, 2, 1]
    assert not run.members.coordinator.ending  # that they ended well does not end the run
    assert not any("lost" in line for line in run.lines)


def test_workers_that_died_when_they_were_to_leave_are_no_loss(run: Run) -> None:
    run.step(0, 1)
    run.ask(1)
    run.act()
    run.come(0, 1, 2)
    run.workers[1].process.channel.close()
    assert run.act()
    run.end(1, signal.SIGKILL)
    run.end(2)
    assert run.act()
    assert run.members.coordinator.members == [0]
    assert run.lines == ["unisono: the number of workers asked for is 1, after 3", "unisono: 1 worker continues"]


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
