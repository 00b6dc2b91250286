"""How much host memory this process may still take."""

from __future__ import annotations

import ctypes
import os
import resource
from pathlib import Path

_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def available_bytes() -> int:
    """Free memory of the host, or what is left of a limit on this process or its group, where that is less.

    >>> 0 < available_bytes() < 1 << 50
    True
    """
    found = [_free()]
    for limit, used in _CGROUPS:
        if Path(limit).is_file() and (text := Path(limit).read_text(encoding="ascii").strip()).isdecimal():
            found.append(int(text) - int(Path(used).read_text(encoding="ascii")))
    pages = [int(n) for n in Path("/proc/self/statm").read_text(encoding="ascii").split()]
    page = os.sysconf("SC_PAGE_SIZE")
    for kind, used_pages in ((resource.RLIMIT_AS, pages[0]), (resource.RLIMIT_DATA, pages[5])):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            found.append(soft - used_pages * page)
    return max(0, min(found))


def _free() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def give_back_freed_memory() -> None:
    """Let the C library return large blocks to the system when they are freed, where it is glibc.

    It keeps them otherwise, and cannot always use them again for aligned memory: a process that frees as much as it
    takes still grows. Costs page faults, so it is only for runs that must fit into little memory.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 1 << 20)
        mallopt(_TRIM_THRESHOLD, 16 << 20)


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
