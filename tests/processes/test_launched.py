"""What process tests wait by: files that a script has written count, also if it has ended meanwhile."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from launched import Launched


class Process:
    """A launcher that ends between two looks of whoever waits, and writes the file last thing."""

    def __init__(self, file: Path | None) -> None:
        self.file, self.returncode = file, 3

    def poll(self) -> int:
        if self.file is not None:
            self.file.write_text("17\n")
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[bytes, bytes]:
        return b"said", b"and why"


def make(folder: Path, process: object) -> Launched:
    launched = object.__new__(Launched)
    launched.folder, launched.process = folder, process  # type: ignore[assignment]
    return launched


def test_a_launcher_that_ends_right_after_its_script_has_written_did_not_end_early(tmp_path: Path) -> None:
    assert make(tmp_path, Process(tmp_path / "ready")).wait_for_files("ready") == ["17"]


def test_one_that_ends_without_is_told_of_with_what_it_said(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"ended early.*3, 'said', 'and why'"):
        make(tmp_path, Process(None)).wait_for_files("ready")


def test_a_run_that_does_not_end_is_told_of_with_what_it_said(tmp_path: Path) -> None:
    program = "import time; print('as far as here', flush=True); open('ready', 'w').write('1\\n'); time.sleep(60)"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, **pipes) as process:  # type: ignore[call-overload]
        launched = make(tmp_path, process)
        launched.wait_for_files("ready")
        with pytest.raises(AssertionError, match=r"(?s)not ended after 0.1 s.*as far as here"):
            launched.finish(timeout_s=0.1)
