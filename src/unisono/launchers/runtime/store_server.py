"""The store in which ranks meet: keys and values in memory, for those who prove that they know the run's secret.

One thread, no torch, no pickle. A question about a key that is not there yet is answered when it is: nobody asks twice.
What strangers can use up is limited (channel.py), and so are keys and values.

A message is a letter and some strings of bytes, of which nothing is evaluated or unpickled. One that is longer than a
frame comes in several; how long it will be is said in its first, so one that is too long is refused before it is kept.

| question | parts | answer |
|---|---|---|
| S | key, value | |
| G | keys | their values, once all are there |
| W | keys | once all are there |
| C | keys | "1" where all are there, else "0" |
| A | key, number | the sum |
| X | key, expected, desired | the value that is there now |
| D | key | "1" where it was there, else "0" |
| N | | how many keys there are |
| K | | all keys |
| P | key, value | (put behind what is there) |
| M | key, value, key, value... | |
| U | key, value | (put at the end of the queue) |
| O | key, "1" to wait | the first of the queue, or nothing |
| L | key | how long the queue is |
"""

from __future__ import annotations

import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from unisono.launchers.runtime.channel import Channel, ChannelServer, Frame, NotProven
from unisono.launchers.runtime.local_channel import EventLoop

__all__ = [
    "ANSWER",
    "LONGEST_KEY",
    "LONGEST_MESSAGE",
    "PROBLEM",
    "Message",
    "MessageReader",
    "StoreServer",
    "pack_parts",
    "send_message",
]

LONGEST_KEY = 4096
LONGEST_MESSAGE = 32 << 20
ANSWER, PROBLEM = "=", "!"
_LENGTH = struct.Struct("<I")


class Message(NamedTuple):
    """`kind` is a letter of store_server.py's list, ANSWER, or PROBLEM with a text."""

    kind: str
    parts: list[bytes]


def send_message(channel: Channel, kind: str, parts: Sequence[bytes] = ()) -> None:
    """Queue a message, and send what can be sent now."""
    channel.send(kind, pack_parts(parts))


def pack_parts(parts: Sequence[bytes]) -> bytes:
    """The contents of the frames of a message; ValueError if it is too long."""
    body = b"".join(_LENGTH.pack(len(part)) + part for part in parts)
    if len(body) > LONGEST_MESSAGE:
        raise ValueError(f"a message of {len(body)} bytes to a store; expected at most {LONGEST_MESSAGE}")
    return _LENGTH.pack(len(body)) + body


class MessageReader:
    """Puts the frames of one connection together."""

    def __init__(self) -> None:
        self._kind, self._left, self._body = "", 0, bytearray()

    def read(self, frames: Iterable[Frame]) -> Iterator[Message]:
        """The messages that these frames complete."""
        for kind, piece in frames:
            if not self._left:
                if len(piece) < _LENGTH.size:
                    raise NotProven("a message without a length")
                (length,) = _LENGTH.unpack_from(piece)
                if length > LONGEST_MESSAGE:
                    raise NotProven(f"a message of {length} bytes")
                self._kind, self._left, self._body = kind, length, bytearray()
                piece = piece[_LENGTH.size :]
            if kind != self._kind or len(piece) > self._left:
                raise NotProven("a message whose frames do not belong together")
            self._left -= len(piece)
            self._body += piece
            if not self._left:
                yield Message(kind, list(_split(bytes(self._body))))


def _split(body: bytes) -> Iterator[bytes]:
    place = 0
    while place < len(body):
        if len(body) - place < _LENGTH.size:
            raise NotProven("a part without a length")
        (length,) = _LENGTH.unpack_from(body, place)
        place += _LENGTH.size
        if length > len(body) - place:
            raise NotProven("a part that is longer than its message")
        yield body[place : place + length]
        place += length


# The server ----------------------------------------------------------------------------------------------------------


MOST_BYTES = 512 << 20  # of all keys and values
MOST_KEYS = 1 << 20
_MOST_UNREAD = 64 << 20  # bytes of answers that a client has not taken


