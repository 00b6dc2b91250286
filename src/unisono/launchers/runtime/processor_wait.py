"""How long this process's threads were ready to run and had no core: others use the cores of this host."""

from __future__ import annotations

import os
import time

__all__ = ["ProcessorWait"]

_TASKS = "/proc/self/task"


class ProcessorWait:
    """Counts from one `take` to the next.

    Linux counts for every thread how long it waited for a core (schedstat), and for a virtual machine how long others
    on its host had the cores (steal). Elsewhere, time that the program computed by the clock and not by the processor's
    count stands for it.
    """

    def __init__(self) -> None:
        self._waited = _read_waits()
        self._stolen, self._ticks = _read_steal()
        self._computed, self._clock = time.process_time(), time.perf_counter()

    def take(self, busy_s: float) -> float:
        """Seconds since the last call; `busy_s`: how long the program computed meanwhile, by the clock."""
        before, self._waited = self._waited, _read_waits()
        stolen, ticks = _read_steal()
        share = (stolen - self._stolen) / max(1, ticks - self._ticks)
        self._stolen, self._ticks = stolen, ticks
        computed, self._computed = time.process_time() - self._computed, time.process_time()
        lasted, self._clock = time.perf_counter() - self._clock, time.perf_counter()
        if not self._waited:
            return max(0.0, busy_s - computed)
        # One thread's: the others may have waited at the same time.
        longest = max((now - before.get(thread, 0) for thread, now in self._waited.items()), default=0)
        return min(lasted, longest / 1e9 + share * lasted)


def _read_waits() -> dict[str, int]:
    """Nanoseconds that every thread has waited for a core; none where the system does not count it."""
    try:
        waits = {thread: _read_wait(thread) for thread in os.listdir(_TASKS)}
    except OSError:
        return {}
    return {thread: wait for thread, wait in waits.items() if wait is not None}


def _read_wait(thread: str) -> int | None:
    try:
        with open(f"{_TASKS}/{thread}/schedstat", "rb") as file:
            return int(file.read().split()[1])
    except (OSError, ValueError, IndexError):  # the thread has ended, or the system does not count it
        return None


def _read_steal() -> tuple[int, int]:
    """Ticks of all cores that went to other guests, and all ticks; zeros where the system does not count them."""
    try:
        with open("/proc/stat") as file:
            ticks = [int(word) for word in file.readline().split()[1:9]]
    except (OSError, ValueError):
        return 0, 0
    return (ticks[7], sum(ticks)) if len(ticks) == 8 else (0, 0)
