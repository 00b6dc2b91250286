"""What workers and a store say to each other over a channel: a letter, and some strings of bytes.

Nothing here is evaluated or unpickled. A message longer than a frame comes in several; how long it will be is said in
its first, so one that is too long is refused before it is kept.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from unisono.launchers.runtime.channel import Channel, Frame, NotProven

__all__ = [
    "ANSWER",
    "LONGEST_KEY",
    "LONGEST_MESSAGE",
    "PROBLEM",
    "Message",
    "MessageReader",
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
