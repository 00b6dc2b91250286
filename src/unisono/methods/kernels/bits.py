"""Eight truth values in a byte: numpy on the CPU, arithmetic on whole words on CUDA; the same bytes from both."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_SPREAD = 0x0101010101010101
_GATHER = 0x0102040810204080  # times eight bytes of 0 or 1: they meet in the top byte
_PICK = 0x8040201008040201 - (1 << 64)  # bit 0 of the lowest byte, bit 1 of the next, ...


def pack(truths: Tensor) -> Tensor:
    """A line of bools, a multiple of 8 long, as bytes; the first is a byte's low bit."""
    if not truths.is_cuda:
        return torch.from_numpy(np.packbits(truths.numpy(), bitorder="little"))
    words = truths.view(torch.uint8).view(torch.int64)
    return ((words * _GATHER) >> 56).to(torch.uint8)


def unpack(packed: Tensor) -> Tensor:
    """The bools in a line of bytes."""
    if not packed.is_cuda:
        return torch.from_numpy(np.unpackbits(packed.numpy(), bitorder="little")).view(torch.bool)
    words = packed.to(torch.int64)
    words.mul_(_SPREAD).bitwise_and_(_PICK)
    return words.view(torch.uint8) != 0
