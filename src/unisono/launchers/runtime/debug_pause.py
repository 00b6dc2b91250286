"""Whether this process is to stop for the debugger, and a clock that stands still while it is stopped.

World operations and the ends of steps look at `active`: one name, false as long as nobody debugs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

__all__ = [
    "DEBUGGER",
    "DEBUGGER_WAIT_S",
    "PDB",
    "Moment",
    "begin_pause",
    "clock",
    "end_pause",
    "look",
    "on_look",
    "paused_s",
]

DEBUGGER = "UNISONO_DEBUGGER"  # where the launcher's hub is: "host:port,host:port"; "0": no debugger
DEBUGGER_WAIT_S = "UNISONO_DEBUG_WAIT_S"  # how long stopped workers wait for a prompt if there is no terminal
PDB = "UNISONO_PDB"  # "1": stop where a worker raises; "debugpy:5678": wait for an editor
active = False  # whether `look` has something to do
Moment = Literal["before", "after", "step"]  # an operation of the world begins, or is over; a step has ended
_looks: list[Callable[[Moment], None]] = []
ended_s = 0.0  # of stops that are over
_since: float | None = None


def look(moment: Moment) -> None:
    """Stop here, if this thread has been asked to."""
    for call in _looks:
        call(moment)


def on_look(call: Callable[[Moment], None]) -> None:
    """Register a function that `look` calls; the function sets `active`."""
    if call not in _looks:
        _looks.append(call)


def begin_pause() -> None:
    """The workers are stopped from now on, or about to be."""
    global _since
    if _since is None:
        _since = time.perf_counter()


def end_pause() -> None:
    """The workers go on."""
    global ended_s, _since
    if _since is not None:
        ended_s, _since = ended_s + time.perf_counter() - _since, None


def paused_s() -> float:
    """For how many seconds the workers have been stopped in all."""
    return _count_paused(time.perf_counter())


def clock() -> float:
    """A clock for deadlines: it stands still while workers are stopped."""
    now = time.perf_counter()  # one reading: between two, this thread may have had to wait for a core
    return now - _count_paused(now)


def _count_paused(now: float) -> float:
    since = _since
    return ended_s + (0.0 if since is None else now - since)
