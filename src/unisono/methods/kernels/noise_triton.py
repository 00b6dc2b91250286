"""The words of `noise` for CUDA."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from unisono.methods.kernels.noise import MIX, WEYL, Noise

_WEYL, _MIX = tl.constexpr(WEYL), tl.constexpr(MIX)
_BLOCK = 4096


def bits(source: Noise, n: int, device: torch.device) -> Tensor:
    """See `noise.bits`."""
    out = torch.empty(n, dtype=torch.int32, device=device)
    if n:
        with torch.cuda.device_of(out):
            _bits[(triton.cdiv(n, _BLOCK),)](out, n, *kernel_arguments(source), BLOCK=_BLOCK)
    return out


def kernel_arguments(source: Noise) -> tuple[int, int]:
    """A stream's shift, from its start on, and factor: int32, so that kernels see one type whatever the values."""
    shift = _to_signed(source.shift + source.start * WEYL)
    return shift, _to_signed(source.factor)


def _to_signed(word: int) -> int:
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >> 31 else word


# fmt: off
@triton.jit
def words(index, shift, factor):
    """Words of a `noise.Noise`, by index."""
    x = index.to(tl.uint32) * _WEYL + shift.to(tl.uint32)
    x = (x ^ (x >> 16)) * _MIX
    return (x ^ (x >> 15)) * factor.to(tl.uint32)


@triton.jit(do_not_specialize=["n", "shift", "factor"])
def _bits(out, n, shift, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, words(at.to(tl.int32), shift, factor).to(tl.int32, bitcast=True), mask=at < n)
