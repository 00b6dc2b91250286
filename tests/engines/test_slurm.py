"""Real Slurm, two nodes on this host: srun, sbatch, one report for a killed worker, and what is missing is named."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from engine_cases import (
    COMMON,
    EVERYTHING,
    ITSELF,
    KILLED,
    NETWORKED,
    REPLACED,
    check_network,
    network_options,
    right_loss,
    right_weights,
    specs,
)
from engine_commands import Command, only, unisono_run
from slurm_cluster import SlurmCluster, why_not

import unisono as un

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Mapping[str, str]]:
    """The variables with which Slurm's commands find the cluster."""
    if reason := why_not():
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # short: the path of a socket has at most 107 characters
    found = SlurmCluster(folder)
    try:
        found.start()
        yield {"SLURM_CONF": str(found.conf)}
    finally:
        found.stop()
        shutil.rmtree(folder)


def ask(cluster: Mapping[str, str], *words: str) -> str:
    """What a command of Slurm's answers."""
    env = {**os.environ, **cluster}
    return subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout.strip()


def test_the_same_program_has_the_same_loss_and_every_strategy_runs(
    command: Command, cluster: Mapping[str, str]
) -> None:
    wanted = specs()
    words = unisono_run("--on", "slurm", "-n", "2", "script.py", json.dumps(wanted))
    ended = command(*words, script=EVERYTHING, env=cluster)
    found = only(ended)
    assert ended.err == ""
    assert found["loss"] == pytest.approx(right_loss(), rel=1e-12)
    assert found["size"] == 2
    assert set(found["strategies"]) == set(wanted)
    assert all(0 < loss < 20 for loss in found["strategies"].values())


def test_interface_ports_and_encryption_are_the_users(command: Command, cluster: Mapping[str, str]) -> None:
    words = unisono_run("--on", "slurm", "-n", "2", *network_options(), "script.py")
    ended = command(*words, script=NETWORKED, env={**cluster, "UNISONO_SHARED_MEMORY": "0"})
    assert ended.status == 0, ended
    check_network(ended.json())


def test_a_killed_worker_ends_in_one_report_and_the_nodes_are_free_again(
    command: Command, cluster: Mapping[str, str]
) -> None:
    ended = command(*unisono_run("--on", "slurm", "-n", "2", "script.py"), script=KILLED, env=cluster)
    assert ended.status == 137
    assert ended.err.startswith("unisono: worker 1 of 2 failed: killed by SIGKILL\n")
    assert ended.err.count("unisono:") == 1
    assert "srun" not in ended.err
    while ask(cluster, "squeue", "-h"):  # until the test's time is over
        time.sleep(0.1)
    assert ask(cluster, "sinfo", "-h", "-o", "%T %D") == "idle 2"


def test_a_killed_worker_is_replaced_where_workers_come_and_go(command: Command, cluster: Mapping[str, str]) -> None:
    words = unisono_run("--on", "slurm", "-n", "1:2", "--faults", "kill 1@2", "script.py")
    ended = command(*words, script=REPLACED, env=cluster)
    assert ended.status == 0, ended
    first, second = ended.json()
    assert first == second
    assert first["weights"] == pytest.approx(right_weights(first["passes"]), rel=1e-9)
    assert "was lost: killed by SIGKILL" in ended.err


def test_a_job_script_is_written_and_runs(command: Command, cluster: Mapping[str, str], tmp_path: Path) -> None:
    script = COMMON + "print(json.dumps([un.join().rank, os.environ['SLURM_JOB_NAME'], train()]))"
    write = unisono_run("--on", "slurm", "-n", "2", "--script", "job.sh", "--options=--time=5", "script.py")
    written = command(*write, script=script, env=cluster)
    assert written.status == 0, written
    assert "sbatch job.sh" in written.out
    assert "#SBATCH --ntasks=2\n" in (tmp_path / "job.sh").read_text()
    assert "#SBATCH --time=5\n" in (tmp_path / "job.sh").read_text()
    ended = command("sbatch", "--parsable", "job.sh", script=script, env=cluster)
    assert ended.status == 0, ended
    while ask(cluster, "squeue", "-h"):  # `sbatch --wait` looks after 2, 6, 12 seconds only
        time.sleep(0.1)
    assert "JobState=COMPLETED" in ask(cluster, "scontrol", "show", "job", ended.out.strip())
    (output,) = tmp_path.glob("script-*.out")
    found = sorted(json.loads(line.partition("] ")[2]) for line in output.read_text().splitlines())
    assert found == [[rank, "script", pytest.approx(right_loss(), rel=1e-12)] for rank in range(2)]


