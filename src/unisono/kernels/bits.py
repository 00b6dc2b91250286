"""Eight truth values in a byte, by arithmetic on whole words: the same on CPU and CUDA."""

from __future__ import annotations

import torch
from torch import Tensor

_SPREAD = 0x0101010101010101
_GATHER = 0x0102040810204080  # times eight bytes of 0 or 1: they meet in the top byte
_PICK = 0x8040201008040201 - (1 << 64)  # bit 0 of the lowest byte, bit 1 of the next, ...


def pack(truths: Tensor) -> Tensor:
    """A line of bools, a multiple of 8 long, as bytes; the first is a byte's low bit."""
    words = truths.view(torch.uint8).view(torch.int64)
    return ((words * _GATHER) >> 56).to(torch.uint8)


def unpack(packed: Tensor) -> Tensor:
    """The bools in a line of bytes."""
    words = packed.to(torch.int64)
    words.mul_(_SPREAD).bitwise_and_(_PICK)
    return words.view(torch.uint8) != 0
