"""A worker's own watch over what it waits for: its heartbeat, and a word to the launcher where a collective takes long.

The thread needs Python's lock for each beat: where the heartbeat stops, native code holds that lock, or the process is
stopped. The launcher is told at a quarter of the time after which a rank gives up, and shortly before the end of it;
it then reads every worker's stacks, while all are still where they are.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from unisono.launchers.runtime import debug_pause, status
from unisono.launchers.runtime.variables import are_checks_on

__all__ = ["Watchdog", "find_watchdog", "watch_alone"]

WARN_AT, LATE_AT, LATE_S = 0.25, 0.9, 5.0  # shares of the deadline; how long before it, where that is later
_NOTED_S = 0.5  # a wait that is shown on the status page


class _Wait:
    """One wait of one thread."""

    __slots__ = ("began", "deadline_s", "is_noted", "told", "what")

    def __init__(self, what: str, deadline_s: float) -> None:
        self.what, self.deadline_s = what, deadline_s
        self.began = time.monotonic() - debug_pause.ended_s  # the time in which people debug does not count
        self.told = 0  # how many of the two words were said
        self.is_noted = False


class Watchdog:
    """Watches the waits of one process. `tell` is given (kind, what, seconds, deadline) of one that takes long."""

    def __init__(self, tell: Callable[[str, str, float, float], None], beat: Callable[[], None]) -> None:
        self._tell, self._beat = tell, beat
        self._waits: dict[int, _Wait] = {}  # by thread
        self.pid = os.getpid()
        self._shortest_s = 1e9
        self._changed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="unisono watchdog", daemon=True)
        self._thread.start()

    def enter(self, what: str, deadline_s: float) -> None:
        """This thread begins to wait for other ranks, for so long at most."""
        self._waits[threading.get_ident()] = _Wait(what, deadline_s)
        if deadline_s < self._shortest_s:
            self._shortest_s = deadline_s
            self._changed.set()

    def leave(self) -> None:
        """This thread has stopped waiting."""
        wait = self._waits.pop(threading.get_ident(), None)
        if wait is not None and wait.is_noted:
            status.note(doing="")

    def look(self, now: float) -> None:
        """Tell of waits that take long; `now` leaves out pauses in the debugger."""
        for wait in list(self._waits.values()):
            waited_s = now - wait.began
            if waited_s > _NOTED_S and not wait.is_noted:
                wait.is_noted = True
                status.note(doing=wait.what)
            late_s = max(LATE_AT * wait.deadline_s, wait.deadline_s - LATE_S)
            for number, (kind, limit_s) in enumerate((("waiting", WARN_AT * wait.deadline_s), ("hang", late_s)), 1):
                if waited_s > limit_s and wait.told < number:
                    wait.told = number
                    self._tell(kind, wait.what, waited_s, wait.deadline_s)

    def _watch(self) -> None:
        while os.getpid() == self.pid:
            self._beat()
            self.look(time.monotonic() - debug_pause.paused_s())
            if self._changed.wait(min(status.BEAT_S, self._shortest_s / 50)):
                self._changed.clear()


_watchdog: Watchdog | None = None
_alone: tuple[Callable[[str, str, float, float], None], Callable[[], None]] | None = None


def watch_alone(tell: Callable[[str, str, float, float], None], beat: Callable[[], None]) -> None:
    """Set what a watchdog does in a process that no launcher of ours started."""
    global _alone
    _alone = tell, beat


def find_watchdog() -> Watchdog | None:
    """The watchdog of this process; a forked child of a worker has none."""
    global _watchdog
    if not are_checks_on():
        return None
    if _watchdog is None and status.is_attached():
        _watchdog = Watchdog(_tell_launcher, status.beat)
    elif _watchdog is None and _alone is not None:
        _watchdog = Watchdog(*_alone)
    return _watchdog if _watchdog is not None and _watchdog.pid == os.getpid() else None


def _tell_launcher(kind: str, what: str, waited_s: float, deadline_s: float) -> None:
    status.report(kind, what=what[:200], waited_s=waited_s, deadline_s=deadline_s)
