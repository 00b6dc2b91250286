"""Links of emulated hosts, as they are written."""

from __future__ import annotations

import pytest

from unisono.launchers.runtime.link_emulation import Link, LinkError, parse_link, parse_links, write_links


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("100mbit", Link(100e6)),
        ("1Gbit", Link(1e9)),
        ("2.5gbit,150us", Link(2.5e9, 150e-6)),
        ("64kbit , 1.5s", Link(64e3, 1.5)),
        ("20ms", Link(None, 0.02)),
        ("0ms", Link()),
    ],
)
def test_a_link_reads_as_written_and_back(text: str, expected: Link) -> None:
    found = parse_link(text)
    assert (found.bits_per_s, found.latency_s) == pytest.approx((expected.bits_per_s, expected.latency_s))
    assert parse_link(str(found)) == found


def test_each_host_has_its_link() -> None:
    slow, fast = Link(100e6, 0.02), Link(1e9)
    assert parse_links("1gbit", 3) == [fast] * 3
    assert parse_links("100mbit/s", 2) == [Link(100e6)] * 2
    assert parse_links("2x1gbit/100mbit,20ms/1gbit", 4) == [fast, fast, slow, fast]
    assert parse_links(write_links([fast, slow]), 2) == [fast, slow]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "empty"),
        ("fast", "no rate"),
        ("100", "no rate"),
        ("-5mbit", "no rate"),
        ("20ms,100mbit", "no latency"),
        ("1gbit,1gbit,100mbit", "no latency"),
        ("100mbps", "bits or bytes"),
        ("100MB", "bits or bytes"),
        ("0mbit", "at least 1kbit"),
        ("100mbit,1000s", "at most 10s"),
        ("ax1gbit/1gbit", "number of hosts"),
        ("1gbit/100mbit", "links of 2 hosts, and there are 3"),
        ("1gbit/", "empty"),
    ],
)
def test_what_is_no_link_is_refused_with_examples(text: str, why: str) -> None:
    with pytest.raises(LinkError, match=why) as error:
        parse_links(text, 3)
    assert "one link for all" in str(error.value) or "3x1gbit/100mbit" in str(error.value)
