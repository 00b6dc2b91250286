"""The answers of an engine's workers, which come in any order, and how they are merged.

Sums are merged as they come. Another function may depend on the order, so it combines neighbouring parts only.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from unisono.tables.map_reduce.map_reduce import Ask, Reduce, Round

_HERE = os.path.dirname(os.path.abspath(__file__))


@dataclass
class Answers:
    """What one or several parts have answered in a round.

    values: (first part, last part, value), where `value` is that of all parts from the first to the last.
    seconds: how long `map` took, by part.
    missing: parts whose worker no longer has their data.
    errors: (part, names of the error's classes, its text, its traceback).
    """

    values: list[tuple[int, int, Any]] = field(default_factory=list)
    seconds: dict[int, float] = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)
    errors: list[tuple[int, list[str], str, str]] = field(default_factory=list)


def answer_part(part: int, map_: Callable[[Any, Any], Any], block: Any, state: Any) -> Answers:
    """Call `map_` on one part. An error becomes part of the answer, without the frames of this package."""
    start = time.perf_counter()
    try:
        value = map_(block, state)
    except Exception as error:
        names = [kind.__name__ for kind in type(error).__mro__]
        frames = error.__traceback__
        while frames is not None and os.path.dirname(frames.tb_frame.f_code.co_filename) == _HERE:
            frames = frames.tb_next
        trace = "".join(traceback.format_exception(type(error), error, frames))
        return Answers(errors=[(part, names, str(error), trace)])
    return Answers([(part, part, value)], {part: time.perf_counter() - start})


def merge_answers(a: Answers, b: Answers, reduce: Reduce) -> Answers:
    """Merge two answers. A function combines neighbours only, so the order of the parts is kept."""
    values = sorted([*a.values, *b.values], key=lambda item: item[0])
    joined: list[tuple[int, int, Any]] = []
    for first, last, value in values:
        if joined and (reduce == "sum" or joined[-1][1] + 1 == first):
            before = joined.pop()
            value = _add(before[2], value) if reduce == "sum" else reduce(before[2], value)
            first = before[0]
        joined.append((first, last, value))
    return Answers(joined, a.seconds | b.seconds, a.missing + b.missing, a.errors + b.errors)


def end_round(found: Answers, ask: Ask, start: float) -> Any:
    """The value of all parts; the round, begun at `start`, goes into the log.

    An error of any part is raised: a ValueError as itself, others as a `WorkerError`.
    """
    parts = ask.workers
    if found.errors:
        part, names, text, trace = min(found.errors)
        if "ValueError" in names:
            raise ValueError(text)
        from unisono.launchers import WorkerError

        report = f"unisono: worker {part} of {parts} failed: {names[0]}\n\n{trace.rstrip()}"
        raise WorkerError(report, rank=part, exit_status=1, step=None, traceback=trace)
    assert len(found.values) == 1, [item[:2] for item in found.values]
    ask.log.append(Round(time.perf_counter() - start, [found.seconds[part] for part in range(parts)]))
    return found.values[0][2]


def _add(a: Any, b: Any) -> Any:
    """Add numbers, arrays and tensors, also those inside tuples, lists and dicts of one structure."""
    if isinstance(a, tuple | list):
        if len(a) != len(b):
            raise TypeError(f'reduce="sum" got values of {len(a)} and {len(b)} items: expected one structure')
        return type(a)(_add(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return {key: _add(a[key], b[key]) for key in a}
    if isinstance(a, bool | np.bool_) or not (hasattr(a, "__add__") and not isinstance(a, str | bytes)):
        raise TypeError(f'reduce="sum" adds numbers, arrays and tensors, got {type(a).__name__}: give a function')
    return a + b


def merge_all(founds: Sequence[Answers], reduce: Reduce) -> Answers:
    """Merge any number of answers."""
    result = Answers()
    for found in founds:
        result = merge_answers(result, found, reduce)
    return result
