"""A trace for chrome://tracing or ui.perfetto.dev: a process for each rank, with lines by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["TraceFile", "TraceRank"]


class TraceFile:
    """All ranks' events, on one clock whose zero is the first of them."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def rank(self, number: int, offset: float, name: str = "") -> TraceRank:
        """The lines of a rank; `offset` added to one of its times gives that of the trace."""
        return TraceRank(number, offset, self.events, name or f"rank {number}")

    def write(self, path: str | Path) -> None:
        """As JSON."""
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"traceEvents": self.events, "displayTimeUnit": "ms"}, file)


class TraceRank:
    """One rank's lines in a trace, by name; the format numbers them."""

    def __init__(self, rank: int, offset: float, events: list[dict[str, Any]], name: str) -> None:
        self._rank, self._offset, self._events = rank, offset, events
        self._numbers: dict[str, int] = {}
        self._name("process_name", name, 0)

    def _name(self, kind: str, name: str, line: int) -> None:
        self._events.append({"ph": "M", "pid": self._rank, "tid": line, "name": kind, "args": {"name": name}})

    def event(self, line: str, name: str, start: float, end: float, args: dict[str, Any] | None = None) -> None:
        """Something that lasted."""
        lasted = (end - start) * 1e6
        self._events.append({"ph": "X", **self._at(line, start), "name": name, "dur": lasted, "args": args or {}})

    def moment(self, line: str, name: str, at: float, args: dict[str, Any]) -> None:
        """Something that happened."""
        self._events.append({"ph": "i", "s": "t", **self._at(line, at), "name": name, "args": args})

    def value(self, name: str, at: float, value: float) -> None:
        """A number as it was then."""
        at_us = (at + self._offset) * 1e6
        self._events.append({"ph": "C", "pid": self._rank, "ts": at_us, "name": name, "args": {name: value}})

    def collective(
        self, channel: str, op: str, tag: str, start: float, last: float, end: float, bytes_sent: int
    ) -> None:
        """One operation between ranks; `last`: when the last rank came (nan: not known)."""
        last = last if last == last else start
        if last > start:
            self.event(channel, "waiting for the last rank", start, last)
        self.event(channel, f"{op} {tag}".strip(), max(start, last), end, {"bytes": bytes_sent})

    def _at(self, line: str, start: float) -> dict[str, Any]:
        if line not in self._numbers:
            self._numbers[line] = len(self._numbers) + 1
            self._name("thread_name", line, self._numbers[line])
        return {"pid": self._rank, "tid": self._numbers[line], "ts": (start + self._offset) * 1e6}
