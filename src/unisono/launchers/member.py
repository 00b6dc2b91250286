"""A worker on an engine as the launcher sees it: what its agent has said."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from unisono.launchers.failures import Failure, failure_of_exit, read_failure
from unisono.runtime.channel import Channel

__all__ = ["Member"]


@dataclass
class Member:
    """One worker of one attempt."""

    rank: int
    channel: Channel
    host: str
    identity: str  # of the host, see agent.py
    page: int | None = None  # the number of the launcher's meeting page, where its agent could open that
    pid: int = 0
    started: float = 0.0
    ready: bool = False  # whether it has begun its program, and handles SIGINT
    text: bytes = b""  # of its reports: an unfinished line, and faulthandler's dump
    done: bool = False  # whether its program has ended well
    preemptible: bool = False  # whether it saves and leaves by itself after SIGTERM
    told: bool = False  # whether the launcher has told it to
    preempted: bool = False  # whether it has saved and left
    failure: Failure | None = None
    ended: float | None = None
    step: int | None = None
    doing: str = ""
    since_s: float = 0.0
    result: list[bytes] = field(default_factory=list)

    @property
    def is_leaving(self) -> bool:
        """Whether it ends by itself, and need not be told to."""
        return self.done or self.preempted or self.failure is not None

    def take_report(self, data: bytes, now: float) -> list[dict[str, Any]]:
        """A piece of what the worker wrote to its report pipe; times are this host's. The messages in it."""
        *lines, self.text = (self.text + data).split(b"\n")
        unknown, messages = b"", []
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError:
                unknown += line + b"\n"  # faulthandler's
                continue
            if isinstance(message, dict):
                self.ready = True
                self.done = self.done or message.get("kind") == "done"
                self.preempted = self.preempted or message.get("kind") == "preempted"
                if message.get("kind") == "preemptible":
                    self.preemptible = bool(message.get("wanted"))
                message["time"] = now
                self.failure = self.failure or read_failure(self.rank, message, now)
                messages.append(message)
        self.text = unknown + self.text
        return messages

    def take_status(self, message: dict[str, Any], now: float) -> None:
        """Where the worker stands: its process, its last step, what it is doing."""
        if isinstance(message.get("pid"), int):
            self.pid = message["pid"]
        step, doing, since_s = message.get("step"), message.get("doing"), message.get("since_s")
        self.step = step if isinstance(step, int) else self.step
        self.doing = str(doing or "")
        self.since_s = float(since_s or 0.0)

    def take_end(self, status: int, now: float, *, stopping: bool) -> None:
        """The worker has ended; `status` is negative for a signal, as in subprocess.

        `stopping`: it may have been told to. One that was done and took its time to leave has not failed.
        """
        self.ended = now
        if status != 0 and self.failure is None and not self.preempted and not (stopping and self.done):
            self.failure = failure_of_exit(self.rank, status, now, self.text.decode("utf-8", "replace"))

    def activity(self) -> str:
        """What it last noted, in words; "" when it noted nothing."""
        parts = [] if self.step is None else [f"last step {self.step}"]
        if self.doing:
            parts.append(f"doing: {self.doing} (since {max(0.0, self.since_s):.1f} s)")
        return ", ".join(parts)
