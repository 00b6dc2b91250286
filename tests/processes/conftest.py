"""Starts the `unisono` command on small scripts, and looks for processes that should be gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import pytest

import unisono.launchers

SOURCES = Path(unisono.launchers.__file__).parents[2]


class Launched:
    """A running `unisono run`."""

    def __init__(self, command: Sequence[str], folder: Path, **streams: int) -> None:
        env = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "UNISONO_RUN")}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SOURCES), env.get("PYTHONPATH", "")]))
        env.setdefault("OMP_NUM_THREADS", "1")
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-m", "unisono", *command], cwd=folder, env=env, start_new_session=True, **pipes
        )

    def finish(self, timeout_s: float = 150) -> tuple[int, str, str]:
        """Exit status, standard output and standard error."""
        out, err = self.process.communicate(timeout=timeout_s)
        decoded = ((text or b"").decode("utf-8", "replace") for text in (out, err))
        return (self.process.returncode, *decoded)

    def wait_for_files(self, *names: str, timeout_s: float = 120) -> list[str]:
        """Contents of the files that the scripts write when they are ready."""
        deadline = time.monotonic() + timeout_s
        files = [self.folder / name for name in names]
        while not all(file.exists() and file.read_text().endswith("\n") for file in files):
            assert self.process.poll() is None, f"the launcher ended early: {self.finish()}"
            assert time.monotonic() < deadline, f"no {names} after {timeout_s} s"
            time.sleep(0.01)
        return [file.read_text().strip() for file in files]

    def written(self, *names: str) -> list[str]:
        """Contents of files that must exist, after the end."""
        return [(self.folder / name).read_text().strip() for name in names]

    def signal(self, signum: signal.Signals) -> None:
        self.process.send_signal(signum)


@pytest.fixture(params=["fresh", "forked"])
def start(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How the workers of a test are started; both ways, unless the test says which."""
    if request.param == "fresh":
        monkeypatch.setenv("UNISONO_WARM", "0")


@pytest.fixture
def run_script(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    """run_script(text, *options, args=()) starts `unisono run *options script.py *args`; killed at the end."""
    started: list[Launched] = []

    def start(text: str, *options: str, args: Sequence[str] = (), **streams: int) -> Launched:
        (tmp_path / "script.py").write_text(textwrap.dedent(text))
        started.append(Launched(["run", *options, "script.py", *args], tmp_path, **streams))
        return started[-1]

    yield start
    for launched in started:
        launched.process.kill()
        launched.process.wait()
        for stream in (launched.process.stdout, launched.process.stderr):
            if stream is not None:
                stream.close()


@pytest.fixture
def run_command(tmp_path: Path) -> Callable[..., tuple[int, str, str]]:
    """run_command(*arguments) runs `unisono *arguments` in the test's folder to its end."""
    return lambda *arguments: Launched(arguments, tmp_path).finish()


def _running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def still_running() -> Callable[..., list[int]]:
    """still_running(pids, within_s) waits for the processes to end and returns those that did not."""

    def check(pids: Iterable[int | str], within_s: float = 0.0) -> list[int]:
        deadline = time.monotonic() + within_s
        left = [int(pid) for pid in pids]
        while (left := [pid for pid in left if _running(pid)]) and time.monotonic() < deadline:
            time.sleep(0.02)
        return left

    return check
