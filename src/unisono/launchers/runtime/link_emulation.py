"""Links of emulated hosts without the kernel's help: until when each is taken, as times that senders keep to.

All emulated hosts are on one machine, so that their processes have one clock, and memory in which each link's times
are: workers of one host share its link, and so do the channels of a worker. Messages are sent as fast as the machine
does it; whoever takes part in an exchange then waits until the time at which it would have ended.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import threading
import time
from collections.abc import Callable

from unisono.launchers.runtime.link_text import Link
from unisono.launchers.runtime.memfd import anonymous_file

__all__ = ["FRAMED", "Wire"]

FRAMED = 1514 / 1448  # bytes on the wire for a byte of payload: TCP, IP and Ethernet have headers
_TIMES = struct.Struct("dd")  # from when on a link is free: up, down


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
        self._page = mmap.mmap(fd, hosts * _TIMES.size)
        self._lock = threading.Lock()

    @staticmethod
    def create(hosts: int) -> int:
        """A descriptor of memory for the times of so many links."""
        fd = anonymous_file("unisono-wire")
        os.ftruncate(fd, hosts * _TIMES.size)
        return fd

    def take(self, host: int, link: Link, *, up: float = 0.0, down: float = 0.0, since: float | None = None) -> float:
        """Take a host's link for so many bytes each way, after what it is taken for already; when they have passed.

        `since`: when they could pass at the earliest, now by default.
        """
        up_s, down_s = link.seconds(FRAMED * up), link.seconds(FRAMED * down)
        with self._locked():
            free_up, free_down = _TIMES.unpack_from(self._page, host * _TIMES.size)
            now = self.clock() if since is None else since
            ends = max(now, free_up) + up_s, max(now, free_down) + down_s
            _TIMES.pack_into(
                self._page, host * _TIMES.size, ends[0] if up_s else free_up, ends[1] if down_s else free_down
            )
        return max(ends[0] if up_s else now, ends[1] if down_s else now)

    def keep(self, host: int, until: float) -> None:
        """A host's link is taken until then: the others were late, or slower."""
        with self._locked():
            free_up, free_down = _TIMES.unpack_from(self._page, host * _TIMES.size)
            _TIMES.pack_into(self._page, host * _TIMES.size, max(free_up, until), max(free_down, until))

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

    def _locked(self) -> _Locked:
        return _Locked(self._lock, self._fd)


class _Locked:
    """For the threads of this process, and for other processes."""

    def __init__(self, lock: threading.Lock, fd: int) -> None:
        self._lock, self._fd = lock, fd

    def __enter__(self) -> None:
        self._lock.acquire()
        self._set(exclusive=True)

    def __exit__(self, *_: object) -> None:
        self._set(exclusive=False)
        self._lock.release()

    def _set(self, *, exclusive: bool) -> None:
        if sys.platform == "linux":
            import fcntl

            fcntl.lockf(self._fd, fcntl.LOCK_EX if exclusive else fcntl.LOCK_UN)
