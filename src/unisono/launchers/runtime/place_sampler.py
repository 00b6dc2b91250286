"""Where a thread spends its time, by looking at its stack now and then: for a rank that is suspected to be slow."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from types import FrameType

from unisono.launchers.runtime.stack_text import Frame, Kind, find_kind

__all__ = ["PlaceSampler", "list_frames"]

_MOST = 200  # looks


class PlaceSampler:
    """Looks at one thread, every `interval_s`, until it is stopped or has looked often enough."""

    def __init__(self, thread: int, interval_s: float) -> None:
        self._thread, self._interval_s = thread, interval_s
        self._found: Counter[tuple[Kind, str]] = Counter()
        self._stopped = threading.Event()
        self._looker = threading.Thread(target=self._look, name="unisono sampler", daemon=True)
        self._looker.start()

    def stop(self, kind: Kind) -> str:
        """The line of the program where the thread was most often, of those times that it did this; "": never."""
        self._stopped.set()
        self._looker.join()
        counts = {place: count for (what, place), count in self._found.items() if what == kind and place}
        return max(counts, key=lambda place: counts[place]) if counts else ""

    def _look(self) -> None:
        for _ in range(_MOST):
            if self._stopped.wait(self._interval_s):
                return
            frame = sys._current_frames().get(self._thread)
            if frame is None:
                return
            self._found[find_kind(list_frames(frame))] += 1


def list_frames(frame: FrameType | None) -> list[Frame]:
    """A stack, from its innermost frame outwards."""
    found = []
    while frame is not None:
        found.append(Frame(frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name))
        frame = frame.f_back
    return found
