"""Exact top-k on CUDA, in Triton: the gradient and the residual are read once, and the host never waits.

Six phases, for all segments of a line together; a segment is cut into tiles:
1. sample: a guess of each segment's k-th magnitude, from some of its numbers;
2. fold: p = residual + gradient, but zero where it reaches the guess: these numbers go to slots of each tile;
3. narrow: histograms of the keys in the slots, first just above the guess, then inside the bin that holds the
   k-th key, give that key exactly;
4. count: how many of each tile's numbers are above that key, and how many equal it;
5. place: running sums of these counts say where each tile's part goes;
6. pack: values and places of the selected in ascending order; what was not selected goes back from the slots.

A tile with more numbers than slots, and every tile of a segment whose guess was too high, is read again in full
in phases 3 to 6: the result is exact whatever the guess was.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from unisono.methods.kernels import select_programs_triton as programs
from unisono.methods.kernels.select import Plan

_TILE = 2048  # numbers of a segment that one program folds
_FOLD_WARPS = 4
_SAMPLE = 8192
_GROUP = 2048  # slots that one program of phases 3 to 6 looks at
_PIECE = 1024  # numbers of a tile without slots that are packed at once
# By the bits of a key: the width of the first level's bins (a power of two), and how many levels it may take.
_FINE, _LEVELS = {15: 4, 31: 16, 63: 46}, {15: 3, 31: 4, 63: 7}
_GUESSED_BITS = 16


class _Tables(NamedTuple):
    """A plan on a device: segments, their tiles, groups of tiles, and memory to work in."""

    segments: Tensor  # (segments, 5) int32: start, end, kept, where its part of the wire begins, its first tile
    tiles: Tensor  # (tiles, 2) int32: start, segment
    groups: Tensor  # (groups, 3) int32: first tile, last tile + 1, segment
    slots: int
    per_group: int
    work: dict[torch.dtype, _Work]
    compiled: dict[Any, Any]


class _Work(NamedTuple):
    """Memory of the phases."""

    zeros: Tensor  # at the start: `found` and `histograms`
    found: Tensor  # candidates of each segment
    histograms: Tensor  # by segment and level
    guess: Tensor
    counts: Tensor  # candidates of each tile
    slot_values: Tensor
    slot_places: Tensor
    lows: Tensor
    rest: Tensor
    tallies: Tensor


def select_top(plan: Plan, grad: Tensor, residual: Tensor | None, out: Tensor, values: Tensor, indices: Tensor) -> None:
    """See `unisono.methods.kernels.select.select_top`."""
    if not plan.total:
        return
    tables = _tables(plan, grad.device)
    work = tables.work.get(out.dtype) or _work(tables, out.dtype)
    n_segments, n_tiles, n_groups = len(tables.segments), len(tables.tiles), len(tables.groups)
    bits = out.element_size() * 8 - 1
    feedback, kept = (False, out) if residual is None else (True, residual)
    most = torch.finfo(values.dtype).max if values.element_size() < out.element_size() else 0.0
    work.zeros.zero_()
    launch = partial(_launch, tables.compiled, _kind(grad, kept, out, values, indices))

    # Sample, fold
    segments, tiles, groups = tables.segments, tables.tiles, tables.groups
    guess, found, counts, slot_values = work.guess, work.found, work.counts, work.slot_values
    launch(
        programs.sample,
        n_segments,
        16,
        grad,
        kept,
        segments,
        guess,
        _SAMPLE,
        min(bits, _GUESSED_BITS) // 2,
        bits,
        feedback,
    )
    folded = (grad, kept, out, segments, tiles, guess, found, counts, slot_values, work.slot_places)
    launch(programs.fold, n_tiles, _FOLD_WARPS, *folded, _TILE, tables.slots, bits, 64 // grad.element_size(), feedback)
    # Narrow
    how = (_LEVELS[bits], _FINE[bits], tables.per_group, _TILE, tables.slots, bits)
    slotted = (out, segments, tiles, groups, guess, found, counts, slot_values, work.slot_places)
    known = (work.histograms, work.lows, work.rest)
    for level in range(_LEVELS[bits]):
        launch(programs.narrow, n_groups, 4, *slotted, *known, level, feedback, *how)
    # Count, place, pack
    launch(programs.count_tiles, n_groups, 4, *slotted, *known, work.tallies, *how)
    running = torch.cumsum(work.tallies, 0)
    packed = (work.tallies, running, values, indices, most)
    launch(programs.pack, n_groups, 4, *slotted, *known, *packed, _PIECE, feedback, most > 0, *how)


def spread(total: Tensor, values: Tensor, indices: Tensor, ranks: int, flag: Tensor, *, first: bool) -> None:
    """See `unisono.methods.kernels.select.spread`."""
    n = len(indices)
    kind = (*_kind(total, values, indices), n % 16 == 0, n == 1, ranks, first)
    _launch(
        _compiled,
        kind,
        programs.spread_values,
        triton.cdiv(n, 1024),
        4,
        total,
        values,
        indices,
        flag,
        n,
        ranks,
        first,
        1024,
    )


def restore(flag: Tensor, before: Tensor, line: Tensor) -> None:
    """See `unisono.methods.kernels.select.restore`."""
    n = line.numel()
    if n:
        kind = (*_kind(before, line), n % 16 == 0, n == 1)
        _launch(_compiled, kind, programs.restore_line, min(256, triton.cdiv(n, 8192)), 8, flag, before, line, n, 8192)


_compiled: dict[Any, Any] = {}


def _kind(*tensors: Tensor) -> tuple[Any, ...]:
    """What a kernel is compiled for: dtypes, devices, and which lines are aligned."""
    return tensors[0].device, *[(x.dtype, x.data_ptr() % 16) for x in tensors]


def _launch(compiled: dict[Any, Any], kind: Any, kernel: Any, grid: int, warps: int, *args: Any) -> None:
    """Run a kernel. From the second time on without Triton's own look-up, which takes longer than small kernels do."""
    key = (kind, kernel.__name__, *[x for x in args if not isinstance(x, Tensor)])
    found = compiled.get(key)
    if found is None:
        compiled[key] = kernel[(grid,)](*args, num_warps=warps)
    else:
        found[(grid, 1, 1)](*args)


