"""Real mpirun: the same program as local, one report for a killed worker, and mpi4py's own world."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from engine_cases import (
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
from engine_commands import Command, environment, left_over, only, unisono_run

import unisono as un

needs_mpirun = pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun: apt-get install openmpi-bin")
pytestmark = pytest.mark.timeout(300)
# mpi4py's world, where it is installed, has the ranks of ours.
SAME_RANKS = """
try:
    from mpi4py import MPI
except ModuleNotFoundError:
    pass
else:
    assert MPI.COMM_WORLD.size == 2
    assert MPI.COMM_WORLD.rank == un.join().rank, (MPI.COMM_WORLD.rank, un.join().rank)
"""
AS_ROOT = ["--allow-run-as-root"] if os.geteuid() == 0 else []


@needs_mpirun
def test_the_same_program_has_the_same_loss_and_every_strategy_runs(command: Command) -> None:
    wanted = specs()
    words = unisono_run("--on", "mpi", "-n", "2", "script.py", json.dumps(wanted))
    ended = command(*words, script=EVERYTHING + SAME_RANKS)
    found = only(ended)
    assert ended.err == ""
    assert found["loss"] == pytest.approx(right_loss(), rel=1e-12)
    assert (found["size"], found["how"]) == (2, "shared memory")
    assert set(found["strategies"]) == set(wanted)
    assert all(0 < loss < 20 for loss in found["strategies"].values())


@needs_mpirun
def test_interface_ports_and_encryption_are_the_users(command: Command) -> None:
    words = unisono_run("--on", "mpi", "-n", "2", *network_options(), "script.py")
    ended = command(*words, script=NETWORKED, env={"UNISONO_SHARED_MEMORY": "0"})
    assert ended.status == 0, ended
    check_network(ended.json())


@needs_mpirun
def test_a_killed_worker_ends_in_one_report(command: Command) -> None:
    ended = command(*unisono_run("--on", "mpi", "-n", "2", "script.py"), script=KILLED)
    assert ended.status == 137
    assert ended.out == ""
    assert ended.err.startswith("unisono: worker 1 of 2 failed: killed by SIGKILL\n")
    assert "last step 6" in ended.err
    assert ended.err.count("unisono:") == 1
    assert "mpirun" not in ended.err.lower()


@needs_mpirun
def test_a_killed_worker_is_replaced_where_workers_come_and_go(command: Command) -> None:
    words = unisono_run("--on", "mpi", "-n", "1:2", "--faults", "kill 1@2", "script.py")
    ended = command(*words, script=REPLACED)
    assert ended.status == 0, ended
    first, second = ended.json()
    assert first == second
    assert first["weights"] == pytest.approx(right_weights(first["passes"]), rel=1e-9)
    assert "was lost: killed by SIGKILL" in ended.err


@needs_mpirun
def test_results_and_errors_of_functions_come_back(capfd: pytest.CaptureFixture[str]) -> None:
    def work(count: int) -> tuple[int, int, bytes]:
        world = un.join(device="cpu")
        print("working")
        if world.rank == 1 and count < 0:
            raise LookupError(f"nothing below {count}")
        world.barrier()
        return world.rank, world.size, bytes([world.rank]) * count

    large = 3_000_000  # several frames
    found = un.launch(work, workers=2, args=(large,), on=un.on.mpi())
    assert found == [(rank, 2, bytes([rank]) * large) for rank in range(2)]
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0] working", "[1] working"]
    with pytest.raises(un.WorkerError, match="LookupError: nothing below -1") as caught:
        un.launch(work, workers=2, args=(-1,), on=un.on.mpi())
    assert (caught.value.rank, caught.value.exit_status) == (1, 1)


@needs_mpirun
@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_nothing_is_left_when_the_launcher_ends(
    tmp_path: Path, signum: signal.Signals, status: int, waiting_program: str
) -> None:
    (tmp_path / "script.py").write_text(waiting_program)
    launcher = subprocess.Popen(
        unisono_run("--on", "mpi", "-n", "2", "script.py"),
        cwd=tmp_path,
        env=environment(),
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    files = [tmp_path / f"ready-{rank}" for rank in range(2)]
    while not all(file.exists() for file in files):
        assert launcher.poll() is None, launcher.communicate()
        time.sleep(0.02)
    launcher.send_signal(signum)
    _, err = launcher.communicate(timeout=30)
    assert launcher.returncode == status
    assert left_over(str(tmp_path)) == []
    if signum == signal.SIGINT:
        assert err.startswith("unisono: interrupted (SIGINT); 2 workers stopped in ")


@pytest.fixture
def waiting_program() -> str:
    """Each rank says that it is there, starts a child of its own, and waits."""
    return """if True:
        import os, pathlib, subprocess, sys, time
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        pathlib.Path(f"ready-{os.environ['RANK']}").touch()
        time.sleep(600)
    """


@needs_mpirun
def test_what_takes_too_long_is_stopped() -> None:
    with pytest.raises(TimeoutError, match=r"not finished after 3 s; the workers were stopped"):
        un.launch(time.sleep, workers=2, args=(600,), on=un.on.mpi(), timeout_s=3)


@needs_mpirun
def test_too_few_slots_is_said_at_once() -> None:
    with pytest.raises(un.EngineError, match="fewer than 500 slots"):
        un.launch(pow, workers=500, args=(2, 3), on=un.on.mpi())


def test_a_missing_mpirun_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(un.EngineError, match=r"`mpirun` is not installed here .*PATH=/nowhere.*apt-get install"):
        un.launch(pow, workers=2, args=(2, 3), on=un.on.mpi())


@needs_mpirun
def test_a_program_that_mpirun_started_itself_finds_its_world(command: Command) -> None:
    ended = command("mpirun", *AS_ROOT, "-np", "2", sys.executable, "script.py", script=ITSELF + SAME_RANKS)
    assert ended.status == 0, ended
    assert sorted(ended.json()) == [[0, 2, 21.0], [1, 2, 21.0]]