PREEMPTED = """
import time
from pathlib import Path
import torch, unisono as un
from unisono.launchers.runtime import sigterm
class Pause(un.Callback):
    def on_step_end(self, trainer, logs):
        if logs["step"] == 5:
            Path(f"ready-{trainer.world.rank}").touch()
            while not sigterm.told():
                time.sleep(0.01)
x, model = torch.ones(80, 2), torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
un.Trainer(
    model, optimizer, loss=torch.nn.MSELoss(), checkpoint="checkpoint", callbacks=[Pause()], progress=False
).fit((x, x[:, :1]), epochs=2, batch_size=4)
print("step", un.join().ledger.step_count)
"""


def test_workers_of_a_cancelled_job_save_and_leave_and_the_same_script_goes_on(
    command: Command, cluster: Mapping[str, str], tmp_path: Path
) -> None:
    command(*unisono_run("--on", "slurm", "-n", "2", "--script", "job.sh", "script.py"), script=PREEMPTED, env=cluster)
    job = command("sbatch", "--parsable", "job.sh", script=PREEMPTED, env=cluster).out.strip()
    while not all((tmp_path / f"ready-{rank}").exists() for rank in range(2)):
        assert ask(cluster, "squeue", "-h"), (tmp_path / f"script-{job}.out").read_text()
        time.sleep(0.1)
    ask(cluster, "scancel", job)
    while ask(cluster, "squeue", "-h"):
        time.sleep(0.1)
    output = (tmp_path / f"script-{job}.out").read_text()
    (saved,) = (tmp_path / "checkpoint").iterdir()
    step = int(saved.name.removeprefix("step-"))
    assert 5 <= step <= 20
    assert f"all 2 workers left after step {step} with exit status 143" in output
    ended = command(*unisono_run("--on", "slurm", "-n", "2", "script.py"), script=PREEMPTED, env=cluster)
    assert (ended.status, ended.err) == (0, ""), ended
    assert sorted(ended.out.splitlines()) == [f"[{rank}] step 40" for rank in range(2)]


def test_a_program_that_srun_started_itself_finds_its_world(command: Command, cluster: Mapping[str, str]) -> None:
    ended = command("srun", "-n", "2", sys.executable, "script.py", script=ITSELF, env=cluster)
    assert ended.status == 0, ended
    assert sorted(ended.json()) == [[0, 2, 21.0], [1, 2, 21.0]]


def test_too_small_a_cluster_or_allocation_is_said_at_once(command: Command, cluster: Mapping[str, str]) -> None:
    words = unisono_run("--on", "slurm", "-n", "3", "script.py")
    ended = command(*words, env=cluster)
    assert (ended.status, ended.out) == (1, "")
    assert ended.err.startswith("unisono run: the cluster has 2 CPUs in all, too few for 3 workers")
    ended = command("salloc", "-Q", "-n", "1", *unisono_run("--on", "slurm", "-n", "2", "script.py"), env=cluster)
    assert ended.status == 1
    assert "is for 1 tasks, not 2 workers" in ended.err


def test_a_controller_that_does_not_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := why_not():
        pytest.skip(reason)
    conf = tmp_path / "slurm.conf"
    conf.write_text(
        "ClusterName=none\nSlurmctldHost=localhost(127.0.0.1)\nSlurmctldPort=1\nAuthType=auth/munge\n"
        "MessageTimeout=2\nNodeName=n1 NodeAddr=127.0.0.1\nPartitionName=all Nodes=n1\n"
    )
    monkeypatch.setenv("SLURM_CONF", str(conf))
    with pytest.raises(un.EngineError, match=rf"controller does not answer .*{conf}.*SlurmctldHost=localhost"):
        un.launch(pow, workers=1, args=(2, 3), on=un.on.slurm())


def test_a_missing_srun_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(un.EngineError, match=r"`srun` is not installed here .*PATH=/nowhere"):
        un.launch(pow, workers=2, args=(2, 3), on=un.on.slurm())
