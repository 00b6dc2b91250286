"""The status page: each worker's step and activity, in memory that outlives the worker; and how its program ends.

The launcher makes the page (an anonymous file) and every worker inherits it, so the launcher can still say what a
worker was doing when it was killed without warning. Writing is a store into mapped memory: well under a microsecond.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
import sys
import time
from dataclasses import dataclass
from time import monotonic
from typing import Any

from unisono.launchers.runtime.files import anonymous_file
from unisono.launchers.runtime.variables import read_worker_number

__all__ = [
    "BEAT_S",
    "ENDED",
    "StatusPage",
    "WorkerStatus",
    "attach",
    "beat",
    "describe_ending",
    "describe_failure",
    "is_attached",
    "note",
    "note_ending",
    "note_failure",
    "note_wish",
    "read_regroup_request",
    "read_step",
    "report",
]

BEAT_S = 0.5  # between two heartbeats of a worker
_MAGIC = b"unisono status 1"
_HEADER = struct.Struct("<16sQ")  # magic, number of rows
_STEP = struct.Struct("<q")
_DOING_BYTES = 176
_DOING = struct.Struct(f"<d{_DOING_BYTES}s")  # when it was noted, what
_HEADER_BYTES = 64
_REGROUP = struct.Struct("<Q")
_REGROUP_AT = 24  # in the header: the generation of the world that all are called to
_WISH_AT = 192  # in a row, after step and activity: one byte
_BEAT_AT = 200
_TIME = struct.Struct("<d")
_STEP_AT = 208
_ROW_BYTES = 256
_NO_STEP = -1

assert _STEP.size + _DOING.size <= _WISH_AT < _BEAT_AT
assert _BEAT_AT + _TIME.size <= _STEP_AT
assert _STEP_AT + _TIME.size <= _ROW_BYTES
assert _HEADER.size <= _REGROUP_AT
assert _REGROUP_AT + _REGROUP.size <= _HEADER_BYTES


@dataclass(frozen=True)
class WorkerStatus:
    """One worker's row: `step` is None before the first note of a step; `doing` is "" before the first activity."""

    step: int | None
    doing: str
    doing_since: float  # time.monotonic() of the note; one clock for all processes of a host
    preemptible: bool = False  # whether it saves and leaves by itself after SIGTERM
    heartbeat: float = 0.0  # time.monotonic() of the last; 0.0: it gives none
    step_at: float = 0.0  # time.monotonic() when the step was noted


class StatusPage:
    """The launcher's side of the page.

    >>> page = StatusPage.create(2)
    >>> page.read(1)
    WorkerStatus(step=None, doing='', doing_since=0.0, preemptible=False, heartbeat=0.0, step_at=0.0)
    >>> page.close()
    """

    def __init__(self, fd: int, rows: int) -> None:
        self.fd = fd
        self.rows = rows
        self._map = mmap.mmap(fd, _HEADER_BYTES + rows * _ROW_BYTES)

    @classmethod
    def create(cls, rows: int) -> StatusPage:
        """Make an empty page with one row for each worker."""
        fd = anonymous_file("unisono-status")
        os.ftruncate(fd, _HEADER_BYTES + rows * _ROW_BYTES)
        page = cls(fd, rows)
        for rank in range(rows):
            _STEP.pack_into(page._map, _row(rank), _NO_STEP)
        _HEADER.pack_into(page._map, 0, _MAGIC, rows)
        return page

    def read(self, rank: int) -> WorkerStatus:
        """The last thing `rank` noted."""
        (step,) = _STEP.unpack_from(self._map, _row(rank))
        since, doing = _DOING.unpack_from(self._map, _row(rank) + _STEP.size)
        text = doing.rstrip(b"\0").decode("utf-8", "replace")
        preemptible = self._map[_row(rank) + _WISH_AT] != 0
        (heartbeat,) = _TIME.unpack_from(self._map, _row(rank) + _BEAT_AT)
        (step_at,) = _TIME.unpack_from(self._map, _row(rank) + _STEP_AT)
        return WorkerStatus(None if step == _NO_STEP else step, text, since, preemptible, heartbeat, step_at)

    def clear(self, rank: int) -> None:
        """Empty a row for the next worker that has it."""
        self._map[_row(rank) : _row(rank) + _ROW_BYTES] = bytes(_ROW_BYTES)
        _STEP.pack_into(self._map, _row(rank), _NO_STEP)

    def request_regroup(self, generation: int) -> None:
        """Call all workers to another generation of their world, at their next step (see membership.py)."""
        _REGROUP.pack_into(self._map, _REGROUP_AT, generation)

    def close(self) -> None:
        """Unmap the page and close its descriptor."""
        self._map.close()
        os.close(self.fd)


