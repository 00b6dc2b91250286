"""Exact top-k on CUDA, in Triton: the gradient and the residual are read once, and the host never waits.

Six phases, for all segments of a line together; a segment is cut into tiles:
1. sample: a guess of each segment's k-th magnitude, from some of its numbers;
2. fold: p = residual + gradient; each tile writes those of its numbers that reach the guess to slots of its own;
3. narrow: histograms of the keys in the slots, first just above the guess, then inside the bin that holds the
   k-th key, give that key exactly;
4. count: how many of each tile's numbers are above that key, and how many equal it;
5. place: running sums of these counts say where each tile's part goes;
6. pack: values and places of the selected in ascending order; the residual loses them.

A tile with more numbers than slots, and every tile of a segment whose guess was too high, is read again in full
in phases 3 to 6: the result is exact whatever the guess was.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from unisono.kernels.select import Plan

_TILE = 4096  # numbers of a segment that one program folds
_FOLD_WARPS = 4
_SAMPLE = 8192
_GROUP = 2048  # slots that one program of phases 3 to 6 looks at
_PIECE = 1024  # numbers of a tile without slots that are packed at once
_BINS: tl.constexpr = tl.constexpr(2048)
_BIN_BITS: tl.constexpr = tl.constexpr(11)
# By the bits of a key: the width of the first histogram's bins (a power of two), and how many levels it may take.
_FINE, _LEVELS = {15: 0, 31: 11, 63: 40}, {15: 3, 31: 4, 63: 7}
_GUESSED_BITS = 16


class _Tables(NamedTuple):
    """A plan on a device: segments, their tiles, and groups of tiles."""

    segments: Tensor  # (segments, 5) int32: start, end, kept, where its part of the wire begins, its first tile
    tiles: Tensor  # (tiles, 2) int32: start, segment
    groups: Tensor  # (groups, 3) int32: first tile, last tile + 1, segment
    slots: int
    per_group: int


def top(plan: Plan, grad: Tensor, residual: Tensor | None, out: Tensor, values: Tensor, indices: Tensor) -> None:
    """See `unisono.kernels.select.top`."""
    if not plan.total:
        return
    tables = _tables(plan, grad.device)
    n_segments, n_tiles, n_groups = (t.shape[0] for t in (tables.segments, tables.tiles, tables.groups))
    bits = out.element_size() * 8 - 1
    levels, key = _LEVELS[bits], torch.int64 if bits > 31 else torch.int32
    new = partial(torch.empty, device=grad.device)
    zeros = torch.zeros(n_segments * (1 + levels * (_BINS.value + 1)), dtype=torch.int32, device=grad.device)
    found, histograms = zeros[:n_segments], zeros[n_segments:]  # candidates of each segment; bins by segment and level
    guess, counts = new(n_segments, dtype=key), new(n_tiles, dtype=torch.int32)
    lows, rest = new(n_segments * levels, dtype=key), new(n_segments * levels * 2, dtype=torch.int32)
    slots = n_tiles * tables.slots
    slot_values, slot_places = new(slots, dtype=out.dtype), new(slots, dtype=torch.int16)
    feedback, kept = (False, out) if residual is None else (True, residual)

    # Sample, fold
    how: dict[str, Any] = {"KEY_BITS": bits, "FEEDBACK": feedback}
    _sample[(n_segments,)](
        *(grad, kept, tables.segments, guess), SAMPLE=_SAMPLE, ROUNDS=min(bits, _GUESSED_BITS) // 2, num_warps=16, **how
    )
    how |= {"TILE": _TILE, "SLOTS": tables.slots}
    folded = (grad, kept, out, tables.segments, tables.tiles, guess, found, counts, slot_values, slot_places)
    _fold[(n_tiles,)](*folded, ALIGN=64 // grad.element_size(), num_warps=_FOLD_WARPS, **how)
    # Narrow
    del how["FEEDBACK"]
    how |= {"LEVELS": levels, "FINE": _FINE[bits], "PER_GROUP": tables.per_group, "num_warps": 4}
    slotted = (out, tables.segments, tables.tiles, tables.groups, guess, found, counts, slot_values)
    for level in range(levels):
        _narrow[(n_groups,)](*slotted, histograms, lows, rest, LEVEL=level, **how)
    # Count, place, pack
    tallies = new(n_tiles, dtype=torch.int64)
    _count[(n_groups,)](*slotted, histograms, lows, rest, tallies, **how)
    running = torch.cumsum(tallies, 0)
    most = torch.finfo(values.dtype).max if values.element_size() < out.element_size() else 0.0
    how |= {"FEEDBACK": feedback, "NARROW": most > 0, "PIECE": _PIECE}
    packed = (slot_places, histograms, lows, rest, tallies, running, values, indices, most)
    _pack[(n_groups,)](*slotted, *packed, **how)


def spread(total: Tensor, values: Tensor, indices: Tensor, ranks: int, flag: Tensor, *, first: bool) -> None:
    """See `unisono.kernels.select.spread`."""
    n = len(indices)
    _spread[(triton.cdiv(n, 1024),)](total, values, indices, flag, n, RANKS=ranks, FIRST=first, BLOCK=1024, num_warps=4)


def restore(flag: Tensor, before: Tensor, line: Tensor) -> None:
    """See `unisono.kernels.select.restore`."""
    n = line.numel()
    if n:
        _restore[(min(256, triton.cdiv(n, _TILE)),)](flag, before, line, n, TILE=_TILE, num_warps=8)


def _tables(plan: Plan, device: torch.device) -> _Tables:
    if device in plan.tables:
        return plan.tables[device]  # type: ignore[no-any-return]
    share = max((s.kept / s.length for s in plan.segments if s.length >= _TILE), default=0.0)
    slots = 64
    while slots < min(_TILE // 2, 2.2 * share * _TILE + 16):  # the guess lets about 1.3 times the share through
        slots *= 2
    per_group = _GROUP // slots
    segments: list[tuple[int, ...]] = []
    tiles: list[tuple[int, ...]] = []
    groups: list[tuple[int, ...]] = []
    wire = 0
    for i, (start, length, kept) in enumerate(plan.segments):
        first = len(tiles)
        segments.append((start, start + length, kept, wire, first))
        wire += kept
        tiles += [(at, i) for at in range(start, start + length, _TILE)]
        groups += [(t, min(t + per_group, len(tiles)), i) for t in range(first, len(tiles), per_group)]
    on: Any = lambda rows: torch.tensor(rows, dtype=torch.int32).to(device, non_blocking=True)  # noqa: E731
    made = plan.tables[device] = _Tables(on(segments), on(tiles), on(groups), slots, per_group)
    return made


# Kernels -------------------------------------------------------------------------------------------------------
# fmt: off


@triton.jit
def _key(p, KEY_BITS: tl.constexpr):
    """The bits of |p|, as an integer."""
    if KEY_BITS == 15:
        return (p.to(tl.int16, bitcast=True) & 0x7FFF).to(tl.int32)
    elif KEY_BITS == 31:
        return p.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        return p.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF


@triton.jit
def _sample(
    grad, kept, segments, guess,
    SAMPLE: tl.constexpr, ROUNDS: tl.constexpr, KEY_BITS: tl.constexpr, FEEDBACK: tl.constexpr,
):
    """A key that somewhat more than `count` numbers of a segment reach: its highest bits, two in a round."""
    s = tl.program_id(0)
    start = tl.load(segments + 5 * s)
    length = tl.load(segments + 5 * s + 1) - start
    count = tl.load(segments + 5 * s + 2)
    j = tl.arange(0, SAMPLE)
    width = length // SAMPLE
    jitter = (((j * 40503) & 0xFFF) * width) >> 12
    spread = j * width + (j * (length % SAMPLE)) // SAMPLE + jitter  # one at random in each of equal parts
    place = start + tl.where(length > SAMPLE, spread, j)
    there = j < length
    p = tl.load(grad + place, mask=there, other=0)
    if FEEDBACK:
        p = p.to(kept.dtype.element_ty) + tl.load(kept + place, mask=there, other=0)
    key = tl.where(there, _key(p, KEY_BITS), -1)
    expected = count.to(tl.float32) * SAMPLE / length.to(tl.float32)
    target = tl.minimum((expected + 4 * tl.sqrt(expected) + 5).to(tl.int32), SAMPLE)
    target = tl.where(length > SAMPLE, target, count)
    low = tl.load(guess + s) * 0
    for i in range(ROUNDS):
        step = (low * 0 + 1) << (KEY_BITS - 2 - 2 * i)
        reach = (key >= low + step).to(tl.int64) + ((key >= low + 2 * step).to(tl.int64) << 20)
        reach = tl.sum(reach + ((key >= low + 3 * step).to(tl.int64) << 40), 0)
        for part in range(3):
            low += tl.where(((reach >> (20 * part)) & 0xFFFFF) >= target, step, 0)
    tl.store(guess + s, tl.maximum(low, 1))


@triton.jit
def _fold(
    grad, kept, out, segments, tiles, guess, found, counts, slot_values, slot_places,
    TILE: tl.constexpr, SLOTS: tl.constexpr, KEY_BITS: tl.constexpr,
    ALIGN: tl.constexpr, FEEDBACK: tl.constexpr,
):
    """p = residual + gradient, and what reaches the guess into the tile's slots."""
    t = tl.program_id(0)
    start = tl.multiple_of(tl.load(tiles + 2 * t), ALIGN)
    s = tl.load(tiles + 2 * t + 1)
    end = tl.load(segments + 5 * s + 1)
    line_end = tl.multiple_of((end + ALIGN - 1) // ALIGN * ALIGN, ALIGN)  # a segment is padded to whole lines
    i = tl.arange(0, TILE)
    place = start + i
    p = tl.load(grad + place, mask=place < line_end, other=0)
    if FEEDBACK:
        p = tl.load(kept + place, mask=place < line_end, other=0) + p.to(kept.dtype.element_ty)
        tl.store(out + place, p, mask=place < line_end)
    reach = (_key(p, KEY_BITS) >= tl.load(guess + s)) & (place < end)
    ones = reach.to(tl.int32)
    count = tl.sum(ones, 0)
    tl.store(counts + t, count)
    tl.atomic_add(found + s, count, sem="relaxed")
    if count <= SLOTS:
        slot = t * SLOTS + tl.cumsum(ones, 0) - 1
        tl.store(slot_values + slot, p, mask=reach)
        tl.store(slot_places + slot, i.to(tl.int16), mask=reach)


@triton.jit
def _state(
    segments, guess, found, histograms, lows, rest, s,
    LEVELS: tl.constexpr, LEVEL: tl.constexpr, FINE: tl.constexpr, KEY_BITS: tl.constexpr,
):
    """What is known of the k-th key before a level: (low, width, shift, want).

    It is the want-th largest of the keys from `low` to `low` + 2^width; the level's bins are 2^shift wide. A width
    of -1 says that it is `low`.
    """
    if LEVEL == 0:
        count, candidates = tl.load(segments + 5 * s + 2), tl.load(found + s)
        low = tl.load(guess + s)
        enough = candidates >= count
        zero = (low == 1) & (candidates < count)  # fewer than wanted differ from zero
        want = tl.where(zero, count - candidates, count)
        low = tl.where(enough, low, 0)
        width = tl.where(zero, -1, KEY_BITS)
        shift = tl.where(enough, FINE, KEY_BITS - _BIN_BITS)
    else:
        low = tl.load(lows + s * LEVELS + LEVEL - 1)
        width = tl.load(rest + (s * LEVELS + LEVEL - 1) * 2)
        want = tl.load(rest + (s * LEVELS + LEVEL - 1) * 2 + 1)
        shift = tl.where(width >= 0, tl.maximum(width - _BIN_BITS, 0), 0)
        if LEVEL == 1:
            enough = tl.load(found + s) >= tl.load(segments + 5 * s + 2)
            shift = tl.where(enough, FINE, shift)
        if width >= 0:
            row = histograms + (s * LEVELS + LEVEL - 1) * (_BINS + 1)
            bins = tl.arange(0, _BINS)
            histogram, beyond = tl.load(row + bins), tl.load(row + _BINS)
            at_least = beyond + tl.sum(histogram, 0) - tl.cumsum(histogram, 0) + histogram
            chosen = tl.sum((at_least >= want).to(tl.int32), 0) - 1
            above = beyond + tl.sum(tl.where(bins > chosen, histogram, 0), 0)
            far = beyond >= want
            low += tl.where(far, _BINS, chosen).to(low.dtype) << shift
            want -= tl.where(far, 0, above)
            width = tl.where(far, KEY_BITS, tl.where(shift == 0, -1, shift))
        shift = tl.where(width >= 0, tl.maximum(width - _BIN_BITS, 0), 0)
    return low, width, shift, want


@triton.jit
def _limit(found, segments, s, SLOTS: tl.constexpr):
    """How many candidates a tile may have had to be read from its slots: none where the guess was too high."""
    return tl.where(tl.load(found + s) >= tl.load(segments + 5 * s + 2), SLOTS, -1)


@triton.jit
def _tile(out, segments, tiles, t, at, s, LENGTH: tl.constexpr):
    """Some of a tile's numbers, from `at` on, their places, and which of them there are."""
    place = tl.load(tiles + 2 * t) + at + tl.arange(0, LENGTH)
    there = place < tl.load(segments + 5 * s + 1)
    return tl.load(out + place, mask=there, other=0), place, there


@triton.jit
def _bin(key, there, low, width, shift):
    """The bins of keys, and which of them are in the range, and which beyond the bins."""
    above = key - low
    inside = there & (above >= 0) & ((above >> width) == 0)
    bins = above >> shift
    return bins.to(tl.int32), inside & (bins < _BINS), inside & (bins >= _BINS)


@triton.jit
def _narrow(
    out, segments, tiles, groups, guess, found, counts, slot_values, histograms, lows, rest,
    LEVEL: tl.constexpr, LEVELS: tl.constexpr, FINE: tl.constexpr, PER_GROUP: tl.constexpr, TILE: tl.constexpr,
    SLOTS: tl.constexpr, KEY_BITS: tl.constexpr,
):
    """Histogram of the candidates in the range that is left; the last entry counts those beyond the bins."""
    g = tl.program_id(0)
    first, last = tl.load(groups + 3 * g), tl.load(groups + 3 * g + 1)
    s = tl.load(groups + 3 * g + 2)
    low, width, shift, want = _state(segments, guess, found, histograms, lows, rest, s, LEVELS, LEVEL, FINE, KEY_BITS)
    tl.store(lows + s * LEVELS + LEVEL, low)  # every program of the segment writes the same
    tl.store(rest + (s * LEVELS + LEVEL) * 2, width)
    tl.store(rest + (s * LEVELS + LEVEL) * 2 + 1, want)
    if width >= 0:
        limit = _limit(found, segments, s, SLOTS)
        row = histograms + (s * LEVELS + LEVEL) * (_BINS + 1)
        i = tl.arange(0, PER_GROUP * SLOTS)
        t = first + i // SLOTS
        count = tl.load(counts + t, mask=t < last, other=SLOTS + 1)
        there = (count <= limit) & (i % SLOTS < count)
        p = tl.load(slot_values + first * SLOTS + i, mask=there, other=0)
        bins, near, far = _bin(_key(p, KEY_BITS), there, low, width, shift)
        tl.atomic_add(row + bins, 1, mask=near, sem="relaxed")
        beyond = tl.sum(far.to(tl.int32), 0)
        for again in range(first, last):
            if tl.load(counts + again) > limit:
                q, _spot, inside = _tile(out, segments, tiles, again, 0, s, TILE)
                spots, close, distant = _bin(_key(q, KEY_BITS), inside, low, width, shift)
                histogram = tl.histogram(spots, _BINS, mask=close)
                tl.atomic_add(row + tl.arange(0, _BINS), histogram, mask=histogram > 0, sem="relaxed")
                beyond += tl.sum(distant.to(tl.int32), 0)
        if beyond > 0:
            tl.atomic_add(row + _BINS, beyond, sem="relaxed")


@triton.jit
def _slots(slot_values, counts, first, last, limit, PER_GROUP: tl.constexpr, SLOTS: tl.constexpr):
    """A group's candidates as (tiles, slots), which of them there are, and which tiles have all theirs in slots."""
    t = first + tl.arange(0, PER_GROUP)
    count = tl.load(counts + t, mask=t < last, other=SLOTS + 1)
    whole = count <= limit
    column = tl.arange(0, SLOTS)[None, :]
    there = whole[:, None] & (column < count[:, None])
    slot = t[:, None] * SLOTS + column
    return tl.load(slot_values + slot, mask=there, other=0), slot, there, t, whole


@triton.jit
def _count(
    out, segments, tiles, groups, guess, found, counts, slot_values, histograms, lows, rest, tallies,
    LEVELS: tl.constexpr, FINE: tl.constexpr, PER_GROUP: tl.constexpr, TILE: tl.constexpr, SLOTS: tl.constexpr,
    KEY_BITS: tl.constexpr,
):
    """How many of each tile are above the k-th key (upper 32 bits), and how many equal it (lower)."""
    g = tl.program_id(0)
    first, last = tl.load(groups + 3 * g), tl.load(groups + 3 * g + 1)
    s = tl.load(groups + 3 * g + 2)
    limit = _limit(found, segments, s, SLOTS)
    least, _width, _shift, _want = _state(
        segments, guess, found, histograms, lows, rest, s, LEVELS, LEVELS, FINE, KEY_BITS
    )
    p, _slot, there, t, whole = _slots(slot_values, counts, first, last, limit, PER_GROUP, SLOTS)
    key = _key(p, KEY_BITS)
    above = tl.sum((there & (key > least)).to(tl.int32), 1).to(tl.int64)
    equal = tl.sum((there & (key == least)).to(tl.int32), 1)
    tl.store(tallies + t, (above << 32) | equal, mask=whole)
    for again in range(first, last):
        if tl.load(counts + again) > limit:
            q, _spot, inside = _tile(out, segments, tiles, again, 0, s, TILE)
            other = _key(q, KEY_BITS)
            more = tl.sum((inside & (other > least)).to(tl.int32), 0).to(tl.int64)
            same = tl.sum((inside & (other == least)).to(tl.int32), 0)
            tl.store(tallies + again, (more << 32) | same)


@triton.jit
def _put(
    p, key, place, there, before, least, want, out, values, indices, most,
    AXIS: tl.constexpr, FEEDBACK: tl.constexpr, NARROW: tl.constexpr,
):
    """Write the selected of some numbers; `before` has how many of the segment were above and equal until here."""
    above, equal = there & (key > least), there & (key == least)
    ties = (before & 0xFFFFFFFF).to(tl.int32) + tl.cumsum(equal.to(tl.int32), AXIS) - equal.to(tl.int32)
    rank = (before >> 32).to(tl.int32) + tl.cumsum(above.to(tl.int32), AXIS) - above.to(tl.int32)
    taken = above | (equal & (ties < want))
    rank += tl.minimum(ties, want)
    sent = p
    if NARROW:  # finite numbers stay finite
        infinite = tl.abs(p) == float("inf")
        sent = tl.where((p > most) & ~infinite, most, tl.where((p < -most) & ~infinite, -most, p))
    sent = sent.to(values.dtype.element_ty)
    tl.store(values + rank, sent, mask=taken)
    tl.store(indices + rank, place, mask=taken)
    if FEEDBACK:
        tl.store(out + place, p - sent.to(p.dtype), mask=taken)


@triton.jit
def _pack(
    out, segments, tiles, groups, guess, found, counts, slot_values, slot_places, histograms, lows, rest, tallies,
    running, values, indices, most,
    PIECE: tl.constexpr, FEEDBACK: tl.constexpr, NARROW: tl.constexpr, LEVELS: tl.constexpr, FINE: tl.constexpr,
    PER_GROUP: tl.constexpr, TILE: tl.constexpr, SLOTS: tl.constexpr, KEY_BITS: tl.constexpr,
):
    """Values and places of the selected, in ascending order; the residual loses them."""
    g = tl.program_id(0)
    first, last = tl.load(groups + 3 * g), tl.load(groups + 3 * g + 1)
    s = tl.load(groups + 3 * g + 2)
    limit = _limit(found, segments, s, SLOTS)
    least, _width, _shift, want = _state(
        segments, guess, found, histograms, lows, rest, s, LEVELS, LEVELS, FINE, KEY_BITS
    )
    wire, origin = tl.load(segments + 5 * s + 3), tl.load(segments + 5 * s + 4)
    base = tl.load(running + origin) - tl.load(tallies + origin)
    p, slot, there, t, whole = _slots(slot_values, counts, first, last, limit, PER_GROUP, SLOTS)
    before = tl.load(running + t, mask=whole, other=0) - tl.load(tallies + t, mask=whole, other=0) - base
    place = tl.load(tiles + 2 * t, mask=whole, other=0)[:, None] + tl.load(slot_places + slot, mask=there, other=0)
    _put(p, _key(p, KEY_BITS), place, there, before[:, None], least, want, out,
         values + wire, indices + wire, most, 1, FEEDBACK, NARROW)
    for again in range(first, last):
        if tl.load(counts + again) > limit:
            until = tl.load(running + again) - tl.load(tallies + again) - base
            for at in range(0, TILE, PIECE):
                q, spot, inside = _tile(out, segments, tiles, again, at, s, PIECE)
                other = _key(q, KEY_BITS)
                _put(q, other, spot, inside, until, least, want, out,
                     values + wire, indices + wire, most, 0, FEEDBACK, NARROW)
                more = tl.sum((inside & (other > least)).to(tl.int32), 0).to(tl.int64)
                until += (more << 32) | tl.sum((inside & (other == least)).to(tl.int32), 0)


@triton.jit
def _restore(flag, before, line, n, TILE: tl.constexpr):
    """Copy `before` into `line` if the flag is NaN."""
    bad = tl.load(flag)
    if bad != bad:
        for at in range(tl.program_id(0) * TILE, n, tl.num_programs(0) * TILE):
            place = at + tl.arange(0, TILE)
            tl.store(line + place, tl.load(before + place, mask=place < n), mask=place < n)


@triton.jit
def _spread(total, values, indices, flag, n, RANKS: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr):
    """Add a rank's share to the mean (the first rank's is written), and make the flag NaN if one is not finite."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = total + tl.load(indices + i, mask=i < n, other=0)
    value = tl.load(values + i, mask=i < n, other=0)
    value = value.to(total.dtype.element_ty)
    part = value * (tl.full([1], 1.0, tl.float64) / RANKS).to(value.dtype)
    if not FIRST:
        part += tl.load(place, mask=i < n, other=0)
    tl.store(place, part, mask=i < n)
    if tl.sum((value - value != 0).to(tl.int32), 0) > 0:
        tl.store(flag, float("nan"))
