"""What a launcher knows of one worker: of this host, or on an engine, by what its agent has said."""

from __future__ import annotations

import json
import signal
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from unisono.launchers.failures import Failure, failure_of_exit, read_failure
from unisono.launchers.processes import Process
from unisono.launchers.runtime.channel import Channel
from unisono.launchers.runtime.status import StatusPage, WorkerStatus

__all__ = ["LocalWorker", "RemoteWorker", "Worker"]


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


@dataclass(kw_only=True, eq=False)
class LocalWorker(Worker):
    """A worker that this process started."""

    is_elsewhere: ClassVar[bool] = False

    process: Process
    page: StatusPage
    schedule: list[tuple[float, signal.Signals]] = field(default_factory=list)  # signals still to be sent, and when

    def read_status(self) -> WorkerStatus:
        return self.page.read(self.rank)

    def send(self, signum: signal.Signals) -> None:
        """Send a signal to the worker's main process, if it has not ended."""
        if self.ended is None:
            self.process.send(signum)

    def send_group(self, signum: signal.Signals) -> None:
        """Send a signal to the worker and the children in its process group, if it has not ended."""
        if self.ended is None:
            self.process.send_group(signum)


@dataclass(kw_only=True, eq=False)
class RemoteWorker(Worker):
    """One worker of one attempt, reached through its agent."""

    is_elsewhere: ClassVar[bool] = True

    channel: Channel
    identity: str  # of its host, see agent.py
    page: int | None = None  # the number of the launcher's meeting page, if its agent could open that
    told: bool = False  # whether the launcher has told it to save and leave
    status: WorkerStatus = field(default_factory=lambda: WorkerStatus(None, "", 0.0))
    result: list[bytes] = field(default_factory=list)

    def read_status(self) -> WorkerStatus:
        return self.status

    def take_report(self, data: bytes, now: float) -> Iterator[dict[str, Any]]:
        for message in super().take_report(data, now):
            if message.get("kind") == "preemptible":
                self.status = replace(self.status, preemptible=bool(message.get("wanted")))
            yield message

    def take_status(self, message: dict[str, Any], now: float) -> None:
        """Note what its agent says: the worker's process, its last step, what it is doing."""
        if isinstance(message.get("pid"), int):
            self.pid = message["pid"]
        step, doing, since_s = message.get("step"), message.get("doing"), message.get("since_s")
        self.status = replace(
            self.status,
            step=step if isinstance(step, int) else self.status.step,
            doing=str(doing or ""),
            doing_since=now - float(since_s or 0.0),
        )
