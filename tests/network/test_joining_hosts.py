"""Hosts that come to a run under way: by `unisono join`, encrypted."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from test_lost_hosts import SOURCES, Launcher, train_alone


def enter(pid: int) -> list[str]:
    """A command in front of others that runs them on the host of a process."""
    kinds = ["net"] if os.geteuid() == 0 else ["user", "net"]
    return ["nsenter", "--preserve-credentials", *(f"--{kind}=/proc/{pid}/ns/{kind}" for kind in kinds)]


def join(pid: int, command: str, name: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1", "UNISONO_HOST": name}
    words = [*enter(pid), sys.executable, "-m", *command.split()]
    return subprocess.Popen(words, env=env, stderr=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


@pytest.mark.timeout(240)
def test_a_host_joins_is_lost_and_another_takes_its_place(tmp_path: Path) -> None:
    with contextlib.ExitStack() as ending:
        options = ["-n", "1:2", "--hosts", "1", "--later", "1", "--encrypt"]
        launcher = Launcher(tmp_path, heartbeat_s=2.0, options=options)
        ending.callback(launcher.end)
        said = launcher.await_line(lambda line: "free for hosts that join later" in line)
        found = re.search(r"unisono join .*", said)
        assert found is not None
        secret = Path(found.group().split()[-1])
        assert secret.stat().st_mode & 0o777 == 0o600
        first = launcher.await_training(0)

        come = join(first, found.group(), "late")
        ending.callback(end, come)
        worker = launcher.await_training(1)
        full = join(first, found.group(), "too-late")
        assert "2 workers at most" in full.communicate(timeout=60)[1]
        assert full.returncode == 1

        os.kill(worker, signal.SIGKILL)  # a loss like others: its agent starts another
        launcher.await_line(lambda line: "worker 1 " in line and "on late) was lost: killed by SIGKILL" in line)
        second = launcher.await_training(1, other_than=worker)
        come.kill()  # the host, with its agent
        launcher.await_line(lambda line: "worker 1 " in line and "was lost" in line)
        again = join(first, found.group() + " --wait", "later")
        ending.callback(end, again)
        launcher.await_line(lambda line: line == "unisono: host later joins, for worker 1\n")
        launcher.await_training(1, other_than=second)
        (tmp_path / "stop").touch()
        lines = launcher.await_end()
        assert "the run is over" in again.communicate(timeout=60)[1]
        assert again.returncode == 0
    assert not secret.exists()
    results = [json.loads(line[4:]) for line in lines if line.startswith(("[0] [", "[1] ["))]
    assert len(results) == 2, lines
    assert results[0] == results[1]
    passes, weights = results[0]
    assert weights == [pytest.approx(one, rel=0, abs=1e-7) for one in train_alone(passes)]
    assert not os.path.exists(f"/proc/{second}")
