"""Starts the `unisono` command on small scripts, and looks for processes that should be gone."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import pytest
from launched import Launched


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
