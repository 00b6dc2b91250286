"""Running a command on an engine, and looking for processes that should be gone."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

SOURCES = Path(__file__).parents[2] / "src"


class Ended(NamedTuple):
    """How a command ended."""

    status: int
    out: str
    err: str

    def json(self) -> list[Any]:
        """What was printed as JSON, in order; a prefix with the rank is left out."""
        lines = [re.sub(r"^\[ *\d+\] ", "", line) for line in self.out.splitlines()]
        return [value for line in lines if line.startswith(("{", "[")) for value in _values(line)]


def _values(line: str) -> Iterator[Any]:
    """Several, where two processes share a pipe: what each prints is whole, but the line ends may come after both."""
    while line:
        value, end = json.JSONDecoder().raw_decode(line)
        line = line[end:].lstrip()
        yield value


Command = Callable[..., Ended]


def run_in(
    folder: Path, *words: str, script: str = "", env: Mapping[str, str] | None = None, timeout_s: float = 280
) -> Ended:
    """Write script.py into the folder, run the words there, and wait for the end."""
    (folder / "script.py").write_text(textwrap.dedent(script))
    process = subprocess.Popen(
        words,
        cwd=folder,
        env=environment(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
        process.wait()
    return Ended(process.returncode, out, err)


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment for a program that finds these sources; `more` on top."""
    env = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "UNISONO_RUN")}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SOURCES), env.get("PYTHONPATH", "")]))
    return {**env, "OMP_NUM_THREADS": "1", **(more or {})}


def unisono_run(*words: str) -> list[str]:
    """The command line of `unisono run`."""
    return [sys.executable, "-m", "unisono", "run", *words]


def left_over(mark: str, within_s: float = 20.0) -> list[str]:
    """Command lines of processes with `mark` in their command line or folder that do not end."""
    deadline = time.monotonic() + within_s
    while (found := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def _marked(mark: str) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            folder = os.readlink(entry / "cwd")
        except OSError:
            continue
        if words and (mark in words or folder.startswith(mark)):
            found.append(words)
    return found


def only(ended: Ended) -> Any:
    """The one JSON value of a program that ended well."""
    assert ended.status == 0, ended
    (value,) = ended.json()
    return value