def _tables(plan: Plan, device: torch.device) -> _Tables:
    if device in plan.tables:
        return plan.tables[device]  # type: ignore[no-any-return]
    share = max((s.kept / s.length for s in plan.segments if s.length >= _TILE), default=0.0)
    slots = 64
    # The guess lets about 1.3 times the share through; in gradients large numbers lie together.
    while slots < min(_TILE // 2, 4.4 * share * _TILE + 16):
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
    made = plan.tables[device] = _Tables(on(segments), on(tiles), on(groups), slots, per_group, {}, {})
    return made


def _work(tables: _Tables, dtype: torch.dtype) -> _Work:
    n_segments, n_tiles = len(tables.segments), len(tables.tiles)
    bits = dtype.itemsize * 8 - 1
    levels, key = _LEVELS[bits], torch.int64 if bits > 31 else torch.int32
    new = partial(torch.empty, device=tables.segments.device)
    zeros = new(n_segments * (1 + levels * (programs.MANY.value + 1)), dtype=torch.int32)
    slots = n_tiles * tables.slots
    tables.work[dtype] = made = _Work(
        *(zeros, zeros[:n_segments], zeros[n_segments:]),
        *(new(n_segments, dtype=key), new(n_tiles, dtype=torch.int32)),
        *(new(slots, dtype=dtype), new(slots, dtype=torch.int16)),
        *(new(n_segments * levels, dtype=key), new(n_segments * levels * 2, dtype=torch.int32)),
        new(n_tiles, dtype=torch.int64),
    )
    return made
