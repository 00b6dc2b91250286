"""Links of emulated hosts: "100mbit", "100mbit,20ms", "3x1gbit/100mbit,20ms", read and checked, and kept to as times.

A link joins one host to all others. `RATE` is what passes each way, `LATENCY` how long a message is on its way from a
host to another (half of it on either link, so that hosts with different links are the mean of both apart). Hosts are
separated by `/`; `3x` stands for three hosts; a single link is that of every host.

Without the kernel's help a link is the time until which it is taken. All emulated hosts are on one machine, so that
their processes have one clock, and memory in which each link's times are: workers of one host share its link, and so do
the channels of a worker. Messages are sent as fast as the machine does it; whoever takes part in an exchange then waits
until the time at which it would have ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import os
import re
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

from unisono.launchers.runtime.files import anonymous_file
from unisono.units import show_rate, show_s, write_number

__all__ = ["FRAMED", "Link", "LinkError", "Wire", "parse_link", "parse_links", "write_links"]

_EXAMPLES = "100mbit, 1gbit, 100mbit,20ms (one way), or a link for each host: 3x1gbit/100mbit"
_RATES = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_MOST_LATENCY_S = 10.0
_LEAST_BITS_PER_S = 1e3


class LinkError(ValueError):
    """A text that names no link; the message says why, and shows some that do."""


@dataclass(frozen=True)
class Link:
    """How a host is joined to the others: bits a second each way, and seconds from a host to another.

    >>> str(Link(100e6, 0.02)), Link(2.5e9).describe()
    ('100mbit,20ms', '2.5 Gbit/s')
    """

    bits_per_s: float | None = None  # None: as fast as the machine
    latency_s: float = 0.0

    def __str__(self) -> str:
        """Text that reads back to an equal link."""
        parts = [] if self.bits_per_s is None else [_write(self.bits_per_s, _RATES)]
        return ",".join(parts + ([_write(self.latency_s, _TIMES)] if self.latency_s or not parts else []))

    def describe(self) -> str:
        """For people."""
        parts = [] if self.bits_per_s is None else [show_rate(self.bits_per_s)]
        return ", ".join(parts + ([show_s(self.latency_s)] if self.latency_s else [])) or "as fast as it goes"

    def seconds(self, count: float) -> float:
        """How long so many bytes take to pass, without the latency.

        >>> Link(100e6).seconds(12_500_000)
        1.0
        """
        return 0.0 if self.bits_per_s is None else 8.0 * count / self.bits_per_s


def parse_link(text: str) -> Link:
    """One link: a rate, a latency, or both.

    >>> parse_link("100mbit,20ms")
    Link(bits_per_s=100000000.0, latency_s=0.02)
    >>> parse_link("5ms")
    Link(bits_per_s=None, latency_s=0.005)
    """
    rate: float | None = None
    latency: float | None = None
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z/]+)\s*", part.lower())
        unit = found[2] if found else ""
        if found and unit in _RATES and rate is None and latency is None:
            rate = float(found[1]) * _RATES[unit]
            if not _LEAST_BITS_PER_S <= rate < math.inf:
                _refuse(text, "a rate is at least 1kbit")
        elif found and unit in _TIMES and latency is None:
            latency = float(found[1]) * _TIMES[unit]
            if latency > _MOST_LATENCY_S:
                _refuse(text, f"a latency is at most {_MOST_LATENCY_S:g}s")
        else:
            _refuse(text, _explain_unit(part, unit))
    return Link(rate, latency or 0.0)


def parse_links(text: str, hosts: int) -> list[Link]:
    """The link of each host; one link stands for all.

    >>> [str(link) for link in parse_links("2x1gbit/100mbit,20ms", 3)]
    ['1gbit', '1gbit', '100mbit,20ms']
    """
    found: list[Link] = []
    parts = re.sub(r"(bit)/s\b", r"\1", text.lower()).split("/")  # 100mbit/s
    for part in parts:
        times, x, one = part.strip().rpartition("x")
        if x and not (times.isdigit() and int(times) > 0):
            _refuse(text, f"{part!r} begins with no number of hosts")
        found += [parse_link(one)] * (int(times) if x else 1)
    if len(parts) == 1 and len(found) == 1:
        return found * hosts
    if len(found) != hosts:
        raise LinkError(f"{text!r} names the links of {len(found)} hosts, and there are {hosts}: name one link for all")
    return found


def write_links(links: Sequence[Link]) -> str:
    """Text that reads back to these.

    >>> write_links([Link(1e9), Link(1e9)]), write_links([Link(1e9), Link(1e8, 0.02)])
    ('1gbit', '1gbit/100mbit,20ms')
    """
    return str(links[0]) if len(set(links)) == 1 else "/".join(map(str, links))


def _write(value: float, units: dict[str, float]) -> str:
    """In the largest unit in which it is at least 1."""
    unit, size = max(((u, s) for u, s in units.items() if s <= value), key=lambda pair: pair[1], default=("us", 1e-6))
    return write_number(value / size) + unit


def _explain_unit(part: str, unit: str) -> str:
    if re.fullmatch(r"[kmg]?(bps|b|ib|bytes?|b/s|bit/s)", unit):
        return f"{part.strip()!r} may mean bits or bytes: write kbit, mbit or gbit, which are bits per second"
    if not part.strip():
        return "a part of it is empty"
    return f"{part.strip()!r} is no rate (kbit, mbit, gbit), or no latency (us, ms, s) after it"


def _refuse(text: str, why: str) -> NoReturn:
    raise LinkError(f"got the link {text!r}: {why}; expected such as {_EXAMPLES}")


# Kept to as times ----------------------------------------------------------------------------------------------------


FRAMED = 1514 / 1448  # bytes on the wire for a byte of payload: TCP, IP and Ethernet have headers
_FREE_FROM = struct.Struct("dd")  # from when on a link is free: up, down


class Wire:
    """The links of all hosts. `clock` is that of the machine: the same in all processes."""

    def __init__(
        self,
        fd: int,
        hosts: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`fd`: of `create`, in this process or another; it is kept."""
        self.clock, self._sleep, self._fd = clock, sleep, fd
        self._page = mmap.mmap(fd, hosts * _FREE_FROM.size)
        self._lock = threading.Lock()

    @staticmethod
    def create(hosts: int) -> int:
        """A descriptor of memory for the times of so many links."""
        fd = anonymous_file("unisono-wire")
        os.ftruncate(fd, hosts * _FREE_FROM.size)
        return fd

    def take(self, host: int, link: Link, *, up: float = 0.0, down: float = 0.0, since: float | None = None) -> float:
        """Take a host's link for so many bytes each way, after what it is taken for already; when they have passed.

        `since`: when they could pass at the earliest, now by default.
        """
        up_s, down_s = link.seconds(FRAMED * up), link.seconds(FRAMED * down)
        with self._locked():
            free_up, free_down = _FREE_FROM.unpack_from(self._page, host * _FREE_FROM.size)
            now = self.clock() if since is None else since
            ends = max(now, free_up) + up_s, max(now, free_down) + down_s
            _FREE_FROM.pack_into(
                self._page, host * _FREE_FROM.size, ends[0] if up_s else free_up, ends[1] if down_s else free_down
            )
        return max(ends[0] if up_s else now, ends[1] if down_s else now)

    def keep(self, host: int, until: float) -> None:
        """A host's link is taken until then: the others were late, or slower."""
        with self._locked():
            free_up, free_down = _FREE_FROM.unpack_from(self._page, host * _FREE_FROM.size)
            _FREE_FROM.pack_into(self._page, host * _FREE_FROM.size, max(free_up, until), max(free_down, until))

    def hold(self, until: float) -> None:
        """Wait until the time `end`."""
        while (left := until - self.clock()) > 0:
            self._sleep(left)

    def close(self) -> None:
        """Unmap the memory."""
        if self._fd >= 0:
            self._page.close()
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """For the threads of this process, and for other processes."""
        with self._lock:
            if sys.platform != "linux":
                yield
                return
            fcntl.lockf(self._fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self._fd, fcntl.LOCK_UN)
