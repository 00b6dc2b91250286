"""Encrypted connections after the handshake: what is sent comes out as it was, and what was changed does not."""

from __future__ import annotations

import contextlib
import hashlib
import random
import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.distributed import HashStore

from unisono.world.transports import sealing
from unisono.world.transports.sealing import Sealed
from unisono.world.transports.sockets import SocketTransport

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(not sealing.is_available(), reason="this Python has libcrypto built in"),
]
KEYS = b"k" * 16, b"q" * 16


@pytest.fixture
def ends() -> Iterator[tuple[Sealed, Sealed]]:
    """Both ends of a connection with little room."""
    near, far = socket.socketpair()
    for sock in (near, far):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    with Sealed(near, *KEYS) as one, Sealed(far, *KEYS[::-1]) as other:
        yield one, other


def pass_on(source: Sealed, target: Sealed, data: bytes, rooms: Iterator[int]) -> bytes:
    """Send all of `data`, as a stream does: what could not leave is given again; received in views of these sizes."""
    sent, came = 0, bytearray()
    while len(came) < len(data):
        with contextlib.suppress(BlockingIOError):
            while sent < len(data):
                sent += source.send(memoryview(data)[sent : sent + 2_500_000])
        with contextlib.suppress(BlockingIOError):
            while len(came) < len(data):
                room = bytearray(next(rooms))
                came += room[: target.recv_into(memoryview(room))]
    return bytes(came)


@pytest.mark.parametrize("size", [1, 8, 64, 65, 4096, 65_537, 1_000_000, 2 << 20, 4_500_001])
def test_what_is_sent_comes_out_as_it_was_in_views_of_any_size(ends: tuple[Sealed, Sealed], size: int) -> None:
    rng = random.Random(size)
    for source, target in (ends, ends[::-1]):
        data = rng.randbytes(size)
        rooms = iter(lambda: rng.choice([1, 7, 4096, 300_000, 2_000_000]) if size < 1e5 else 300_000, None)
        assert pass_on(source, target, data, rooms) == data


def test_keys_change_on_both_ends_together(ends: tuple[Sealed, Sealed], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealing, "_FRAMES_PER_KEY", 3)
    before = ends[0]._encrypt._key
    for number in range(20):
        assert pass_on(*ends, bytes([number]) * 50, iter(lambda: 100, None)) == bytes([number]) * 50
    assert ends[0]._encrypt._key == ends[1]._decrypt._key != before


def test_what_could_not_leave_is_sent_before_anything_else(ends: tuple[Sealed, Sealed]) -> None:
    source, target = ends
    stuck = b"x" * 30_000
    with contextlib.suppress(BlockingIOError):
        while True:
            source.send(stuck)
    with pytest.raises(BlockingIOError):
        source.send(stuck)
    came = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            came += len(target.recv(30_000))
    assert source.send(stuck) == len(stuck)
    assert source.send(b"a count of 8"[:8]) == 8
    rest = b""
    with contextlib.suppress(BlockingIOError):
        while True:
            rest += target.recv(60_000)
    assert (came + len(rest)) % 30_000 == 8
    assert rest.endswith(b"xa count ")
    assert not target.has_more


@pytest.mark.parametrize("where", [0, 3, 4, 50, -1])
def test_a_changed_byte_is_noticed(where: int) -> None:
    sent = capture(b"gradients " * 10)[0]
    sent[where] ^= 1
    if where == 0:  # of the length: one byte more never comes
        assert read(bytes(sent)) == []
        return
    with pytest.raises(ConnectionResetError, match="was announced" if where == 3 else "changed on its way"):
        read(bytes(sent))


def test_frames_that_come_twice_or_in_another_order_are_noticed() -> None:
    first, second = capture(b"first", b"second")
    assert read(bytes(first + second)) == [b"first", b"second"]
    for order in (first + first, second + first):
        with pytest.raises(ConnectionResetError, match="changed on its way"):
            read(bytes(order))


def capture(*messages: bytes) -> list[bytearray]:
    """The frames of some messages, as they are on the wire."""
    near, far = socket.socketpair()
    with Sealed(near, *KEYS) as source, far:
        found = []
        for message in messages:
            source.send(message)
            found.append(bytearray(far.recv(1 << 16)))
        return found


def read(wire: bytes) -> list[bytes]:
    """The messages of bytes on the wire."""
    near, far = socket.socketpair()
    with Sealed(near, *KEYS[::-1]) as target, far:
        far.sendall(wire)
        far.shutdown(socket.SHUT_WR)
        found = []
        while message := target.recv(1 << 16):
            found.append(message)
        return found


def test_the_cipher_is_the_standards() -> None:
    """Test case 3 of McGrew and Viega's paper on GCM."""
    cipher = sealing._Cipher(bytes.fromhex("feffe9928665731c6d6a8f9467308308"), encrypts=True)
    cipher._number = int.from_bytes(bytes.fromhex("cafebabefacedbaddecaf888"), "little")
    text = bytes.fromhex(
        "d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a72"
        "1c3c0c95956809532fcf0e2449a6b525b16aedf5aa0de657ba637b391aafd255"
    )
    out = numpy.zeros(len(text) + 16, numpy.uint8)
    assert cipher.run(out, numpy.frombuffer(text, numpy.uint8), len(text))
    assert out.tobytes().hex() == (
        "42831ec2217774244b7221b784d0d49ce3aa212f2c02a4e035c17e2329aca12e"
        "21d514b25466931c7d8f6a5aac84aa051ba30b396a0aac973d58e091473f5985"
        "4d5c2af327cd64a62cf35abd2ba6fab4"
    )


@pytest.mark.parametrize("kinds", ["both", "one", "none"])
def test_ranks_seal_if_both_ends_can_and_stay_with_tls_otherwise(kinds: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An end that cannot is a thread whose name says so."""
    library, can = sealing._load(), {"both": "01", "one": "0", "none": ""}[kinds]
    monkeypatch.setattr(
        sealing, "_load", lambda: library if threading.current_thread().name in ("sealed", "unisono door") else None
    )
    monkeypatch.setenv("UNISONO_ENCRYPT", "1")
    store, found = HashStore(), [None] * 2
    digests: list[Any] = [None] * 2

    def run(rank: int) -> None:
        transport = SocketTransport(store, rank, 2, timeout_s=30)
        x = torch.randn(1_000_000, generator=torch.Generator().manual_seed(rank))
        transport.all_reduce([x], "sum")
        transport.all_reduce([y := torch.ones(3)], "sum")
        found[rank] = {type(stream.wire).__name__ for stream in transport._links._outs.values()}  # type: ignore[call-overload]
        digests[rank] = hashlib.sha256(x.numpy().tobytes() + y.numpy().tobytes()).digest()
        transport.close()

    names = ["sealed" if str(rank) in can else "plain" for rank in range(2)]
    threads = [threading.Thread(target=run, args=(r,), name=names[r]) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wanted = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0))
    wanted += torch.randn(1_000_000, generator=torch.Generator().manual_seed(1))
    assert digests == [hashlib.sha256(wanted.numpy().tobytes() + torch.full((3,), 2.0).numpy().tobytes()).digest()] * 2
    assert found == [{"Sealed"} if name == "sealed" else {"Encrypted"} for name in names]
