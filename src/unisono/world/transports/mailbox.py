"""Small messages between ranks, each under a key that both ends know: whoever waits for one is given just that.

Two threads may use a mailbox at once: the one that runs collectives in their order, and one that waits for a small
all-reduce that was begun earlier. What one of them reads for the other is kept until that asks for it.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence

from unisono.world.transports.streams import InStream, LinkLost, OutStream, Patience, poll

__all__ = ["Key", "Mailbox"]

Key = tuple[int, int]  # number of the collective, and which of its messages

_HEAD = struct.Struct("<IIQ")
_ROOM = 64 << 10
_MOST_BYTES = 64 << 20  # that one message may have
_SHARED_S = 0.001  # that a thread sleeps at most while another one reads too


class Mailbox:
    """The messages of one rank; `open_out` and `open_in` give its streams to and from another one."""

    def __init__(self, open_out: Callable[[int], OutStream], open_in: Callable[[int], InStream]) -> None:
        self._open_out, self._open_in = open_out, open_in
        self._lock = threading.Lock()
        self._outs: dict[int, OutStream] = {}
        self._ins: dict[int, _Reader] = {}
        self._waiting = 0
        self.rounds = 0  # how often this rank has waited for others

    def send(self, to: Sequence[int], key: Key, *parts: bytes | memoryview) -> None:
        """Send a message to these ranks, or queue it: what cannot leave at once leaves with the next `take`."""
        message = b"".join((_HEAD.pack(sum(map(len, parts)), key[1], key[0]), *parts))
        with self._lock:
            for r in to:
                stream = self._outs.get(r)
                if stream is None:
                    stream = self._outs[r] = self._open_out(r)
                stream.push(message)
                stream.pump()

    def take(self, sources: Sequence[int], key: Key, patience: Patience) -> list[bytearray]:
        """The messages of these ranks under a key, once all are here, and all of mine have left."""
        with self._lock:
            self._waiting += 1
            self.rounds += 1
        try:
            while True:
                with self._lock:
                    moved = self._pump(sources, key)
                    if self._is_done(sources, key):
                        return [self._ins[r].came.pop(key) for r in sources]
                    if moved:
                        patience.moved()
                    if moved or patience.is_fresh():
                        continue
                    waits = self._list_waits(sources, key)
                patience.look()
                if self._waiting > 1:
                    poll(waits, _SHARED_S)
                else:
                    poll(waits)
        finally:
            with self._lock:
                self._waiting -= 1

    def has_come(self, sources: Sequence[int], key: Key) -> bool:
        """Whether `take` would return at once."""
        with self._lock:
            self._pump(sources, key)
            return self._is_done(sources, key)

    def _pump(self, sources: Sequence[int], key: Key) -> bool:
        moved = False
        for out in self._outs.values():
            if out.sent < out.queued:
                moved |= out.pump()
        for r in sources:
            reader = self._ins.get(r)
            if reader is None:
                reader = self._ins[r] = _Reader(self._open_in(r), r)
            if key not in reader.came:
                moved |= reader.pump()
        return moved

    def _is_done(self, sources: Sequence[int], key: Key) -> bool:
        for r in sources:  # no generators here: they are slower, and every message passes
            if key not in self._ins[r].came:
                return False
        return all([out.sent == out.queued for out in self._outs.values()])  # noqa: C419 - likewise

    def _list_waits(self, sources: Sequence[int], key: Key) -> list[tuple[int, int]]:
        waits = [self._ins[r].stream.wait_for() for r in sources if key not in self._ins[r].came]
        return waits + [out.wait_for() for out in self._outs.values() if out.sent < out.queued]


class _Reader:
    """Cuts the stream of a rank into messages."""

    def __init__(self, stream: InStream, rank: int) -> None:
        self.stream, self._rank = stream, rank
        self.came: dict[Key, bytearray] = {}
        self._room = memoryview(bytearray(_ROOM))
        self._rest = b""  # of a message whose head is not here yet
        self._key: Key = (0, 0)
        self._body = bytearray()  # of a message that comes in parts
        self._missing = 0

    def pump(self) -> bool:
        """Read what has come, up to some length; whether there was something. The rest of a long message is read to
        where it is kept."""
        if self._missing:
            count = self.stream.recv_into(memoryview(self._body)[-self._missing :])
            self._missing -= count
            if not self._missing:
                self.came[self._key] = self._body
            return count > 0
        count = self.stream.recv_into(self._room)
        data = self._room[:count] if not self._rest else memoryview(self._rest + bytes(self._room[:count]))
        at = 0
        while len(data) - at >= _HEAD.size and not self._missing:
            at = self._open(data, at)
        self._rest = bytes(data[at:])
        return count > 0

    def _open(self, data: memoryview, at: int) -> int:
        """Take the message that begins at a place; where it ends, or what is here of it."""
        length, part, number = _HEAD.unpack_from(data, at)
        if length > _MOST_BYTES:
            raise LinkLost(
                f"rank {self._rank} announced a message of {length} bytes; no rank sends more than {_MOST_BYTES}"
            )
        at += _HEAD.size
        body, self._key = bytearray(data[at : at + length]), (number, part)
        here = len(body)
        if here == length:
            self.came[self._key] = body
        else:
            body.extend(bytes(length - here))
            self._body, self._missing = body, length - here
        return at + here
