"""The launcher's board, as an agent on the same host opens it, and as others do not."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from unisono.launchers.meeting_page import OfferedBoard, open_board

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="boards are Linux's anonymous memory")


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Iterator[OfferedBoard]:
    monkeypatch.delenv("UNISONO_SHARED_MEMORY", raising=False)
    made = OfferedBoard()
    yield made
    made.close()


def test_what_is_opened_is_the_board_itself(board: OfferedBoard) -> None:
    fd = open_board(board.offer())
    try:
        os.pwrite(fd, b"seen", 0)
        assert os.pread(board.fd, 4, 0) == b"seen"
        assert os.fstat(fd).st_ino == board.number
        assert not os.get_inheritable(fd)
    finally:
        os.close(fd)


def test_after_a_failure_the_same_offer_gives_a_new_board(board: OfferedBoard) -> None:
    offer, first = board.offer(), board.number
    old = open_board(offer)
    os.pwrite(old, b"of the first attempt", 0)
    board.renew()
    new = open_board(offer)
    try:
        assert os.pread(new, 20, 0) == b""
        assert os.fstat(new).st_ino == board.number != first
        assert not os.get_inheritable(board.fd)
    finally:
        os.close(old)
        os.close(new)


def test_an_offer_of_another_host_or_of_something_else_is_left_alone(board: OfferedBoard) -> None:
    kernel, _, address = board.offer().rpartition(" ")
    assert open_board("") == -1
    assert open_board(f"{kernel}x {address}") == -1
    with open(os.devnull) as other:
        assert open_board(f"{kernel} /proc/{os.getpid()}/fd/{other.fileno()}") == -1
    assert open_board(f"{kernel} /proc/{os.getpid()}/fd/9999") == -1


def test_it_is_neither_offered_nor_opened_where_shared_memory_is_turned_off(
    board: OfferedBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer = board.offer()
    monkeypatch.setenv("UNISONO_SHARED_MEMORY", "0")
    assert board.offer() == ""
    assert open_board(offer) == -1