def _row(rank: int) -> int:
    return _HEADER_BYTES + rank * _ROW_BYTES


def _find_row() -> tuple[mmap.mmap | None, int]:
    """This worker's page and the offset of its row; (None, 0) outside a launcher.

    The magic is checked because a program started by a worker inherits the variable, but not the descriptor it names.
    """
    try:
        fd = int(os.environ["UNISONO_STATUS_FD"])
        rank = read_worker_number()
        page = mmap.mmap(fd, os.fstat(fd).st_size)
        magic, rows = _HEADER.unpack_from(page, 0)
    except (KeyError, ValueError, OSError, struct.error):
        return None, 0
    if magic != _MAGIC or rank is None or not 0 <= rank < rows:
        return None, 0
    return page, _row(rank)


_page, _offset = _find_row()
_step: int | None = None  # the last that was noted, also outside a launcher


def attach() -> None:
    """Look again for this worker's page: for a worker that was forked after this module was imported."""
    global _page, _offset
    _page, _offset = _find_row()


def is_attached() -> bool:
    """Whether this process is a worker of a launcher (a program that a worker starts is not)."""
    return _page is not None


def note(step: int | None = None, doing: str | None = None) -> None:
    """Note the step just reached and/or what this worker does now; costs nothing outside a launcher.

    >>> note(step=12, doing="all_reduce grads/3")
    """
    global _step
    if step is not None:
        _step = step
    if _page is None:
        return
    if step is not None:
        _TIME.pack_into(_page, _offset + _STEP_AT, monotonic())
        _STEP.pack_into(_page, _offset, step)
    if doing is not None:
        _DOING.pack_into(_page, _offset + 8, monotonic(), doing.encode())  # struct cuts or pads to the field


def note_wish(*, preemptible: bool) -> bool:
    """Note whether this worker saves and leaves by itself after SIGTERM; False outside a launcher."""
    if _page is None:
        return False
    _page[_offset + _WISH_AT] = preemptible
    return True


def beat() -> None:
    """Give a heartbeat, which shows that this process is not stopped."""
    if _page is not None:
        _TIME.pack_into(_page, _offset + _BEAT_AT, monotonic())


def read_regroup_request() -> int:
    """The newest generation of the world that all workers are called to; 0 at first."""
    return 0 if _page is None else int(_REGROUP.unpack_from(_page, _REGROUP_AT)[0])


def read_step() -> int | None:
    """The last step that this process has noted."""
    return _step


def report(kind: str, **fields: Any) -> None:
    """Tell the launcher something by a JSON line on the report pipe; short, since it is written in one piece."""
    line = json.dumps({"kind": kind, **fields}) + "\n"
    with contextlib.suppress(OSError):  # the launcher is gone, and this process is about to go
        os.write(int(os.environ["UNISONO_REPORT_FD"]), line.encode())


# How the program ends ------------------------------------------------------------------------------------------------


ENDED = "has ended its program"
_noted = ""


def note_ending(text: str) -> None:
    """Note how the program ended, such as "has ended its program with status 0"."""
    global _noted
    _noted = text


def note_failure(error: BaseException) -> None:
    """Note that an error ended the program."""
    note_ending(describe_failure(error))


def describe_ending() -> str:
    """How it ends, when, and after which step; asked when the interpreter shuts down.

    >>> describe_ending().startswith("has ended its program")
    True
    """
    error = getattr(sys, "last_value", None)  # set for an error that nobody caught
    how = _noted or (ENDED if error is None else describe_failure(error))
    step = _step
    return f"{how} at {time.strftime('%H:%M:%S')}" + (f", after step {step}" if step is not None else "")


def describe_failure(error: BaseException) -> str:
    """An error in one line.

    >>> describe_failure(ValueError("a bad batch"))
    'has failed (ValueError: a bad batch)'
    """
    lines = str(error).splitlines()
    return f"has failed ({type(error).__name__}{f': {lines[0][:160]}' if lines else ''})"
