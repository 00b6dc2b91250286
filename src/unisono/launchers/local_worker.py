"""A worker of this host: its process, and the pipe on which it reports."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from typing import ClassVar

from unisono.launchers.processes import Pipes, Process
from unisono.launchers.runtime.status import StatusPage, WorkerStatus
from unisono.launchers.worker_state import Worker

__all__ = ["LocalWorker"]


@dataclass(kw_only=True, eq=False)
class LocalWorker(Worker):
    """A worker that this process started."""

    is_elsewhere: ClassVar[bool] = False

    process: Process
    page: StatusPage
    report_fd: int
    pipes: Pipes = field(init=False)  # that are read: reports, and its output unless it writes that elsewhere
    schedule: list[tuple[float, signal.Signals]] = field(default_factory=list)  # signals still to be sent, and when

    def read_status(self) -> WorkerStatus:
        """See Worker."""
        return self.page.read(self.rank)

    def send(self, signum: signal.Signals) -> None:
        """Send a signal to the worker's main process, if it has not ended."""
        if self.ended is None:
            self.process.send(signum)

    def send_group(self, signum: signal.Signals) -> None:
        """Send a signal to the worker and the children in its process group, if it has not ended."""
        if self.ended is None:
            self.process.send_group(signum)

    def close(self) -> None:
        """Reap the process, which must have ended, and close our ends of its pipes."""
        self.process.close()
        os.close(self.report_fd)
