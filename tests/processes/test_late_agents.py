"""An engine that has room for some agents at first, and for the others later: the run begins with MIN of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "src"
TRAIN = """
import json, os, time, torch, unisono as un
world = un.join(device="cpu")
torch.manual_seed(0)
model = torch.nn.Linear(8, 1).to(torch.float64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
un.parallel(model, optimizer)
x = torch.randn(48, 8, dtype=torch.float64)
sizes = set()
while not world.broadcast_object(os.path.exists("joined")):
    for (a,) in un.shard((x,), batch_size=16, shuffle=False):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(a), a.sum(1, keepdim=True)).backward()
        optimizer.step()
        sizes.add(world.size)
        if "UNISONO_JOINING" in os.environ:
            open("joined", "w").close()
        time.sleep(0.02)
print(json.dumps([sorted(sizes), model.weight.flatten().tolist()]), flush=True)
"""
LAUNCH = """
import sys
from unisono.launchers.engines.engine import agent_command
from unisono.launchers.engines.here import Here
from unisono.launchers.engines.ssh import HostCommand, HostsStarted, write_setup
from unisono.launchers.job import ElasticSettings, Job

class Growing(HostsStarted):
    def revive(self, missing):
        if 1 in missing and len(self._hosts) == 1:
            self._commands["b"] = command([1])
            self._hosts["b"], self._began["b"] = self._commands["b"].start(), self._began["a"]

class Engine(Here):
    def start(self, work):
        global command
        command = lambda ranks: HostCommand(agent_command(None, "host"), write_setup(work, ranks), ranks)
        return Growing({"a": command([0])}, elastic=True)

job = Job(["train.py"], 2, output="prefix", elastic=ElasticSettings(1, 2, patience_s=1.0))
sys.exit(Engine().run(job.program, 2, job=job))
"""


@pytest.mark.timeout(120)
def test_a_run_begins_with_the_least_and_takes_what_the_engine_starts_later(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "launch.py").write_text(LAUNCH)
    env = {**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "launch.py"]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    found = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    first, later = json.loads(found["[0]"]), json.loads(found["[1]"])
    assert first[0] == [1, 2]
    assert later[0] == [2]
    assert first[1] == later[1]
