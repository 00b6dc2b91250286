"""Reads the folder of a run: what has been appended since the last time, whatever state it is in.

`RunReader(folder).poll()` is called once for a report and again and again for a live view. It never raises for a folder
that is incomplete or damaged: `missing` says in words what is not there. Memory stays bounded however long the run.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from unisono.launchers.runtime.run_folder import FORMAT, is_running, read_run
from unisono.observe.runs.table import COLUMNS, Array, Series, StepTable
from unisono.units import show_ranks

__all__ = ["Batch", "Joined", "Listener", "RankLog", "RunReader", "say_mesh_place"]

AXES = ("data", "tensor", "pipeline")
_MOST_ROWS = 1 << 18  # over all ranks
_LEAST_ROWS, _MOST_A_RANK = 256, 8192
_MOST_NAMES = 200  # metrics; further ones are counted as unreadable
_MOST_EVENTS = 2_000
_MOST_HEADERS = 200
_PIECE = 1 << 20  # bytes read at once
_LONGEST_LINE = 4 << 20
_TAIL = 128 << 10
_WRONG = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError)


class _Grows:
    """A file that is read as it grows; only whole lines are given out."""

    def __init__(self, path: Path, *, ends: bool = False) -> None:
        self.path = path
        self.offset = 0
        self._rest = b""
        self._ends = ends  # only the first line and the last ones are read

    def skip(self) -> list[bytes]:
        """Return the first line, and continue near the end of the file."""
        self._ends = False
        try:
            with self.path.open("rb") as file:
                first = file.readline(_TAIL)
                self.offset = max(len(first), os.stat(self.path).st_size - _TAIL)
                file.seek(self.offset - 1)
                self.offset += len(file.readline()) - 1 if first else 0
        except OSError:
            return []
        return [first] if first.endswith(b"\n") else []

    def read(self) -> tuple[list[bytes], bool]:
        """The next whole lines, and whether there may be more at once."""
        if self._ends:
            return self.skip(), True
        try:
            if os.stat(self.path).st_size <= self.offset:
                return [], False
            with self.path.open("rb") as file:
                file.seek(self.offset)
                piece = file.read(_PIECE)
        except OSError:
            return [], False
        self.offset += len(piece)
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > _LONGEST_LINE:
            lines, self._rest = [*lines, b"?"], b""  # not ours: counted as unreadable
        return [line for line in lines if line.strip()], len(piece) == _PIECE


@dataclass
class RankLog:
    """What one worker wrote. Times are those of its own clock; `offset` added to one gives unix time."""

    place: int
    rows: StepTable = field(default_factory=StepTable)
    header: dict[str, Any] = field(default_factory=dict)  # the last
    headers: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_MOST_HEADERS))
    metrics: dict[str, Series] = field(default_factory=dict)
    events: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_MOST_EVENTS))
    tags: dict[str, int] = field(default_factory=dict)  # bytes sent so far, by tag
    data: dict[str, Any] = field(default_factory=dict)  # samples, classes, seconds
    encryption: dict[str, float] = field(default_factory=dict)  # bytes that it encrypted, and the seconds that took
    pipeline: dict[str, Any] = field(default_factory=dict)  # how long it stood still in a pipeline, and why
    spans: deque[tuple[str, int, float, float]] = field(default_factory=lambda: deque(maxlen=20_000))
    records: deque[tuple[Any, ...]] = field(default_factory=lambda: deque(maxlen=20_000))
    end: dict[str, Any] | None = None  # None: it has not written its end
    last_time: float = math.nan  # of the last line
    last_step: int = -1
    offset: float = math.nan
    tag_sums: dict[int, dict[str, int]] = field(default_factory=dict)  # by process: each counts from 0

    @property
    def rank(self) -> int:
        """The worker's rank in the last world that it was in."""
        return int(self.header.get("rank", self.place))

    def was_at(self, steps: Array) -> npt.NDArray[np.bool_]:
        """Whether it made these steps, or was about to; all, where it counts none."""
        rows = np.maximum.accumulate(self.rows.array[:, :2])  # the first step of each row, and the last
        if not len(rows):
            return np.ones(len(steps), dtype=bool)
        row = np.searchsorted(rows[:, 0], steps, side="right") - 1
        found: npt.NDArray[np.bool_] = (row < 0) | (steps <= rows[row, 1] + 1)
        return found

    @property
    def last_unix(self) -> float:
        """Unix time of the worker's last line."""
        return self.last_time + self.offset


