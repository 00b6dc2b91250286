"""Sparse sets on the wire: of each chunk of a line its largest numbers, each a place inside the chunk and a few bits.

A message has two ends for every chunk (bfloat16), then for each number its place, in as many bits as places need, and
its value: a sign and one of the levels between the chunk's ends. Where every number is sent, no places are. Plain
torch on every device.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from unisono.methods.kernels.select import count_kept, find_largest_of_rows, narrow_to


class Piece(NamedTuple):
    """`rows` chunks of `width` numbers, side by side in a line from `start` on; `kept` of each chunk are sent."""

    start: int
    rows: int
    width: int
    kept: int


def cut(start: int, length: int, chunk: int, k: float) -> list[Piece]:
    """A stretch of a line in chunks. `k`: how many of a whole chunk are sent, or the share if it is a float; of the
    shorter one at the end the same share, at least one.

    >>> cut(0, 10000, 4096, 64)
    [Piece(start=0, rows=2, width=4096, kept=64), Piece(start=8192, rows=1, width=1808, kept=28)]
    """
    share = k / chunk if isinstance(k, int) else k
    whole, rest = divmod(length, chunk)
    found = [(start, whole, chunk), (start + length - rest, 1, rest)]
    return [Piece(at, rows, width, count_kept(share, width)) for at, rows, width in found if rows * width]


class SparseSets:
    """The largest numbers of each chunk, as messages and back.

    chunk: no chunk is longer: it gives the bits of a place. bits: of a value, 2 to 8; None: values as they are.
    zero: it is one of the levels, so that a zero stays one.
    """

    def __init__(
        self, pieces: Sequence[Piece], chunk: int, bits: int | None, device: torch.device, *, zero: bool = False
    ) -> None:
        self._pieces = sorted(pieces, key=lambda piece: piece.kept)  # chunks that send as much lie side by side
        self._bits, self._zero = bits, zero
        whole = all(piece.kept == piece.width for piece in pieces)
        self._place_bits = 0 if whole else (chunk - 1).bit_length()
        self._groups: list[tuple[int, int]] = []  # how many chunks, and how many numbers of each
        for kept, some in itertools.groupby(self._pieces, lambda piece: piece.kept):
            self._groups.append((sum(piece.rows for piece in some), kept))
        self.total = sum(rows * kept for rows, kept in self._groups)
        self._chunks = sum(rows for rows, _ in self._groups)
        self._starts: Tensor | None = None  # of each number's chunk; made when it is needed
        self._device = device

    def nbytes(self, itemsize: int) -> int:
        """Bytes of a message; `itemsize`: of a value that goes as it is."""
        if self._bits is None:
            return self.total * itemsize + -(-self.total * self._place_bits // 8)
        return 4 * self._chunks + -(-self.total * (self._place_bits + self._bits) // 8)

    def encode(self, line: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """The message of a line, the places in it that are sent, and the values that arrive there; those that go as
        they are travel in `dtype`."""
        inside = self._select(line)
        places = inside + self._find_starts()
        picked = line.index_select(0, places)
        if self._bits is None:
            values = narrow_to(picked, dtype)
            packed = pack(inside, self._place_bits)
            return torch.cat([values.view(torch.uint8), packed]), places, values.to(line.dtype)
        fitted = [fit(x.view(-1, kept), self._bits, zero=self._zero) for x, (_, kept) in self._split(picked)]
        ends = torch.cat([one for one, _ in fitted]) if fitted else line.new_zeros(0, 2, dtype=torch.bfloat16)
        codes = torch.cat([codes.view(-1) for _, codes in fitted]) if fitted else inside.int()
        values = self._read(ends, codes, line.dtype)
        if self._place_bits:
            codes = codes | inside.int() << self._bits
        packed = pack(codes, self._place_bits + self._bits)
        return torch.cat([ends.view(-1).view(torch.uint8), packed]), places, values

    def decode(self, message: Tensor, dtype: torch.dtype, wide: torch.dtype) -> tuple[Tensor, Tensor]:
        """The places in a line, and the values that are sent there, in `wide`."""
        if self._bits is None:
            head = self.total * dtype.itemsize
            values = message[:head].view(dtype).to(wide)
            inside = unpack(message[head:], self.total, self._place_bits)
        else:
            head = 4 * self._chunks
            codes = unpack(message[head:], self.total, self._place_bits + self._bits)
            values = self._read(message[:head].view(torch.bfloat16).view(-1, 2), codes, wide)
            inside = codes >> self._bits
        if not self._place_bits:
            inside = torch.cat([self._count_up(piece) for piece in self._pieces])
        return inside + self._find_starts(), values

    def _select(self, line: Tensor) -> Tensor:
        """Where in their chunks the largest numbers are, ascending in each."""
        found = [torch.zeros(0, dtype=torch.int64, device=line.device)]
        for piece in self._pieces:
            if piece.kept == piece.width:
                found.append(self._count_up(piece))
                continue
            rows = line[piece.start : piece.start + piece.rows * piece.width].view(piece.rows, piece.width)
            if line.is_cuda:
                top = torch.topk(rows.abs(), piece.kept, dim=1, sorted=False).indices
                found.append(top.sort(dim=1).values.view(-1))
            else:
                found.append(torch.from_numpy(find_largest_of_rows(rows, piece.kept)))
        return torch.cat(found)

    def _count_up(self, piece: Piece) -> Tensor:
        return torch.arange(piece.width, device=self._device).repeat(piece.rows)

    def _find_starts(self) -> Tensor:
        if self._starts is None:
            each = [
                torch.arange(p.rows, device=self._device).mul_(p.width).add_(p.start).repeat_interleave(p.kept)
                for p in self._pieces
            ]
            self._starts = torch.cat([torch.zeros(0, dtype=torch.int64, device=self._device), *each])
        return self._starts

    def _split(self, x: Tensor) -> list[tuple[Tensor, tuple[int, int]]]:
        """A line of all numbers that are sent, by the chunks that send as many."""
        lengths = [rows * kept for rows, kept in self._groups]
        return list(zip(x.split(lengths), self._groups, strict=True)) if lengths else []

    def _read(self, ends: Tensor, codes: Tensor, dtype: torch.dtype) -> Tensor:
        assert self._bits is not None
        found, at = [torch.zeros(0, dtype=dtype, device=codes.device)], 0
        for x, (rows, kept) in self._split(codes):
            found.append(read(ends[at : at + rows], x.view(rows, kept), self._bits, dtype).view(-1))
            at += rows
        return torch.cat(found)


def fit(x: Tensor, bits: int, *, zero: bool = False) -> tuple[Tensor, Tensor]:
    """Each row as signs and levels: the levels' two ends (bfloat16), and a code a number.

    Magnitudes go to the nearest of 2^(bits-1) levels from the smallest to the largest (with two levels, to one side of
    their mean); then the ends become those with the least squared error. A row never loses more than it has. A row with
    a number that is not finite has ends that are not finite. `zero`: the lower end is zero.
    """
    sizes, most = x.abs(), (1 << bits - 1) - 1
    mean = sizes.mean(1, keepdim=True)
    low = torch.zeros_like(mean) if zero else sizes.amin(1, keepdim=True)
    high = sizes.amax(1, keepdim=True) if most > 1 else 2 * mean - low
    step = (high - low) / most
    levels = ((sizes - low) / torch.where(step > 0, step, 1.0)).round_().clamp_(0, most).nan_to_num_(0.0)
    at = levels / most
    middle = torch.zeros_like(mean) if zero else at.mean(1, keepdim=True)
    spread = (at - middle).square().sum(1, keepdim=True)
    slope = ((at - middle) * (sizes - mean * (not zero))).sum(1, keepdim=True) / torch.where(spread > 0, spread, 1.0)
    low = low if zero else mean - slope * middle
    codes = levels.to(torch.int32) | (x < 0).to(torch.int32) << bits - 1
    return narrow_to(torch.cat([low, low + slope], 1), torch.bfloat16).to(torch.bfloat16), codes


def read(ends: Tensor, codes: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """The numbers that `fit` wrote, a row for each pair of ends."""
    most = (1 << bits - 1) - 1
    low, high = ends.to(dtype).unbind(1)
    sizes = torch.addcmul(low[:, None], (codes & most).to(dtype) / most, (high - low)[:, None])
    return torch.where((codes >> bits - 1 & 1).bool(), -sizes, sizes)


def pack(codes: Tensor, width: int) -> Tensor:
    """Whole numbers of `width` bits each, one after the other, as bytes; the last byte is filled up with zeros.

    >>> pack(torch.tensor([1, 2, 3]), 3).tolist()
    [209, 0]
    """
    if not width:
        return codes.new_zeros(0, dtype=torch.uint8)
    each, size = _group(width)
    filled = torch.cat([codes, codes.new_zeros(-len(codes) % each)]).int().view(-1, each).unbind(1)
    found = [
        reduce(torch.bitwise_or, [_shift(x, i * width - at) for i, x in enumerate(filled) if _meet(i, at, width)])
        for at in range(0, 8 * size, 8)
    ]
    return torch.stack([byte & 255 for byte in found], 1).to(torch.uint8).view(-1)[: -(-len(codes) * width // 8)]


def unpack(packed: Tensor, count: int, width: int) -> Tensor:
    """The numbers that `pack` wrote.

    >>> unpack(pack(torch.tensor([1, 2, 3]), 3), 3, 3).tolist()
    [1, 2, 3]
    """
    if not width:
        return packed.new_zeros(count, dtype=torch.int32)
    each, size = _group(width)
    filled = torch.cat([packed, packed.new_zeros(-len(packed) % size)]).view(-1, size).int().unbind(1)
    found = [
        reduce(
            torch.bitwise_or, [_shift(b, 8 * at - i * width) for at, b in enumerate(filled) if _meet(i, 8 * at, width)]
        )
        for i in range(each)
    ]
    return torch.stack([code & (1 << width) - 1 for code in found], 1).view(-1)[:count]


def _group(width: int) -> tuple[int, int]:
    """The fewest codes that end with a byte, and their bytes."""
    each = 8 // math.gcd(width, 8)
    return each, each * width // 8


def _meet(code: int, at: int, width: int) -> bool:
    """Whether a code of a group has bits in the byte that begins with bit `at`."""
    return -8 < at - code * width < width


def _shift(x: Tensor, by: int) -> Tensor:
    return x << by if by > 0 else x >> -by
