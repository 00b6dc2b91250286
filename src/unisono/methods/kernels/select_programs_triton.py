"""The Triton programs behind `select_triton`: one for each phase, and what they share.

A key is the bits of |p|. Of a segment, tables hold (start, end, kept, where its part of the wire begins, its first
tile); of a tile (start, segment); of a group of tiles (first, last + 1, segment).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

FEW: tl.constexpr = tl.constexpr(64)  # bins of the first level, whose numbers crowd in some of them
FEW_BITS: tl.constexpr = tl.constexpr(6)
MANY: tl.constexpr = tl.constexpr(2048)  # and of the others
MANY_BITS: tl.constexpr = tl.constexpr(11)
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
def sample(
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
    target = tl.minimum((expected + 3 * tl.sqrt(expected) + 5).to(tl.int32), SAMPLE)
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
def fold(
    grad, kept, out, segments, tiles, guess, found, counts, slot_values, slot_places,
    TILE: tl.constexpr, SLOTS: tl.constexpr, KEY_BITS: tl.constexpr, ALIGN: tl.constexpr, FEEDBACK: tl.constexpr,
):
    """p = residual + gradient; what reaches the guess goes into the tile's slots, if there are enough of them."""
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
    reach = (_key(p, KEY_BITS) >= tl.load(guess + s)) & (place < end)
    ones = reach.to(tl.int32)
    count = tl.sum(ones, 0)
    tl.store(counts + t, count)
    tl.atomic_add(found + s, count, sem="relaxed")
    if FEEDBACK:
        slotted = tl.where(count <= SLOTS, start, end)  # from here on, candidates leave the line
        tl.store(out + place, tl.where(reach & (place >= slotted), 0.0, p), mask=place < line_end)
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
        shift = tl.where(enough, FINE, KEY_BITS - FEW_BITS)
    else:
        low = tl.load(lows + s * LEVELS + LEVEL - 1)
        width = tl.load(rest + (s * LEVELS + LEVEL - 1) * 2)
        want = tl.load(rest + (s * LEVELS + LEVEL - 1) * 2 + 1)
        shift = tl.maximum(width - MANY_BITS, 0)
        BINS: tl.constexpr = FEW if LEVEL == 1 else MANY
        if LEVEL == 1:
            enough = tl.load(found + s) >= tl.load(segments + 5 * s + 2)
            shift = tl.where(enough, FINE, KEY_BITS - FEW_BITS)
        if width >= 0:
            row = histograms + (s * LEVELS + LEVEL - 1) * (MANY + 1)
            bins = tl.arange(0, BINS)
            histogram, beyond = tl.load(row + bins), tl.load(row + MANY)
            at_least = beyond + tl.sum(histogram, 0) - tl.cumsum(histogram, 0) + histogram
            chosen = tl.sum((at_least >= want).to(tl.int32), 0) - 1
            above = beyond + tl.sum(tl.where(bins > chosen, histogram, 0), 0)
            far = beyond >= want
            low += tl.where(far, BINS, chosen).to(low.dtype) << shift
            want -= tl.where(far, 0, above)
            width = tl.where(far, KEY_BITS, tl.where(shift == 0, -1, shift))
        shift = tl.maximum(width - MANY_BITS, 0)
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
def _bin(key, there, low, width, shift, BINS: tl.constexpr):
    """The bins of keys, which of them are in the range, and which beyond the bins."""
    above = key - low
    inside = there & (above >= 0) & ((above >> width) == 0)
    bins = above >> shift
    return bins.to(tl.int32), inside & (bins < BINS), inside & (bins >= BINS)


@triton.jit
def _tally(row, bins, near, BINS: tl.constexpr):
    """Add to a histogram, counted together first: for bins that many numbers share."""
    histogram = tl.histogram(bins, BINS, mask=near)
    tl.atomic_add(row + tl.arange(0, BINS), histogram, mask=histogram > 0, sem="relaxed")


@triton.jit
def _add(row, bins, near):
    """Add to a histogram, one by one, but those of the highest bin at once: numbers often tie."""
    most = tl.max(tl.where(near, bins, -1), 0)
    tied = tl.sum((near & (bins == most)).to(tl.int32), 0)
    if tied > 0:
        tl.atomic_add(row + most, tied, sem="relaxed")
        tl.atomic_add(row + bins, 1, mask=near & (bins != most), sem="relaxed")


@triton.jit
def _put_back(out, tiles, counts, slot_values, slot_places, first, last, limit, t, i, SLOTS: tl.constexpr):
    """Write the slots of a segment whose guess was too high back: from now on its tiles are read in full."""
    if limit < 0:
        count = tl.load(counts + t, mask=t < last, other=SLOTS + 1)
        there = (count <= SLOTS) & (i % SLOTS < count)
        slot = first * SLOTS + i
        place = tl.load(tiles + 2 * t, mask=there, other=0) + tl.load(slot_places + slot, mask=there, other=0)
        tl.store(out + place, tl.load(slot_values + slot, mask=there, other=0), mask=there)
        tl.debug_barrier()


