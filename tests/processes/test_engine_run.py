"""What the launcher does on any engine, shown on one that only starts processes here and then misbehaves."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import unisono as un
from engine_agents import Agents
from unisono.launchers.engine_run import open_remote_run
from unisono.launchers.engines.engine import Engine, Work
from unisono.launchers.job import Job
from unisono.launchers.runtime.run_folder import RunFolder
from unisono.observe.runs.reading import RunReader

pytestmark = pytest.mark.timeout(120)


@dataclass(frozen=True)
class Here(Engine):
    """Starts `more` agents more than asked for, then does `then(agents, work)`."""

    name: ClassVar[str] = "here"
    more: int = 0
    then: Callable[[Agents, Work], object] = field(default=lambda agents, work: None)
    patience_s: float = 60.0

    @property
    def local(self) -> bool:
        return True

    @property
    def start_s(self) -> float:
        return self.patience_s

    def environment(self) -> str:
        return "torchrun"

    def start(self, work: Work) -> Agents:
        size = work.workers + self.more
        agents = Agents([])
        for rank in range(size):
            env = {**os.environ, **work.env, "RANK": str(rank), "WORLD_SIZE": str(size)}
            agents.processes.append(subprocess.Popen(list(work.agent), env=env, start_new_session=True))
        self.then(agents, work)
        return agents


def ranks() -> list[Any]:
    """In every worker."""
    world = un.join(device="cpu")
    return world.gather_objects(world.rank)


def waits(ready: Callable[[], object] | None = None) -> None:
    """In every worker: rank 1 does something, and all wait."""
    if os.environ["RANK"] == "1" and ready is not None:
        ready()
    time.sleep(600)


def test_strangers_at_the_launchers_port_change_nothing() -> None:
    held: list[socket.socket] = []

    def strangers(_: Agents, work: Work) -> None:
        for text in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(64), os.urandom(100_000)):
            held.append(socket.create_connection(work.addresses[0]))
            held[-1].sendall(text)

    assert un.launch(ranks, workers=2, on=Here(then=strangers)) == [[0, 1], [0, 1]]
    for sock in held:
        sock.close()


def test_an_engine_that_starts_another_number_is_refused() -> None:
    with pytest.raises(un.EngineError, match=r"here started 3 workers, not the 2 that were asked for"):
        un.launch(ranks, workers=2, on=Here(more=1))


def test_workers_that_never_report_are_an_error_with_numbers() -> None:
    def end_one(agents: Agents, _: Work) -> None:
        agents.processes[1].send_signal(signal.SIGSTOP)

    with pytest.raises(
        un.EngineError, match=r"1 of 2 workers had reported to this host after 5 s \(at 127.0.0.1, port"
    ):
        un.launch(ranks, workers=2, on=Here(then=end_one, patience_s=5))


def test_an_engine_that_ends_before_its_workers_run_is_quoted() -> None:
    with pytest.raises(
        un.EngineError, match=r"(?s)here ended \(exit status 9\) before 2 workers.*the engine's own words"
    ):
        un.launch(ranks, workers=2, on=Here(then=lambda agents, _: agents.close()))


def test_an_engine_that_ends_under_its_workers_is_one_report_and_nothing_is_left() -> None:
    found: list[Agents] = []

    def keep(agents: Agents, _: Work) -> None:
        found.append(agents)

    class Ending:
        """Lets the engine say that it has ended, once a worker runs."""

        def write(self, text: str) -> int:
            if "running" in text:
                found[0].status = 3
            return len(text)

        def flush(self) -> None: ...

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", Ending())
        with pytest.raises(
            un.WorkerError, match=r"(?s)connection lost.*ended with exit status 3. the engine's own words"
        ):
            un.launch(waits, workers=2, kwargs={"ready": _running}, on=Here(then=keep))
    assert all(process.poll() is not None for process in found[0].processes)


def _running() -> None:
    print("running", flush=True)


def test_an_agent_that_is_killed_is_one_report() -> None:
    with pytest.raises(un.WorkerError, match=r"worker 1 of 2 failed: connection lost") as caught:
        un.launch(waits, workers=2, kwargs={"ready": _kill_agent}, on=Here())
    assert caught.value.rank == 1


def _kill_agent() -> None:
    os.kill(int(os.environ["UNISONO_AGENT_PID"]), signal.SIGKILL)


class Starting(Agents):
    """Starts all agents again when all have ended, once."""

    def __init__(self, start: Callable[[], list[subprocess.Popen[bytes]]]) -> None:
        super().__init__(start())
        self.begin, self.ended = start, list[subprocess.Popen[bytes]]()

    def poll(self) -> int | None:
        found = super().poll()
        if found and not self.ended:
            self.ended, self.processes = self.processes, self.begin()
            return None
        return found


@dataclass(frozen=True)
class HereAgain(Here):
    """Starts all workers again after a failure."""

    @property
    def restarts(self) -> int:
        return 1

    def start(self, work: Work) -> Agents:
        return Starting(lambda: Here.start(self, work).processes)


def count_steps() -> tuple[int, int]:
    """In every worker: three steps, and how often it was started."""
    un.join(device="cpu")
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replica = un.parallel(model, optimizer)
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    return replica.step, int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def test_a_fault_fires_once_in_a_run_whose_workers_are_started_again(capfd: pytest.CaptureFixture[str]) -> None:
    found = un.launch(count_steps, workers=2, on=HereAgain(), faults="kill 1@2; slow 0 x1.5@3")
    assert found == [(3, 1), (3, 1)]
    told = capfd.readouterr().err
    assert told.count("unisono: fault: rank 1 kills itself at step 2\n") == 1
    assert "worker 1 failed: killed by SIGKILL; all workers start again (restart 1 of 1)" in told


def test_a_fault_that_does_not_fire_on_an_engine_fails_the_run() -> None:
    with pytest.raises(un.WorkerError, match=r"(?s)the fault did not fire\n  kill 1@4: rank 1 came to step 3 only"):
        un.launch(count_steps, workers=2, on=Here(), faults="kill 1@4")


def test_workers_on_hosts_without_the_runs_folder_are_recorded_by_the_launcher(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch, unisono as un\n"
        "model = torch.nn.Linear(4, 4)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "un.parallel(model, optimizer)\n"
        "for i in range(30):\n"
        "    model(torch.ones(1, 4)).sum().backward()\n"
        "    optimizer.step()\n"
    )
    record = RunFolder.create(["train.py"], folder=tmp_path / "run", workers=2, command=["unisono", "run"])
    assert record is not None
    record.update(id="another")  # so that workers take it for the folder of another machine
    run = open_remote_run(Job([str(tmp_path / "train.py")], 2, record=record), Here())
    assert run.supervise().failure is None
    reader = RunReader(record.path)
    reader.poll()
    assert reader.unreadable == 0
    assert [rank.rows.steps for rank in reader.ranks.values()] == [30, 30]
    assert all(rank.end is not None and rank.end["outcome"] == "ok" for rank in reader.ranks.values())
    assert sorted(event["kind"] for event in reader.events) == ["worker ended"] * 2 + ["worker started"] * 2
