"""The folder in which a run is recorded: where it lies, what it is called, and what the launcher writes there.

A run folder is text that only grows, readable while the run goes on, after a kill, and by hand: run.json says what the
run was, events.jsonl what its launcher saw, and ranks/00003.jsonl what the worker in place 3 did (see unisono.runs).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import re
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from unisono.launchers.runtime.files import local_path
from unisono.launchers.runtime.machine import read_boot_id, read_start, usable_cores

__all__ = [
    "FOLDER",
    "FOLDER_ID",
    "FORMAT",
    "NOISE",
    "PLACE",
    "SIGNAL",
    "SUMMED",
    "WRITE_S",
    "NoSuchRun",
    "RunFolder",
    "append",
    "divide_noise",
    "find_boot",
    "find_run",
    "find_runs_folder",
    "find_version",
    "find_write_s",
    "is_running",
    "list_runs",
    "make_folder",
    "name_rank_file",
    "read_run",
]

PLACE = "UNISONO_RUNS"  # where runs are recorded, or "off"
FOLDER = "UNISONO_RUN_FOLDER"  # in a worker: the folder of its run
FOLDER_ID = "UNISONO_RUN_FOLDER_ID"  # and the id in its run.json: a worker that does not find it is on another host
FORMAT = 1
# What is summed over the steps of a line.
SUMMED = (
    *("wall", "compute", "communication", "waiting", "data", "hidden"),
    *("bytes_sent", "collectives", "compression"),
)
NOISE, SIGNAL = "gradient_noise", "gradient_signal"  # metrics whose quotient is the gradient noise scale
MOST_RUNS, MOST_BYTES = 50, 1 << 30  # the oldest that have ended are removed beyond that
WRITE_S = 0.5  # a worker writes so often,
WRITES_A_RUN = 40_000  # later more rarely: after 1/40,000 of the time so far, if that is longer,
MANY_WRITERS = 64  # and where there are more workers, each more rarely: there is one folder for all
_MOST_TEXT = 20_000  # characters of a failure report


class NoSuchRun(LookupError):
    """There is no run of this name or in this folder; the message says what there is."""

    def __str__(self) -> str:
        return str(self.args[0])


# Where runs lie -------------------------------------------------------------------------------------------------------


def find_runs_folder() -> Path | None:
    """The folder that holds the runs; None where none are recorded (`UNISONO_RUNS=off`)."""
    asked = os.environ.get(PLACE, "").strip()
    if asked.lower() in ("off", "0", "no"):
        return None
    return Path(asked).expanduser() if asked else _default_place()


def _default_place() -> Path:
    state = os.environ.get("XDG_STATE_HOME", "")
    return (Path(state) if state else Path.home() / ".local" / "state") / "unisono" / "runs"


def list_runs(place: Path | None = None) -> list[Path]:
    """The folders of all recorded runs, the newest first."""
    place = place if place is not None else find_runs_folder() or _default_place()
    try:
        folders = [Path(entry.path) for entry in os.scandir(place) if entry.is_dir()]
    except OSError:
        return []
    found = [(_read_start(run), path.name, path) for path in folders if (run := read_run(path)) is not None]
    return [path for _, _, path in sorted(found, reverse=True)]


def _read_start(run: dict[str, Any]) -> float:
    started = run.get("started")
    return float(started) if isinstance(started, int | float) else 0.0


def find_run(text: str) -> Path:
    """The folder that `text` means: a folder, the name of a run, the beginning of one, or "last".

    "last" is the newest run that was started in the working directory; where none was, the only one there is.
    """
    path = Path(text).expanduser()
    if text != "last" and (path.name in ("run.json", "events.jsonl")) and path.is_file():
        return path.parent
    if text != "last" and path.is_dir() and _looks_like_a_run(path):
        return path
    runs = list_runs()
    if text == "last" and runs:
        return _find_last(runs)
    matching = [run for run in runs if run.name == text] or [run for run in runs if run.name.startswith(text)]
    if len(matching) == 1:
        return matching[0]
    place = find_runs_folder() or _default_place()
    if len(matching) > 1:
        raise NoSuchRun(f"{text!r} may be any of {', '.join(run.name for run in matching[:8])}: give more of the name")
    if path.is_dir() and text != "last":
        raise NoSuchRun(f"{text} is a folder, but no run is recorded in it: there is no run.json and no ranks/ in it")
    known = f"there are {', '.join(run.name for run in runs[:5])}" if runs else f"no run is recorded in {place}"
    raise NoSuchRun(f"no run {text!r}: {known}. `unisono runs` lists them; expected a name, a folder, or last")


def _find_last(runs: list[Path]) -> Path:
    started = {run: (read_run(run) or {}).get("cwd") for run in runs}
    here = os.getcwd()
    last = next((run for run in runs if started[run] == here), None)
    if last is None and len(runs) > 1:
        newest = "".join(f"\n  {run.name}, started in {started[run]}" for run in runs[:5])
        raise NoSuchRun(f"no run was started in {here}; name one of the others. The newest are{newest}")
    return last or runs[0]


def _looks_like_a_run(path: Path) -> bool:
    return (path / "run.json").is_file() or (path / "ranks").is_dir()


def read_run(folder: Path) -> dict[str, Any] | None:
    """What run.json says; None where it is not there or cannot be read."""
    try:
        found = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def is_running(run: dict[str, Any]) -> bool | None:
    """Whether the launcher of a run is still there; None: it was started on another machine."""
    if run.get("ended") is not None:
        return False
    if run.get("boot") != find_boot():
        machine = run.get("machine")
        is_here = isinstance(machine, dict) and machine.get("host") == socket.gethostname()
        return False if is_here else None  # the machine was started anew
    pid, start = run.get("launcher_pid"), run.get("launcher_start")
    if not isinstance(pid, int) or pid <= 0:
        return False
    return read_start(pid) == start if start is not None else _exists(pid)


def name_rank_file(place: int) -> str:
    """Where the worker in a place writes.

    >>> name_rank_file(3)
    'ranks/00003.jsonl'
    """
    return f"ranks/{place:05}.jsonl"


def find_write_s(elapsed_s: float, workers: int) -> float:
    """Seconds between two writes of a worker, of so many, after so long."""
    return max(WRITE_S, elapsed_s / WRITES_A_RUN) * max(1.0, workers / MANY_WRITERS)


# Making one -----------------------------------------------------------------------------------------------------------


def make_folder(program: Sequence[str], folder: Path | None = None) -> Path:
    """Make the folder of a run: the one that was named, or a new one where runs lie. Raises OSError, and
    ValueError for an address that is no path."""
    if folder is not None:
        local_path(folder)
        if _looks_like_a_run(folder):
            raise FileExistsError(0, f"a run is recorded in {folder} already: name another folder, or remove that one")
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (folder / "ranks").mkdir(exist_ok=True)
        return folder
    place = find_runs_folder()
    assert place is not None
    local_path(place).mkdir(parents=True, exist_ok=True, mode=0o700)
    if place == _default_place():
        _prune(place)
    name = f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{_name_program(program)}"
    for number in range(1, 1000):
        path = place / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir(mode=0o700)  # the program's arguments are nobody else's business
        except FileExistsError:
            continue
        (path / "ranks").mkdir()
        return path
    raise FileExistsError(0, f"there are 1000 runs called {name} in {place}")


def _name_program(program: Sequence[str]) -> str:
    """A word for the program.

    >>> _name_program(["train.py", "--epochs", "3"]), _name_program(["-m", "my.training"])
    ('train', 'my.training')
    """
    word = program[1] if program[:1] == ["-m"] and len(program) > 1 else Path(program[0]).stem if program else ""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", word).strip("-.")[:40] or "run"


def _prune(place: Path) -> None:
    """Remove the oldest finished runs until there is room for one more within MOST_RUNS and MOST_BYTES.

    Only finished runs that stay count towards the bytes: a large one does not cost the smaller, older ones their place.
    """
    kept, size = 0, 0
    for path in list_runs(place):
        is_over = is_running(read_run(path) or {}) is not True
        bytes_here = _count_bytes(path) if is_over else 0
        if is_over and (kept + 1 >= MOST_RUNS or size + bytes_here > MOST_BYTES):
            shutil.rmtree(path, ignore_errors=True)
        else:
            kept, size = kept + 1, size + bytes_here


def _count_bytes(folder: Path) -> int:
    found = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                found += os.stat(os.path.join(where, name)).st_size
    return found


# What is written by whoever started the run -------------------------------------------------------------------------


class RunFolder:
    """The folder of a run that is under way. Where it can no longer be written, that is said once."""

    def __init__(self, path: Path, say: Callable[[str], None] | None = None) -> None:
        self.path = path.resolve()
        self.id = secrets.token_hex(8)
        self.run: dict[str, Any] = {}
        self._say = say if say is not None else _print
        self._is_lost = False

    @classmethod
    def create(
        cls, program: Sequence[str], *, folder: Path | None = None, workers: int, command: Sequence[str], **known: Any
    ) -> RunFolder | None:
        """Make the folder and its run.json; None, and a word on standard error, where that cannot be done."""
        try:
            found = cls(make_folder(program, folder))
        except (OSError, ValueError) as error:
            where = folder if folder is not None else find_runs_folder()
            why = f"{where}: {_explain(error)}" if isinstance(error, OSError) else str(error)
            _print(f"unisono: this run is not recorded: {why}")
            return None
        found.run = {
            "format": FORMAT,
            "id": found.id,
            "name": found.path.name,
            "command": list(command),
            "cwd": os.getcwd(),
            "program": list(program),
            "workers": workers,
            "engine": "local",
            "hosts": [],
            "versions": {"unisono": find_version(), "python": platform.python_version()},
            "machine": {"host": socket.gethostname(), "system": platform.system(), "cores": usable_cores()},
            "started": time.time(),
            "ended": None,
            "outcome": None,
            "report": "",
            "exit_status": None,
            "launcher_pid": os.getpid(),
            "launcher_start": read_start(os.getpid()),
            "boot": find_boot(),
            "page": None,
            **known,
        }
        found.update()
        return None if found._is_lost else found

    @property
    def variables(self) -> dict[str, str]:
        """What workers need to know."""
        return {FOLDER: str(self.path), FOLDER_ID: self.id}

    def update(self, **values: Any) -> None:
        """Write run.json anew, whole."""
        self.run.update(values)
        self._guarded(self._write_run)

    def event(self, kind: str, **values: Any) -> None:
        """Something happened that the launcher saw: a line of events.jsonl."""
        self.append("events.jsonl", json.dumps({"time": time.time(), "kind": kind, **values}) + "\n")

    def append(self, name: str, text: str) -> None:
        """Add to a file of the folder."""
        self._guarded(lambda: append(self.path / name, text.encode()))

    def finish(self, outcome: str, *, exit_status: int, report: str = "") -> None:
        """The run is over."""
        plain = re.sub(r"\x1b\[[0-9;]*m", "", report)  # without colours
        self.update(ended=time.time(), outcome=outcome, exit_status=exit_status, report=plain[:_MOST_TEXT])

    def end(self) -> None:
        """The launcher ends: where the run did not say how it ended, it did not begin."""
        if self.run["ended"] is None:
            self.finish("failed", exit_status=1)

    def close(self, *, keep: bool) -> None:
        """Say where it is. Where no worker wrote anything, there is nothing to keep, unless it was asked for."""
        if not any((self.path / "ranks").glob("*.jsonl")) and not keep:
            shutil.rmtree(self.path, ignore_errors=True)
        elif sys.stderr.isatty() and not self._is_lost:
            what = "last" if self.path.parent == find_runs_folder() else _shorten(self.path)
            self._say(f"unisono: recorded in {_shorten(self.path)}; `unisono report {what}` shows it")

    def _write_run(self) -> None:
        fd, draft = tempfile.mkstemp(prefix=".run.json.", dir=self.path)  # mode 600: a page's address has a token
        with open(fd, "w", encoding="utf-8") as file:
            file.write(json.dumps(self.run, indent=1) + "\n")
        os.replace(draft, self.path / "run.json")

    def _guarded(self, write: Callable[[], None]) -> None:
        if self._is_lost:
            return
        try:
            write()
        except OSError as error:
            self._is_lost = True
            self._say(f"unisono: this run is no longer recorded: {self.path}: {_explain(error)}; training continues")


def append(path: Path, data: bytes) -> None:
    """Add to a file in one piece; what a full disk took half of is taken back, so that lines stay whole."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        size = os.fstat(fd).st_size
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(fd, view) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, size)
            raise
    finally:
        os.close(fd)


def _shorten(path: Path) -> str:
    home = str(Path.home())
    return f"~{str(path)[len(home) :]}" if str(path).startswith(home + "/") else str(path)


def _explain(error: OSError) -> str:
    return (error.strerror or str(error)).rstrip(".")


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def find_version() -> str:
    """Of this package, which has been imported: it is above all its parts."""
    return str(sys.modules["unisono"].__version__)


def find_boot() -> str:
    """Which start of which machine this is; "" if the kernel does not say."""
    try:
        return read_boot_id()
    except OSError:
        return ""


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def divide_noise(noise: float, signal: float) -> float | None:
    """The gradient noise scale, in global batches; None: not measured, or the signal is lost in the noise.

    >>> divide_noise(6.0, 2.0), divide_noise(6.0, -0.1), divide_noise(-0.5, 2.0)
    (3.0, None, 0.0)
    """
    return max(0.0, noise) / signal if signal > 0 and math.isfinite(noise) else None
