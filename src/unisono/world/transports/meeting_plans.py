"""What the ranks that meet on a page are about to do: told with the meeting, and compared."""

from __future__ import annotations

import struct
from zlib import crc32

import torch

from unisono.world.transports import DTYPE_CODES, DTYPES, Mismatch, Op
from unisono.world.transports.meeting_page import ITEM_LIMIT, OP_CODES, MeetingPage

__all__ = ["EXTRA_LIMIT", "check_signatures", "meet_with_plan"]

_HEAD = struct.Struct("BBHqiq")  # operation, dtype, which collective, elements, where they lie (two numbers)
_PLAN = b"plan"  # how an item begins: what its rank came to do
EXTRA_LIMIT = ITEM_LIMIT - len(_PLAN) - _HEAD.size
_NONE = _PLAN + _HEAD.pack(255, 0, 0, 0, -1, 0)  # of a rank that came for something else


def meet_with_plan(
    page: MeetingPage,
    what: str,
    op: Op,
    dtype: torch.dtype,
    count: int,
    place: tuple[int, int] = (-1, 0),
    *,
    same: bool = True,
    extra: bytes = b"",
) -> tuple[list[tuple[int, ...]], list[bytes], float]:
    """Meet, and compare what each rank is about to do. `same`: with as many elements on each; `extra`: what else the
    others are told.

    Returns every rank's (operation, dtype, collective, elements, place), what else it told, and when the last came.
    """
    kind = crc32(what.encode()) & 0xFFFF
    page.arrive(_PLAN + _HEAD.pack(OP_CODES[op], DTYPE_CODES[dtype], kind, count, *place) + extra)
    last = page.await_all(what)
    items = [item if item.startswith(_PLAN) else _NONE for item in page.read_items()]
    heads = [_HEAD.unpack_from(item, len(_PLAN)) for item in items]
    keep = 4 if same else 3
    numbers = page.read_sequences()
    if any(head[:keep] != heads[0][:keep] for head in heads) or len(set(numbers)) > 1:
        ops = list(OP_CODES)
        each = [
            f"rank {r} has {ops[h[0]] if h[0] < len(ops) else 'another operation'} of {h[3]} x {DTYPES[h[1]]}"
            + ("" if h[2] == kind else " in another collective")
            + ("" if len(set(numbers)) == 1 else f" as collective {numbers[r]}")
            for r, h in enumerate(heads)
        ]
        calls = page.exchange_descriptions(page.signature)
        raise Mismatch(f"{what}: the ranks disagree; " + "; ".join(each), calls=calls)
    check_signatures(page, what)
    return heads, [item[len(_PLAN) + _HEAD.size :] for item in items], last


def check_signatures(page: MeetingPage, what: str) -> None:
    """Compare what the ranks of the meeting that just ended called, beyond its size, and where."""
    signature = page.signature
    if signature is None:
        return
    whats, wheres = page.read_signatures()
    if whats.count(signature.what) != page.size and 0 not in whats:
        calls = page.exchange_descriptions(signature)
        each = "; ".join(f"rank {call.rank} has {call.text}" for call in calls)
        raise Mismatch(f"{what}: the ranks disagree; {each}", calls=calls)
    signature.check_places(wheres, lambda: page.exchange_descriptions(signature))