class _Client:
    """One connection, and what it waits for: only one question at a time."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.reader = MessageReader()
        self.missing: set[bytes] = set()
        self.resume: Callable[[], None] | None = None  # asks again, once nothing is missing


class StoreServer:
    """Serves from `start` to `close`; connections made before `start` are served then."""

    def __init__(self, listener: socket.socket, secret: bytes, *, is_encrypted: bool = False) -> None:
        self.listener = listener
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self._values: dict[bytes, bytes] = {}
        self._queues: dict[bytes, deque[bytes]] = {}
        self._bytes = 0
        self._waiting: dict[bytes, dict[_Client, None]] = {}  # by the key that they wait for, in their order
        self._clients: dict[Channel, _Client] = {}
        self._loop = EventLoop()
        self._server = ChannelServer(
            self._loop,
            listener,
            secret,
            self._on_frames,
            self._on_lost,
            most_unread=_MOST_UNREAD,
            is_encrypted=is_encrypted,
            name="the store of this run",
        )
        self._is_closing = False
        self._thread = threading.Thread(target=self._serve, name="unisono-store", daemon=True)
        self._questions: dict[str, tuple[int, Callable[..., Sequence[bytes] | None]]] = {
            "S": (2, self._keep),
            "A": (2, self._add),
            "X": (3, self._compare_set),
            "D": (1, self._delete),
            "N": (0, lambda: [b"%d" % len(self._values)]),
            "K": (0, lambda: list(self._values)),
            "P": (2, lambda key, value: self._keep(key, self._values.get(key, b"") + value)),
            "U": (2, self._push),
            "L": (1, lambda key: [b"%d" % len(self._queues.get(key, ()))]),
        }

    @property
    def serving(self) -> bool:
        """Whether it was started."""
        return self._thread.ident is not None

    def start(self) -> None:
        """Serve, in a thread of this process."""
        self._server.start()
        self._thread.start()

    def close(self) -> None:
        """End the store: every connection is closed."""
        self._is_closing = True
        if self.serving:
            self._loop.wake()
            self._thread.join()
        self._server.close()
        self._loop.close()

    def _serve(self) -> None:
        while not self._is_closing:
            self._loop.pump(self._server.drop_late())

    # -- connections ---------------------------------------------------------------------------------------------------

    def _on_frames(self, channel: Channel, frames: list[Frame]) -> None:
        client = self._clients.setdefault(channel, _Client(channel))
        for message in client.reader.read(frames):
            if client.resume is not None:
                raise ConnectionError("a question before the last was answered")
            self._take(client, message)

    def _on_lost(self, channel: Channel) -> None:
        client = self._clients.pop(channel, None)
        if client is not None:
            self._stop_waiting(client)

    # -- questions -----------------------------------------------------------------------------------------------------

    def _take(self, client: _Client, message: Message) -> None:
        """Answer a question, or remember it until the keys are there that it needs."""
        client.resume = None
        try:
            if message.kind in "GWO":
                answer = self._answer_when_there(client, message)
            elif message.kind == "C":
                answer = [_digit(all(key in self._values for key in message.parts))]
            elif message.kind == "M":
                if len(message.parts) % 2:
                    raise ValueError("a key without a value")
                for key, value in zip(message.parts[::2], message.parts[1::2], strict=True):
                    self._keep(key, value)
                answer = []
            else:
                if message.kind not in self._questions:
                    raise ValueError(f"this store knows no question {message.kind!r}")
                count, reply = self._questions[message.kind]
                if len(message.parts) != count:
                    raise ValueError(f"a question {message.kind} with {len(message.parts)} parts; expected {count}")
                answer = reply(*message.parts) or []
        except ValueError as error:
            self._say(client, PROBLEM, [str(error).encode()])
        else:
            if answer is not None:
                self._say(client, ANSWER, answer)

    def _answer_when_there(self, client: _Client, message: Message) -> Sequence[bytes] | None:
        """The answer to a question that may have to wait for keys; None if the client waits."""
        keys = message.parts if message.kind != "O" else message.parts[:1]
        there: Iterable[bytes] = self._values if message.kind != "O" else self._queues
        missing = {key for key in keys if key not in there}
        if missing and message.kind == "O" and message.parts[1:] != [b"1"]:
            return []
        if missing:
            client.missing, client.resume = missing, lambda: self._take(client, message)
            for key in missing:
                self._waiting.setdefault(_name(message.kind, key), {})[client] = None
            return None
        if message.kind == "O":
            return [self._pop(keys[0])]
        return [self._values[key] for key in keys] if message.kind == "G" else []

    def _say(self, client: _Client, kind: str, parts: Sequence[bytes]) -> None:
        try:
            body = pack_parts(parts)
        except ValueError as error:
            kind, body = PROBLEM, pack_parts([str(error).encode()])
        self._server.send_frame(client.channel, kind, body)

    def _stop_waiting(self, client: _Client) -> None:
        for key in client.missing:
            for name in (_name("G", key), _name("O", key)):
                waiting = self._waiting.get(name, {})
                waiting.pop(client, None)
                if not waiting:
                    self._waiting.pop(name, None)
        client.missing, client.resume = set(), None

    def _wake(self, key: bytes, kind: str) -> None:
        """A key has come: ask the questions again that lacked only this one."""
        for client in list(self._waiting.get(_name(kind, key), {})):
            if client.missing != {key}:
                client.missing.discard(key)
                self._waiting[_name(kind, key)].pop(client)
                continue
            resume = client.resume
            self._stop_waiting(client)
            assert resume is not None
            resume()
        if not self._waiting.get(_name(kind, key), {None: None}):
            del self._waiting[_name(kind, key)]

    # -- values --------------------------------------------------------------------------------------------------------

    def _keep(self, key: bytes, value: bytes) -> None:
        before = self._values.get(key)
        self._count_bytes(key, len(value) - (len(before) if before is not None else -len(key)), before is None)
        self._values[key] = value
        if before is None:
            self._wake(key, "G")

    def _count_bytes(self, key: bytes, more: int, is_new: bool) -> None:
        if len(key) > LONGEST_KEY:
            raise ValueError(f"a key of {len(key)} bytes; expected at most {LONGEST_KEY}")
        keys = len(self._values) + len(self._queues) + is_new
        if self._bytes + more > MOST_BYTES or keys > MOST_KEYS:
            raise ValueError(f"the store is full: it holds at most {MOST_BYTES} bytes and {MOST_KEYS} keys")
        self._bytes += more

    def _add(self, key: bytes, number: bytes) -> Sequence[bytes]:
        there = self._values.get(key, b"0")
        if len(there) > 20 or len(number) > 20:
            raise ValueError(f"{_show(key)} holds no number of 64 bits")
        try:
            total = b"%d" % (int(there) + int(number))
        except ValueError:
            raise ValueError(f"{_show(key)} holds {there[:20]!r}, to which no number can be added") from None
        self._keep(key, total)
        return [total]

    def _compare_set(self, key: bytes, expected: bytes, desired: bytes) -> Sequence[bytes]:
        there = self._values.get(key)
        if there is None and expected:
            return [expected]  # as torch's
        if there is None or there == expected:
            self._keep(key, desired)
        return [self._values[key]]

    def _delete(self, key: bytes) -> Sequence[bytes]:
        value = self._values.pop(key, None)
        if value is not None:
            self._bytes -= len(key) + len(value)
        return [_digit(value is not None)]

    def _push(self, key: bytes, value: bytes) -> None:
        queue = self._queues.get(key)
        self._count_bytes(key, len(value) + (len(key) if queue is None else 0), queue is None)
        if queue is None:
            queue = self._queues[key] = deque()
        queue.append(value)
        self._wake(key, "O")

    def _pop(self, key: bytes) -> bytes:
        queue = self._queues[key]
        value = queue.popleft()
        self._bytes -= len(value)
        if not queue:
            del self._queues[key]
            self._bytes -= len(key)
        return value


def _name(kind: str, key: bytes) -> bytes:
    """The key of `_waiting`: values and queues are told apart."""
    return (b"queue " if kind == "O" else b"value ") + key


def _digit(yes: bool) -> bytes:
    return b"1" if yes else b"0"


def _show(key: bytes) -> str:
    return repr(key[:60].decode("utf-8", "replace"))