@dataclass
class Batch:
    """What a batch of a worker's lines held. Times are those of the worker's clock."""

    rows: list[list[float]] = field(default_factory=list)  # steps, in the order of COLUMNS
    values: dict[str, tuple[str, list[tuple[float, float, float]]]] = field(default_factory=dict)
    # of each metric: how ranks are joined; steps, times and values
    events: list[dict[str, Any]] = field(default_factory=list)  # with "kind", "step" and "time"


@dataclass(frozen=True)
class Joined:
    """One metric over all ranks: unix times, and how ranks were joined."""

    name: str
    how: str
    steps: Array
    times: Array
    values: Array
    ranks: int  # that logged it


class Listener(Protocol):
    """Receives all that is read, also what the reader does not keep."""

    def take_event(self, event: dict[str, Any]) -> None:
        """Take a line of events.jsonl."""

    def take_batch(self, log: RankLog, batch: Batch) -> None:
        """Take what a worker wrote; `log` has its newest header, and its end if it has written one."""


class RunReader:
    """The folder of a run, as far as it has been read.

    Attributes:
        run: What run.json says.
        ranks: By place, what each worker wrote.
        events: What the launcher saw: dicts with "time" (unix), "kind", and more.
        unreadable: Lines that could not be read.
    """

    def __init__(self, folder: str | Path, *, ends: bool = False, listener: Listener | None = None) -> None:
        """`ends`: read only the beginning and the end of what workers wrote, for a list of many runs. `listener`: is
        told of every event and line, after they were taken here."""
        self.folder, self._ends, self._listener = Path(folder), ends, listener
        self.run: dict[str, Any] = {}
        self.ranks: dict[int, RankLog] = {}
        self.events: deque[dict[str, Any]] = deque(maxlen=_MOST_EVENTS * 5)
        self.unreadable = 0
        self._files: dict[int, _Grows] = {}
        self._event_file = _Grows(self.folder / "events.jsonl")
        self._run_seen: tuple[int, int] | None = None
        self._boots: dict[str, float] = {}  # one clock a boot: its offset to unix time

    # Reading --------------------------------------------------------------------------------------------------------

    def poll(self, budget_s: float | None = None) -> bool:
        """Read what was appended; with `budget_s` for about so long at most. True where there is more to read."""
        until = None if budget_s is None else time.monotonic() + budget_s
        self._read_run()
        self._find_ranks()
        more = self._drain(self._event_file, self._take_events, until)
        for place in sorted(self._files):
            rank = self.ranks[place]
            more |= self._drain(self._files[place], lambda lines, rank=rank: self._take_lines(rank, lines), until)
            if until is not None and time.monotonic() >= until:
                return True
        return more

    def _drain(self, file: _Grows, take: Any, until: float | None) -> bool:
        while True:
            lines, more = file.read()
            if lines:
                take(lines)
            if not more:
                return False
            if until is not None and time.monotonic() >= until:
                return True

    def _read_run(self) -> None:
        path = self.folder / "run.json"
        try:
            found = path.stat()
        except OSError:
            return
        seen = (found.st_mtime_ns, found.st_ino)
        if seen != self._run_seen and (run := read_run(self.folder)) is not None:
            self._run_seen, self.run = seen, run
            self._note_torch()

    def _find_ranks(self) -> None:
        try:
            names = [entry.name for entry in os.scandir(self.folder / "ranks")]
        except OSError:
            return
        known = len(self.ranks)
        for name in names:
            stem, _, ext = name.partition(".")
            if ext == "jsonl" and stem.isdecimal() and int(stem) not in self._files:
                self._files[int(stem)] = _Grows(self.folder / "ranks" / name, ends=self._ends)
                self.ranks[int(stem)] = RankLog(int(stem))
        if len(self.ranks) > known:
            self.ranks = dict(sorted(self.ranks.items()))
            most = min(_MOST_A_RANK, max(_LEAST_ROWS, _MOST_ROWS // len(self.ranks)))
            for rank in self.ranks.values():
                rank.rows.limit(most)
                for series in rank.metrics.values():
                    series.limit(most)

    # Lines ----------------------------------------------------------------------------------------------------------

    def _take_events(self, lines: Sequence[bytes]) -> None:
        for event in _parse(lines):
            if isinstance(event, dict) and isinstance(event.get("kind"), str) and _is_number(event.get("time")):
                self.events.append(event)
                if self._listener is not None:
                    self._listener.take_event(event)
            else:
                self.unreadable += 1

    def _take_lines(self, rank: RankLog, lines: Sequence[bytes]) -> None:
        fresh = Batch()
        for line in _parse(lines):
            self._take_line(rank, fresh, line)
        if fresh.rows:
            rank.rows.add(fresh.rows)
            rank.last_step = int(fresh.rows[-1][1])
            ended = fresh.rows[-1][2] + fresh.rows[-1][3]
            rank.last_time = rank.last_time if rank.last_time > ended else ended
        for name, (how, values) in list(fresh.values.items()):
            if name not in rank.metrics:
                if len(rank.metrics) >= _MOST_NAMES:
                    self.unreadable += len(fresh.values.pop(name)[1])
                    continue
                rank.metrics[name] = Series(how, rank.rows.most)
            rank.metrics[name].add(values)
        rank.events += fresh.events
        if self._listener is not None:
            self._listener.take_batch(rank, fresh)

    def _take_line(self, rank: RankLog, fresh: Batch, line: Any) -> None:
        try:
            kind = line[0]
            if kind == "step":
                _, step, start, wall, *sums = line
                fresh.rows.append(_read_row([step, step, start, wall, *sums, wall]))
            elif kind == "steps":
                fresh.rows.append(_read_row(line[1:]))
            elif kind == "metrics":
                _, step, at, found, how = line
                rank.last_time = at = _read_time(at)
                for name, value in found.items():
                    number = math.nan if value is None else float(value)
                    fresh.values.setdefault(name, (str(how), []))[1].append((float(step), at, number))
            elif kind == "event":
                _, name, step, at, found = line
                rank.last_time = at = _read_time(at)
                fresh.events.append({**found, "kind": str(name), "step": int(step), "time": at})
            else:
                self._take_other(rank, line)
        except _WRONG:
            self.unreadable += 1

    def _take_other(self, rank: RankLog, line: Sequence[Any]) -> None:
        kind = line[0]
        if kind == "header":
            self._take_header(rank, dict(line[1]))
        elif kind == "tags":
            rank.tag_sums[int(rank.header.get("pid", 0))] = {str(k): int(v) for k, v in line[1].items()}
            sums: Counter[str] = Counter()
            for of_process in rank.tag_sums.values():
                sums.update(of_process)
            rank.tags = dict(sums)
        elif kind == "data":
            rank.data = dict(line[1])
        elif kind == "encryption":
            rank.encryption = {str(k): float(v) for k, v in line[1].items()}
        elif kind == "pipeline":
            rank.pipeline = dict(line[1])
        elif kind == "span":
            _, name, step, start, end = line
            rank.spans.append((str(name), int(step), float(start), float(end)))
        elif kind == "record":
            _, op, tag, sent, channel, sequence, step, *times = line
            start, last, end = (math.nan if t is None else float(t) for t in times)
            rank.records.append(
                (str(op), str(tag), int(sent), str(channel), int(sequence), int(step), start, last, end)
            )
        elif kind == "end":
            rank.last_time = _read_time(line[1])
            rank.end = {**line[2], "time": rank.last_time}
        else:
            raise ValueError(kind)

    def _take_header(self, rank: RankLog, header: dict[str, Any]) -> None:
        _check_header(header)
        rank.header, rank.end = header, None
        rank.headers.append(header)
        unix, boot = float(header.get("unix", math.nan)), str(header.get("boot", ""))
        rank.offset = self._boots.setdefault(boot, unix) if boot else unix
        if _is_number(header.get("time")):
            rank.last_time = float(header["time"])
        self._note_torch()

    def _note_torch(self) -> None:
        """Copy torch's version from a worker's header to `run`: the launcher does not know it."""
        if isinstance(versions := self.run.get("versions"), dict) and "torch" in versions:
            return
        for rank in self.ranks.values():
            if isinstance(found := rank.header.get("versions"), dict) and isinstance(self.run.get("versions"), dict):
                self.run["versions"].setdefault("torch", found.get("torch"))
                return

    # What was read --------------------------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool | None:
        """Whether the run goes on; None: it was started on another machine, and has not written its end."""
        return is_running(self.run) if self.run else None

    @property
    def missing(self) -> list[str]:
        """What is not there, in words; empty for a run that is recorded from its beginning to its end."""
        return list(self._find_missing())

    def _find_missing(self) -> Iterator[str]:
        if not self.run:
            there = (self.folder / "run.json").exists()
            yield f"what the run was: run.json {'cannot be read' if there else 'is missing'}"
        elif self.run.get("format") != FORMAT:
            yield f"some of it, perhaps: it is of format {self.run.get('format')}, and this version reads {FORMAT}"
        over = self.is_running is not True
        if self.run and over and self.run.get("ended") is None:
            yield "its end: the launcher was killed, or its machine went down"
        if not self.ranks:
            yield "all steps: no worker wrote anything (a program that does not call un.parallel has none)"
            return
        workers = self.run.get("workers")
        absent = [p for p in range(workers) if p not in self.ranks] if isinstance(workers, int) else []
        if absent:
            yield f"{_list(absent)}: nothing was written there"
        headless = [p for p, rank in self.ranks.items() if not rank.header]
        if headless:
            yield f"the beginning of {_list(headless)}: no header"
        if over and (cut := [p for p, rank in self.ranks.items() if rank.header and rank.end is None]):
            yield f"the end of {_list(cut)}: killed, or cut off; up to the last half second is missing"
        if self.unreadable:
            yield f"{self.unreadable} line{'s' if self.unreadable > 1 else ''} that could not be read"

    @property
    def metric_names(self) -> list[str]:
        """All metrics that some rank has logged, in the order of their first sight."""
        return list(dict.fromkeys(name for rank in self.ranks.values() for name in rank.metrics))

    def join_metric(self, name: str) -> Joined | None:
        """A metric over the ranks that logged it: at each step at which one did, each rank's newest value up to that
        step, while the rank makes steps: not that of one which was lost. None where it is each rank's own, or nobody
        logged it."""
        found = [(rank, rank.metrics[name]) for rank in self.ranks.values() if name in rank.metrics]
        found = [(rank, series) for rank, series in found if len(series)]
        if not found or found[0][1].how == "rank":
            return None
        found.sort(key=lambda pair: len(pair[1]))
        steps: Array = np.unique(np.concatenate([series.steps for _, series in found]))
        times, how = np.zeros(len(steps)), found[-1][1].how
        columns = np.zeros((len(found), len(steps)))
        known = np.zeros(columns.shape, dtype=bool)
        for i, (rank, series) in enumerate(found):
            at = np.searchsorted(series.steps, steps, side="right") - 1
            known[i] = (at >= 0) & rank.was_at(steps)
            known[i, np.searchsorted(steps, series.steps)] = True
            columns[i, known[i]] = series.values[at[known[i]]]
            times[np.searchsorted(steps, series.steps)] = series.times + rank.offset  # of the one with most values
        return Joined(name, how, steps, times, _join(columns, known, how), len(found))


def _join(columns: Array, known: npt.NDArray[np.bool_], how: str) -> Array:
    """Rows of values to one. What is not known does not count; a value that is not finite makes the result so."""
    found: Array
    if how == "min":
        found = np.where(known, columns, np.inf).min(axis=0)
    elif how == "max":
        found = np.where(known, columns, -np.inf).max(axis=0)
    else:
        found = columns.sum(axis=0) / (1.0 if how == "sum" else known.sum(axis=0))
    return found


def say_mesh_place(header: Mapping[str, Any], *, short: bool = False) -> str:
    """Where a rank is on the axes of its mesh that have more than one; "" without a mesh.

    >>> header = {"mesh": [2, 1, 4], "at": [0, 0, 3]}
    >>> say_mesh_place(header), say_mesh_place(header, short=True), say_mesh_place({})
    ('data 0, pipeline 3', 'd0 p3', '')
    """
    sizes, at = header.get("mesh"), header.get("at")
    if not sizes or not at:
        return ""
    axes = [(name, n) for name, n, size in zip(AXES, at, sizes, strict=True) if size > 1]
    return " ".join(f"{name[0]}{n}" for name, n in axes) if short else ", ".join(f"{name} {n}" for name, n in axes)


def _parse(lines: Sequence[bytes]) -> list[Any]:
    """Lines as values; a damaged one as (), which is no line of ours and counts as unreadable."""
    try:
        found: list[Any] = json.loads(b"[" + b",".join(lines) + b"]")
    except _WRONG:
        return [()] if len(lines) == 1 else [value for line in lines for value in _parse([line])]
    return found


_list = partial(show_ranks, noun="worker", most=12)


def _check_header(header: dict[str, Any]) -> None:
    """Raise if a header lacks what readers of the record rely on."""
    for name in ("rank", "size", "generation", "place", "hosts", "pid", "parameters"):
        if not isinstance(header.get(name, 0), int):
            raise TypeError(name)
    for name in ("mesh", "at"):
        if name in header and not (len(header[name]) == len(AXES) and all(isinstance(n, int) for n in header[name])):
            raise TypeError(name)
    if not isinstance(header.get("not_measured", []), list) or not isinstance(header.get("versions", {}), dict):
        raise TypeError("not_measured and versions")


def _read_row(values: Sequence[Any]) -> list[float]:
    """A row of COLUMNS; raises if it is none."""
    numbers = [float(value) for value in values]
    if len(numbers) != len(COLUMNS) or not all(map(math.isfinite, numbers)) or numbers[1] < numbers[0]:
        raise ValueError(numbers)
    return numbers


def _read_time(value: Any) -> float:
    """Seconds of a clock; raises if they are none."""
    if not math.isfinite(value):
        raise ValueError(value)
    return float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
