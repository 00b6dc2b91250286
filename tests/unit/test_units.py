"""Quantities as text: what is read, what is refused, and that no rounding leaves a unit or writes an exponent."""

from __future__ import annotations

import json
import math

import pytest

from unisono.units import as_json, parse_duration, show_bytes, show_duration, show_ms, show_rate, show_s


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("100ms", 0.1), ("5us", 5e-6), ("1.5 s", 1.5), ("2m", 120.0), ("2min", 120.0), ("1h", 3600.0), ("30D", 2592e3)],
)
def test_a_time_is_read_with_its_unit(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "soon", "3", "-1s", "0s", "1e3s", "5 weeks", "nan", "1s2m"])
def test_what_is_no_time_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match=r"^--mtbf: got .*; expected a time above 0 with its unit"):
        parse_duration(text, "--mtbf")


def test_a_number_without_a_unit_and_zero_are_times_if_the_caller_says_so() -> None:
    assert (parse_duration("90", bare=True), parse_duration("0", bare=True, zero=True)) == (90.0, 0.0)
    with pytest.raises(ValueError, match="got '0'; expected seconds, or a time such as 90s"):
        parse_duration("0", bare=True)


@pytest.mark.parametrize("seconds", [1e-7, 4e-5, 9.994e-4, 0.9994, 0.99951, 59.49, 59.51, 3599.7, 86399.6, 1e7])
def test_a_duration_reads_back_to_about_itself(seconds: float) -> None:
    shown = show_duration(seconds)
    assert "e" not in shown.replace("never", "")
    if seconds >= 1e-6:
        parts = shown.split()
        total = sum(parse_duration(f"{n}{unit}") for n, unit in zip(parts[::2], parts[1::2], strict=True))
        assert total == pytest.approx(seconds, rel=0.01)


def test_large_numbers_have_no_exponent() -> None:
    assert (show_s(1234.0), show_ms(12.345), show_rate(999.9e6), show_rate(4e12)) == (
        "1234 s",
        "12345",
        "1000 Mbit/s",
        "4000 Gbit/s",
    )
    assert (show_bytes(999.6), show_bytes(999_600), show_bytes(5e15)) == ("1 kB", "1 MB", "5000 TB")
    assert show_duration(math.inf) == "never"


def test_json_gets_null_for_what_it_cannot_hold() -> None:
    text = json.dumps(as_json({"a": [math.inf, (math.nan, 1.5)], "b": None}), allow_nan=False)
    assert json.loads(text) == {"a": [None, [None, 1.5]], "b": None}
