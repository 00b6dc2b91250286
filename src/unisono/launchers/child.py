"""A started worker as the launcher sees it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field

from unisono.launchers.failures import Failure

__all__ = ["Child", "exit_status", "pid_fd"]


@dataclass
class Child:
    """One worker: its process, the pipe of its reports, and how it ended."""

    rank: int
    process: subprocess.Popen[bytes]
    pid_fd: int | None
    report_fd: int
    started: float
    ready: bool = False  # whether it has begun its program, and handles SIGINT
    text: bytes = b""  # of the report pipe: an unfinished line, and faulthandler's dump
    failure: Failure | None = None
    exited: float | None = None
    schedule: list[tuple[float, signal.Signals]] = field(default_factory=list)  # signals still to come

    def send(self, signum: signal.Signals) -> None:
        """Send a signal to the worker's main process, if it has not ended."""
        if self.exited is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signum)

    def send_group(self, signum: signal.Signals) -> None:
        """Send a signal to the worker and the children in its process group."""
        if self.exited is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signum)

    def stream_fds(self) -> list[int]:
        """Our ends of its standard output and error, where we have them."""
        return [stream.fileno() for stream in (self.process.stdout, self.process.stderr) if stream is not None]

    def close(self) -> None:
        """Reap the process, which must have ended, and close our ends of its pipes."""
        self.process.wait()
        os.close(self.report_fd)
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


def pid_fd(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends; None where the system has none."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # kernel before 5.3
            return os.pidfd_open(pid)
    return None


def exit_status(pid: int, *, wait: bool = False) -> int | None:
    """How the child ended, as subprocess counts it (negative: by a signal); None while it runs. Does not reap it."""
    try:
        result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | (0 if wait else os.WNOHANG))
    except ChildProcessError:  # reaped by others: this program ignores SIGCHLD
        return 0
    if result is None:
        return None
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
