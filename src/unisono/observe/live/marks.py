"""What happened in a run, as marks: world changes, faults, lost workers, stragglers, verdicts, each with its text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Marks", "TimelineMark"]

_KEPT = 400
_GRAVE = {"verdict", "hang", "worker lost", "fault", "failure", "desync"}
_WORTH = _GRAVE | {"straggler", "straggler over", "world", "worker joined", "worker left", "preempted", "switch", "end"}
_NOT_TOLD = {"worker started", "worker ended", "worker stopped"}  # as many as ranks; their states tell it
_TEXT_CHARACTERS = 600


@dataclass
class TimelineMark:
    """A moment. `tone` is "bad", "note" or "quiet": quiet ones are listed, and drawn nowhere."""

    number: int
    kind: str
    tone: str
    time: float
    step: int | None
    rank: int | None
    text: str
    cause: str = ""
    place: str = ""
    times: int = 1  # how many ranks said the same

    def as_list(self) -> list[Any]:
        """The mark as the page's script reads it."""
        time = round(self.time, 3)
        return [
            self.number, self.kind, self.tone, time, self.step, self.rank, self.text, self.cause, self.place, self.times
        ]  # fmt: skip


class Marks:
    """The last of them, the same said by several ranks once; and who is slow now."""

    def __init__(self) -> None:
        self.kept: list[TimelineMark] = []
        self.verdicts = 0
        self.slow: dict[int, str] = {}  # rank: cause
        self.changed = 0  # the lowest number that has changed since `mark_told`
        self._next = 0
        self._known: dict[str, TimelineMark] = {}

    def add(self, kind: str, time: float, step: int | None, values: Mapping[str, Any]) -> None:
        """Add an event of a rank's ledger or of the launcher."""
        if kind in _NOT_TOLD:
            return
        rank = values.get("rank") if isinstance(values.get("rank"), int) else None
        key = json.dumps([kind, step, values], sort_keys=True, default=str)
        if (known := self._known.get(key)) is not None and abs(known.time - time) < 60.0:
            known.times += 1
            self.changed = min(self.changed, known.number)
            return
        tone = "bad" if kind in _GRAVE else "note" if kind in _WORTH else "quiet"
        cause, place = str(values.get("cause", "")), str(values.get("place", ""))
        mark = TimelineMark(self._next, kind, tone, time, step, rank, _describe(kind, rank, values), cause, place)
        self._next += 1
        self._note(kind, rank, cause)
        self._known[key] = mark
        self.kept.append(mark)
        if len(self.kept) > _KEPT:
            self._drop()

    def since(self, number: int) -> list[list[Any]]:
        """Marks from a number on, as the page reads them."""
        return [mark.as_list() for mark in self.kept if mark.number >= number]

    def mark_told(self) -> None:
        """Note that everything so far has been sent to the pages."""
        self.changed = self._next

    def _note(self, kind: str, rank: int | None, cause: str) -> None:
        self.verdicts += kind == "verdict"
        if rank is None:
            return
        if kind == "straggler" or (kind == "verdict" and cause.startswith("slow")):
            self.slow[rank] = cause
        elif kind in ("straggler over", "worker lost"):
            self.slow.pop(rank, None)

    def _drop(self) -> None:
        """Drop a mark: the oldest quiet one, else the oldest."""
        gone = next((mark for mark in self.kept if mark.tone == "quiet"), self.kept[0])
        self.kept.remove(gone)
        self._known = {key: mark for key, mark in self._known.items() if mark is not gone}


def _describe(kind: str, rank: int | None, values: Mapping[str, Any]) -> str:
    """What happened, in words.

    >>> _describe("straggler", 2, {"rank": 2, "factor": 3.12, "cause": "input"})
    'rank 2 is 3.1 times as slow as the others: input'
    >>> _describe("worker lost", 1, {"rank": 1, "text": "killed by SIGKILL"})
    'worker 1 lost: killed by SIGKILL'
    """
    text = next((str(values[name]) for name in ("text", "what") if isinstance(values.get(name), str)), "")
    if kind.startswith("worker ") and rank is not None and f" {rank} " not in f" {text} ":  # the launcher's
        text = f"{kind.replace('worker', f'worker {rank}', 1)}{': ' if text else ''}{text}"
    if text:
        return text[:_TEXT_CHARACTERS]
    if kind == "straggler":
        factor = values.get("factor")
        much = f"{factor:.1f} times as slow as" if isinstance(factor, int | float) else "slower than"
        return f"rank {rank} is {much} the others: {values.get('cause', 'no cause is known')}"
    if kind == "straggler over":
        return f"rank {rank} is as fast as the others again"
    if kind == "world" and "size" in values:
        size = values["size"]
        return f"the world has {size} rank{'s' if size != 1 else ''} now"
    told = {name: value for name, value in values.items() if name not in ("rank", "host") and value not in (None, "")}
    who = f"rank {rank}" if rank is not None else ""
    rest = ", ".join(f"{name} {_shorten(value)}" for name, value in told.items())
    return ": ".join(part for part in (who, rest) if part)[:_TEXT_CHARACTERS] or kind


def _shorten(value: Any) -> str:
    if isinstance(value, dict | list) and len(value) > 8:
        return f"({len(value)} values)"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
