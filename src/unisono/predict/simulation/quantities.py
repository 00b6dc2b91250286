"""Numbers with units, as a command line gives them: "0.1s", "30d", "25M", "1%x3"; read and checked."""

from __future__ import annotations

import math
import re

__all__ = [
    "parse_counts",
    "parse_number",
    "parse_share",
    "parse_share_times",
]

_SCALES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}
_NUMBER = r"(\d+(?:\.\d*)?|\.\d+)"


def parse_number(text: str, name: str = "a number") -> int:
    """How many, in words such as 25M; at least 1.

    >>> parse_number("25M"), parse_number("1.3B"), parse_number("4_000")
    (25000000, 1300000000, 4000)
    """
    found = re.fullmatch(rf"\s*{_NUMBER}\s*([kmgbt]?)\s*", text.lower().replace("_", ""))
    value = round(float(found[1]) * _SCALES[found[2]]) if found else 0
    if not 1 <= value <= 10**15:
        raise ValueError(f"{name}: got {text!r}, expected a count from 1 up, such as 300k, 25M or 1.3B")
    return value


def parse_counts(text: str, name: str = "workers") -> list[int]:
    """Several counts, smallest first.

    >>> parse_counts("64,8,10000")
    [8, 64, 10000]
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= 10**6 for part in parts):
        raise ValueError(f"{name}: got {text!r}, expected counts from 1 to 1000000, such as 8,64,512")
    return sorted({int(part) for part in parts})


def parse_share(text: str, name: str = "a share") -> float:
    """A part of a whole, in percent or as a number below 1.

    >>> parse_share("1%"), parse_share("0.25")
    (0.01, 0.25)
    """
    found = re.fullmatch(rf"\s*{_NUMBER}\s*(%?)\s*", text)
    value = float(found[1]) / (100 if found[2] else 1) if found else -1.0
    if not 0 <= value < 1:
        raise ValueError(f"{name}: got {text!r}, expected a share from 0 to below 100%, such as 1%")
    return value


def parse_share_times(text: str, name: str = "slow workers") -> tuple[float, float]:
    """A share and a factor.

    >>> parse_share_times("1%x3")
    (0.01, 3.0)
    """
    share, x, times = text.lower().partition("x")
    found = re.fullmatch(rf"\s*{_NUMBER}\s*", times)
    if not x or not found or not 1 <= float(found[1]) < math.inf:
        raise ValueError(f"{name}: got {text!r}, expected a share and a factor from 1 up, such as 1%x3")
    return parse_share(share, name), float(found[1])