@triton.jit
def narrow(
    out, segments, tiles, groups, guess, found, counts, slot_values, slot_places, histograms, lows, rest,
    LEVEL: tl.constexpr, FEEDBACK: tl.constexpr, LEVELS: tl.constexpr, FINE: tl.constexpr, PER_GROUP: tl.constexpr,
    TILE: tl.constexpr, SLOTS: tl.constexpr, KEY_BITS: tl.constexpr,
):
    """Histogram of the candidates in the range that is left; the last entry counts those beyond the bins."""
    g = tl.program_id(0)
    first, last = tl.load(groups + 3 * g), tl.load(groups + 3 * g + 1)
    s = tl.load(groups + 3 * g + 2)
    low, width, shift, want = _state(segments, guess, found, histograms, lows, rest, s, LEVELS, LEVEL, FINE, KEY_BITS)
    tl.store(lows + s * LEVELS + LEVEL, low)  # every program of the segment writes the same
    tl.store(rest + (s * LEVELS + LEVEL) * 2, width)
    tl.store(rest + (s * LEVELS + LEVEL) * 2 + 1, want)
    limit = _limit(found, segments, s, SLOTS)
    i = tl.arange(0, PER_GROUP * SLOTS)
    t = first + i // SLOTS
    BINS: tl.constexpr = FEW if LEVEL == 0 else MANY
    if LEVEL == 0 and FEEDBACK:
        _put_back(out, tiles, counts, slot_values, slot_places, first, last, limit, t, i, SLOTS)
    if width >= 0:
        row = histograms + (s * LEVELS + LEVEL) * (MANY + 1)
        p = tl.load(slot_values + first * SLOTS + i, mask=t < last, other=0)  # also empty slots: waits for nothing
        count = tl.load(counts + t, mask=t < last, other=SLOTS + 1)
        there = (count <= limit) & (i % SLOTS < count)
        bins, near, far = _bin(_key(p, KEY_BITS), there, low, width, shift, BINS)
        if LEVEL == 0:
            _tally(row, bins, near, BINS)
        else:
            _add(row, bins, near)
        beyond = tl.sum(far.to(tl.int32), 0)
        for again in range(first, last):
            if tl.load(counts + again) > limit:
                q, _spot, inside = _tile(out, segments, tiles, again, 0, s, TILE)
                spots, close, distant = _bin(_key(q, KEY_BITS), inside, low, width, shift, BINS)
                if LEVEL == 0:
                    _tally(row, spots, close, BINS)
                else:  # few of them are left in the range
                    _add(row, spots, close)
                beyond += tl.sum(distant.to(tl.int32), 0)
        if beyond > 0:
            tl.atomic_add(row + MANY, beyond, sem="relaxed")


@triton.jit
def _slots(slot_values, counts, first, last, limit, PER_GROUP: tl.constexpr, SLOTS: tl.constexpr):
    """A group's candidates as (tiles, slots), which of them there are, and which tiles have all theirs in slots."""
    t = first + tl.arange(0, PER_GROUP)
    count = tl.load(counts + t, mask=t < last, other=SLOTS + 1)
    whole = count <= limit
    column = tl.arange(0, SLOTS)[None, :]
    there = whole[:, None] & (column < count[:, None])
    slot = t[:, None] * SLOTS + column
    return tl.load(slot_values + slot, mask=(t < last)[:, None] & (column >= 0), other=0), slot, there, t, whole


@triton.jit
def count_tiles(
    out, segments, tiles, groups, guess, found, counts, slot_values, slot_places, histograms, lows, rest, tallies,
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
    SLOTTED: tl.constexpr, FEEDBACK: tl.constexpr, NARROW: tl.constexpr,
):
    """Write the selected of some numbers; `before` has how many of the segment were above and equal until here."""
    above, equal = there & (key > least), there & (key == least)
    ties = (before & 0xFFFFFFFF).to(tl.int32) + tl.cumsum(equal.to(tl.int32), SLOTTED) - equal.to(tl.int32)
    rank = (before >> 32).to(tl.int32) + tl.cumsum(above.to(tl.int32), SLOTTED) - above.to(tl.int32)
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
        left = p - sent.to(p.dtype) if NARROW else tl.zeros_like(p)
        if SLOTTED:  # zero in `out` until now
            left = tl.where(taken, left, p)
            tl.store(out + place, left, mask=there & (left != 0))
        else:
            tl.store(out + place, left, mask=taken)


@triton.jit
def pack(
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
    spots = tl.load(slot_places + slot, mask=(t < last)[:, None] & (slot >= 0), other=0)
    place = tl.load(tiles + 2 * t, mask=t < last, other=0)[:, None] + spots
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
def restore_line(flag, before, line, n, TILE: tl.constexpr):
    """Copy `before` into `line` if the flag is NaN."""
    bad = tl.load(flag)
    if bad != bad:
        for at in range(tl.program_id(0) * TILE, n, tl.num_programs(0) * TILE):
            place = at + tl.arange(0, TILE)
            tl.store(line + place, tl.load(before + place, mask=place < n), mask=place < n)


@triton.jit
def spread_values(total, values, indices, flag, n, RANKS: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr):
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
