"""The channel between launcher and workers: only who knows the token is heard, and nothing is changed on the way."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import socket
import threading
from collections.abc import Iterator

import pytest

from unisono.launchers.runtime.channel import PIECE_BYTES, Channel, Frame, NotProven, Unreachable, connect

TOKEN = bytes(range(32))


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock


def served(listener: socket.socket, token: bytes = TOKEN) -> tuple[Channel, Channel]:
    """The two ends of one connection, the greeting done on the worker's side in a thread."""
    ends: list[Channel | OSError] = []

    def worker() -> None:
        try:
            ends.append(connect([listener.getsockname()], token, timeout_s=0.5))
        except OSError as error:
            ends.append(error)

    thread = threading.Thread(target=worker)
    thread.start()
    sock, _ = listener.accept()
    launcher = Channel(sock, TOKEN, server=True)
    launcher.flush()
    try:
        while not launcher.proven and launcher.receive() is not None:
            pass
    except NotProven:
        launcher.close()
        raise
    finally:
        listener.close()
        thread.join()
    (end,) = ends
    assert isinstance(end, Channel), end
    return launcher, end


def received(channel: Channel, count: int) -> list[Frame]:
    frames: list[Frame] = []
    while len(frames) < count:
        new = channel.receive()
        assert new is not None
        frames += new
    return frames


def test_frames_arrive_whole_in_order_and_long_ones_in_pieces(listener: socket.socket) -> None:
    launcher, worker = served(listener)
    long = bytes(range(256)) * (PIECE_BYTES // 256 * 2 + 3)

    def speak() -> None:
        for kind, body in (("o", b"one"), ("R", long), ("o", b"")):
            worker.send(kind, body)

    thread = threading.Thread(target=speak)
    thread.start()
    frames = received(launcher, 5)
    thread.join()
    assert [frame[0] for frame in frames] == ["o", "R", "R", "R", "o"]
    assert (frames[0][1], frames[-1][1]) == (b"one", b"")
    assert b"".join(frame[1] for frame in frames[1:4]) == long
    launcher.send_json(kind="exit", status=3)
    (frame,) = received(worker, 1)
    assert frame.json() == {"kind": "exit", "status": 3}
    worker.close()
    assert launcher.receive() is None
    launcher.close()


def test_a_worker_with_another_token_is_refused(listener: socket.socket) -> None:
    with pytest.raises(NotProven, match="does not know this run's token"):
        served(listener, token=b"x" * 32)


def test_a_launcher_with_another_token_is_not_obeyed(listener: socket.socket) -> None:
    """It cannot answer the worker's nonce, however it tries: here it echoes the worker's own code."""

    def impostor() -> None:
        sock, _ = listener.accept()
        with sock:
            sock.sendall(b"unisono channel 1\n" + bytes(32))
            got = sock.recv(64, socket.MSG_WAITALL)
            sock.sendall(got[32:])
            listener.close()

    thread = threading.Thread(target=impostor)
    thread.start()
    with pytest.raises(Unreachable, match=r"does not know this run's token|refused"):
        connect([listener.getsockname()], TOKEN, timeout_s=0.1)
    thread.join()


def test_what_else_may_listen_there_is_not_waited_for(listener: socket.socket) -> None:
    def other() -> None:
        sock, _ = listener.accept()
        with sock, contextlib.suppress(ConnectionResetError):
            sock.sendall(b"220 mail.example.org ESMTP\r\n")
            sock.recv(100)

    thread = threading.Thread(target=other)
    thread.start()
    address = listener.getsockname()
    with pytest.raises(
        Unreachable, match=rf"cannot reach the launcher. Tried: 127.0.0.1:{address[1]} \(something else"
    ):
        connect([address], TOKEN, timeout_s=0.0)
    thread.join()


@pytest.mark.parametrize("place", [0, 1, 5, 36, 40, -1])
def test_a_changed_byte_is_noticed(listener: socket.socket, place: int) -> None:
    launcher, worker = served(listener)
    frame = _captured(worker, "P", b"do this and that")
    frame[place] ^= 1
    worker.sock.sendall(frame + bytes(64))  # so that a longer length is filled
    with pytest.raises(NotProven):
        received(launcher, 99)
    launcher.close()
    worker.close()


def test_a_frame_that_is_played_again_is_noticed(listener: socket.socket) -> None:
    launcher, worker = served(listener)
    frame = _captured(worker, "P", b"once")
    worker.sock.sendall(frame)
    assert received(launcher, 1) == [("P", b"once")]
    worker.sock.sendall(frame)
    with pytest.raises(NotProven, match="changed"):
        received(launcher, 1)
    launcher.close()
    worker.close()


def _captured(channel: Channel, kind: str, body: bytes) -> bytearray:
    """The bytes that `send` would put on the wire."""
    sock, (ours, theirs) = channel.sock, socket.socketpair()
    channel.sock = ours
    channel.send(kind, body)
    channel.sock = sock
    with ours, theirs:
        return bytearray(theirs.recv(1 << 16))


def test_the_token_itself_never_travels(listener: socket.socket) -> None:
    """What the worker sends to an unknown launcher is its nonce and a code."""
    thread = threading.Thread(target=lambda: _try(listener.getsockname()))
    thread.start()
    sock, _ = listener.accept()
    with sock:
        sock.sendall(b"unisono channel 1\n" + b"n" * 32)
        got = sock.recv(1000)
    listener.close()
    thread.join()
    assert got[32:] == hmac.digest(TOKEN, b"worker" + b"n" * 32 + got[:32], hashlib.sha256)


def _try(address: tuple[str, int]) -> None:
    with pytest.raises(Unreachable):
        connect([address], TOKEN, timeout_s=0.0)
