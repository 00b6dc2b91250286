"""Numbers as a few bits each, in blocks: a sign and a level by stochastic rounding, or a byte between two ends.

A message holds the blocks' scales first (float32), then the packed codes; the first of several codes in a byte
has its low bits. Every function has the same result on CPU and CUDA, bit by bit where the input is finite (the
sum of a block's squares is float64, in whatever order: its float32 root is the same but once in about 10^8 blocks).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from unisono.methods.kernels.noise import CHUNK, Noise, draw

RowFactors = list[Tensor]
_MANY = 1 << 20  # numbers whose scales are worked out at a time
_ONE = 1 << 23  # a float32 has 23 bits after the point: rounding up is a carry out of them


class Levels(NamedTuple):
    """The grid of a block's magnitudes relative to its L2 norm, its zero level included.

    bits: a sign, and bits - 1 for the level. block: numbers that share a norm.
    exponential: levels {0, 2^-s, ..., 1/2, 1} with s = 2^(bits-1) - 2, else {0, 1/s, ..., 1} with s = 2^(bits-1) - 1.
    """

    bits: int
    block: int
    exponential: bool

    @property
    def top(self) -> int:
        """The number of the highest level, 1."""
        return (1 << (self.bits - 1)) - 1

    @property
    def noise(self) -> float:
        """A bound on E|Q(v) - v|^2 / |v|^2, of the papers: 1/8 + d 2^(-2s-2), and min(d/s^2, sqrt(d)/s)."""
        if self.exponential:
            return 1 / 8 + self.block * 2.0 ** (-2 * (self.top - 1) - 2)
        return float(min(self.block / self.top**2, self.block**0.5 / self.top))

    def nbytes(self, n: int) -> int:
        """Bytes of a message of n numbers."""
        return 4 * -(-n // self.block) + -(-n * self.bits // 8)


# Levels by stochastic rounding ---------------------------------------------------------------------------------


def encode(x: Tensor, levels: Levels, noise: Noise, out: Tensor) -> None:
    """Write the message of a line into `out` (uint8, levels.nbytes(n) long)."""
    norms, codes = split(out, x.numel(), levels.block)
    if (triton := _triton(x)) is not None:
        triton.encode(x, levels, noise, norms, codes)
        return
    scratch = torch.empty(4, min(x.numel(), CHUNK) // 16 * 16 + 32, dtype=torch.int32)  # room for whole last bytes
    for first, last in chunks(x.numel(), levels.block, _MANY):
        line, scales = x[first:last].float(), norms[first // levels.block : -(-last // levels.block)]
        norm = torch.linalg.vector_norm(line.view(len(scales), -1), dim=1, dtype=torch.float64).float()
        factors = _factors(torch.add(norm, norm - norm, out=scales))  # NaN where a number is not finite
        for a, b in chunks(last - first, levels.block):
            at = slice((first + a) * levels.bits // 8, -(-(first + b) * levels.bits // 8))
            mine = [f[a // levels.block : -(-b // levels.block)] for f in factors]
            _encode_chunk(line[a:b], levels, noise.after(first + a), mine, codes[at], scratch)


def decode(code: Tensor, levels: Levels, out: Tensor, *, ranks: int = 1, add: bool = False) -> None:
    """Write a message's numbers over `ranks` into `out` (float32 or float64), or add them to it."""
    norms, codes = split(code, out.numel(), levels.block)
    if (triton := _triton(out)) is not None:
        triton.decode(norms, codes, levels, out, ranks, add)
        return
    scales = _scales(norms, levels, ranks, out.dtype)
    per, table = 8 // levels.bits, _table(levels)
    for a, b in chunks(out.numel(), levels.block):
        bytes_ = codes[a // per : -(-b // per)]
        values = torch.index_select(table, 0, bytes_.to(torch.int32)).view(torch.float32)[: b - a]
        _scale_rows(values, scales[a // levels.block : -(-b // levels.block)], out[a:b], add)


def unpack(code: Tensor, n: int, levels: Levels) -> Tensor:
    """The codes of a message, one a byte: level l is l where the sign is +, 2^bits - 1 - l where it is -."""
    _, codes = split(code, n, levels.block)
    shifts = torch.arange(0, 8, levels.bits, dtype=torch.uint8, device=code.device)
    return (codes[:, None] >> shifts & (1 << levels.bits) - 1).view(-1)[:n]


def pack(codes: Tensor, levels: Levels, out: Tensor) -> None:
    """The opposite of `unpack`: write codes into the message `out`, whose norms stay."""
    per = 8 // levels.bits
    _, packed = split(out, len(codes), levels.block)
    whole = torch.zeros(len(packed) * per, dtype=torch.uint8, device=codes.device)
    whole[: len(codes)] = codes
    shifts = torch.arange(0, 8, levels.bits, dtype=torch.uint8, device=codes.device)
    packed.copy_((whole.view(-1, per) << shifts).sum(1))


def level_values(levels: Levels) -> Tensor:
    """What each code stands for, in units of `_scales`: 2^bits numbers."""
    number = torch.arange(levels.top + 1, dtype=torch.float64)
    values = torch.where(number > 0, torch.exp2(number - levels.top), 0.0) if levels.exponential else number
    return torch.cat([values, -values.flip(0)]).float()


def _encode_chunk(x: Tensor, levels: Levels, noise: Noise, factors: RowFactors, codes: Tensor, scratch: Tensor) -> None:
    n = x.numel()
    ratio, size, word, spare = scratch[:, :n].unbind()
    r, t = ratio.view(torch.float32), size.view(torch.float32)
    _multiply(x, factors, r)
    torch.abs(r, out=t)
    if levels.exponential:  # a float's own bits are log2, linear between powers; below the lowest level: linear to 0
        torch.add(t, 2.0 ** (1 - levels.top), out=word.view(torch.float32))
        torch.maximum(size, word.sub_(_ONE), out=size)
    else:
        t.mul_(levels.top * float(_ONE)).add_(0.5)
        size.copy_(t)
    _random_23(noise, word, spare)
    size.add_(word).bitwise_right_shift_(23)
    if levels.exponential:
        size.sub_(127 - levels.top)
    ratio.bitwise_right_shift_(31)  # all ones where negative
    size.bitwise_xor_(ratio).bitwise_and_((1 << levels.bits) - 1)
    _pack(scratch[1], scratch[3], n, levels.bits, codes)


def _factors(by: Tensor) -> RowFactors:
    """What to multiply rows by to divide them by their scales (by 1 where that is 0): reciprocals, and a power of two
    first where a scale is so near an end of float32's range that it has none."""
    power = torch.where(by < 2.0**-63, 2.0**64, torch.where(by > 2.0**63, 2.0**-64, 1.0))
    reciprocal = (torch.where(by == 0, 1.0, by) * power).reciprocal_()
    return [power, reciprocal] if bool((power != 1).any()) else [reciprocal]


def _multiply(x: Tensor, factors: RowFactors, out: Tensor) -> None:
    """Every row times its factors, one after the other."""
    rows = out.view(len(factors[0]), -1)
    torch.mul(x.view(rows.shape), factors[0][:, None], out=rows)
    for factor in factors[1:]:
        rows.mul_(factor[:, None])


def _random_23(noise: Noise, out: Tensor, spare: Tensor) -> None:
    """Whole numbers from 0 to 2^23 - 1."""
    words, other = out.numpy().view(np.uint32), spare.numpy().view(np.uint32)
    draw(noise, words, other)
    np.right_shift(words, np.uint32(9), out=words)


def _pack(line: Tensor, spare: Tensor, n: int, bits: int, out: Tensor) -> None:
    """Codes of int32 as bytes: neighbours are joined until they fill one. Both lines have room for four more."""
    line[n : n + 4] = 0
    words, other = line.numpy(), spare.numpy()
    count = len(out) * (8 // bits)
    while bits < 8:
        pairs, joined = words[:count].view(np.int64), other[:count].view(np.int64)
        np.right_shift(pairs, 32 - bits, out=joined)
        np.bitwise_or(pairs, joined, out=joined)
        count, bits = count // 2, bits * 2
        if bits == 8:
            np.copyto(out.numpy(), joined, casting="unsafe")
            return
        np.copyto(words[:count], joined, casting="unsafe")
    np.copyto(out.numpy(), words[:count], casting="unsafe")


def _scales(norms: Tensor, levels: Levels, ranks: int, dtype: torch.dtype) -> Tensor:
    steps = 1 if levels.exponential else levels.top
    return norms.to(dtype) / float(ranks * steps)


@functools.cache
def _table(levels: Levels) -> Tensor:
    """What each byte stands for: the floats of its codes, seen as one element that `index_select` copies."""
    per, values = 8 // levels.bits, level_values(levels)
    shifts = torch.arange(0, 8, levels.bits)
    floats = values[torch.arange(256)[:, None] >> shifts & (1 << levels.bits) - 1].contiguous()
    return floats.view(-1).view({1: torch.float32, 2: torch.float64, 4: torch.complex128}[per])


# Bytes between two ends ------------------------------------------------------------------------------------------


def bytes_nbytes(n: int, block: int) -> int:
    """Bytes of a message of n numbers, a byte each and two floats a block."""
    return n + 8 * -(-n // block)


def encode_bytes(x: Tensor, block: int, out: Tensor) -> None:
    """A block's numbers as 0..255 steps from its lowest; rounded to the nearest. Zero is a step where it lies
    between the ends, and a block of one number is exact."""
    ends, codes = split(out, x.numel(), block, floats=2)
    if (triton := _triton(x)) is not None:
        triton.encode_bytes(x, block, ends, codes)
        return
    scratch = torch.empty(min(x.numel(), CHUNK), dtype=torch.float32)
    for first, last in chunks(x.numel(), block, _MANY):
        pairs, given = ends.view(-1, 2)[first // block : -(-last // block)], x[first:last].float()
        rows = given.view(len(pairs), -1)
        lows, steps = _low_and_step(rows.amin(1), rows.amax(1))
        pairs[:, 0], pairs[:, 1] = lows, steps
        factors = _factors(steps)
        for a, b in chunks(last - first, block):
            line, mine = scratch[: b - a], slice(a // block, -(-b // block))
            torch.sub(rows[mine], lows[mine, None], out=line.view(-1, rows.shape[1]))
            _multiply(line, [f[mine] for f in factors], line)
            line.clamp_(0, 255).add_(ROUND)  # its low bits are now the nearest whole number
            codes[first + a : first + b].copy_(line.view(torch.int32))


def decode_bytes(code: Tensor, block: int, out: Tensor, *, ranks: int = 1, add: bool = False) -> None:
    """Write a message's numbers over `ranks` into `out` (float32 or float64), or add them to it."""
    ends, codes = split(code, out.numel(), block, floats=2)
    if (triton := _triton(out)) is not None:
        triton.decode_bytes(ends, codes, block, out, ranks, add)
        return
    pairs = ends.view(-1, 2).to(out.dtype) / float(ranks)
    for a, b in chunks(out.numel(), block):
        pair = pairs[a // block : -(-b // block)]
        rows = codes[a:b].to(out.dtype).view(len(pair), -1)
        rows.mul_(pair[:, 1:])
        if add:
            out[a:b].add_(rows.add_(pair[:, :1]).view(-1))
        else:
            torch.add(rows, pair[:, :1], out=out[a:b].view(len(pair), -1))


ROUND = 12582912.0  # 1.5 * 2^23: what is added to it is rounded to a whole number
FAR = 4194304.0  # steps: a block further than 2^22 of them from zero stays where it is


def _low_and_step(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """The lowest value, moved by less than half a step so that zero is a whole number of steps away."""
    span = high - low
    low = low + (span - span)  # NaN where a number is not finite
    step = span / 255.0
    at = low / torch.where(step == 0, 1.0, step)
    snapped = ((at + ROUND) - ROUND) * step
    return torch.where((step > 0) & (at.abs() < FAR), snapped, low), step


# Lines, chunks, rows -------------------------------------------------------------------------------------------


def split(message: Tensor, n: int, block: int, *, floats: int = 1) -> tuple[Tensor, Tensor]:
    """The floats and the codes of a message: views."""
    head = 4 * floats * -(-n // block)
    return message[:head].view(torch.float32), message[head:]


def chunks(n: int, block: int, size: int = CHUNK) -> Iterator[tuple[int, int]]:
    """Whole blocks at a time, `size` numbers of them (a multiple of every block); a last short block comes alone."""
    whole = n // block * block
    for a in range(0, whole, size):
        yield a, min(a + size, whole)
    if whole < n:
        yield whole, n


def _scale_rows(values: Tensor, scales: Tensor, out: Tensor, add: bool) -> None:
    rows = values.view(len(scales), -1)
    if add:
        out.add_((rows.to(out.dtype) * scales[:, None]).view(-1))
    else:
        torch.mul(rows, scales[:, None], out=out.view(len(scales), -1))


def _triton(x: Tensor) -> ModuleType | Any | None:
    """The Triton kernels, for tensors on CUDA where Triton is there."""
    if not x.is_cuda:
        return None
    try:
        import unisono.methods.kernels.quantise_triton as quantise_triton
    except ImportError:
        return None
    return quantise_triton
