"""What is left where the system is another than Linux: without memfd, futex and pidfd, as on macOS. It is this system
that says it were another one: no test runs on macOS itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PRETEND = """
import os, sys, asyncio, ctypes, multiprocessing, platform, selectors, socket, subprocess, sysconfig
sysconfig.get_config_vars(), platform.uname()
import torch

sys.platform = "darwin"
for name in ("memfd_create", "pidfd_open", "sched_getaffinity", "sched_setaffinity", "eventfd"):
    delattr(os, name) if hasattr(os, name) else None
"""
PROGRAM = """
import torch, unisono as un

def train(world):
    x = torch.full((3,), float(world.rank + 1))
    world.all_reduce(x).wait()
    return [type(world.transport).__name__, *x.tolist()]

world = un.join(device="cpu")
print("found", *train(world))
if world.rank == 0:
    print("threads", *un.run_threads(train, 2)[1][1:])
"""


def test_workers_send_messages_and_threads_work_on_a_system_like_macos(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(PRETEND)
    (tmp_path / "train.py").write_text(PROGRAM)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "unisono", "run", "-n", "2", str(tmp_path / "train.py")]
    done = subprocess.run(command, env={**env, "UNISONO_WARM": "0"}, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = sorted(line.partition("] ")[2] for line in done.stdout.splitlines())
    assert lines == ["found SocketTransport 1.5 1.5 1.5"] * 2 + ["threads 1.5 1.5 1.5"]
