"""Sizes in words: "18GiB" to bytes, and bytes to "18.0 GiB"."""

from __future__ import annotations

import re

_POWERS = ("", "k", "m", "g", "t", "p")
_UNITS = {
    **{f"{letter}b": 1000**i for i, letter in enumerate(_POWERS)},
    **{f"{letter}ib": 1024**i for i, letter in enumerate(_POWERS) if letter},
}
_FORM = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*")
_MAX_BYTES, _MAX_DIGITS = 2**63 - 1, 30
_EXPECTED = 'a number of bytes, or text such as "18GiB" (18 · 2^30 bytes) or "500 MB" (500 · 10^6 bytes)'


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
    """Bytes in words, with three digits or so.

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
