"""`un.log`: values of the program's own, into the record of its run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unisono.observe.runs.recording import find_recorder
from unisono.observe.runs.values import HOWS, How, Logged, check_value, start_copies

__all__ = ["log"]


def log(
    values: Mapping[str, Any] | None = None, /, *, how: How = "mean", step: int | None = None, **named: Any
) -> None:
    """Record values of this rank: `un.log(loss=loss, accuracy=0.9)`.

    They go where the run is recorded (`unisono report`, the live page, and what `unisono run --log` names); where
    nobody records, it does nothing. No message is sent between ranks, and a tensor of a GPU is not waited for.

    Args:
        values: The same as keywords, for names that are none: `un.log({"val/loss": 0.3})`.
        how: What becomes of the values that several ranks logged for one step: their "mean", "sum", "min" or "max"; or
            "rank": each rank's stays its own.
        step: The step to record them at; by default the one where training is.

    >>> log(loss=0.5, accuracy=0.9)
    """
    if how not in HOWS:
        raise ValueError(f"un.log: got how={how!r}; expected one of {', '.join(map(repr, HOWS))}")
    found = {**(values or {}), **named}
    for name, value in found.items():
        check_value(name, value)
    recorder = find_recorder()
    if recorder is not None and found:
        recorder.log(Logged(start_copies(found), how, step))
