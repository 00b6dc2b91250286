"""Every byte and second of a run: compute, communication, waiting for the slowest, data; by step and rank."""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from unisono.units import as_json

if TYPE_CHECKING:
    from unisono.world.timeline import Report
    from unisono.world.world import World

KEPT = 10_000  # records, spans and rows kept in detail; totals go on for ever
KEPT_EVENTS = 1_000  # an event may hold a value for every parameter
KEPT_TAGS = 1_000  # tags whose bytes are summed; further ones are summed together
OTHER_TAGS = "other tags"


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
    signature: Any = None  # while it is under way: what ranks compare (call_signatures.py)


@dataclass(slots=True)
class Span:
    """A stretch of this rank's own time: "data", "blocked" (waiting on an exchange), "reducer" (one that
    compresses works, or waits for its collectives), "bubble" (a pipeline's stage waits), "forming" (ranks are lost or
    come, and the world is formed anew: all of it is waiting), or a user's kind."""

    kind: str
    start: float
    end: float
    step: int


@dataclass(slots=True)
class Event:
    """A moment worth remembering, such as a decision: plain values by name, as JSON has them."""

    kind: str
    start: float
    step: int
    values: dict[str, Any]

    def __str__(self) -> str:
        """One line; of long lists only their length.

        >>> str(Event("accordion", 0.0, 7, {"why": "the end of a window", "norms": {"w": 0.5}}))
        "accordion: why=the end of a window, norms={'w': 0.5}"
        """
        values = {
            k: f"{len(v)} values" if isinstance(v, dict | list) and len(v) > 8 else v for k, v in self.values.items()
        }
        return f"{self.kind}: " + ", ".join(f"{name}={value}" for name, value in values.items())


@dataclass(slots=True)
class Row:
    """One step, in seconds and bytes. compute + communication + waiting + data = wall.

    `communication` and `waiting` are what the program stood still for; `hidden` is communication that ran
    behind compute and cost nothing. `compression` is the part of `communication` in which no byte moved, as a reducer
    was at work. `bubble` is the part of the step in which a stage of a pipeline had nothing to compute.
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
    compression: float = 0.0
    bubble: float = 0.0


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
    compression: float = 0.0
    bubble: float = 0.0

    def add(self, row: Row) -> None:
        """Count one more step. In full: a loop over the names took a third of a step's cost in a world of one."""
        self.steps += 1
        self.wall += row.wall
        self.compute += row.compute
        self.communication += row.communication
        self.waiting += row.waiting
        self.data += row.data
        self.hidden += row.hidden
        self.bytes_sent += row.bytes_sent
        self.collectives += row.collectives
        self.compression += row.compression
        self.bubble += row.bubble

    def replace(self, old: Row, new: Row) -> None:
        """Count `new` in place of `old`: the same step, divided anew."""
        for name in _SUMMED:
            setattr(self, name, getattr(self, name) - getattr(old, name) + getattr(new, name))

    def __sub__(self, before: Totals) -> Totals:
        """What came after `before`, the totals of an earlier moment: exact however many steps lie between."""
        names = ("steps", *_SUMMED)
        return Totals(self.rank, **{name: getattr(self, name) - getattr(before, name) for name in names})


@dataclass(frozen=True, slots=True)
class Sent:
    """All collectives of one rank so far, inside steps and outside; the sent bytes by tag."""

    collectives: int
    bytes_sent: int
    by_tag: dict[str, int]


class LedgerListener(Protocol):
    """Called for each step and event as it is entered, in the thread that enters it (see unisono.observe.runs)."""

    def on_row(self, row: Row) -> None: ...

    def on_event(self, event: Event) -> None: ...


E = TypeVar("E", Record, Span)
_SUMMED = [f.name for f in fields(Totals) if f.name not in ("rank", "steps")]


