"""All ranks on one clock, from what they recorded: a trace, and who waited for whom.

Ranks of one machine share a clock. Those of several are put on one by the collectives that all took part in: none ends
before every rank has begun it, so each says how far apart two clocks can be at most.

While it runs, a rank cannot know when the last one arrived on another host without a message: its wait counts as
communication. The record has the collectives of some steps, with each rank's own times; together they tell.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from unisono.launchers.runtime.trace_file import TraceFile
from unisono.observe.runs.reading import RankLog, RunReader
from unisono.observe.runs.table import COLUMNS

__all__ = ["ALL_WAIT", "find_offsets", "find_waits", "write_trace"]

Interval = tuple[float, float]
ALL_WAIT = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "objects", "barrier")  # for all
_MOST_STEPS = 2_000
_MOST_VALUES = 5_000


def write_trace(reader: RunReader, path: str | Path) -> None:
    """Write a trace of all ranks for Perfetto; ValueError if no worker recorded a step."""
    logs = [log for log in reader.ranks.values() if len(log.rows) or log.records]
    if not logs:
        raise ValueError(f"{reader.folder}: no worker recorded a step, so there is no trace")
    offsets = find_offsets(logs)
    zero = min(_find_first(log) + offset for log, offset in zip(logs, offsets, strict=True))
    trace = TraceFile()
    for log, offset in zip(logs, offsets, strict=True):
        host = log.header.get("host")
        track = trace.rank(log.place, offset - zero, f"rank {log.rank}" + (f" ({host})" if host else ""))
        for row in log.rows.array[-_MOST_STEPS:].tolist():
            values = dict(zip(COLUMNS, row, strict=True))
            name = f"step {row[0]:.0f}" if row[0] == row[1] else f"steps {row[0]:.0f}-{row[1]:.0f}"
            track.event("steps", name, values["start"], values["start"] + values["wall"], values)
        for kind, step, start, end in log.spans:
            track.event("program", kind, start, end, {"step": step})
        for op, tag, sent, channel, _, _, start, last, end in log.records:
            track.collective(channel, op, tag, start, last, end, sent)
        for event in log.events:
            track.moment("events", event["kind"], event["time"], event)
        for name, series in log.metrics.items():
            for at, value in list(zip(series.times.tolist(), series.values.tolist(), strict=True))[-_MOST_VALUES:]:
                if math.isfinite(value):
                    track.value(name, at, value)
    trace.write(path)


def _find_first(log: RankLog) -> float:
    starts = [float(row[2]) for row in log.rows.array[-_MOST_STEPS:][:1]]
    starts += [span[2] for span in log.spans] + [record[6] for record in log.records]
    return min(starts + [float(event["time"]) for event in log.events])


def find_offsets(logs: Sequence[RankLog]) -> list[float]:
    """For each rank, the seconds to add to its times: to those of the first rank's machine, in unix time."""
    first = logs[0]
    begun = {(r[3], r[4]): (r[6], r[8]) for r in first.records if r[0] in ALL_WAIT}
    by_boot = {first.header.get("boot"): first.offset}
    for log in logs[1:]:
        boot = log.header.get("boot")
        if boot not in by_boot:
            by_boot[boot] = _align(log, first, begun)
    return [by_boot[log.header.get("boot")] for log in logs]


def _align(log: RankLog, first: RankLog, begun: dict[tuple[str, int], tuple[float, float]]) -> float:
    """The offset of a rank on another machine, between the bounds that common collectives set."""
    low, high = -math.inf, math.inf
    for op, _, _, channel, sequence, _, start, _, end in log.records:
        if op in ALL_WAIT and (channel, sequence) in begun:
            theirs = begun[channel, sequence]
            low, high = max(low, theirs[0] - end), min(high, theirs[1] - start)
    if math.isinf(low) or low > high:  # nothing in common, or a clock that was set meanwhile
        return log.offset
    return first.offset + (low + high) / 2


# Waiting told from communication between hosts ------------------------------------------------------------------------


def find_waits(logs: Sequence[RankLog]) -> tuple[dict[int, float], int]:
    """By place, the seconds of a mean step for which the program stood still until the last rank arrived, and was not
    known to; and how many steps that is taken from (0: the record does not tell)."""
    steps = _find_common_steps(logs)
    if not steps:
        return {}, 0
    offsets = find_offsets(logs)
    last: dict[tuple[str, int], float] = {}
    came: dict[tuple[str, int], int] = {}
    for log, offset in zip(logs, offsets, strict=True):
        for key, start, _ in _list_unknown(log, steps):
            last[key] = max(last.get(key, -math.inf), start + offset)
            came[key] = came.get(key, 0) + 1
    waits = {}
    for log, offset in zip(logs, offsets, strict=True):
        late = [
            (start, min(end, last[key] - offset))
            for key, start, end in _list_unknown(log, steps)
            if came[key] == len(logs)
        ]
        blocked = [(start, end) for kind, step, start, end in log.spans if kind == "blocked" and step in steps]
        waits[log.place] = _sum_overlap(blocked, late) / len(steps)
    return waits, len(steps)


def _list_unknown(log: RankLog, steps: set[int]) -> list[tuple[tuple[str, int], float, float]]:
    """Collectives of these steps whose last arrival the rank did not know."""
    found = []
    for op, _, _, channel, sequence, step, start, last, end in log.records:
        if op in ALL_WAIT and step in steps and math.isnan(last) and not math.isnan(start + end):
            found.append(((channel, sequence), start, end))
    return found


def _find_common_steps(logs: Sequence[RankLog]) -> set[int]:
    """The steps that all ranks recorded; the first of each stretch may be cut, so it does not count."""
    every = []
    for log in logs:
        mine = {record[5] for record in log.records} & {span[1] for span in log.spans}
        every.append({step for step in mine if step - 1 in mine})
    return set.intersection(*every) if len(every) > 1 else set()


def _sum_overlap(left: Iterable[Interval], right: Iterable[Interval]) -> float:
    """How long both cover.

    >>> _sum_overlap([(0.0, 2.0), (1.0, 4.0)], [(3.0, 9.0), (0.5, 1.0)])
    1.5
    """
    total = 0.0
    others = _merge(right)
    for start, end in _merge(left):
        total += sum(max(0.0, min(end, b) - max(start, a)) for a, b in others if a < end and b > start)
    return total


def _merge(intervals: Iterable[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for a, b in sorted(i for i in intervals if i[1] > i[0]):
        if merged and a <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], b))
        else:
            merged.append((a, b))
    return merged
