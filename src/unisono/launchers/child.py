"""A started worker as the launcher sees it."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field

from unisono.launchers.failures import Failure
from unisono.launchers.processes import Process

__all__ = ["Child"]


@dataclass
class Child:
    """One worker: its process, the pipe of its reports, and how it ended."""

    rank: int
    process: Process
    report_fd: int
    started: float
    ready: bool = False  # whether it has begun its program, and handles SIGINT
    text: bytes = b""  # of the report pipe: an unfinished line, and faulthandler's dump
    done: bool = False  # whether its program has ended well
    is_overdue: bool = False  # and its process did not end by itself
    preempted: bool = False  # whether it has saved and left
    failure: Failure | None = None
    exited: float | None = None
    schedule: list[tuple[float, signal.Signals]] = field(default_factory=list)  # signals still to come

    @property
    def is_leaving(self) -> bool:
        """Whether it ends by itself, and need not be told to."""
        return self.done or self.preempted or self.failure is not None

    def send(self, signum: signal.Signals) -> None:
        """Send a signal to the worker's main process, if it has not ended."""
        if self.exited is None:
            self.process.send(signum)

    def send_group(self, signum: signal.Signals) -> None:
        """Send a signal to the worker and the children in its process group."""
        if self.exited is None:
            self.process.send_group(signum)

    def stream_fds(self) -> list[int]:
        """Our ends of its standard output and error, where we have them."""
        return [fd for fd in (self.process.stdout, self.process.stderr) if fd is not None]

    def close(self) -> None:
        """Reap the process, which must have ended, and close our ends of its pipes."""
        self.process.close()
        os.close(self.report_fd)
