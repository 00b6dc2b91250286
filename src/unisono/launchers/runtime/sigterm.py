"""SIGTERM as a word to leave soon: noted, while the program asks for it, instead of ending this process at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from unisono.launchers.runtime import status
from unisono.launchers.runtime.spot_notice import follow_notice

__all__ = ["PREEMPTED", "has_agreed", "note_agreement", "noting", "told", "watch"]

PREEMPTED = 128 + signal.SIGTERM  # the exit status of a program that saved and left, as of one that SIGTERM ended
_AGAIN_S = 2.0  # a scheduler, an agent and a launcher may each pass on the same word; a later one means at once

_owner = 0  # the process that notes SIGTERM
_before: Any = signal.SIG_DFL  # what it did before
_told_at: float | None = None
_agreed = False
_follows_notice = False  # a cloud's word counts like SIGTERM


def watch() -> bool:
    """Note SIGTERM from now on; the launcher, if there is one, is told. False where it is noted already, or cannot be:
    in a thread beside the main one, or where the program ignores the signal."""
    global _owner, _before, _follows_notice
    if _owner == os.getpid() or threading.current_thread() is not threading.main_thread():
        return False
    before = signal.getsignal(signal.SIGTERM)
    if before is None or before is signal.SIG_IGN:  # None: a handler that is not Python's
        return False
    _owner, _before = os.getpid(), before
    signal.signal(signal.SIGTERM, _note)
    if before is signal.SIG_DFL:
        signal.siginterrupt(signal.SIGTERM, False)  # native code need not know of the signal
    _tell_launcher(wanted=True)
    if not _follows_notice:
        _follows_notice = True
        follow_notice(_take_notice)
    return True


@contextmanager
def noting() -> Iterator[None]:
    """Note SIGTERM inside the block; after it the signal does what it did before, unless this process is leaving."""
    global _owner
    began = watch()
    try:
        yield
    finally:
        if began and not _agreed:
            _tell_launcher(wanted=False)
            if signal.getsignal(signal.SIGTERM) is _note:
                signal.signal(signal.SIGTERM, _before)
            _owner = 0


def told() -> bool:
    """Whether this process has been sent SIGTERM."""
    return _told_at is not None


def note_agreement() -> None:
    """Note that all ranks have agreed to leave."""
    global _agreed
    _agreed = True


def has_agreed() -> bool:
    """Whether the ranks have agreed to leave."""
    return _agreed


def _note(signum: int, frame: FrameType | None) -> None:
    global _told_at
    now = time.monotonic()
    again = _told_at is not None and now > _told_at + _AGAIN_S
    if os.getpid() != _owner or again:  # a forked child has nothing to save: it ends, as it would without us
        signal.signal(signum, _before)
        os.kill(os.getpid(), signum)
        return
    _told_at = now if _told_at is None else _told_at
    if callable(_before):
        _before(signum, frame)


def _take_notice() -> None:
    global _told_at
    if _told_at is None:
        _told_at = time.monotonic()
        print("unisono: the cloud will take this machine away; saving and leaving", file=sys.stderr, flush=True)


def _tell_launcher(*, wanted: bool) -> None:
    """Note the wish on the status page, and send a report so that the launcher looks at the page."""
    if status.note_wish(preemptible=wanted):
        status.report("preemptible", wanted=wanted)