class Ledger:
    """The record of one rank. `World` writes collectives, spans come from the parts that work or wait.

    The last `KEPT` of each are kept in detail (`KEPT_EVENTS` events): memory does not grow with the length of a run.
    `totals` and `sent` count all of it.
    """

    def __init__(self, rank: int = 0, clock: Callable[[], float] = time.perf_counter) -> None:
        self.rank = rank
        self.clock = clock
        self.step_count = 0
        self.records: deque[Record] = deque(maxlen=KEPT)
        self.spans: deque[Span] = deque(maxlen=KEPT)
        self.events: deque[Event] = deque(maxlen=KEPT_EVENTS)
        self.rows: deque[Row] = deque(maxlen=KEPT)
        self._totals = Totals(rank)
        self._collectives = 0
        self._bytes_by_tag: dict[str, int] = {}
        self._counting = threading.Lock()  # collectives end in several threads
        self._fresh: deque[Record] = deque(maxlen=KEPT)
        self._fresh_spans: deque[Span] = deque(maxlen=KEPT)
        self._open_since = self.clock()
        self._owner: Callable[[], object | None] = lambda: None
        self.tag_names: dict[str, str] = {}  # what travels under a tag: " (layer4.weight and 3 more)"
        self.on_record: weakref.WeakMethod[Callable[[Record], None]] | None = None  # called as a collective ends
        self.listener: LedgerListener | None = None
        self.accounts: dict[str, Callable[[], dict[str, Any]]] = {}  # what others sum up, for who records: by name

    # Writing ---------------------------------------------------------------------------------------------

    def close_record(self, record: Record) -> None:
        """Enter a finished collective."""
        record.step = self.step_count
        record.signature = None
        self.records.append(record)
        self._fresh.append(record)
        with self._counting:
            sums, tag = self._bytes_by_tag, record.tag or record.op
            if tag not in sums and len(sums) >= KEPT_TAGS:
                tag = OTHER_TAGS
            sums[tag] = sums.get(tag, 0) + record.bytes_sent
            self._collectives += 1
        if self.on_record is not None and (call := self.on_record()) is not None:
            call(record)

    def name_tag(self, tag: str, names: Sequence[str]) -> None:
        """Say which parameters travel under a tag, for reports."""
        if len(self.tag_names) < KEPT_TAGS:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            self.tag_names[tag] = f" ({names[0]}{more})" if names else ""

    def close_span(self, kind: str, start: float, end: float) -> None:
        """Enter a finished span."""
        span = Span(kind, start, end, self.step_count)
        self.spans.append(span)
        self._fresh_spans.append(span)

    def event(self, kind: str, /, **values: Any) -> None:
        """Enter a moment: `ledger.event("accordion", levels={"head": "low"})`. Values are what JSON can hold."""
        _check_plain(kind, values)
        event = Event(kind, self.clock(), self.step_count, values)
        self.events.append(event)
        if self.listener is not None:
            self.listener.on_event(event)

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
        self._fresh.clear()
        self._fresh_spans.clear()

    def step(self, owner: object | None = None) -> None:
        """End a step. With several replicas in one world, the first that calls is the one that counts."""
        counts = self._owner()
        if counts is None and owner is not None:
            self._owner = weakref.ref(owner)  # when it is gone, the next one takes over
        elif owner is not counts:
            return
        now = self.clock()
        records, spans = _take(self._fresh, self.step_count), _take(self._fresh_spans, self.step_count)
        row = _divide(self.step_count, self._open_since, now, records, spans)
        self.rows.append(row)
        self._totals.add(row)
        self.step_count += 1
        self._open_since = now
        if self.listener is not None:
            self.listener.on_row(row)

    def measure(self, owner: object) -> Row | None:
        """The row of the current step if it ended now; None if `owner` is not the one that ends steps."""
        if (counts := self._owner()) is not None and counts is not owner:
            return None
        return _divide(self.step_count, self._open_since, self.clock(), list(self._fresh), list(self._fresh_spans))

    def leave(self, owner: object) -> None:
        """`owner` ends no more steps: the next that calls `step` is the one that counts."""
        if self._owner() is owner:
            self._owner = lambda: None

    def resume(self, step_count: int) -> None:
        """Continue counting at `step_count`, after a checkpoint was loaded."""
        self.step_count = step_count
        self.restart()

    # Reading ---------------------------------------------------------------------------------------------

    def totals(self, *, last: int | None = None) -> Totals:
        """Sums over the whole run, or over the `last` steps (of those kept in detail; `steps` says how many).

        Of any stretch, however long: `before = ledger.totals()`, and later `ledger.totals() - before`.
        """
        if last is None or last >= self._totals.steps:
            return replace(self._totals)
        sums = Totals(self.rank)
        for row in list(self.rows)[-last:] if last > 0 else []:
            sums.add(row)
        return sums

    def sent(self) -> Sent:
        """Counts of all collectives so far, including those of the unfinished step."""
        with self._counting:
            return Sent(self._collectives, sum(self._bytes_by_tag.values()), dict(self._bytes_by_tag))

    def table(self, *, last: int = 20) -> str:
        """The last steps as text, a line each, times in milliseconds."""
        head = f"{'step':>8}{'wall':>9}{'compute':>9}{'comm':>9}{'waiting':>9}{'data':>9}{'hidden':>9}{'MB sent':>10}"
        lines = [head]
        for r in list(self.rows)[-last:]:
            times = (r.wall, r.compute, r.communication, r.waiting, r.data, r.hidden)
            lines.append(f"{r.step:>8}" + "".join(f"{t * 1e3:>9.2f}" for t in times) + f"{r.bytes_sent / 1e6:>10.3f}")
        return "\n".join(lines)

    def format_events(self, *, kind: str | None = None, last: int = 20) -> str:
        """The last events as text, a line each: all, or those of a kind."""
        events = [event for event in list(self.events) if kind in (None, event.kind)]
        return "\n".join(f"step {event.step}: {event}" for event in events[-last:])

    def by_tag(self) -> dict[str, int]:
        """Bytes sent so far by tag; what has no tag, by operation."""
        return self.sent().by_tag

    def write_jsonl(self, path: str | Path) -> None:
        """Write steps, collectives, spans and events as JSON lines, told apart by "type"."""
        with open(path, "w", encoding="utf-8") as file:
            kinds: list[tuple[str, Sequence[Any]]] = [("step", self.rows), ("collective", self.records)]
            for kind, rows in (*kinds, ("span", self.spans), ("event", self.events)):
                for row in list(rows):
                    values: dict[str, Any] = {"type": kind, "rank": self.rank, **asdict(row)}
                    values.pop("signature", None)
                    file.write(json.dumps(as_json(values)) + "\n")

    def gather(self, world: World) -> Report:
        """Every rank's ledger on one clock (a collective: every rank calls it).

        Where the transport could not know when the last rank arrived (messages between hosts), that is
        worked out here from every rank's own arrival times.
        """
        from unisono.world.timeline import gather

        return gather(self, world)

    def fill_in_arrivals(self, last_arrivals: dict[tuple[str, int], float]) -> None:
        """Fill in when the last rank arrived, by (channel, sequence), and divide the rows anew."""
        changed = set()
        for record in list(self.records):
            key = (record.channel, record.sequence)
            if record.last != record.last and key in last_arrivals:
                record.last = min(max(last_arrivals[key], record.start), record.end)
                changed.add(record.step)
        records, spans = _group_by_step(list(self.records)), _group_by_step(list(self.spans))
        since = self.spans[0].end if len(self.spans) == self.spans.maxlen else float("-inf")
        for i, row in enumerate(self.rows):
            mine = [r for r in records.get(row.step, []) if r.end >= row.start]  # not what `restart` left out
            if row.step in changed and len(mine) == row.collectives and row.start >= since:  # nothing was dropped
                self.rows[i] = _divide(row.step, row.start, row.start + row.wall, mine, spans.get(row.step, []))
                self._totals.replace(row, self.rows[i])


