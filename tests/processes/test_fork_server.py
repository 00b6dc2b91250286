"""Workers forked from a process that has imported torch: the same as fresh ones, and nothing outlives their server."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from unisono.launchers import WorkerError, forks, launch
from unisono.launchers.forks import connect_warm, list_warm, stop_warm
from unisono.launchers.local import LocalRun
from unisono.launchers.processes import open_starter

SOURCES = Path(forks.__file__).parents[2]


@pytest.fixture
def warm(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A server of this test alone."""
    folder = tmp_path_factory.mktemp("warm")
    folder.chmod(0o700)
    monkeypatch.setenv("UNISONO_WARM", str(folder))
    yield folder
    stop_warm()


LIGHT_TORCH = """
class default_generator:
    seed = staticmethod(lambda: None)

def set_num_threads(count):
    pass
"""


@pytest.fixture
def light(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers and programs find a torch that is imported at once: of tests of how they begin and end."""
    folder = tmp_path_factory.mktemp("light")
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(LIGHT_TORCH)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(SOURCES)]))


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`launch` uses this program's own server, which is one of this test."""
    monkeypatch.delenv("UNISONO_WARM")
    monkeypatch.setattr(forks, "_own", None)
    yield
    if forks._own is not None:
        forks._own.close()


def facts() -> dict[str, Any]:
    """What a program can see of its process, as far as two workers of one rank must agree."""
    import gc
    import locale
    import resource
    import threading

    import torch

    from unisono.launchers.runtime import status  # which has the status page open

    status.note(doing="looking")
    return {
        "env": {k: v for k, v in os.environ.items() if not k.endswith("_FD") and k not in VARYING},
        "path": sys.path,
        "folder": os.getcwd(),
        "umask": os.umask(0o022),
        "limits": resource.getrlimit(resource.RLIMIT_NOFILE),
        "cores": sorted(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "tasks": len(os.listdir("/proc/self/task")),
        "main": threading.current_thread() is threading.main_thread(),
        "signals": [str(signal.getsignal(s)) for s in sorted(signal.valid_signals()) if s != signal.SIGINT],
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "leads": os.getsid(0) == os.getpid() == os.getpgid(0),
        "streams": [(s.encoding, s.errors, s.name, s.isatty()) for s in (sys.stdin, sys.stdout, sys.stderr)],
        "locale": locale.getpreferredencoding(False),
        "collects": gc.isenabled(),
        "cuda": torch.cuda.is_initialized(),
        "main_module": sys.modules["__main__"].__name__,
        "executable": sys.executable,
        "open": sorted(os.readlink(f"/proc/self/fd/{fd}").partition(":[")[0] for fd in open_files()),
    }


VARYING = (
    "MASTER_PORT",
    "UNISONO_SECRET",
    "UNISONO_STORE",
    "UNISONO_RUN",
    "UNISONO_DEBUGGER",
    "UNISONO_WARM",
    "PYTEST_CURRENT_TEST",
    "UNISONO_LAUNCHER_PID",
)


def open_files() -> list[str]:
    found = os.listdir("/proc/self/fd")
    return [fd for fd in found if os.path.exists(f"/proc/self/fd/{fd}")]


@pytest.mark.parametrize(("workers", "threads"), [(2, 1), (1, 2)])
def test_a_forked_worker_sees_what_a_fresh_one_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, workers: int, threads: int
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SOME_WORD", "found")
    before = os.umask(0o027)
    try:
        forked = launch(facts, workers=workers, threads=threads)
        monkeypatch.setenv("UNISONO_WARM", "0")
        fresh = launch(facts, workers=workers, threads=threads)
    finally:
        os.umask(before)
    for rank in range(workers):
        if threads > 1:  # torch.set_num_threads makes a pool for QNNPACK at once
            del forked[rank]["tasks"]
        assert {k: v for k, v in forked[rank].items() if v != fresh[rank][k]} == {}, fresh[rank]
    assert forked[0]["env"]["SOME_WORD"] == "found"
    assert forked[0]["threads"] == threads


def test_every_fork_draws_random_numbers_of_its_own():
    def draw() -> tuple[float, float, float]:
        import random

        import numpy as np
        import torch

        return random.random(), float(np.random.rand()), float(torch.rand(1))

    drawn = [*launch(draw, workers=2), *launch(draw, workers=2)]
    for numbers in zip(*drawn, strict=True):
        assert len(set(numbers)) == 4


@pytest.mark.skipif(os.environ.get("UNISONO_WARM") == "0", reason="UNISONO_WARM=0: all workers are fresh")
def test_workers_that_tests_start_are_forked(monkeypatch: pytest.MonkeyPatch):
    """Where the server of the tests refuses them, all tests pass, and take twice as long."""
    refusals: list[str] = []
    monkeypatch.setattr(forks.ForkStarter, "_note_refusal", lambda _, why: refusals.append(why))
    seen = launch(lambda: (os.getppid(), "torch.nn" in sys.modules), workers=2)
    assert refusals == []
    assert {parent for parent, _ in seen} <= {server.pid for server in list_warm()}
    assert all(has_torch for _, has_torch in seen)


@pytest.mark.skipif(os.environ.get("UNISONO_WARM") == "0", reason="UNISONO_WARM=0: all workers are fresh")
def test_a_lost_worker_is_reaped_when_it_is_replaced(tmp_path: Path):
    def train() -> tuple[list[int], list[int]]:
        import torch

        import unisono as un

        (tmp_path / str(os.getpid())).touch()
        world, model = un.join(device="cpu"), torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        un.parallel(model, optimizer)
        for x in un.shard(torch.ones(8, 1), 4).steps(8):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        started = [int(file.name) for file in tmp_path.iterdir()]
        return [pid for pid in started if Path(f"/proc/{pid}").exists()], world.gather_objects(os.getpid())

    there, alive = launch(train, workers=2, least=2, faults="kill 1@2; kill 0@5")[0]
    assert len(list(tmp_path.iterdir())) == 4
    assert sorted(there) == sorted(alive)


def test_a_worker_is_forked_and_has_torch(own: None, light: None):
    def look() -> tuple[bool, int]:
        return "torch" in sys.modules, os.getppid()

    import torch  # noqa: F401  # a program that has it gets a server that has it

    first, second = launch(look, workers=2), launch(look, workers=2)
    assert [imported for imported, _ in first + second] == [True] * 4
    assert len({parent for _, parent in first + second}) == 1
    assert {os.getpid()} != {parent for _, parent in first}


def test_a_variable_that_counts_at_the_start_makes_workers_fresh(
    own: None, light: None, monkeypatch: pytest.MonkeyPatch
):
    def look() -> tuple[int, str]:
        return os.getppid(), os.environ["TORCH_LOGS"]

    import torch  # noqa: F401

    launch(len, workers=1, args=("",))  # the server is there, without the variable
    monkeypatch.setenv("TORCH_LOGS", "+dynamo")
    assert launch(look, workers=1) == [(os.getpid(), "+dynamo")]


def test_a_module_of_the_program_goes_before_one_that_the_server_has(tmp_path: Path, light: None, warm: Path):
    (tmp_path / "numpy").mkdir()
    (tmp_path / "numpy" / "__init__.py").write_text("WORD = 'the programs own'\n")
    (tmp_path / "script.py").write_text("import numpy\nprint(numpy.WORD)\n")
    assert run(tmp_path, "-n", "1", "--warm", "script.py") == (
        0,
        "the programs own\n",
        f"unisono: workers are started without the warm server: {tmp_path} has its own numpy\n",
    )


@pytest.mark.skipif(os.environ.get("UNISONO_WARM") == "0", reason="UNISONO_WARM=0: all workers are fresh")
def test_a_module_behind_the_one_that_the_server_has_is_none_of_the_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As setuptools' own copies are, at the end of sys.path of all who have imported it."""
    (tmp_path / "numpy").mkdir()
    (tmp_path / "numpy" / "__init__.py").write_text("")
    refusals: list[str] = []
    monkeypatch.setattr(forks.ForkStarter, "_note_refusal", lambda _, why: refusals.append(why))
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    launch(os.getppid, workers=1)
    assert refusals == []
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path[:-1]])
    launch(os.getppid, workers=1)
    assert refusals == [f"{tmp_path} has its own numpy"]


