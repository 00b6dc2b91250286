"""A run folder followed while it grows: where time went, who does what, metrics, marks; memory stays bounded."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from unisono.launchers.runtime.run_folder import find_write_s
from unisono.observe.live.bins import BYTES, PARTS, STEPS, Bins, StepSeries
from unisono.observe.runs.reading import Batch, RankLog, RunReader
from unisono.observe.runs.table import COLUMNS

__all__ = ["LiveRun", "LiveWorker", "Marks", "Speed", "TimelineMark"]

RECENT_WIDTH_S, RECENT_BINS = 0.5, 240
WHOLE_BINS = 256
_METRICS = 40  # further names are not kept
_SILENT_S = 10.0  # a rank that says nothing for so long, for several steps, and for several of its writes
_SPEED_S = 5.0  # speeds are those of so many seconds
_ENDS = {"worker lost": "lost", "worker stopped": "stopped", "worker ended": "ended"}  # events of the launcher
_AHEAD_S = 60.0  # a time further in the future is a broken line
_MARKS = 400
_GRAVE = {"verdict", "hang", "worker lost", "fault", "failure", "desync"}
_WORTH = _GRAVE | {"straggler", "straggler over", "world", "worker joined", "worker left", "preempted", "switch", "end"}
_NOT_TOLD = {"worker started", "worker ended", "worker stopped"}  # as many as ranks; their states tell it
_TEXT_CHARACTERS = 600


@dataclass
class LiveWorker:
    """One worker, as its file shows it. Its rank may be another after a change of the world."""

    place: int
    header: dict[str, Any] = field(default_factory=dict)
    offset: float = 0.0  # from the file's clock to unix time
    step: int = -1
    step_s: float = 0.0  # the newest step's wall time
    last: float = 0.0  # unix time of what was said last
    since: float = 0.0  # unix time of the first header
    began: float = 0.0  # of the newest
    end: dict[str, Any] | None = None  # its last line, once it has written it
    outcome: str = ""  # how it ended, by its last line or by the launcher: "" while it goes on

    @property
    def rank(self) -> int:
        """The worker's rank in its newest world."""
        return int(self.header.get("rank", self.place))

    @property
    def generation(self) -> int:
        """The newest generation of the world that the worker was in."""
        return int(self.header.get("generation") or 0)


@dataclass(frozen=True)
class Speed:
    """How a place did in its last seconds: steps a second, seconds of a step by part, bytes a second, and its own time
    (compute and data) against the median of all."""

    steps_s: float
    parts: tuple[float, ...]
    bytes_s: float
    factor: float


