"""Who records this process's run, and where its lines go; `un.log`, for values of the program's own.

`un.parallel` begins the record, if the launcher or the environment asked for one.

A worker of `unisono run` is told the folder. A program that was started in another way is recorded where UNISONO_RUNS
says where: rank 0 makes the folder, and tells the others while they check that they train the same. A worker writes
into the folder, or over the report pipe to the launcher that has it.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

from torch import Tensor

from unisono.launchers.runtime import status
from unisono.launchers.runtime.launch_env import read_place
from unisono.launchers.runtime.run_folder import (
    FOLDER,
    FOLDER_ID,
    PLACE,
    RunFolder,
    append,
    find_runs_folder,
    name_rank_file,
    read_run,
)
from unisono.launchers.runtime.variables import read_worker_number
from unisono.observe.runs.recorder import Facts, LineWriter, Recorder
from unisono.world import World
from unisono.world.rendezvous import find_joined, join

__all__ = [
    "FileWriter",
    "PipeWriter",
    "begin",
    "find_recorder",
    "find_writer",
    "log",
    "needs_folder",
    "note_loss",
    "note_method",
    "share_folder",
]

How = Literal["mean", "sum", "min", "max", "rank"]
_HOWS: tuple[str, ...] = get_args(How)
_PIECE = 1_900  # characters of a message: as JSON in JSON at most twice that, and a pipe takes 4 KiB in one piece
_MOST_HELD = 4 << 20  # characters that wait for a launcher that does not read

_feeding: subprocess.Popen[bytes] | None = None
_made: RunFolder | None = None  # in rank 0 of a program that no launcher of ours started


def needs_folder(world: World) -> bool:
    """Whether the run is to be recorded, and nobody has made a folder for it: it is asked of all ranks together."""
    if not _is_recordable(world) or FOLDER in os.environ or not os.environ.get(PLACE, "").strip():
        return False
    return find_runs_folder() is not None and not status.is_attached()


def share_folder(world: World) -> None:
    """Make the run folder on rank 0 and tell all ranks where it is. A collective: every rank calls it."""
    global _made
    text = ""
    if world.rank == 0:
        program = [sys.argv[0] or "python", *sys.argv[1:]]
        engine = (place := read_place()) and place.engine
        _made = RunFolder.create(program, workers=world.size, command=["python", *program], engine=engine or "python")
        text = "" if _made is None else str(_made.path)
        hosts = list(dict.fromkeys(world.hosts))
        if _made is not None:
            _made.update(hosts=hosts)
            _start_feeding(_made)
    text = world.broadcast_object(text, 0) if world.size > 1 else text
    if text and Path(text).is_dir():  # on a host that does not have it, ranks write nothing
        os.environ[FOLDER] = text
    elif not text:
        os.environ[PLACE] = "off"


def begin(world: World, facts: Facts) -> Recorder | None:
    """Record what follows in this process, where somebody asked for it; the first model's training counts."""
    recorder = find_recorder(world, facts)
    if recorder is not None and not recorder.facts.strategy:
        recorder.update(facts)
    return recorder


def find_recorder(world: World | None = None, facts: Facts | None = None) -> Recorder | None:
    """This rank's recorder; made at the first call, None where nobody asked for one."""
    world = world if world is not None else find_joined()
    if world is None:
        if FOLDER not in os.environ or ((place := read_place()) is not None and place.size > 1):
            return None
        world = join()
    listener = world.ledger.listener
    if isinstance(listener, Recorder):
        return listener
    if FOLDER not in os.environ or listener is not None or not _is_recordable(world):
        return None
    return _make(world, facts)


def note_method(world: World, not_measured: Sequence[str], *, bytes_by_formula: bool) -> None:
    """Another method trains from here on: what can't be measured under any method of the run is said of the run."""
    recorder = world.ledger.listener
    if isinstance(recorder, Recorder):
        known = recorder.facts
        unknown = tuple(dict.fromkeys((*known.not_measured, *not_measured)))
        facts = replace(known, not_measured=unknown, bytes_by_formula=known.bytes_by_formula or bytes_by_formula)
        if facts != replace(known, not_measured=tuple(known.not_measured)):
            recorder.update(facts)


@contextmanager
def note_loss(world: World) -> Iterator[Callable[[Tensor], None]]:
    """Around several backward passes of one loss, such as those of a pipeline's microbatches: tell it what is given."""
    recorder = find_recorder(world)
    if recorder is None:
        yield lambda loss: None
    else:
        with recorder.one_loss() as note:
            yield note


