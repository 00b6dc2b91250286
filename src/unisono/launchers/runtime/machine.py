"""What is known of this machine, without torch: cores and how long threads waited for one, memory, boot."""

from __future__ import annotations

import ctypes
import math
import os
import resource
import time
from pathlib import Path

__all__ = [
    "ProcessorWait",
    "available_bytes",
    "give_back_freed_memory",
    "host_bytes",
    "read_boot_id",
    "read_namespaces",
    "read_start",
    "usable_cores",
]

_MEMORY_LIMITS = (  # of the control group: limit and use, versions 2 and 1
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h


# -- cores -------------------------------------------------------------------------------------------------------------


def usable_cores() -> int:
    """The cores that this process may use: those it is bound to, and no more than its container's quota."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on this system
        cores = os.cpu_count() or 1
    return max(1, math.ceil(min(cores, _quota())))


def _quota() -> float:
    """CPUs that the control group allows; infinite where there is no limit."""
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
        return math.inf if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        with (
            open("/sys/fs/cgroup/cpu/cpu.cfs_quota_us") as first,
            open("/sys/fs/cgroup/cpu/cpu.cfs_period_us") as second,
        ):
            quota_us, period_us = int(first.read()), int(second.read())
        return quota_us / period_us if quota_us > 0 and period_us > 0 else math.inf
    except (OSError, ValueError):
        return math.inf


# -- memory ------------------------------------------------------------------------------------------------------------


def host_bytes() -> int:
    """Memory of this host, or the limit that was set on this program's group where that is lower."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [Path(path).read_text(encoding="ascii").strip() for path, _ in _MEMORY_LIMITS if Path(path).is_file()]
    return min([found, *(int(limit) for limit in limits if limit.isdecimal())])


def available_bytes() -> int:
    """Free memory of the host, or what is left of a limit on this process or its group, where that is less.

    >>> 0 < available_bytes() < 1 << 50
    True
    """
    page = os.sysconf("SC_PAGE_SIZE")
    known = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    free_pages = os.sysconf("SC_AVPHYS_PAGES")
    found = [int(known["MemAvailable"].split()[0]) << 10 if "MemAvailable" in known else page * free_pages]
    for limit, used in _MEMORY_LIMITS:
        if Path(limit).is_file() and (text := Path(limit).read_text(encoding="ascii").strip()).isdecimal():
            found.append(int(text) - int(Path(used).read_text(encoding="ascii")))
    pages = [int(n) for n in Path("/proc/self/statm").read_text(encoding="ascii").split()]
    for kind, used_pages in ((resource.RLIMIT_AS, pages[0]), (resource.RLIMIT_DATA, pages[5])):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            found.append(soft - used_pages * page)
    return max(0, min(found))


def give_back_freed_memory() -> None:
    """Let the C library return large blocks to the system when they are freed, where it is glibc.

    It keeps them otherwise, and cannot always use them again for aligned memory: a process that frees as much as it
    takes still grows. Costs page faults, so it is only for runs that must fit into little memory.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 1 << 20)
        mallopt(_TRIM_THRESHOLD, 16 << 20)


# -- which machine -----------------------------------------------------------------------------------------------------


def read_boot_id() -> str:
    """The same for two processes just when one kernel, since one start of it, runs both. Raises OSError elsewhere."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def read_start(pid: int) -> int | None:
    """When a process was started, in the kernel's count: it tells a process from a later one of the same number."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


def read_namespaces(*kinds: str) -> list[str]:
    """The namespaces of this process: "net", "pid" and so on."""
    return [os.readlink(f"/proc/self/ns/{kind}") for kind in kinds]


# -- waiting for a core -----------------------------------------------------------------------------------------------


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