class LiveRun:
    """What the page and the terminal show of a run. `read` is called now and then."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run: dict[str, Any] = {}
        self.places: dict[int, LiveWorker] = {}
        self.recent = Bins(RECENT_WIDTH_S, RECENT_BINS, slides=True)
        self.whole = Bins(RECENT_WIDTH_S, WHOLE_BINS, slides=False)
        self.metrics: dict[str, StepSeries] = {}
        self.marks = Marks()
        self._reader = RunReader(folder, listener=self)
        self._is_new = False
        self._ends: list[tuple[int, float, str]] = []  # of workers whose place is not known yet

    def read(self) -> bool:
        """Take what was appended to the folder; whether there was something."""
        before, self._is_new = self._reader.run, False
        self._reader.poll()
        if self._reader.run is not before:
            self.take_run(self._reader.run)
        self._enter_ends()
        return self._is_new

    def _enter_ends(self) -> None:
        """What the launcher saw of the end of workers; it may have been read before the worker's own file."""
        waiting = []
        for number, when, how in self._ends:
            place = self.places.get(number)
            if place is None:
                waiting.append((number, when, how))
            elif when >= place.began and (not place.outcome or how == "lost"):
                place.outcome = how
        self._ends = waiting[-1000:]

    @property
    def unreadable(self) -> int:
        """How many lines could not be read."""
        return self._reader.unreadable

    @property
    def missing(self) -> list[str]:
        """What is not in the folder, in words; while the run goes on, what is not there yet is not listed."""
        return [] if self.describe_state() in ("running", "starting") else self._reader.missing

    # Taking ----------------------------------------------------------------------------------------------------------

    def take_run(self, run: Mapping[str, Any]) -> None:
        """Take the contents of run.json."""
        self._is_new = True
        self.run = dict(run)
        started = self.run.get("started")
        if self.recent.begin is None and isinstance(started, int | float):
            self.recent.begin = self.whole.begin = math.floor(started)

    def take_event(self, event: Mapping[str, Any]) -> None:
        """Take an event that the launcher wrote."""
        self._is_new = True
        values = {name: value for name, value in event.items() if name not in ("time", "kind", "step")}
        kind, when = str(event.get("kind", "event")), float(event.get("time") or 0.0)
        self.marks.add(kind, when, event.get("step"), values)
        number = values.get("place", values.get("rank"))  # the launcher counts places
        if kind in _ENDS and isinstance(number, int):
            self._ends.append((number, when, _ENDS[kind]))

    def take_batch(self, log: RankLog, batch: Batch) -> None:
        """Take what a worker wrote."""
        self._is_new = True
        place = self.places.setdefault(log.place, LiveWorker(log.place))
        place.offset = log.offset  # all of a file are on one clock
        if log.headers and log.header is not place.header:
            self._take_header(place, log)
        for name, (how, values) in batch.values.items():
            if name not in self.metrics and len(self.metrics) < _METRICS:
                self.metrics[name] = StepSeries(how)
            if name in self.metrics:
                for step, when, value in values:
                    self.metrics[name].add(int(step), place.offset + when, value)
        events = batch.events if math.isfinite(place.offset) else []  # without its header its clock is not known
        self._reader.unreadable += len(batch.events) - len(events)
        for event in events:
            values_of = {name: value for name, value in event.items() if name not in ("kind", "step", "time")}
            self.marks.add(event["kind"], place.offset + event["time"], event["step"], values_of)
        if log.end is not place.end:
            place.end = log.end
            if log.end is not None:
                place.outcome = str(log.end.get("outcome") or "ended")
                place.last = max(place.last, place.offset + log.end["time"])
        self._take_rows(place, batch.rows)

    def _take_header(self, place: LiveWorker, log: RankLog) -> None:
        times = [header.get("time") for header in (log.headers[0], log.header)]
        first, place.began = (place.offset + (at if isinstance(at, int | float) else 0.0) for at in times)
        place.header, place.end, place.outcome = log.header, None, ""
        place.since = place.since or first
        place.last = max(place.last, place.began)

    def _take_rows(self, place: LiveWorker, rows: Sequence[Sequence[float]]) -> None:
        if not rows:
            return
        table = dict(zip(COLUMNS, np.array(rows).T, strict=True))
        start, wall = table["start"] + place.offset, table["wall"]
        ahead = start + wall > time.time() + _AHEAD_S
        sound = np.isfinite(start) & (wall >= 0) & (start > 0) & ~ahead
        self._reader.unreadable += int((~sound).sum())
        if not sound.any():
            return
        steps, communication = table["last"] - table["first"] + 1.0, table["communication"]
        compression = np.minimum(table["compression"], communication)
        columns = (
            *(start, wall, table["compute"], compression, communication - compression),
            *(table["waiting"], table["data"], table["bytes_sent"], steps),
        )
        entered = np.stack(columns, axis=1)[sound]
        self.recent.add(place.place, entered)
        self.whole.add(place.place, entered)
        place.step = int(table["last"][sound][-1])
        place.step_s = float(entered[-1, 1] / max(1.0, entered[-1, -1]))
        place.last = max(place.last, float(entered[-1, 0] + entered[-1, 1]))

    def mark_told(self) -> None:
        """Note that everything so far has been sent to the pages."""
        for bins in (self.recent, self.whole):
            bins.mark_told()
        for series in self.metrics.values():
            series.mark_told()
        self.marks.mark_told()

    # Looking ---------------------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The furthest step that any rank has made."""
        return max((place.step for place in self.places.values()), default=-1)

    def describe_state(self) -> str:
        """What the whole run does: "running", "ok", "failed", "launcher gone", ..."""
        if self.run.get("ended") is not None:
            return str(self.run.get("outcome") or "ended")
        if not self.run:
            return "no run.json"
        if self._reader.is_running is False:
            return "launcher gone"
        return "starting" if self.step < 0 else "running"

    def is_over(self) -> bool:
        """Whether nothing more is to come."""
        return self.describe_state() not in ("running", "starting", "no run.json")

    def describe_places(self, now: float) -> dict[int, str]:
        """What each worker does: "training", "slow", "silent", "starting", "lost", "left", "failed", "ended", ..."""
        over = self.is_over()
        began = min((place.since for place in self.places.values()), default=now)
        write_s = find_write_s(now - began, len(self.places))
        newest = max((place.generation for place in self.places.values()), default=0)

        def describe(place: LiveWorker) -> str:
            if place.outcome:
                return "ended" if place.outcome in ("ok", "ended") else place.outcome
            if place.generation < newest:
                return "left"
            if over:
                return "gone"
            if place.step < 0:
                return "starting"
            if now - place.last > max(_SILENT_S, 6 * place.step_s, 3 * write_s):
                return "silent"
            return "slow" if place.rank in self.marks.slow else "training"

        return {number: describe(place) for number, place in self.places.items()}

    def measure_speeds(self) -> dict[int, Speed]:
        """The speed of each worker in the seconds before its last line."""
        found: dict[int, tuple[float, Any]] = {}
        bins = self.recent
        count = max(1, round(_SPEED_S / bins.width_s))
        for number, place in self.places.items():
            if place.step < 0 or bins.begin is None or number >= bins.places:
                continue
            end = bins.bin_of(place.last) + 1
            width = max(count, math.ceil(2 * place.step_s / bins.width_s))
            sums = bins.sums(end - width, end)[:, number].sum(0)
            if sums[STEPS] > 0:
                found[number] = float(sums[: len(PARTS)].sum()), sums
        own = {n: (s[0] + s[PARTS.index("data")]) / s[STEPS] for n, (_, s) in found.items()}
        median = float(np.median(list(own.values()))) if own else 0.0
        return {
            number: Speed(
                steps_s=float(sums[STEPS] / wall) if wall else 0.0,
                parts=tuple(float(part) for part in sums[: len(PARTS)] / sums[STEPS]),
                bytes_s=float(sums[BYTES] / wall) if wall else 0.0,
                factor=own[number] / median if median else 1.0,
            )
            for number, (wall, sums) in found.items()
        }

    def order_places(self, speeds: Mapping[int, Speed], states: Mapping[int, str]) -> list[int]:
        """Places, the worst first: lost ones, silent ones, then by how slow they are."""
        rank = {"failed": 0, "lost": 0, "silent": 1, "gone": 2, "slow": 3}
        return sorted(
            self.places,
            key=lambda n: (rank.get(states.get(n, ""), 4), -(speeds[n].factor if n in speeds else 0.0), n),
        )


# What happened -------------------------------------------------------------------------------------------------------


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
        if len(self.kept) > _MARKS:
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
