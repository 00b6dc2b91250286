"""Quantities as text, read and shown: sizes, rates, times, ranks. Whatever is printed with a unit is printed by this.

`parse_...` reads what a person wrote and refuses the rest by name; `show_...` writes for people, with three digits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from itertools import islice
from typing import Any

__all__ = [
    "as_json",
    "parse_counts",
    "parse_duration",
    "parse_number",
    "parse_ranks",
    "parse_share_times",
    "parse_size",
    "show_bytes",
    "show_duration",
    "show_ms",
    "show_number",
    "show_ranks",
    "show_rate",
    "show_s",
    "show_size",
    "write_number",
]

_POWERS = ("", "k", "m", "g", "t", "p")
_UNITS = {
    **{f"{letter}b": 1000**i for i, letter in enumerate(_POWERS)},
    **{f"{letter}ib": 1024**i for i, letter in enumerate(_POWERS) if letter},
}
_FORM = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*")
_MAX_BYTES, _MAX_DIGITS = 2**63 - 1, 30
_EXPECTED = 'a number of bytes, or text such as "18GiB" (18 · 2^30 bytes) or "500 MB" (500 · 10^6 bytes)'
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


# Bytes and bits ----------------------------------------------------------------------------------------------------


def parse_size(size: str | int | float, name: str = "size") -> int:
    """Bytes of a size in words; a number counts bytes. `name` is what an error calls it.

    >>> parse_size("1.5 GiB"), parse_size("500 MB"), parse_size(4096)
    (1610612736, 500000000, 4096)
    """
    if isinstance(size, bool) or not isinstance(size, (str, int, float)):
        raise TypeError(f"{name} must be {_EXPECTED}, got {size!r}")
    if not isinstance(size, str):
        if not 0 <= size <= _MAX_BYTES:
            got = repr(size) if isinstance(size, float) or abs(size) <= _MAX_BYTES else "one beyond 2^63"
            raise ValueError(f"{name} must be {_EXPECTED}, got {got}")
        return int(size)
    found = _FORM.fullmatch(size)
    unit = found[2].lower() if found else ""
    if found and unit and unit not in _UNITS and f"{unit}b" in _UNITS:
        letter = unit.upper()
        raise ValueError(
            f'{name}: got {size!r}, which may mean either; write "{found[1]}{letter}iB" (powers of 1024) or '
            f'"{found[1]}{letter}B" (powers of 1000)'
        )
    if not found or (unit and unit not in _UNITS):
        raise ValueError(f"{name} must be {_EXPECTED}, got {size!r}")
    scale = _UNITS[unit] if unit else 1
    if len(found[1]) > _MAX_DIGITS or (counted := float(found[1]) * scale) > _MAX_BYTES:
        raise ValueError(f"{name} is beyond every memory and disk: expected less than 2^63 bytes, got {size[:40]!r}")
    return round(counted)


def show_size(nbytes: float) -> str:
    """Memory or disk space, in powers of 1024.

    >>> show_size(0), show_size(1000), show_size(25 << 20), show_size(18.25 * 2**30)
    ('0', '1000 B', '25.0 MiB', '18.2 GiB')
    """
    if nbytes < 0:
        return f"-{show_size(-nbytes)}"
    if nbytes < 1024:
        return f"{nbytes:.0f} B" if nbytes >= 0.5 else "0"
    for power, unit in ((1, "KiB"), (2, "MiB"), (3, "GiB"), (4, "TiB")):
        scaled = nbytes / 1024**power
        if scaled < 999.5 or unit == "TiB":
            return f"{scaled:.2f} {unit}" if scaled < 9.995 else f"{scaled:.1f} {unit}"
    raise AssertionError("TiB takes all")


def show_bytes(count: float) -> str:
    """Bytes that are sent, in powers of 1000 as rates of links are.

    >>> show_bytes(0), show_bytes(999), show_bytes(69_700), show_bytes(27_878_400)
    ('0 B', '999 B', '69.7 kB', '27.9 MB')
    """
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 999.5 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{_shorten(count)} {unit}"
        count /= 1000
    raise AssertionError("TB takes all")


def show_rate(bits_per_s: float, digits: int = 3) -> str:
    """Bits a second.

    >>> show_rate(95.61e6), show_rate(12.3e9), show_rate(64e3), show_rate(317e6, digits=2)
    ('95.6 Mbit/s', '12.3 Gbit/s', '64 kbit/s', '317 Mbit/s')
    """
    size, unit = next(
        ((size, unit) for size, unit in ((1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s")) if bits_per_s >= size),
        (1.0, "bit/s"),
    )
    return f"{_shorten(bits_per_s / size, digits)} {unit}"


# Times -------------------------------------------------------------------------------------------------------------


def parse_duration(text: str, name: str = "", *, bare: bool = False, zero: bool = False) -> float:
    """Seconds of a time such as 100ms, 90s, 5m, 5min, 2h or 30d.

    Args:
        name: what an error calls it, such as the option that it was given to.
        bare: whether a number without a unit is allowed; it counts seconds.
        zero: whether 0 is allowed.

    >>> parse_duration("100ms"), parse_duration("30d"), parse_duration("90", bare=True)
    (0.1, 2592000.0, 90.0)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)\s*", text.lower())
    scale = {**_SECONDS, "": 1.0 if bare else math.nan}.get(found[2], math.nan) if found else math.nan
    seconds = float(found[1]) * scale if found else math.nan
    if 0 < seconds < math.inf or (zero and seconds == 0):
        return seconds
    expected = (
        "seconds, or a time such as 90s or 5m" if bare else "a time above 0 with its unit, such as 100ms, 5min, 30d"
    )
    raise ValueError(f"{f'{name}: ' if name else ''}got {text!r}; expected {expected}")


