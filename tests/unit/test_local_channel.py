"""Connections between processes of one host, and the loop that reads them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from unisono.launchers.runtime.local_channel import PACKET_BYTES, EventLoop, LocalChannel


@pytest.fixture
def ends() -> Iterator[tuple[LocalChannel, LocalChannel]]:
    ours, theirs = LocalChannel.pair()
    with ours, theirs:
        yield ours, theirs


def count_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("size", [0, PACKET_BYTES - 20, PACKET_BYTES, 5_000_000])
def test_messages_of_any_length_arrive_in_order_with_their_files(
    ends: tuple[LocalChannel, LocalChannel], tmp_path: Path, size: int
) -> None:
    ours, theirs = ends
    with open(tmp_path / "given", "w") as given:
        ours.send({"text": "x" * size}, [given.fileno()])
        ours.send({"text": "last"})
        message, files = theirs.receive()
        assert message == {"text": "x" * size}
        assert [os.fstat(fd).st_ino for fd in files] == [os.fstat(given.fileno()).st_ino]
        assert not any(os.get_inheritable(fd) for fd in files)
    for fd in files:
        os.close(fd)
    assert theirs.receive() == ({"text": "last"}, [])


@pytest.mark.parametrize("data", [b"what?", b"[]", b"[" * 60_000, b"\xff\xfe", b"+"])
def test_nonsense_is_a_value_error_and_its_files_are_closed(
    ends: tuple[LocalChannel, LocalChannel], data: bytes
) -> None:
    ours, theirs = ends
    before = count_files()
    with ends[0].sock.dup() as given:  # a message in a file that cannot be read so
        socket.send_fds(ours.sock, [data], [given.fileno(), given.fileno()])
    with pytest.raises(ValueError, match=r"JSON object|Expecting value|decode"):
        theirs.receive()
    assert count_files() == before
    ours.send({"still": "there"})
    assert theirs.receive()[0] == {"still": "there"}


def test_an_end_that_is_gone_is_no_message_and_one_that_is_silent_is_told_from_it(
    ends: tuple[LocalChannel, LocalChannel],
) -> None:
    ours, theirs = ends
    theirs.set_timeout(0)
    with pytest.raises(BlockingIOError):
        theirs.receive()
    theirs.set_timeout(0.01)
    with pytest.raises(TimeoutError):
        theirs.receive()
    ours.close()
    assert theirs.receive() == (None, [])


def test_the_kernel_says_who_is_at_the_other_end(ends: tuple[LocalChannel, LocalChannel]) -> None:
    assert ends[0].read_peer() == (os.getpid(), os.getuid())
    assert ends[0].is_of_this_user()


def test_a_source_that_another_call_has_dropped_is_not_called(ends: tuple[LocalChannel, LocalChannel]) -> None:
    loop, called = EventLoop(), []

    def take(mine: LocalChannel, other: LocalChannel) -> None:
        called.append(mine)
        loop.forget(other)

    for mine, other in (ends, ends[::-1]):
        loop.watch(mine, lambda mine=mine, other=other: take(mine, other))
        other.send({})
    loop.pump(1.0)
    assert len(called) == 1
    loop.forget(ends[0])
    loop.forget(ends[0])
    loop.close()


def test_a_loop_that_waits_can_be_woken() -> None:
    loop = EventLoop()
    loop.wake()
    loop.pump(None)
    loop.close()
    loop.wake()
