"""The `unisono` command, running beside a test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import unisono.launchers

__all__ = ["SOURCES", "Launched"]

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
        try:
            out, err = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            said = self.process.communicate()  # and nothing of it is left for later tests to find
            raise AssertionError(f"the launcher has not ended after {timeout_s} s; it said {said}") from None
        decoded = ((text or b"").decode("utf-8", "replace") for text in (out, err))
        return (self.process.returncode, *decoded)

    def wait_for_files(self, *names: str, timeout_s: float = 120) -> list[str]:
        """Contents of the files that the scripts write when they are ready."""
        deadline = time.monotonic() + timeout_s
        files = [self.folder / name for name in names]
        while True:
            has_ended = self.process.poll() is not None  # asked first: what it has written by then is there
            if all(file.exists() and file.read_text().endswith("\n") for file in files):
                return [file.read_text().strip() for file in files]
            assert not has_ended, f"the launcher ended early: {self.finish()}"
            assert time.monotonic() < deadline, f"no {names} after {timeout_s} s"
            time.sleep(0.01)

    def written(self, *names: str) -> list[str]:
        """Contents of files that must exist, after the end."""
        return [(self.folder / name).read_text().strip() for name in names]

    def signal(self, signum: signal.Signals) -> None:
        self.process.send_signal(signum)
