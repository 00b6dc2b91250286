"""Whether other processes of this machine are still alive."""

from __future__ import annotations

import os
import select
from collections.abc import Sequence

from unisono.world.transports import PeerLost


class ProcessWatch:
    """Tells whether the processes of the other ranks are still alive."""

    def __init__(self, pids: Sequence[int]) -> None:
        self.pids = list(pids)
        self._fds = [-1] * len(self.pids)
        try:
            for rank, pid in enumerate(self.pids):
                if pid != os.getpid():
                    self._fds[rank] = os.pidfd_open(pid)
        except ProcessLookupError:
            self.close()
            raise PeerLost(f"rank {rank} (process {pid}) has ended") from None

    def has_died(self, rank: int) -> bool:
        """Whether the process of `rank` is gone."""
        if self._fds[rank] < 0:
            return False
        poll = select.poll()
        poll.register(self._fds[rank], select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        for fd in self._fds:
            if fd >= 0:
                os.close(fd)
        self._fds = [-1] * len(self._fds)
