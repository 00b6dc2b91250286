"""Waiting told from communication between hosts, afterwards: from when every rank arrived at each collective.

While it runs, a rank cannot know when the last one arrived on another host without a message: its wait counts as
communication. The record has the collectives of some steps, with each rank's own times; together they tell.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from unisono.observe.reports.trace import ALL_WAIT, find_offsets
from unisono.observe.runs.reading import RankLog

__all__ = ["find_waits"]

Interval = tuple[float, float]


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
