"""Sizes in words, and what a machine has."""

from __future__ import annotations

from pathlib import Path

import pytest

from unisono.predict.footprint.memory_report import find_capacity
from unisono.units import parse_size, show_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("18GiB", 18 * 2**30),
        ("500 MB", 500_000_000),
        (" 1.5 gib ", 3 * 2**29),
        ("2TiB", 2**41),
        ("7kB", 7000),
        ("7KiB", 7168),
        (".5MiB", 2**19),
        ("12", 12),
        ("12 B", 12),
        (4096, 4096),
        (2.5e9, 2_500_000_000),
        (0, 0),
    ],
)
def test_sizes_are_read(text: str | int | float, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "18 XiB", "1,5 GB", "18GiBs", "nan", "1e3 MB", -1, float("inf")])
def test_what_is_no_size_is_refused_with_an_example(text: str | int | float) -> None:
    with pytest.raises(ValueError, match=r"device_memory must be .*18GiB"):
        parse_size(text, "device_memory")


def test_a_letter_that_may_mean_either_is_refused_with_both() -> None:
    with pytest.raises(ValueError, match=r'"24GiB" \(powers of 1024\) or "24GB"'):
        parse_size("24G")


@pytest.mark.parametrize("value", [None, True, [1]])
def test_other_types_are_refused(value: object) -> None:
    with pytest.raises(TypeError, match="number of bytes"):
        parse_size(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("nbytes", [0, 1, 999, 1024, 123_456, 25 << 20, 999 << 20, 1 << 30, 10**13, 10**16])
def test_a_shown_size_reads_back_to_about_the_same(nbytes: int) -> None:
    assert parse_size(show_size(nbytes)) == pytest.approx(nbytes, rel=0.006)


def test_a_machine_takes_what_is_given_and_its_own_for_the_rest(tmp_path: Path) -> None:
    given = find_capacity("24GiB", "1 TiB", "2TB", workers=4)
    assert (given.device, given.host, given.disk, given.guessed) == (24 << 30, 1 << 40, 2 * 10**12, ())
    own = find_capacity(1000, None, tmp_path, workers=1)
    assert own.device == 1000
    assert own.guessed == ("host",)
    assert 1 << 20 < own.host < 1 << 50
    assert own.disk > 0
    with pytest.raises(ValueError, match=r"disk must be .* or a folder"):
        find_capacity(None, None, "/no/such/folder", workers=1)
