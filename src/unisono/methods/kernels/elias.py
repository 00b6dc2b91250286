"""Elias's gamma code for quantised numbers that are mostly zero: gaps between those that are not, signs, levels.

A whole number v >= 1 of l + 1 binary digits is l zeros, a one, and its last l digits (Elias 1975). Here the zeros
and ones of all codes come first, then the signs, then all digits, lowest first: as many bits as code by code, and
both directions are a few operations on arrays. The work is the CPU's, for tensors of every device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]
_HEAD = 8  # bytes: how many numbers are not zero, and how many bits say the lengths


def encode(codes: Tensor, bits: int) -> Tensor:
    """Codes as `quantise.unpack` gives them, as a line of bytes."""
    given = codes.cpu().numpy()
    negative = given >> (bits - 1) != 0
    level = np.where(negative, (1 << bits) - 1 - given, given)
    where = np.flatnonzero(level)
    values = np.concatenate([np.diff(where, prepend=-1), level[where].astype(np.int64)])
    length = np.frexp(values.astype(np.float64))[1] - 1  # digits after the first
    ends = np.cumsum(length + 1)
    total = int(ends[-1]) if len(ends) else 0
    lengths = np.zeros(total, np.uint8)
    lengths[ends - 1] = 1
    digits = np.zeros(int(length.sum()), np.uint8)
    first = np.cumsum(length) - length
    for k in range(int(length.max(initial=0))):
        longer = np.flatnonzero(length > k)
        digits[first[longer] + k] = values[longer] >> k & 1
    head = np.array([len(where), total], np.uint32).view(np.uint8)
    packed = [np.packbits(part, bitorder="little") for part in (lengths, negative[where], digits)]
    return torch.from_numpy(np.concatenate([head, *packed])).to(codes.device)


def decode(data: Tensor, n: int, bits: int) -> Tensor:
    """The n codes in a line of bytes."""
    message = data.cpu().numpy()
    count, total = (int(x) for x in message[:_HEAD].copy().view(np.uint32))
    lengths, at = _bits(message, _HEAD, total)
    ends = np.flatnonzero(lengths)
    if len(ends) != 2 * count:
        raise ValueError(
            f"expected an Elias code with {2 * count} lengths, got {len(ends)}: the message is damaged, "
            "or was not written by elias.encode"
        )
    length = np.diff(ends, prepend=-1) - 1
    negative, at = _bits(message, at, count)
    digits, _ = _bits(message, at, int(length.sum()))
    values = np.left_shift(np.int64(1), length)
    first = np.cumsum(length) - length
    for k in range(int(length.max(initial=0))):
        longer = np.flatnonzero(length > k)
        values[longer] |= digits[first[longer] + k].astype(np.int64) << k
    codes = np.zeros(n, np.uint8)
    level = values[count:]
    codes[np.cumsum(values[:count]) - 1] = np.where(negative, (1 << bits) - 1 - level, level)
    return torch.from_numpy(codes).to(data.device)


def _bits(message: Array, at: int, count: int) -> tuple[Array, int]:
    """`count` bits from byte `at` on, and where the next line of bits begins."""
    end = at + -(-count // 8)
    return np.unpackbits(message[at:end], count=count, bitorder="little"), end
