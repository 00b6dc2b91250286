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

    def send(self, to: int, key: Key, body: bytes) -> None:
        """Send a message, or queue it: what cannot leave at once leaves with the next `take`."""
        with self._lock:
            stream = self._outs.get(to)
            if stream is None:
                stream = self._outs[to] = self._open_out(to)
            stream.push(_HEAD.pack(len(body), key[1], key[0]) + body)
            stream.pump()

    def take(self, sources: Sequence[int], key: Key, patience: Patience) -> list[bytes]:
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
                    waits = self._list_waits(sources, key)
                if moved:
                    patience.moved()
                    continue
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
                reader = self._ins[r] = _Reader(self._open_in(r))
            if key not in reader.came:
                moved |= reader.pump()
        return moved

    def _is_done(self, sources: Sequence[int], key: Key) -> bool:
        return all(key in self._ins[r].came for r in sources) and all(
            out.sent == out.queued for out in self._outs.values()
        )

    def _list_waits(self, sources: Sequence[int], key: Key) -> list[tuple[int, int]]:
        waits = [self._ins[r].stream.wait_for() for r in sources if key not in self._ins[r].came]
        return waits + [out.wait_for() for out in self._outs.values() if out.sent < out.queued]


class _Reader:
    """Cuts a stream into messages."""

    def __init__(self, stream: InStream) -> None:
        self.stream = stream
        self.came: dict[Key, bytes] = {}
        self._room = memoryview(bytearray(_ROOM))
        self._rest = bytearray()

    def pump(self) -> bool:
        count = self.stream.recv_into(self._room)
        if not count:
            return False
        self._rest += self._room[:count]
        at = 0
        while len(self._rest) - at >= _HEAD.size:
            length, part, number = _HEAD.unpack_from(self._rest, at)
            if length > _MOST_BYTES:
                raise LinkLost(
                    f"a message of {length} bytes was announced, of which no rank sends more than {_MOST_BYTES}"
                )
            end = at + _HEAD.size + length
            if len(self._rest) < end:
                break
            self.came[number, part] = bytes(self._rest[at + _HEAD.size : end])
            at = end
        if at:
            del self._rest[:at]
        return True