def show_s(seconds: float, *, fixed: bool = False) -> str:
    """A short time, in seconds or milliseconds; `fixed`: with as many decimals as others in its column.

    >>> show_s(0.02), show_s(0.000124), show_s(1.5), show_s(0)
    ('20 ms', '0.124 ms', '1.5 s', '0 ms')
    >>> show_s(2.104, fixed=True), show_s(0.0213, fixed=True), show_s(0.00004, fixed=True)
    ('2.10 s', '21.3 ms', '0.04 ms')
    """
    scaled, unit = (seconds, "s") if seconds >= 0.9995 else (1e3 * seconds, "ms")
    if fixed:
        return f"{scaled:.{1 if unit == 'ms' and scaled >= 1 else 2}f} {unit}"
    return f"{_shorten(scaled) if seconds >= 5e-7 else '0'} {unit}"


def show_ms(seconds: float | None) -> str:
    """Milliseconds without their unit, for a column that names it.

    >>> show_ms(0.0123456), show_ms(1.5), show_ms(None), show_ms(0.0)
    ('12.3', '1500', '-', '0')
    """
    return "-" if seconds is None or math.isnan(seconds) else _shorten(1e3 * seconds)


def show_duration(seconds: float | None) -> str:
    """How long something lasts, from microseconds to days.

    >>> show_duration(3.25), show_duration(75), show_duration(7300), show_duration(30 * 86400), show_duration(None)
    ('3.25 s', '1 min 15 s', '2 h 1 min', '30 d', 'not known')
    """
    if seconds is None:
        return "not known"
    if not math.isfinite(seconds):
        return "never"
    if seconds < 59.5:
        return show_s(seconds)
    units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    left, parts = round(seconds), []
    for unit, size in units:
        count, left = divmod(left, size)
        parts.append((count, unit))
    first = next(i for i, (count, _) in enumerate(parts) if count)
    return " ".join(f"{count} {unit}" for count, unit in parts[first : first + 2] if count)


# Ranks, plain numbers, JSON ----------------------------------------------------------------------------------------


def show_ranks(ranks: Iterable[int], noun: str = "rank", most: int | None = None) -> str:
    """Ranks, those that follow each other as a range; `most`: how many ranges are listed.

    >>> show_ranks([0, 1, 2, 5]), show_ranks([3], "worker"), show_ranks([1, 3, 5], most=2)
    ('ranks 0-2, 5', 'worker 3', 'ranks 1, 3, ...')
    """
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    text = ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts[:most])
    text += ", ..." if most is not None and len(parts) > most else ""
    return f"{noun} {text}" if text.isdigit() else f"{noun}s {text}"


def parse_ranks(text: str, present: Iterable[int]) -> list[int]:
    """Ranks as they are typed; ValueError where one is not there.

    >>> parse_ranks("0,2-3", range(4))
    [0, 2, 3]
    """
    found, there = set[int](), set(present)
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        asked = range(int(match[1]), int(match[2] or match[1]) + 1) if match else ()
        if not asked:
            raise ValueError(f"got @{text}; expected ranks, such as @2, @0,3 or @0-2, or @all")
        if missing := list(islice((rank for rank in asked if rank not in there), 100)):
            raise ValueError(f"{show_ranks(missing)} not here; there are {show_ranks(there)}")
        found.update(asked)
    return sorted(found)


def show_number(value: float | None) -> str:
    """A number without a unit, with four digits.

    >>> show_number(0.123456), show_number(None), show_number(float("nan")), show_number(12345678.0)
    ('0.1235', '-', 'nan', '1.235e+07')
    """
    return "-" if value is None else f"{value:.4g}"


def write_number(value: float) -> str:
    """A number that reads back the same, to nine decimals.

    >>> write_number(0.25), write_number(5.0)
    ('0.25', '5')
    """
    return f"{value:.9f}".rstrip("0").rstrip(".")


def as_json(value: Any) -> Any:
    """Nested values as JSON can hold them: it has no inf and no nan, which become null.

    >>> as_json({"loss": (1.0, float("nan"))})
    {'loss': [1.0, None]}
    """
    if isinstance(value, dict):
        return {key: as_json(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _shorten(value: float, digits: int = 3) -> str:
    """So many digits, and never an exponent."""
    return f"{value:.{digits}g}" if abs(value) < 10**digits - 0.5 else f"{value:.0f}"


# Counts and shares -------------------------------------------------------------------------------------------------

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


def parse_share_times(text: str, name: str = "slow workers") -> tuple[float, float]:
    """A share and a factor.

    >>> parse_share_times("1%x3")
    (0.01, 3.0)
    """
    share, x, times = text.lower().partition("x")
    factor = re.fullmatch(rf"\s*{_NUMBER}\s*", times)
    if not x or not factor or not 1 <= float(factor[1]) < math.inf:
        raise ValueError(f"{name}: got {text!r}, expected a share and a factor from 1 up, such as 1%x3")
    found = re.fullmatch(rf"\s*{_NUMBER}\s*(%?)\s*", share)
    value = float(found[1]) / (100 if found[2] else 1) if found else -1.0
    if not 0 <= value < 1:
        raise ValueError(f"{name}: got {share!r}, expected a share from 0 to below 100%, such as 1%")
    return value, float(factor[1])
