"""What a rank says of its operation with every message, so that ranks which do different things are told."""

from __future__ import annotations

import struct
from typing import NamedTuple

from unisono.world.transports import CallDescription, CallSignature, Mismatch

__all__ = ["ALIGNED", "Sign", "make_sign", "open_message"]

_HEAD = struct.Struct("<IIIH")  # what, where, rank, length of the text
_PLACE = b"\x1f"  # in the text, before where the call stands
_MOST_TEXT = 1000
ALIGNED = 16  # bytes: where numbers of any dtype may lie that are used as they came


class Sign(NamedTuple):
    """What a rank is about to do; `packed` is put before what its messages carry."""

    packed: bytes
    what: int
    where: int
    rank: int
    text: bytes
    signature: CallSignature | None = None

    def describe(self, rank: int) -> CallDescription:
        """The call in words; `rank`: whose it is, if the sign does not say so."""
        text, _, place = self.text.decode("utf-8", "replace").partition(_PLACE.decode())
        line = place.partition(" ")[0]
        if not self.what:
            return CallDescription(rank, 0, 0, text, "")
        text = f"{text} at {place}" if line else f"{text},{place}"
        return CallDescription(self.rank, self.what, self.where, text, line)


def make_sign(operation: str, sequence: int, signature: CallSignature | None, rank: int) -> Sign:
    """The sign of an operation, such as "all_reduce sum of 3 x torch.float32"; `sequence`: its number, 0 if unknown."""
    text = f"{operation} as collective {sequence}" if sequence else operation
    encoded = text.encode()[:_MOST_TEXT]
    numbers = 0, 0, rank
    if signature is not None:
        encoded += _PLACE + signature.place.encode()[:_MOST_TEXT]
        numbers = signature.what, signature.where, signature.rank
    packed = _HEAD.pack(*numbers, len(encoded)) + encoded
    return Sign(packed.ljust(_round_up(len(packed)), b"\0"), *numbers, encoded, signature)


def _round_up(length: int) -> int:
    return -(-length // ALIGNED) * ALIGNED


def open_message(mine: Sign, me: int, rank: int, body: bytearray) -> memoryview:
    """What a message of `rank` carries behind its sign; Mismatch if that rank is about to do something else than I."""
    what, where, number, length = _HEAD.unpack_from(body)
    text = bytes(body[_HEAD.size : _HEAD.size + length])

    def describe_both() -> list[CallDescription]:
        return [mine.describe(me), Sign(b"", what, where, number, text).describe(rank)]

    if what != mine.what or text.partition(_PLACE)[0] != mine.text.partition(_PLACE)[0]:
        calls = describe_both()
        both = " and ".join(f"rank {call.rank} has {call.text}" for call in calls[::-1])
        name = mine.text.partition(b" ")[0].decode()
        raise Mismatch(f"{name}: the ranks disagree; {both}", calls=[call for call in calls if call.what])
    if mine.signature is not None:
        mine.signature.check_places([mine.where, where], describe_both)
    return memoryview(body)[_round_up(_HEAD.size + length) :]
