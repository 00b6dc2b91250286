"""Signs and sizes on CUDA, in Triton: every phase is one launch for all tensors of a line.

A message holds a float for each tensor, then a bit for each number of the line, as `reducers/_signs.py` says.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from unisono.methods.kernels.launch_triton import launch
from unisono.methods.kernels.noise import Noise
from unisono.methods.kernels.noise_triton import kernel_arguments, words

_TILE = 2048  # numbers of a tensor that one program looks at


class Tables:
    """Where tensors lie in a line of n numbers, a multiple of 8; each begins at a multiple of 8."""

    def __init__(self, starts: Sequence[int], counts: Sequence[int], n: int, device: torch.device) -> None:
        tiles: list[tuple[int, int, int, int]] = []  # from, to (numbers), to (with the gap after them), tensor
        owners: list[tuple[int, int, int]] = []  # first tile, last tile + 1, numbers
        for i, (start, count, end) in enumerate(zip(starts, counts, [*starts[1:], n], strict=True)):
            first = len(tiles)
            tiles += [(at, start + count, end, i) for at in range(start, end, _TILE)]
            owners.append((first, len(tiles), count))
        self.tiles = torch.tensor(tiles, dtype=torch.int64).view(-1, 4).to(device)
        self.owners = torch.tensor(owners, dtype=torch.int64).view(-1, 3).to(device)
        self.count, self.head = len(starts), 4 * len(starts)
        self.partial = {
            dtype: torch.empty(len(tiles), dtype=dtype, device=device) for dtype in (torch.float32, torch.float64)
        }


def measure(tables: Tables, line: Tensor, residual: Tensor | None, message: Tensor, *, vote: bool) -> None:
    """line += residual; then the mean magnitude of each tensor into the message's floats: NaN where a number is not
    finite. `vote`: 1 instead, and 0 where it is 0."""
    partial = tables.partial[torch.float64 if line.dtype == torch.float64 else torch.float32]
    kept = line if residual is None else residual
    launch(_fold, len(tables.tiles), (line, kept, tables.tiles, partial), _TILE, residual is not None)
    floats = message[: tables.head].view(torch.float32)
    launch(_average, tables.count, (partial, tables.owners, floats), 1024, vote)


def encode(tables: Tables, line: Tensor, message: Tensor, zeros: Noise | None = None, *, flipped: bool = False) -> None:
    """The bits of a message: 1 where a number is negative. `zeros`: a zero counts as negative where the top bit of its
    word is set, or (`flipped`) where it is not."""
    shift, factor = kernel_arguments(zeros) if zeros is not None else (0, 1)
    bits = message[tables.head :]
    settings = (zeros is not None, flipped, _TILE)
    launch(_encode, len(tables.tiles), (line, bits, tables.tiles), *settings, numbers=(shift, factor))


def add_up(tables: Tables, messages: Tensor, out: Tensor, *, vote: bool) -> None:
    """The mean of all messages (a row each) into `out`; `vote`: the sign of their sum, or 0."""
    _decode_all(tables, messages, messages[0], out, out, vote=vote, keep=False)


def add_up_and_keep(tables: Tables, messages: Tensor, mine: Tensor, line: Tensor, residual: Tensor) -> None:
    """The same; `line` holds what the message `mine` was made of, and gets the mean; what was not sent is the new
    residual."""
    _decode_all(tables, messages, mine, line, residual, vote=False, keep=True)


def _decode_all(
    tables: Tables, messages: Tensor, mine: Tensor, line: Tensor, residual: Tensor, *, vote: bool, keep: bool
) -> None:
    tensors = (messages, mine, line, residual, tables.tiles)
    constants = (len(messages), tables.head, messages.stride(0), vote, keep, _TILE)
    launch(_add_up, len(tables.tiles), tensors, *constants)


# fmt: off
@triton.jit
def _fold(line, residual, tiles, partial, TILE: tl.constexpr, KEPT: tl.constexpr):
    tile = tl.program_id(0)
    start, end = tl.load(tiles + 4 * tile), tl.load(tiles + 4 * tile + 1)
    at = start + tl.arange(0, TILE)
    mask = at < end
    wide: tl.constexpr = partial.dtype.element_ty
    x = tl.load(line + at, mask=mask, other=0.0)
    if KEPT:
        x = x + tl.load(residual + at, mask=mask, other=0.0).to(x.dtype)
        tl.store(line + at, x, mask=mask)
    tl.store(partial + tile, tl.sum(tl.abs(x.to(wide)), axis=0))


@triton.jit
def _average(partial, owners, floats, BLOCK: tl.constexpr, VOTE: tl.constexpr):
    i = tl.program_id(0)
    first, last, count = tl.load(owners + 3 * i), tl.load(owners + 3 * i + 1), tl.load(owners + 3 * i + 2)
    wide: tl.constexpr = partial.dtype.element_ty
    sums = tl.zeros([BLOCK], dtype=wide)
    for at in range(first, last, BLOCK):
        place = at + tl.arange(0, BLOCK)
        sums += tl.load(partial + place, mask=place < last, other=0.0)
    mean = (tl.sum(sums, axis=0) / tl.maximum(count, 1).to(wide)).to(tl.float32)
    mean = mean + (mean - mean)
    if VOTE:
        mean = (mean != 0.0).to(tl.float32) + (mean - mean)
    tl.store(floats + i, mean)


@triton.jit(do_not_specialize=["shift", "factor"])
def _encode(
    line, bits, tiles, shift, factor, ZEROS: tl.constexpr, FLIPPED: tl.constexpr, TILE: tl.constexpr,
):
    tile = tl.program_id(0)
    start, end, stop = tl.load(tiles + 4 * tile), tl.load(tiles + 4 * tile + 1), tl.load(tiles + 4 * tile + 2)
    at = start + tl.arange(0, TILE)
    x = tl.load(line + at, mask=at < end, other=0.0)
    negative = x < 0
    if ZEROS:
        drawn = words(at.to(tl.int32), shift, factor).to(tl.int32, bitcast=True) < 0
        if FLIPPED:
            drawn = drawn == 0
        negative = negative | ((x == 0) & drawn)
    weight = negative.to(tl.int32) << (tl.arange(0, TILE) % 8)
    packed = tl.sum(tl.reshape(weight, [TILE // 8, 8]), axis=1).to(tl.uint8)
    place = start // 8 + tl.arange(0, TILE // 8)
    tl.store(bits + place, packed, mask=place < stop // 8)


@triton.jit
def _read_signs(bits, start, stop, TILE: tl.constexpr):
    """+1 or -1 for each number of a tile."""
    at = start + tl.arange(0, TILE)
    packed = tl.load(bits + at // 8, mask=at < stop, other=0).to(tl.int32)
    return 1 - 2 * ((packed >> (tl.arange(0, TILE) % 8)) & 1)


@triton.jit
def _add_up(
    messages, mine, line, residual, tiles,
    RANKS: tl.constexpr, HEAD: tl.constexpr, STRIDE: tl.constexpr,
    VOTE: tl.constexpr, KEEP: tl.constexpr, TILE: tl.constexpr,
):
    tile = tl.program_id(0)
    start, end = tl.load(tiles + 4 * tile), tl.load(tiles + 4 * tile + 1)
    stop, tensor = tl.load(tiles + 4 * tile + 2), tl.load(tiles + 4 * tile + 3)
    at = start + tl.arange(0, TILE)
    mask = at < end
    kind: tl.constexpr = line.dtype.element_ty
    if KEEP:
        size = tl.load(mine.to(tl.pointer_type(tl.float32)) + tensor).to(kind)
        sent = _read_signs(mine + HEAD, start, stop, TILE).to(kind) * size
        left = tl.load(line + at, mask=mask, other=0.0) - sent
        left = left.to(residual.dtype.element_ty)
        tl.store(residual + at, left, mask=mask)
    total = tl.zeros([TILE], dtype=kind)
    for rank in tl.static_range(RANKS):
        message = messages + rank * STRIDE
        size = tl.load(message.to(tl.pointer_type(tl.float32)) + tensor).to(kind)
        if not VOTE:
            size = tl.div_rn(size, RANKS * 1.0) if kind == tl.float32 else size / RANKS
        value = _read_signs(message + HEAD, start, stop, TILE).to(kind) * size
        total = value if rank == 0 else total + value
    if VOTE:
        total = tl.where(total > 1, 1.0, tl.where(total < -1, -1.0, total)).to(kind)
    tl.store(line + at, total, mask=mask)