def run(folder: Path, *words: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "unisono", "run", *words]
    env = {"PYTHONPATH": str(SOURCES), **os.environ}
    ended = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=100)
    return ended.returncode, ended.stdout, ended.stderr


def test_warm_runs_share_one_server_and_it_can_be_stopped(tmp_path: Path, light: None, warm: Path):
    (tmp_path / "script.py").write_text("import os, sys\nprint('torch' in sys.modules, os.getppid())\n")
    outputs = [run(tmp_path, "-n", "2", "--warm", "script.py") for _ in range(2)]
    (server,) = list_warm()
    assert server.runs == 0
    for status, out, err in outputs:
        assert (status, err) == (0, "")
        assert sorted(out.splitlines()) == [f"[{rank}] True {server.pid}" for rank in range(2)]
    assert [stopped.pid for stopped in stop_warm()] == [server.pid]
    deadline = time.monotonic() + 10
    while os.path.exists(f"/proc/{server.pid}") and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not os.path.exists(f"/proc/{server.pid}")
    assert list_warm() == []
    assert list(warm.glob("*.socket")) == []


def test_a_server_that_was_started_with_all_of_sys_path_gives_workers_the_interpreters_own(
    tmp_path: Path, light: None, warm: Path, monkeypatch: pytest.MonkeyPatch
):
    """As Spark and others start programs: what their variable names, the interpreter has of itself too."""
    text = "import encodings.idna, os, sys, yaml\nprint(os.getppid(), sys.path[1:])\n"
    (tmp_path / "script.py").write_text(text)
    (tmp_path / "fresh.py").write_text("import sys\nprint(sys.path[1:])\n")
    fresh = subprocess.run([sys.executable, "fresh.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([os.environ["PYTHONPATH"], *filter(None, sys.path)]))
        assert run(tmp_path, "-n", "1", "--warm", "fresh.py")[::2] == (0, "")
    (server,) = list_warm()
    assert run(tmp_path, "-n", "1", "--warm", "script.py") == (0, f"{server.pid} {fresh.stdout}", "")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make a network namespace")
def test_a_server_that_was_started_on_another_network_is_not_met_here(tmp_path: Path, light: None, warm: Path):
    (tmp_path / "script.py").write_text("import os\nprint(os.getppid())\n")
    elsewhere = [sys.executable, "-c", "from unisono.launchers.forks import connect_warm; connect_warm().close()"]
    subprocess.run(["unshare", "--net", *elsewhere], check=True, env={**os.environ}, timeout=100)
    (there,) = list_warm()
    status, out, err = run(tmp_path, "-n", "1", "--warm", "script.py")
    (here,) = [server for server in list_warm() if server.pid != there.pid]
    assert (status, out, err) == (0, f"{here.pid}\n", "")


def test_a_folder_that_others_can_enter_is_not_used(warm: Path):
    warm.chmod(0o750)
    with pytest.raises(forks.NoServer, match="not a folder of this user alone"):
        connect_warm()
    assert open_starter("warm").server is None
    warm.chmod(0o700)


def test_the_socket_is_in_a_private_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("UNISONO_WARM", "1")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert list_warm() == []
    assert stat.S_IMODE((tmp_path / "unisono").stat().st_mode) == 0o700


def test_without_runs_the_server_ends_by_itself(light: None, warm: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("UNISONO_WARM_IDLE_S", "0.2")
    with connect_warm() as connection:
        connection.send({"kind": "status"})
        pid = connection.receive()[0]["pid"]
    deadline = time.monotonic() + 10
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not os.path.exists(f"/proc/{pid}")
    assert list(warm.glob("*.socket")) == []


# -- nothing is left ---------------------------------------------------------------------------------------------------

FAMILY = """
import os, pathlib, subprocess, time
def work(folder):
    child = subprocess.Popen(["sleep", "1000"])
    daemon = subprocess.Popen(["setsid", "sleep", "1000"])
    forked = os.fork()
    if forked == 0:
        os.setsid()
        time.sleep(1000)
    pids = os.getpid(), child.pid, daemon.pid, forked
    path = pathlib.Path(folder, "ready-" + os.environ["RANK"])
    path.write_text(" ".join(map(str, pids)) + "\\n")
    time.sleep(1000)
"""


@pytest.mark.parametrize("victim", ["program", "server", "both"])
def test_a_killed_program_or_server_leaves_no_process(
    own: None, light: None, tmp_path: Path, still_running: Callable[..., list[int]], victim: str
):
    (tmp_path / "family.py").write_text(FAMILY)
    (tmp_path / "program.py").write_text(
        textwrap.dedent(
            f"""
            import os, torch, unisono as un, family
            from unisono.launchers import forks
            un.launch(len, workers=1, args=("",))
            open("server", "w").write(f"{{forks._own.process.pid}}\\n")
            un.launch(family.work, workers=2, args=({str(tmp_path)!r},))
            """
        )
    )
    program = subprocess.Popen([sys.executable, "program.py"], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    files = [tmp_path / name for name in ("server", "ready-0", "ready-1")]
    while not all(file.exists() and file.read_text().endswith("\n") for file in files):
        assert program.poll() is None, program.communicate()
        time.sleep(0.01)
    server, *pids = " ".join(file.read_text() for file in files).split()
    if victim in ("program", "both"):
        program.kill()
    if victim in ("server", "both"):
        os.kill(int(server), signal.SIGKILL)
    _, err = program.communicate(timeout=30)
    assert still_running([server, *pids], within_s=10) == []
    if victim == "server":
        assert "killed by SIGKILL" in err, err


def test_after_its_server_was_killed_a_program_starts_another(own: None, light: None):
    import torch  # noqa: F401

    launch(len, workers=1, args=("",))
    assert forks._own is not None
    before = forks._own.process.pid
    os.kill(before, signal.SIGKILL)
    forks._own.process.wait()
    assert launch(os.getppid, workers=1) != [before]
    assert launch(len, workers=1, args=("ab",)) == [2]


def test_a_killed_worker_is_noticed_at_once(monkeypatch: pytest.MonkeyPatch):
    """Its end is an event: until then the launcher waits for nothing else, and for no time to pass."""
    waits: list[float | None] = []
    pump = LocalRun._pump

    def note(run: LocalRun, wait_s: float | None) -> None:
        assert all(worker.process.pid_fd is not None for worker in run.running), "else it looks from time to time"
        waits.extend([] if run.failures else [wait_s])
        pump(run, wait_s)

    monkeypatch.setattr(LocalRun, "_pump", note)
    with pytest.raises(WorkerError, match="killed by SIGKILL"):
        launch(lambda: os.kill(os.getpid(), signal.SIGKILL), workers=1)
    assert set(waits) == {None}


def test_threads_daemons_and_exit_handlers_end_as_in_a_fresh_process(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def work() -> None:
        import atexit
        import threading

        class Loud:
            def __del__(self) -> None:
                os.write(1, b"deleted\n")

        sys.modules["__main__"].kept = Loud()  # type: ignore[attr-defined]
        atexit.register(lambda: print("exit handler"))
        threading.Thread(target=lambda: (time.sleep(0.3), print("thread"))).start()
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()

    launch(work, workers=1)
    forked = capfd.readouterr().out
    monkeypatch.setenv("UNISONO_WARM", "0")
    launch(work, workers=1)
    assert forked == capfd.readouterr().out == "[0] thread\n[0] exit handler\n[0] deleted\n"
