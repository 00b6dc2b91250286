"""Every byte and second of a run: compute, communication, waiting for the slowest, data; by step and rank."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unisono.report import Report
    from unisono.world import World

KEPT = 100_000  # records, spans and rows kept in detail; totals go on for ever


@dataclass(slots=True)
class Record:
    """One collective, as this rank saw it. `last` is when the last rank arrived (NaN: not known yet)."""

    op: str
    tag: str
    bytes_sent: int
    channel: str
    sequence: int
    step: int = 0
    start: float = float("nan")
    last: float = float("nan")
    end: float = float("nan")


@dataclass(slots=True)
class Span:
    """A stretch of this rank's own time: "data", "blocked" (waiting on an exchange), or a user's kind."""

    kind: str
    start: float
    end: float
    step: int


@dataclass(slots=True)
class Row:
    """One step, in seconds and bytes. compute + communication + waiting + data = wall.

    `communication` and `waiting` are what the program stood still for; `hidden` is communication that ran
    behind compute and cost nothing.
    """

    step: int
    start: float
    wall: float
    compute: float
    communication: float
    waiting: float
    data: float
    hidden: float
    bytes_sent: int
    collectives: int


@dataclass(slots=True)
class Totals:
    """Sums over steps of one rank; the meaning of each is that of `Row`."""

    rank: int = 0
    steps: int = 0
    wall: float = 0.0
    compute: float = 0.0
    communication: float = 0.0
    waiting: float = 0.0
    data: float = 0.0
    hidden: float = 0.0
    bytes_sent: int = 0
    collectives: int = 0

    def add(self, row: Row) -> None:
        """Count one more step."""
        self.steps += 1
        for name in _SUMMED:
            setattr(self, name, getattr(self, name) + getattr(row, name))


_SUMMED = [f.name for f in fields(Totals) if f.name not in ("rank", "steps")]


class Ledger:
    """The record of one rank. `World` writes collectives, spans come from the parts that work or wait."""

    def __init__(self, rank: int = 0, clock: Callable[[], float] = time.perf_counter) -> None:
        self.rank = rank
        self.clock = clock
        self.step_count = 0
        self.records: deque[Record] = deque(maxlen=KEPT)
        self.spans: deque[Span] = deque(maxlen=KEPT)
        self.rows: deque[Row] = deque(maxlen=KEPT)
        self._dropped = Totals(rank)
        self._fresh: list[Record] = []
        self._fresh_spans: list[Span] = []
        self._open_since = self.clock()
        self._owner: object | None = None

    # Writing ---------------------------------------------------------------------------------------------

    def close_record(self, record: Record) -> None:
        """Enter a finished collective."""
        record.step = self.step_count
        self.records.append(record)
        self._fresh.append(record)

    def close_span(self, kind: str, start: float, end: float) -> None:
        """Enter a finished span."""
        span = Span(kind, start, end, self.step_count)
        self.spans.append(span)
        self._fresh_spans.append(span)

    @contextmanager
    def span(self, kind: str) -> Iterator[None]:
        """Time a block: `with ledger.span("data"): batch = next(batches)`."""
        start = self.clock()
        try:
            yield
        finally:
            self.close_span(kind, start, self.clock())

    def restart(self) -> None:
        """Begin the first step now: what came before (loading, compiling) belongs to no step."""
        self._open_since = self.clock()
        self._fresh, self._fresh_spans = [], []

    def step(self, owner: object | None = None) -> None:
        """End a step. With several replicas in one world, the first that calls is the one that counts."""
        if self._owner is None:
            self._owner = owner
        elif owner is not self._owner:
            return
        now = self.clock()
        records, spans = self._fresh[:], self._fresh_spans[:]
        del self._fresh[: len(records)], self._fresh_spans[: len(spans)]  # other threads may be appending
        if len(self.rows) == KEPT:
            self._dropped.add(self.rows[0])
        self.rows.append(_row(self.step_count, self._open_since, now, records, spans))
        self.step_count += 1
        self._open_since = now

    def resume(self, step_count: int) -> None:
        """Continue counting at `step_count`, after a checkpoint was loaded."""
        self.step_count = step_count
        self.restart()

    # Reading ---------------------------------------------------------------------------------------------

    def totals(self, *, last: int | None = None) -> Totals:
        """Sums over the whole run, or over the `last` steps."""
        rows = list(self.rows)
        sums = Totals(self.rank)
        if last is None:
            sums = Totals(**asdict(self._dropped))
        else:
            rows = rows[-last:] if last > 0 else []
        for row in rows:
            sums.add(row)
        return sums

    def table(self, *, last: int = 20) -> str:
        """The last steps as text, a line each, times in milliseconds."""
        head = f"{'step':>8}{'wall':>9}{'compute':>9}{'comm':>9}{'waiting':>9}{'data':>9}{'hidden':>9}{'MB sent':>10}"
        lines = [head]
        for r in list(self.rows)[-last:]:
            times = (r.wall, r.compute, r.communication, r.waiting, r.data, r.hidden)
            lines.append(f"{r.step:>8}" + "".join(f"{t * 1e3:>9.2f}" for t in times) + f"{r.bytes_sent / 1e6:>10.3f}")
        return "\n".join(lines)

    def by_tag(self) -> dict[str, int]:
        """Bytes sent so far by tag (of the records kept)."""
        sums: dict[str, int] = {}
        for record in list(self.records):
            sums[record.tag or record.op] = sums.get(record.tag or record.op, 0) + record.bytes_sent
        return sums

    def write_jsonl(self, path: str | Path) -> None:
        """Write steps, collectives and spans as JSON lines, each with its "kind"."""
        with open(path, "w", encoding="utf-8") as file:
            kinds: list[tuple[str, Sequence[Any]]] = [("step", self.rows), ("collective", self.records)]
            for kind, rows in (*kinds, ("span", self.spans)):
                for row in list(rows):
                    values: dict[str, Any] = {"type": kind, "rank": self.rank, **asdict(row)}
                    values = {k: None if v != v else v for k, v in values.items()}
                    file.write(json.dumps(values) + "\n")

    def gather(self, world: World) -> Report:
        """Every rank's ledger on one clock (a collective: every rank calls it).

        Where the transport could not know when the last rank arrived (messages between hosts), that is
        worked out here from every rank's own arrival times.
        """
        from unisono.report import gather

        return gather(self, world)

    def settle(self, last_arrivals: dict[tuple[str, int], float]) -> None:
        """Fill in when the last rank arrived, by (channel, sequence), and part the rows anew."""
        changed = set()
        for record in self.records:
            key = (record.channel, record.sequence)
            if record.last != record.last and key in last_arrivals:
                record.last = min(max(last_arrivals[key], record.start), record.end)
                changed.add(record.step)
        if not changed:
            return
        records: dict[int, list[Record]] = {}
        for record in self.records:
            records.setdefault(record.step, []).append(record)
        spans: dict[int, list[Span]] = {}
        for span in self.spans:
            spans.setdefault(span.step, []).append(span)
        for i, row in enumerate(self.rows):
            if row.step in changed:
                end = row.start + row.wall
                self.rows[i] = _row(row.step, row.start, end, records.get(row.step, []), spans.get(row.step, []))


def _row(step: int, start: float, end: float, records: Sequence[Record], spans: Iterable[Span]) -> Row:
    """Part a step's wall time. Only time that the program stood still counts as communication or waiting."""
    blocked = [(s.start, s.end) for s in spans if s.kind == "blocked"]
    data = sum(s.end - s.start for s in spans if s.kind == "data")
    still = sum(b - a for a, b in blocked)
    late = _union([(r.start, r.last) for r in records if r.last > r.start])
    waiting = _overlap(blocked, late)
    moving = _union([(max(r.start, r.last) if r.last == r.last else r.start, r.end) for r in records])
    shown = _overlap(blocked, moving)
    return Row(
        step,
        start,
        wall=end - start,
        compute=max(0.0, end - start - still - data),
        communication=still - waiting,
        waiting=waiting,
        data=data,
        hidden=max(0.0, sum(b - a for a, b in moving) - shown),
        bytes_sent=sum(r.bytes_sent for r in records),
        collectives=len(records),
    )


def _union(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Sorted, disjoint intervals that cover the same time.

    >>> _union([(3.0, 4.0), (0.0, 2.0), (1.0, 2.5)])
    [(0.0, 2.5), (3.0, 4.0)]
    """
    merged: list[tuple[float, float]] = []
    for a, b in sorted(intervals):
        if merged and a <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], b))
        else:
            merged.append((a, b))
    return merged


def _overlap(left: Iterable[tuple[float, float]], right: Sequence[tuple[float, float]]) -> float:
    return sum(max(0.0, min(b, d) - max(a, c)) for a, b in left for c, d in right)
