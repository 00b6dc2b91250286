"""How much a method learns from a sample, beside exact training: by measurement, from learning.json, which
`benchmarks/evidence_learning.py` makes of the runs that docs/evidence.md is of too."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from unisono.methods.spec import Spec, describe, parse

FILE = Path(__file__).with_name("learning.json")


@dataclass(frozen=True)
class Learning:
    """share: of what exact training learns from a sample; None: not measured; 0: too little to say how much.

    Four of five measurements are expected between low and high; both are 0 where training diverged. task: on which it
    learned least, as far as can be told.

    >>> Learning(0.882, 0.851, 0.914, "text", 3).words
    '88 % (85 - 91)'
    """

    share: float | None = None
    low: float = 0.0
    high: float = 1.0
    task: str = ""
    seeds: int = 0

    @property
    def grade(self) -> Literal["as exact", "less", "diverged", "not measured"]:
        """In a word: less, if four of five measurements are expected below exact training."""
        if self.share is None:
            return "not measured"
        return "diverged" if self.high == 0.0 else "as exact" if self.high >= 1.0 else "less"

    @property
    def words(self) -> str:
        """For a table."""
        if self.grade in ("not measured", "diverged"):
            return self.grade
        share, low, high = (round(100 * x) for x in (self.share or 0.0, self.low, self.high))
        if not share:
            return f"under {high} %"
        return f"{share} %" if low == high else f"{share} % ({low} - {high})"


NOT_MEASURED = Learning()
EXACT = Learning(1.0, 1.0, 1.0)  # as one process on the joined batches, by the conformance tests


def look_up(strategy: Any) -> Learning:
    """What was measured of a strategy with these settings, but for settings that were a share of the measured run."""
    own = parse(describe(strategy))
    found = (learning for spec, free, learning in _read() if str(strip(own, free)) == spec)
    return next(found, NOT_MEASURED)


def strip(value: Any, names: Iterable[str]) -> Any:
    """A spec without the arguments of these names, also in specs inside it."""
    if isinstance(value, list | tuple):
        return type(value)(strip(each, names) for each in value)
    if not isinstance(value, Spec):
        return value
    kept = {name: strip(each, names) for name, each in value.kwargs.items() if name not in names}
    return Spec(value.name, strip(value.args, names), kept)


@cache
def _read() -> list[tuple[str, list[str], Learning]]:
    """Specs with the names that they are without; those that are whole first."""
    plain = json.loads(FILE.read_text(encoding="utf-8"))["methods"]
    found = [(each.pop("spec"), each.pop("free"), Learning(**each)) for each in plain]
    return sorted(found, key=lambda each: len(each[1]))
