"""What is known of this machine, without torch: cores, memory, which boot it is, and its addresses."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import resource
import socket
import struct
import sys
from pathlib import Path

__all__ = [
    "address_of_interface",
    "address_towards",
    "available_bytes",
    "give_back_freed_memory",
    "host_bytes",
    "interface_of_address",
    "read_boot_id",
    "read_namespaces",
    "usable_cores",
]

_MEMORY_LIMITS = (  # of the control group: limit and use, versions 2 and 1
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
_SIOCGIFADDR = 0x8915
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
    found = [_free_bytes()]
    for limit, used in _MEMORY_LIMITS:
        if Path(limit).is_file() and (text := Path(limit).read_text(encoding="ascii").strip()).isdecimal():
            found.append(int(text) - int(Path(used).read_text(encoding="ascii")))
    pages = [int(n) for n in Path("/proc/self/statm").read_text(encoding="ascii").split()]
    page = os.sysconf("SC_PAGE_SIZE")
    for kind, used_pages in ((resource.RLIMIT_AS, pages[0]), (resource.RLIMIT_DATA, pages[5])):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            found.append(soft - used_pages * page)
    return max(0, min(found))


def _free_bytes() -> int:
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


# -- which machine -----------------------------------------------------------------------------------------------------


def read_boot_id() -> str:
    """The same for two processes just when one kernel, since one start of it, runs both. Raises OSError elsewhere."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def read_namespaces(*kinds: str) -> list[str]:
    """The namespaces of this process: "net", "pid" and so on."""
    return [os.readlink(f"/proc/self/ns/{kind}") for kind in kinds]


# -- addresses ---------------------------------------------------------------------------------------------------------


def address_towards(host: str) -> str:
    """The address from which this host would speak to another; "" where there is no way. Nothing is sent.

    IPv4, unless `host` is an IPv6 address.

    >>> address_towards("127.0.0.1")
    '127.0.0.1'
    """
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def address_of_interface(name: str) -> str:
    """The IPv4 address of a network interface. Raises OSError where it has none."""
    if sys.platform != "linux":
        raise OSError("addresses of interfaces are known on Linux only")
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
    return socket.inet_ntoa(answer[20:24])


def interface_of_address(address: str) -> str:
    """The network interface that has this IPv4 address, "" where it cannot be found."""
    for _, name in socket.if_nameindex():
        with contextlib.suppress(OSError):
            if address_of_interface(name) == address:
                return name
    return ""
