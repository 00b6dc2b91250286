"""If no launcher of ours watches (torchrun, MPI): a rank that waits for long reads the stacks of its host's ranks
itself, and says who keeps the others waiting.

What ranks need to know of each other for that lies in their rows of the meeting page.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import threading
import time
import weakref

from unisono.launchers.runtime import stacks, status, watchdog
from unisono.launchers.runtime.stacks import WorkerStack, find_kind, judge, list_frames

__all__ = ["BYTES", "Neighbours"]

_ROW = struct.Struct("=idd")  # the descriptor of its stacks, its heartbeat, when it last said that a wait is long
BYTES = _ROW.size
_TURN_S = 0.3  # that each rank leaves to the one before it


class Neighbours:
    """The ranks of this host, on one meeting page."""

    def __init__(self, memory: mmap.mmap, rank: int, pids_at: list[int], rows_at: list[int]) -> None:
        """`pids_at`, `rows_at`: where each rank's process and the rest of it lie."""
        self._memory, self._rank, self._pids_at, self._rows_at = memory, rank, pids_at, rows_at
        file = None if status.is_attached() else stacks.answer_here()
        self._fd = file.fd if file is not None else -1
        self._said = 0.0
        self.beat()
        if file is not None:
            _known[:] = [ref for ref in _known if ref() is not None]
            _known.append(weakref.ref(self))

    def beat(self) -> None:
        """Write a heartbeat: this process can take Python's lock."""
        _ROW.pack_into(self._memory, self._rows_at[self._rank], self._fd, time.monotonic(), self._said)

    def report(self, what: str, waited_s: float, deadline_s: float) -> None:
        """Print what all ranks of this host do, unless another rank has just done so."""
        for _ in range(self._rank):
            time.sleep(_TURN_S)
            _beat()
        now = time.monotonic()
        rows = [_ROW.unpack_from(self._memory, at) for at in self._rows_at]
        if any(said > now - waited_s / 2 for _, _, said in rows):  # the word before was said earlier
            return
        self._said = now
        self.beat()
        pids = [int(struct.unpack_from("i", self._memory, at)[0]) for at in self._pids_at]
        files = [stacks.open_file(pid, fd) for pid, (fd, _, _) in zip(pids, rows, strict=True)]
        known = {pid: file for pid, file in zip(pids, files, strict=True) if file is not None}
        texts = stacks.read_stacks(known)
        workers = [
            WorkerStack(r, pid, "", texts.get(pid, ""), (), stacks.read_state(pid), now - rows[r][1], what)
            for r, pid in enumerate(pids)
        ]
        for file in known.values():
            file.close()
        _print(judge(workers)[0], waited_s, deadline_s)


_known: list[weakref.ref[Neighbours]] = []


def _beat() -> None:
    for ref in tuple(_known):
        neighbours = ref()
        if neighbours is not None:
            neighbours.beat()


def _tell(_: str, what: str, waited_s: float, deadline_s: float) -> None:
    """Report on the first page, which all ranks of this host share."""
    first = next((found for ref in list(_known) if (found := ref()) is not None), None)
    if first is not None:
        first.report(what, waited_s, deadline_s)
        return
    main = sys._current_frames().get(threading.main_thread().ident or 0)
    place = find_kind(list_frames(main))[1] if main is not None else ""
    who, at = os.environ.get("RANK", ""), f" at {place}" if place else ""
    _print(f"{f'rank {who}' if who else 'this rank'} waits in {what}{at}", waited_s, deadline_s)


def _print(text: str, waited_s: float, deadline_s: float) -> None:
    line = f"unisono: a collective has taken {waited_s:.0f} s: {text}; ranks give up after {deadline_s:g} s"
    print(line, file=sys.stderr, flush=True)


watchdog.watch_alone(_tell, _beat)