def _check_plain(kind: str, value: Any) -> None:
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        for one in value.values():
            _check_plain(kind, one)
    elif isinstance(value, list | tuple):
        for one in value:
            _check_plain(kind, one)
    elif not isinstance(value, str | int | float | bool | None):
        raise TypeError(f"an event holds plain values (numbers, text, lists, dicts), got {value!r} in {kind!r}")


def _take(fresh: deque[E], step: int) -> list[E]:
    """Remove all entries and assign them to `step`; one by one, since other threads may be appending."""
    if not fresh:
        return []
    entries = [fresh.popleft() for _ in range(len(fresh))]
    for entry in entries:
        entry.step = step
    return entries


def _group_by_step(entries: Iterable[E]) -> dict[int, list[E]]:
    groups: dict[int, list[E]] = {}
    for entry in entries:
        groups.setdefault(entry.step, []).append(entry)
    return groups


def _divide(step: int, start: float, end: float, records: Sequence[Record], spans: Sequence[Span]) -> Row:
    """Divide a step's wall time. Only time that the program stood still counts as communication or waiting.

    Spans may touch or hold each other: a moment is counted once, as blocked before as data.
    """
    if not records and not spans:  # a world of one
        return Row(step, start, end - start, end - start, 0.0, 0.0, 0.0, 0.0, 0, 0)

    def cut(*kinds: str) -> list[Interval]:
        return [(max(s.start, start), min(s.end, end)) for s in spans if s.kind in kinds]

    blocked, loading, idle = _merge(cut("forming", "blocked")), _merge(cut("data")), _merge(cut("bubble"))
    late = _merge([*cut("forming"), *((r.start, r.last) for r in records)])
    moving = _merge((r.start if r.last != r.last else max(r.start, r.last), r.end) for r in records)
    still, waiting = _sum_lengths(blocked), _sum_overlap(blocked, late)
    data = _sum_lengths(loading) - _sum_overlap(loading, blocked)
    return Row(
        step,
        start,
        wall=end - start,
        compute=max(0.0, end - start - still - data),
        communication=max(0.0, still - waiting),
        waiting=waiting,
        data=data,
        hidden=max(0.0, _sum_lengths(moving) - _sum_overlap(moving, blocked)),
        bytes_sent=sum(r.bytes_sent for r in records),
        collectives=len(records),
        compression=_measure_compression(blocked, [*late, *moving], spans),
        bubble=_sum_lengths(idle),
    )


