"""SIGTERM: workers that ask for it save after the same step and leave, and the same command goes on."""

from __future__ import annotations

import os
import signal
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from preemption_cases import STEPS, train
from test_engine_run import Agents, Here

import unisono as un
from unisono.launchers.engine_run import RemoteRun
from unisono.launchers.engines.engine import Work
from unisono.launchers.job import Job

SCRIPT = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch
from preemption_cases import train
kind, who = sys.argv[1:]
parameters = train(kind, "checkpoint", who)
import unisono as un
torch.save(parameters, f"parameters-{{un.join().rank}}.pt")
"""


def saved_step(folder: Path) -> int:
    return max(int(path.name.removeprefix("step-")) for path in (folder / "checkpoint").iterdir())


def check_same(folder: Path, undisturbed: list[list[torch.Tensor]]) -> None:
    for rank, right in enumerate(undisturbed):
        found = torch.load(folder / f"parameters-{rank}.pt")
        assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))


@pytest.mark.parametrize(("kind", "to"), [("trainer", "launcher"), ("trainer", "worker"), ("loop", "worker")])
def test_a_preempted_run_saves_leaves_and_goes_on_bit_for_bit(run_script, still_running, tmp_path, kind, to):
    launched = run_script(SCRIPT, "-n", "2", args=[kind, "01" if to == "launcher" else "1"])
    pids = launched.wait_for_files("ready-0", "ready-1")
    if to == "launcher":
        launched.signal(signal.SIGTERM)
    else:
        os.kill(int(pids[1]), signal.SIGTERM)
    status, _, err = launched.finish()
    step = saved_step(tmp_path)
    assert status == 143, err
    assert 5 <= step < STEPS
    assert f"unisono: preempted (SIGTERM): all 2 workers left after step {step} with exit status 143\n" in err
    assert (f"preempted at step {step}, saved to checkpoint; run the same command to resume" in err) == (
        kind == "trainer"
    )
    assert "failed" not in err
    assert still_running(pids) == []
    again = run_script(SCRIPT, "-n", "2", args=[kind, "01" if to == "launcher" else "1"])
    status, _, err = again.finish()
    assert (status, err) == (0, "")
    check_same(tmp_path, un.launch(train, workers=2, args=(kind,)))


class Notice(BaseHTTPRequestHandler):
    """A metadata service of Google's, on a machine that will be taken away."""

    def do_GET(self) -> None:
        self.send_response(200 if self.headers["Metadata-Flavor"] == "Google" else 403)
        self.end_headers()
        self.wfile.write(b"TRUE")

    def log_message(self, *args: object) -> None:
        pass


def test_a_clouds_notice_is_as_good_as_sigterm(run_script, still_running, tmp_path, monkeypatch):
    with ThreadingHTTPServer(("127.0.0.1", 0), Notice) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("UNISONO_SPOT", f"gcp=http://127.0.0.1:{server.server_port}")
        launched = run_script(SCRIPT, "-n", "2", args=["loop", "01"])
        status, _, err = launched.finish()
        server.shutdown()
    assert status == 143, err
    assert "unisono: the cloud will take this machine away; saving and leaving\n" in err
    assert saved_step(tmp_path) < STEPS
    monkeypatch.delenv("UNISONO_SPOT")
    status, _, err = run_script(SCRIPT, "-n", "2", args=["loop", ""]).finish()
    assert (status, err) == (0, "")
    check_same(tmp_path, un.launch(train, workers=2, args=("loop",)))


IGNORES = """
import os, time
from pathlib import Path
import unisono as un
from unisono.launchers.runtime import sigterm
world = un.join(device="cpu")
un.preempted()
Path(f"ready-{world.rank}").write_text(f"{os.getpid()}\\n")
while True:
    if un.preempted():
        Path(f"told-{world.rank}").write_text("yes\\n")
    time.sleep(0.01)
"""


def test_workers_that_do_not_leave_are_ended_after_the_grace_time(run_script, still_running):
    launched = run_script(IGNORES, "-n", "2", "--grace", "0.2s")
    pids = launched.wait_for_files("ready-0", "ready-1")
    launched.signal(signal.SIGTERM)
    status, _, err = launched.finish()
    assert status == 143
    assert err.startswith(
        "unisono: interrupted (SIGTERM, and not all had left 0.2 s later (--grace)); 2 workers stopped in"
    )
    assert still_running(pids) == []


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_does_not_wait_for_the_grace_time(run_script, still_running, second):
    launched = run_script(IGNORES, "-n", "2", "--grace", "1h")
    pids = launched.wait_for_files("ready-0", "ready-1")
    launched.signal(signal.SIGTERM)
    launched.wait_for_files("told-0", "told-1")
    launched.signal(second)
    status, _, err = launched.finish()
    assert status == 143
    assert err.startswith("unisono: interrupted (SIGTERM); 2 workers stopped in")
    assert still_running(pids) == []


def test_without_grace_sigterm_ends_the_run_at_once(run_script, still_running):
    launched = run_script(IGNORES, "-n", "1", "--grace", "0")
    pids = launched.wait_for_files("ready-0")
    launched.signal(signal.SIGTERM)
    status, _, err = launched.finish()
    assert status == 143
    assert err.startswith("unisono: interrupted (SIGTERM); 1 worker stopped in")
    assert still_running(pids) == []


def test_a_worker_that_fails_ends_others_that_note_sigterm(run_script, still_running):
    text = IGNORES + "    if world.rank == 1: raise ValueError('a bad batch')\n"
    launched = run_script(text, "-n", "2", "--grace", "1h")
    status, _, err = launched.finish()
    assert status == 1
    assert "worker 1 of 2 failed: ValueError" in err
    assert still_running(launched.written("ready-0", "ready-1")) == []


# -- on an engine ------------------------------------------------------------------------------------------------------


def wait_for(*files: Path) -> None:
    deadline = time.monotonic() + 60
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_agent_that_an_engine_ends_lets_its_worker_save_and_leave(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def terminate_one(agents: Agents, _: Work) -> None:
        def run() -> None:
            wait_for(tmp_path / "ready-0", tmp_path / "ready-1")
            agents.processes[1].send_signal(signal.SIGTERM)

        threading.Thread(target=run, daemon=True).start()

    with pytest.raises(un.WorkerError, match="preempted \\(SIGTERM\\): all 2 workers left") as left:
        un.launch(train, workers=2, args=("trainer", "checkpoint", "1"), on=Here(then=terminate_one))
    assert (left.value.exit_status, left.value.step) == (143, saved_step(tmp_path))
    (tmp_path / "script.py").write_text(SCRIPT)
    assert RemoteRun(Job(["script.py", "trainer", "1"], 2), Here()).supervise().exit_status == 0
    check_same(tmp_path, un.launch(train, workers=2, args=("trainer",)))


def test_a_launcher_passes_the_word_on_to_an_engines_workers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)
    run = RemoteRun(Job(["script.py", "loop", "01"], 2), Here())

    def tell() -> None:
        wait_for(tmp_path / "ready-0", tmp_path / "ready-1")
        while not run.preempt():
            time.sleep(0.01)

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    outcome = run.supervise()
    thread.join()
    assert (outcome.exit_status, outcome.preempted, outcome.failure) == (143, True, None)
    assert outcome.step == saved_step(tmp_path)
