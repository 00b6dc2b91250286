"""Who records this process's run: begun by `un.parallel` where the launcher, or the environment, asked for it.

A worker of `unisono run` is told the folder. A program that was started in another way is recorded where UNISONO_RUNS
says where: rank 0 makes the folder, and tells the others while they check that they train the same.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from unisono.launchers.runtime import status
from unisono.launchers.runtime.launch_env import read_place
from unisono.launchers.runtime.run_folder import FOLDER, FOLDER_ID, PLACE, RunFolder, find_runs_folder
from unisono.launchers.runtime.variables import read_worker_number
from unisono.observe.runs.lines import find_writer
from unisono.observe.runs.recorder import Facts, Recorder
from unisono.world import World
from unisono.world.rendezvous import find_joined, join

__all__ = ["begin", "find_recorder", "needs_folder", "note_loss", "note_method", "share_folder"]

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
        print(f"unisono: UNISONO_LOG: {error}; training goes on", file=sys.stderr)
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
