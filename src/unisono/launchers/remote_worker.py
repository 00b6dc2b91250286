"""A worker on an engine: what its agent has said of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from unisono.launchers.runtime.channel import Channel
from unisono.launchers.runtime.status import WorkerStatus
from unisono.launchers.worker_state import Worker

__all__ = ["RemoteWorker"]


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
        """See Worker."""
        return self.status

    def take_report(self, data: bytes, now: float) -> Iterator[dict[str, Any]]:
        """See Worker."""
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
