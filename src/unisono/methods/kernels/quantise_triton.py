"""The kernels of `quantise` for CUDA: a block a program, read once, and the same bits as on the CPU.

Products and sums are rounded one by one (`enable_fp_fusion=False`), quotients as IEEE 754 says (`div_rn`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from unisono.methods.kernels.launch_triton import launch
from unisono.methods.kernels.noise import Noise
from unisono.methods.kernels.noise_triton import kernel_arguments, words
from unisono.methods.kernels.quantise import FAR, ROUND, Levels

_ROUND, _FAR = tl.constexpr(ROUND), tl.constexpr(FAR)
_TILE = 4096  # numbers that a program decodes, of a block


def encode(x: Tensor, levels: Levels, noise: Noise, norms: Tensor, codes: Tensor) -> None:
    """See `quantise.encode`."""
    settings = (levels.bits, levels.top, 2.0 ** (1 - levels.top), levels.exponential)
    _by_blocks(_encode, levels.block, (x, norms, codes), (x.numel(), *kernel_arguments(noise)), settings)


def decode(norms: Tensor, codes: Tensor, levels: Levels, out: Tensor, ranks: int, add: bool) -> None:
    """See `quantise.decode`."""
    over = ranks * (1 if levels.exponential else levels.top)
    tile = min(levels.block, _TILE)
    settings = (levels.bits, levels.top, levels.exponential, add, levels.block // tile)
    _by_blocks(_decode, tile, (out, norms, codes), (out.numel(), over), settings)


def encode_bytes(x: Tensor, block: int, ends: Tensor, codes: Tensor) -> None:
    """See `quantise.encode_bytes`."""
    _by_blocks(_encode_bytes, block, (x, ends, codes), (x.numel(),), ())


def decode_bytes(ends: Tensor, codes: Tensor, block: int, out: Tensor, ranks: int, add: bool) -> None:
    """See `quantise.decode_bytes`."""
    _by_blocks(_decode_bytes, block, (out, ends, codes), (out.numel(), ranks), (add,))


def _by_blocks(
    kernel: Any, block: int, tensors: tuple[Tensor, ...], numbers: tuple[int, ...], settings: tuple[Any, ...]
) -> None:
    """A program for each whole block of the first tensor, without masks; then one for a last short block.
    1024 numbers a warp: measured."""
    n = tensors[0].numel()
    whole, warps = n // block, max(1, min(32, block // 1024))
    with torch.cuda.device_of(tensors[0]):
        for first, count, is_whole in ((0, whole, True), (whole, int(n > whole * block), False)):
            if count:
                constants, every = (block, is_whole, *settings), (*numbers, first)
                launch(kernel, count, tensors, *constants, numbers=every, warps=warps, enable_fp_fusion=False)


# fmt: off
_loose = ["n", "shift", "factor", "first", "over"]  # arguments whose values ask for no compilation of their own


@triton.jit
def _divide(v, by):
    """Numbers over a scale: see `quantise._divide`."""
    power = tl.where(by < 1.0842021724855044e-19, 18446744073709551616.0,
                     tl.where(by > 9223372036854775808.0, 5.421010862427522e-20, 1.0))
    return (v * power) * tl.div_rn(1.0, tl.where(by == 0.0, 1.0, by) * power)


@triton.jit
def _join(code, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Codes of neighbours in one byte, the first in the low bits."""
    if BITS == 2:
        low, high = tl.split(tl.reshape(code, [BLOCK // 2, 2]))
        low, high = tl.split(tl.reshape(low | (high << 2), [BLOCK // 4, 2]))
        code = low | (high << 4)
    if BITS == 4:
        low, high = tl.split(tl.reshape(code, [BLOCK // 2, 2]))
        code = low | (high << 4)
    return code.to(tl.uint8)


@triton.jit
def _split(packed, BITS: tl.constexpr):
    """The codes in bytes: the opposite of `_join`."""
    code = packed
    if BITS < 8:
        code = tl.interleave(packed & 15, packed >> 4)
    if BITS == 2:
        code = tl.interleave(code & 3, code >> 2)
    return code


@triton.jit(do_not_specialize=_loose)
def _encode(
    x, norms, codes, n, shift, factor, first, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
    BITS: tl.constexpr, TOP: tl.constexpr, LOWEST: tl.constexpr, EXPONENTIAL: tl.constexpr,
):
    block = (first + tl.program_id(0)).to(tl.int64)
    at = tl.arange(0, BLOCK)
    start = block * BLOCK
    if WHOLE:
        v = tl.load(x + start + at).to(tl.float32)
    else:
        v = tl.load(x + start + at, mask=start + at < n, other=0.0).to(tl.float32)
    wide = v.to(tl.float64)
    norm = tl.sqrt(tl.sum(wide * wide, axis=0)).to(tl.float32)
    norm = norm + (norm - norm)
    tl.store(norms + block, norm)
    r = _divide(v, norm)
    t = tl.abs(r)
    word = (words(start.to(tl.int32) + at, shift, factor) >> 9).to(tl.int32)
    if EXPONENTIAL:
        linear = (t + LOWEST).to(tl.int32, bitcast=True) - 8388608
        level = tl.maximum(t.to(tl.int32, bitcast=True), linear)
        level = ((level + word) >> 23) - (127 - TOP)
    else:
        level = ((t * (TOP * 8388608.0) + 0.5).to(tl.int32) + word) >> 23
    code = (level ^ (r.to(tl.int32, bitcast=True) >> 31)) & (2 * TOP + 1)
    joined = _join(code, BITS, BLOCK)
    size: tl.constexpr = BLOCK * BITS // 8
    place = tl.arange(0, size)
    if WHOLE:
        tl.store(codes + block * size + place, joined)
    else:
        tl.store(codes + block * size + place, joined, mask=(start * BITS // 8 + place) * 8 < n * BITS)


@triton.jit(do_not_specialize=_loose)
def _decode(
    out, norms, codes, n, over, first, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
    BITS: tl.constexpr, TOP: tl.constexpr, EXPONENTIAL: tl.constexpr, ADD: tl.constexpr, PER: tl.constexpr,
):
    block = (first + tl.program_id(0)).to(tl.int64)
    at = tl.arange(0, BLOCK)
    start = block * BLOCK
    kind: tl.constexpr = out.dtype.element_ty
    norm = tl.load(norms + block // PER).to(kind)
    over = over.to(kind)
    scale = tl.div_rn(norm, over) if kind == tl.float32 else norm / over
    size: tl.constexpr = BLOCK * BITS // 8
    place = tl.arange(0, size)
    if WHOLE:
        packed = tl.load(codes + block * size + place)
    else:
        packed = tl.load(codes + block * size + place, mask=(start * BITS // 8 + place) * 8 < n * BITS, other=0)
    code = _split(packed.to(tl.int32), BITS)
    negative = code > TOP
    level = tl.where(negative, 2 * TOP + 1 - code, code)
    if EXPONENTIAL:
        value = tl.where(level > 0, ((level + (127 - TOP)) << 23).to(tl.float32, bitcast=True), 0.0).to(kind)
    else:
        value = level.to(kind)
    value = tl.where(negative, -value, value) * scale
    if WHOLE:
        if ADD:
            value = tl.load(out + start + at) + value
        tl.store(out + start + at, value)
    else:
        mask = start + at < n
        if ADD:
            value = tl.load(out + start + at, mask=mask, other=0.0) + value
        tl.store(out + start + at, value, mask=mask)


@triton.jit(do_not_specialize=_loose)
def _encode_bytes(x, ends, codes, n, first, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    block = (first + tl.program_id(0)).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    if WHOLE:
        v = tl.load(x + at).to(tl.float32)
        low = tl.min(v, axis=0)
        span = tl.max(v, axis=0) - low
    else:
        v = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
        low = tl.min(tl.where(at < n, v, float("inf")), axis=0)
        span = tl.max(tl.where(at < n, v, float("-inf")), axis=0) - low
    low = low + (span - span) + tl.sum(v * 0.0, axis=0)  # min and max pass over NaN; a sum does not
    step = tl.div_rn(span, 255.0)
    steps = tl.div_rn(low, tl.where(step == 0.0, 1.0, step))
    snapped = ((steps + _ROUND) - _ROUND) * step
    low = tl.where((step > 0.0) & (tl.abs(steps) < _FAR), snapped, low)
    tl.store(ends + 2 * block, low)
    tl.store(ends + 2 * block + 1, step)
    q = tl.minimum(tl.maximum(_divide(v - low, step), 0.0), 255.0) + _ROUND
    code = q.to(tl.int32, bitcast=True).to(tl.uint8)
    if WHOLE:
        tl.store(codes + at, code)
    else:
        tl.store(codes + at, code, mask=at < n)


@triton.jit(do_not_specialize=_loose)
def _decode_bytes(
    out, ends, codes, n, over, first, BLOCK: tl.constexpr, WHOLE: tl.constexpr, ADD: tl.constexpr,
):
    block = (first + tl.program_id(0)).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    kind: tl.constexpr = out.dtype.element_ty
    low, step, over = tl.load(ends + 2 * block).to(kind), tl.load(ends + 2 * block + 1).to(kind), over.to(kind)
    low = tl.div_rn(low, over) if kind == tl.float32 else low / over
    step = tl.div_rn(step, over) if kind == tl.float32 else step / over
    if WHOLE:
        value = tl.load(codes + at).to(kind) * step + low
        if ADD:
            value = tl.load(out + at) + value
        tl.store(out + at, value)
    else:
        value = tl.load(codes + at, mask=at < n, other=0).to(kind) * step + low
        if ADD:
            value = tl.load(out + at, mask=at < n, other=0.0) + value
        tl.store(out + at, value, mask=at < n)