def log(
    values: Mapping[str, Any] | None = None, /, *, how: How = "mean", step: int | None = None, **named: Any
) -> None:
    """Record values of this rank: `un.log(loss=loss, accuracy=0.9)`.

    They go into the run's record (`unisono report`, the live page, and what `unisono run --log` names); without a
    record it does nothing. It sends no message between ranks and does not wait for tensors on a GPU.

    Args:
        values: The same as keywords, for names that are none: `un.log({"val/loss": 0.3})`.
        how: How values that several ranks logged for one step are combined: "mean", "sum", "min" or "max"; or "rank":
            each rank keeps its own.
        step: The step to record them at; default: the current step of training.
        named: The values, by name.

    >>> log(loss=0.5, accuracy=0.9)
    """
    if how not in _HOWS:
        raise ValueError(f"un.log: got how={how!r}; expected one of {', '.join(map(repr, _HOWS))}")
    found = {**(values or {}), **named}
    for name, value in found.items():
        _check_value(name, value)
    recorder = find_recorder()
    if recorder is not None and found:
        recorder.log(found, how, step)


def _check_value(name: str, value: Any) -> None:
    """Refuse what is not one number, without reading it."""
    if not isinstance(name, str) or not name:
        raise TypeError(f"un.log: got a value called {name!r}; expected a name")
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex():
            what = f"{value.dtype} of shape {tuple(value.shape)}".removeprefix("torch.")
            raise TypeError(f"un.log: got {name}: {what}; expected one number, such as {name}.mean()")
    elif isinstance(value, str) or not hasattr(value, "__float__"):
        raise TypeError(f"un.log: got {name}={value!r}; expected a number, or a tensor that holds one")


def _make(world: World, facts: Facts | None) -> Recorder | None:
    if FOLDER_ID in os.environ and not status.is_attached():  # a program that a worker started
        return None
    if world.axes is not None:  # the data axis of a mesh: ranks are those of all
        world = world.axes.world
    number = read_worker_number()
    place = world.rank if number is None else number
    lines = find_writer(place)
    if lines is None:
        return None
    finish = _finish if _made is not None else None
    recorder = Recorder(world, lines, facts, place=place, on_close=finish)
    atexit.register(recorder.close)
    return recorder


def _start_feeding(made: RunFolder) -> None:
    """Hand metrics on to what UNISONO_LOG names, as the launcher does."""
    global _feeding
    asked = os.environ.get("UNISONO_LOG", "").strip()
    if not asked:
        return
    from unisono.observe.runs.feeding import start_feeding
    from unisono.observe.runs.sinks import read_asked

    try:
        read_asked(asked)
    except ValueError as error:
        print(f"unisono: UNISONO_LOG: {error}; training continues", file=sys.stderr)
        return
    _feeding = start_feeding(made.path, asked)


def _finish(outcome: str) -> None:
    assert _made is not None
    _made.finish(outcome, exit_status=0 if outcome == "ok" else 1)
    if _feeding is not None:
        from unisono.observe.runs.feeding import stop_feeding

        stop_feeding(_feeding)


def _is_recordable(world: World) -> bool:
    """Whether it is the world of this process: not one of threads, nor a simulated one."""
    joined = find_joined(of_process=True)
    return joined is not None and joined.ledger is world.ledger


# Where lines go ------------------------------------------------------------------------------------------------------


class FileWriter:
    """A file of the folder. Opened for each piece: no other process inherits it."""

    def __init__(self, folder: Path, place: int) -> None:
        self.path = folder / name_rank_file(place)
        self.is_lost = False

    def write(self, text: str, *, last: bool = False) -> None:
        """Append it; where that fails, it is said, and nothing more is written."""
        if self.is_lost:
            return
        try:
            if not self.path.exists():
                self.path.parent.mkdir(parents=True, exist_ok=True)
            append(self.path, text.encode())
        except OSError as error:
            self.is_lost = True
            why = (error.strerror or str(error)).rstrip(".")
            print(
                f"unisono: this worker is no longer recorded: {self.path}: {why}; training continues",
                file=sys.stderr,
                flush=True,
            )


class PipeWriter:
    """The pipe of error reports, whose other end is the launcher's, or its agent's on this host."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._held = ""

    def write(self, text: str, *, last: bool = False) -> None:
        """Send what the pipe takes now; the rest waits for the next call, so that training does not wait for it."""
        self._held += text
        while self._held and (last or select.select([], [self._fd], [], 0.0)[1]):
            piece, self._held = self._held[:_PIECE], self._held[_PIECE:]
            line = json.dumps({"kind": "lines", "text": piece}) + "\n"
            try:
                os.write(self._fd, line.encode())
            except OSError:  # the launcher is gone, and this process is about to go
                self._held = ""
                return
        if len(self._held) > _MOST_HELD:  # the line that it was cut in is counted as unreadable
            self._held = ""


def find_writer(place: int) -> LineWriter | None:
    """Where the worker in `place` writes, as the environment says; None: nobody records this run."""
    folder = os.environ.get(FOLDER, "")
    if not folder:
        return None
    path, wanted = Path(folder), os.environ.get(FOLDER_ID, "")
    if not wanted or (read_run(path) or {}).get("id") == wanted:
        return FileWriter(path, place)
    report = os.environ.get("UNISONO_REPORT_FD", "")
    return PipeWriter(int(report)) if report.isdigit() else None
