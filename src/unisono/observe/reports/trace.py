"""A trace of all ranks on one clock, from what they recorded: steps, collectives, spans, metrics and events.

Ranks of one machine share a clock. Those of several are put on one by the collectives that all took part in: none ends
before every rank has begun it, so each says how far apart two clocks can be at most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from unisono.launchers.runtime.trace_file import TraceFile
from unisono.observe.runs.reading import RankLog, RunReader
from unisono.observe.runs.table import COLUMNS

__all__ = ["ALL_WAIT", "find_offsets", "write_trace"]

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
