"""Workers on other hosts that are lost, and hosts that are cut off for a while: the others go on, and are joined."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

SOURCES = Path(__file__).parents[2] / "src"
SETUP = """
import torch
torch.set_default_dtype(torch.float64)
draw = torch.Generator().manual_seed(1)
xs = torch.randn(24, 5, generator=draw)
ys = xs @ torch.randn(5, 1, generator=draw)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

def step(x, y):
    optimizer.zero_grad()
    ((model(x) - y) ** 2).mean().backward()
    optimizer.step()
"""
PROGRAM = """
import json, os, time
import unisono as un
world = un.join()
un.parallel(model, optimizer)
passes, said = 0, False
while not world.broadcast_object(os.path.exists("stop")):
    for x, y in un.shard((xs, ys), batch_size=6, shuffle=False):
        step(x, y)
        if not said:
            print(f"trains {os.environ['UNISONO_PLACE']} {os.getpid()}", flush=True)
            said = True
        time.sleep(0.02)
    passes += 1
print(json.dumps([passes, [p.flatten().tolist() for p in model.parameters()]]))
"""


class Launcher:
    """`unisono run`, by default with a host for each of two workers, and what it says."""

    def __init__(
        self, folder: Path, heartbeat_s: float, options: Sequence[str] = ("-n", "1:2", "--hosts", "2")
    ) -> None:
        (folder / "script.py").write_text(SETUP + PROGRAM)
        env = {**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"}
        options = [*options, "--heartbeat", f"{heartbeat_s:g}s", "--output", "prefix"]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "unisono", "run", *options, "script.py"],
            env=env,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []

    def await_line(self, is_meant: Callable[[str], bool]) -> str:
        """The next line of that kind."""
        assert self._process.stdout is not None
        for line in iter(self._process.stdout.readline, ""):
            self.lines.append(line)
            if is_meant(line):
                return line
        raise AssertionError("it ended before that:\n" + "".join(self.lines))

    def await_training(self, place: int, *, other_than: int = 0) -> int:
        """Until a worker has made its first step in a place; its process."""
        said = f"[{place}] trains {place} "
        line = self.await_line(lambda line: line.startswith(said) and int(line.split()[-1]) != other_than)
        return int(line.split()[-1])

    def await_end(self) -> list[str]:
        """All that it said."""
        assert self._process.stdout is not None
        self.lines += self._process.stdout.readlines()
        assert self._process.wait() == 0, "".join(self.lines)
        return self.lines

    def end(self) -> None:
        self._process.terminate()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


class Link:
    """The link of the host that a process runs on, while the process and after it."""

    def __init__(self, pid: int) -> None:
        kinds = ["net"] if os.geteuid() == 0 else ["user", "net"]
        self._files = {kind: os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY) for kind in kinds}

    def set(self, how: str) -> None:
        spaces = [f"--{kind}=/proc/self/fd/{fd}" for kind, fd in self._files.items()]
        command = ["nsenter", "--preserve-credentials", *spaces, "ip", "link", "set", "eth0", how]
        subprocess.run(command, check=True, pass_fds=list(self._files.values()))

    def close(self) -> None:
        for fd in self._files.values():
            os.close(fd)


def train_alone(passes: int) -> list[list[float]]:
    """The same batches, in this process and without Unisono."""
    names: dict[str, Any] = {}
    before = torch.get_default_dtype()
    try:
        exec(SETUP, names)
        for start in [*range(0, 24, 6)] * passes:
            names["step"](names["xs"][start : start + 6], names["ys"][start : start + 6])
    finally:
        torch.set_default_dtype(before)
    return [p.flatten().tolist() for p in names["model"].parameters()]


@pytest.mark.timeout(240)
def test_a_killed_worker_and_a_host_that_is_cut_off_are_replaced(tmp_path: Path) -> None:
    with contextlib.ExitStack() as ending:
        launcher = Launcher(tmp_path, heartbeat_s=2.0)
        ending.callback(launcher.end)
        first = launcher.await_training(1)
        os.kill(first, signal.SIGKILL)
        second = launcher.await_training(1, other_than=first)
        link = Link(second)
        ending.callback(link.close)
        link.set("down")
        launcher.await_line(lambda line: "worker 1 " in line and "was lost: connection lost" in line)
        launcher.await_line(lambda line: line.startswith("unisono: 1 worker"))
        link.set("up")
        launcher.await_training(1, other_than=second)
        (tmp_path / "stop").touch()
        lines = launcher.await_end()
    results = [json.loads(line[4:]) for line in lines if line.startswith(("[0] [", "[1] ["))]
    assert len(results) == 2, lines
    assert results[0] == results[1]
    passes, weights = results[0]
    # Rounding differs with the number of workers, and hundreds of steps make it grow; a pass more or less is some 1e-3.
    assert weights == [pytest.approx(one, rel=0, abs=1e-7) for one in train_alone(passes)]
    assert not os.path.exists(f"/proc/{second}"), "the worker that was cut off goes on"