def _measure_compression(blocked: Sequence[Interval], exchanging: Iterable[Interval], spans: Sequence[Span]) -> float:
    """How long the program stood still for a reducer alone: none of its collectives was under way."""
    working = _merge((s.start, s.end) for s in spans if s.kind == "reducer")
    if not working:
        return 0.0
    alone = _intersect(blocked, working)
    return max(0.0, _sum_lengths(alone) - _sum_overlap(alone, _merge(exchanging)))


Interval = tuple[float, float]


def _merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Sorted, disjoint intervals that cover the same time; those without length, or of unknown end, are left out.

    >>> _merge([(3.0, 4.0), (0.0, 2.0), (1.0, 2.5), (5.0, 5.0)])
    [(0.0, 2.5), (3.0, 4.0)]
    """
    merged: list[Interval] = []
    for a, b in sorted([i for i in intervals if i[1] > i[0]]):
        if merged and a <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], b))
        else:
            merged.append((a, b))
    return merged


def _sum_lengths(intervals: Iterable[Interval]) -> float:
    return sum([b - a for a, b in intervals])


def _sum_overlap(left: Sequence[Interval], right: Sequence[Interval]) -> float:
    """How long two sorted, disjoint lists of intervals coincide.

    >>> _sum_overlap([(0.0, 2.0), (3.0, 6.0)], [(1.0, 4.0), (5.0, 9.0)])
    3.0
    """
    return _sum_lengths(_intersect(left, right)) if left and right else 0.0


def _intersect(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    """The time that both of two sorted, disjoint lists of intervals cover."""
    both: list[Interval] = []
    i = j = 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            both.append((start, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return both
