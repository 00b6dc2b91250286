"""What a launcher knows of one worker, whether it runs on this host or an engine started it elsewhere."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from unisono.launchers.failures import Failure, failure_of_exit, read_failure
from unisono.launchers.runtime.status import WorkerStatus

__all__ = ["Worker"]


@dataclass(kw_only=True, eq=False)
class Worker(ABC):
    """One worker, from its start to its end. Times are this host's `time.monotonic()`."""

    is_elsewhere: ClassVar[bool]  # whether it may run on another host, whose clock is another

    rank: int  # in an elastic run its place, which its replacement has after it
    host: str
    pid: int = 0
    started: float = 0.0
    ready: bool = False  # whether it has begun its program, and handles SIGINT
    text: bytes = b""  # of its reports: an unfinished line, and faulthandler's dump
    done: bool = False  # whether its program has ended well
    is_overdue: bool = False  # its program has ended well, but its process had to be killed
    preempted: bool = False  # whether it has saved and left
    failure: Failure | None = None
    ended: float | None = None

    @abstractmethod
    def read_status(self) -> WorkerStatus:
        """The worker's last known step and activity."""

    @property
    def is_leaving(self) -> bool:
        """Whether it ends by itself, and need not be told to."""
        return self.done or self.preempted or self.failure is not None

    def describe_process(self) -> str:
        """The process for a line of the log."""
        return f"process {self.pid} on {self.host}" if self.is_elsewhere else f"process {self.pid}"

    def describe_activity(self, now: float) -> str:
        """Its last step and what it was doing at `now`; "" if it has noted neither."""
        status = self.read_status()
        parts = [] if status.step is None else [f"last step {status.step}"]
        if status.doing:
            parts.append(f"doing: {status.doing} (since {max(0.0, now - status.doing_since):.1f} s)")
        return ", ".join(parts)

    def take_report(self, data: bytes, now: float) -> Iterator[dict[str, Any]]:
        """Parse a piece of what the worker wrote to its report pipe, and yield the messages that it completes.

        A failure that a message reports is noted only after the message was handled.
        """
        *lines, rest = (self.text + data).split(b"\n")
        messages, unknown = [], b""
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError:
                unknown += line + b"\n"  # faulthandler's
                continue
            if isinstance(message, dict):
                messages.append(message)
        self.text = unknown + rest  # before messages are handled, as more may come meanwhile
        for message in messages:
            self.ready = True
            self.done = self.done or message.get("kind") == "done"
            self.preempted = self.preempted or message.get("kind") == "preempted"
            if self.is_elsewhere:
                message["time"] = now
            yield message
            self.failure = self.failure or read_failure(self.rank, message, now)

    def take_end(self, status: int, now: float, *, stopping: bool) -> None:
        """Note that the process has ended with `status`, which is negative for a signal, as in subprocess.

        A worker whose program had ended well and that was killed for being slow to leave, because the launcher stops
        all workers (`stopping`) or because it was overdue, has not failed.
        """
        self.ended = now
        was_killed = self.done and (stopping or self.is_overdue)
        if status != 0 and self.failure is None and not self.preempted and not was_killed:
            self.failure = failure_of_exit(self.rank, status, now, self.text.decode("utf-8", "replace"))
