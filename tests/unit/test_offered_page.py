"""The launcher's meeting page, as an agent on the same host opens it, and as others do not."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from unisono.launchers.meeting import OfferedPage, open_page

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pages are Linux's anonymous memory")


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Iterator[OfferedPage]:
    monkeypatch.delenv("UNISONO_SHARED_MEMORY", raising=False)
    made = OfferedPage()
    yield made
    made.close()


def test_what_is_opened_is_the_page_itself(page: OfferedPage) -> None:
    fd = open_page(page.offer())
    try:
        os.pwrite(fd, b"seen", 0)
        assert os.pread(page.fd, 4, 0) == b"seen"
        assert os.fstat(fd).st_ino == page.number
        assert not os.get_inheritable(fd)
    finally:
        os.close(fd)


def test_after_a_failure_the_same_offer_gives_a_new_page(page: OfferedPage) -> None:
    offer, first = page.offer(), page.number
    old = open_page(offer)
    os.pwrite(old, b"of the first attempt", 0)
    page.renew()
    new = open_page(offer)
    try:
        assert os.pread(new, 20, 0) == b""
        assert os.fstat(new).st_ino == page.number != first
        assert not os.get_inheritable(page.fd)
    finally:
        os.close(old)
        os.close(new)


def test_an_offer_of_another_host_or_of_something_else_is_left_alone(page: OfferedPage) -> None:
    kernel, _, address = page.offer().rpartition(" ")
    assert open_page("") == -1
    assert open_page(f"{kernel}x {address}") == -1
    with open(os.devnull) as other:
        assert open_page(f"{kernel} /proc/{os.getpid()}/fd/{other.fileno()}") == -1
    assert open_page(f"{kernel} /proc/{os.getpid()}/fd/9999") == -1


def test_it_is_neither_offered_nor_opened_where_shared_memory_is_turned_off(
    page: OfferedPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer = page.offer()
    monkeypatch.setenv("UNISONO_SHARED_MEMORY", "0")
    assert page.offer() == ""
    assert open_page(offer) == -1
