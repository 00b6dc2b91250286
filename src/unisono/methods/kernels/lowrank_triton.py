"""Low-rank factors on CUDA, in Triton: each step is one launch for all matrices of a line, whatever their shapes."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from unisono.methods.kernels.lowrank import Factors

MOST = 16  # columns that fit into the registers of a program
_ROWS = 8  # of a matrix that one program of `multiply_left` multiplies
_SPLIT = 256  # rows that one program of `multiply_right` sums; the sums are added up after, always in one order
_TILE = (16, 256)  # of a matrix that one program of `finish` writes
_COPY = 2048  # numbers that are only moved, in a program
_FIELDS = tl.constexpr(7)
_SHIFT = tl.constexpr(1e-12)
_NOISE = tl.constexpr(1e-15)
_BACK = tl.constexpr(1.0 + 0.5e-12)  # what the shift takes from rows that are orthonormal


class _Tables:
    """A layout on a device: what every program of every kernel works on."""

    def __init__(self, layout: Factors, device: torch.device) -> None:
        self.rank = triton.next_power_of_2(max(m.rank for m in layout.matrices))
        self.count = len(layout.matrices)
        # start, rows, columns, rank, place of P, of Q, of the partial sums of Q; without a rank: start, length, kind
        rows: list[list[int]] = []
        left, right, gather, finish, partial, place = [], [], [], [], 0, 0
        for i, m in enumerate(layout.matrices):
            rows.append([*m, layout.p_at[i], layout.q_at[i], partial])
            partial += -(-m.rows // _SPLIT) * m.rank * m.columns
            left += [[i, a] for a in range(0, m.rows, _ROWS)]
            right += [[i, a, b] for a in range(0, m.rows, _SPLIT) for b in range(0, m.columns, _columns(self.rank))]
            gather += [[i, a] for a in range(0, m.rank * m.columns, 256)]
            finish += [[i, a, b] for a in range(0, m.rows, _TILE[0]) for b in range(0, m.columns, _TILE[1])]
        for start, length in layout.rest:
            left += [[len(rows), a] for a in range(0, length, _COPY)]
            finish += [[len(rows), a, 0] for a in range(0, length, _COPY)]
            rows.append([start, length, 0, 0, place, 0, 0])
            place += length
        finish += [[len(rows), a, 0] for a in range(0, layout.q_size, _COPY)]
        rows.append([0, layout.q_size, 1, 0, 0, 0, 0])
        self.rows = torch.tensor(rows, dtype=torch.int64, device=device)
        self.left, self.right, self.gather, self.finish = (
            torch.tensor(x, dtype=torch.int32, device=device) for x in (left, right, gather, finish)
        )
        self.partial = torch.empty(partial, dtype=torch.float32, device=device)
        self._begun: dict[Any, Any] = {}

    def run(self, kernel: Any, programs: int, tensors: tuple[Tensor, ...], *constants: Any, warps: int = 4) -> None:
        """Launch a kernel. Triton looks at every argument at every launch; here it does so once for each way in
        which arguments can differ: their dtypes (fixed in a layout), and whether they lie at 16 bytes."""
        key = (kernel, constants, tensors[0].dtype, tuple([x.data_ptr() % 16 == 0 for x in tensors]))
        if (begin := self._begun.get(key)) is not None:
            begin(*tensors, *constants)
            return
        compiled = kernel[(programs,)](*tensors, *constants, num_warps=warps)
        if compiled is not None:  # None: Triton's interpreter
            self._begun[key] = compiled[(programs, 1, 1)]


def _tables(layout: Factors, device: torch.device) -> _Tables:
    if device not in layout.tables:
        layout.tables[device] = _Tables(layout, device)
    found: _Tables = layout.tables[device]
    return found


def _columns(rank: int) -> int:
    """Columns that a program holds at a time, with `rank` sums for each number."""
    return min(256, 1024 // rank)


# What the interface calls ------------------------------------------------------------------------------------


def orthonormalise(layout: Factors, x: Tensor, noise: Tensor | None, out: Tensor, *, p: bool) -> None:
    """See `lowrank.orthonormalise` and, with noise, `lowrank.make_basis`."""
    tables = _tables(layout, x.device)
    block = max(16, min(1024, 4096 // tables.rank**2))
    tensors = (x, x if noise is None else noise, out, tables.rows)
    where = (1, 4) if p else (2, 5)
    tables.run(_orthonormalise, tables.count, tensors, *where, noise is not None, tables.rank, block)


def multiply_left(layout: Factors, flat: Tensor, residual: Tensor | None, q: Tensor, out: Tensor, rest: Tensor) -> None:
    """See `lowrank.multiply_left`."""
    tables = _tables(layout, q.device)
    kept, inplace = residual is not None, flat.dtype == q.dtype
    tensors = (flat, flat if residual is None else residual, q, out, rest, tables.rows, tables.left)
    columns = _columns(tables.rank)
    tables.run(_left, len(tables.left), tensors, tables.rank, _ROWS, columns, _COPY, kept, inplace)


def multiply_right(layout: Factors, flat: Tensor, residual: Tensor | None, p: Tensor, out: Tensor) -> None:
    """See `lowrank.multiply_right`."""
    tables = _tables(layout, p.device)
    apart = residual is not None and flat.dtype != p.dtype
    tensors = (flat, residual if residual is not None else flat, p, tables.partial, tables.rows, tables.right)
    columns = _columns(tables.rank)
    tables.run(_right, len(tables.right), tensors, tables.rank, _ROWS, _SPLIT, columns, apart)
    tables.run(_gather, len(tables.gather), (tables.partial, out, tables.rows, tables.gather), _SPLIT, 256, warps=2)


def finish(
    layout: Factors,
    flat: Tensor,
    residual: Tensor | None,
    after: Tensor | None,
    p: Tensor,
    mine: Tensor,
    q: Tensor,
    rest: Tensor,
    kept: Tensor,
    overflow: Tensor,
) -> None:
    """See `lowrank.finish`."""
    tables = _tables(layout, p.device)
    apart = flat.dtype != p.dtype
    e, new = flat if residual is None else residual, flat if after is None else after
    tensors = (flat, e, new, p, mine, q, rest, kept, overflow, tables.rows, tables.finish)
    tables.run(_finish, len(tables.finish), tensors, tables.rank, *_TILE, _COPY, after is not None, apart)


# Kernels -----------------------------------------------------------------------------------------------------


@triton.jit
def _left(
    flat, residual, q, p, rest, matrices, work,
    R: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, COPY: tl.constexpr,
    KEPT: tl.constexpr, INPLACE: tl.constexpr,
):  # fmt: skip
    """P[:, some rows] = M Q, where sums stay apart by column until the end; or a part of the rest."""
    item = work + 2 * tl.program_id(0)
    m = matrices + _FIELDS * tl.load(item)
    start, n, columns, rank = tl.load(m), tl.load(m + 1), tl.load(m + 2), tl.load(m + 3)
    if rank == 0:
        k = tl.load(item + 1) + tl.arange(0, COPY)
        part = tl.load(flat + start + k, k < n, 0.0).to(tl.float32)
        if KEPT:
            part += tl.load(residual + start + k, k < n, 0.0)
        tl.store(rest + tl.load(m + 4) + k, part.to(rest.dtype.element_ty), k < n)
        return
    p += tl.load(m + 4)
    q += tl.load(m + 5)
    row, js = tl.load(item + 1) + tl.arange(0, ROWS), tl.arange(0, R)
    sums = tl.zeros([R, ROWS, COLUMNS], tl.float32)
    for first in range(0, columns, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = (row < n)[:, None] & (column < columns)[None, :]
        at = start + row[:, None] * columns + column[None, :]
        x = tl.load(flat + at, inside, 0.0).to(tl.float32)
        if KEPT:
            x += tl.load(residual + at, inside, 0.0)
            if INPLACE:
                tl.store(flat + at, x, inside)
        factor = tl.load(
            q + js[:, None] * columns + column[None, :], (js < rank)[:, None] & (column < columns)[None, :], 0.0
        )
        sums += x[None, :, :] * factor[:, None, :]
    tl.store(p + js[:, None] * n + row[None, :], tl.sum(sums, 2), (js < rank)[:, None] & (row < n)[None, :])


@triton.jit
def _right(
    flat, residual, p, partial, matrices, work,
    R: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr, COLUMNS: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Q[some columns] summed over some rows of M^T P."""
    item = work + 3 * tl.program_id(0)
    m = matrices + _FIELDS * tl.load(item)
    start, n, columns, rank = tl.load(m), tl.load(m + 1), tl.load(m + 2), tl.load(m + 3)
    p += tl.load(m + 4)
    begin, js = tl.load(item + 1), tl.arange(0, R)
    partial += tl.load(m + 6) + (begin // SPLIT) * rank * columns
    column = tl.load(item + 2) + tl.arange(0, COLUMNS)
    sums = tl.zeros([R, ROWS, COLUMNS], tl.float32)
    for step in range(0, SPLIT, ROWS):
        row = begin + step + tl.arange(0, ROWS)
        inside = (row < n)[:, None] & (column < columns)[None, :]
        at = start + row[:, None] * columns + column[None, :]
        x = tl.load(flat + at, inside, 0.0).to(tl.float32)
        if APART:
            x += tl.load(residual + at, inside, 0.0)
        factor = tl.load(p + js[:, None] * n + row[None, :], (js < rank)[:, None] & (row < n)[None, :], 0.0)
        sums += x[None, :, :] * factor[:, :, None]
    where = (js < rank)[:, None] & (column < columns)[None, :]
    tl.store(partial + js[:, None] * columns + column[None, :], tl.sum(sums, 1), where)


@triton.jit
def _gather(partial, q, matrices, work, SPLIT: tl.constexpr, B: tl.constexpr):
    """Add up the partial sums of Q."""
    item = work + 2 * tl.program_id(0)
    m = matrices + _FIELDS * tl.load(item)
    size = tl.load(m + 2) * tl.load(m + 3)
    at = tl.load(item + 1) + tl.arange(0, B)
    partial += tl.load(m + 6)
    total = tl.zeros([B], tl.float32)
    for split in range(tl.cdiv(tl.load(m + 1), SPLIT)):
        total += tl.load(partial + split * size + at, at < size, 0.0)
    tl.store(q + tl.load(m + 5) + at, total, at < size)


@triton.jit
def _finish(
    flat, residual, after, p, mine, q, rest, kept, overflow, matrices, work,
    R: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, COPY: tl.constexpr,
    KEPT: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """A tile of the mean P Q^T, and of the residual that follows, M - P mine^T; or a part of the rest; or of Q, where
    nothing overflowed."""
    item = work + 3 * tl.program_id(0)
    m = matrices + _FIELDS * tl.load(item)
    start, n, columns, rank = tl.load(m), tl.load(m + 1), tl.load(m + 2), tl.load(m + 3)
    if rank == 0:
        k = tl.load(item + 1) + tl.arange(0, COPY)
        if columns == 1:
            tl.store(kept + k, tl.load(q + k, k < n, 0.0), k < tl.where(tl.load(overflow) == 0.0, n, 0))
        else:
            tl.store(flat + start + k, tl.load(rest + tl.load(m + 4) + k, k < n, 0.0), k < n)
            if KEPT:
                tl.store(after + start + k, tl.zeros([COPY], tl.float32), k < n)
        return
    p += tl.load(m + 4)
    mine += tl.load(m + 5)
    q += tl.load(m + 5)
    row, column = tl.load(item + 1) + tl.arange(0, ROWS), tl.load(item + 2) + tl.arange(0, COLUMNS)
    inside = (row < n)[:, None] & (column < columns)[None, :]
    at = start + row[:, None] * columns + column[None, :]
    mean = tl.zeros([ROWS, COLUMNS], tl.float32)
    sent = tl.zeros([ROWS, COLUMNS], tl.float32)
    for j in tl.static_range(R):
        left = tl.load(p + j * n + row, row < tl.where(rank > j, n, 0), 0.0)[:, None]
        here = column < tl.where(rank > j, columns, 0)
        mean += left * tl.load(q + j * columns + column, here, 0.0)[None, :]
        if KEPT:
            sent += left * tl.load(mine + j * columns + column, here, 0.0)[None, :]
    if KEPT:
        x = tl.load(flat + at, inside, 0.0).to(tl.float32)
        if APART:
            x += tl.load(residual + at, inside, 0.0)
        tl.store(after + at, x - sent, inside)
    tl.store(flat + at, mean.to(flat.dtype.element_ty), inside)


@triton.jit
def _orthonormalise(
    x, noise, out, matrices,
    LENGTH: tl.constexpr, PLACE: tl.constexpr, FRESH: tl.constexpr, R: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """One matrix's factor: Cholesky QR twice, in float64, in one program. Reads the factor three or four times."""
    m = matrices + _FIELDS * tl.program_id(0)
    n, at = tl.load(m + LENGTH), tl.load(m + PLACE)
    rank, js = tl.load(m + 3), tl.arange(0, R)
    x += at
    noise += at
    out += at
    length = tl.zeros([R], tl.float64) + 1.0
    if FRESH:
        squares = tl.zeros([R, B], tl.float64)
        for first in range(0, n, B):
            v = _rows(x, noise, length, first, n, rank, False, R, B)
            squares += v * v
        length = tl.sum(squares, 1)
        length = tl.where(length == 0.0, 1.0, 1.0 / tl.sqrt(length))
    gram = tl.zeros([R, R, B], tl.float64)
    for first in range(0, n, B):
        v = _rows(x, noise, length, first, n, rank, FRESH, R, B)
        gram += v[:, None, :] * v[None, :, :]
    once = _whitening(tl.sum(gram, 2), R)
    gram = tl.zeros([R, R, B], tl.float64)
    for first in range(0, n, B):
        v = _apply(once, _rows(x, noise, length, first, n, rank, FRESH, R, B))
        gram += v[:, None, :] * v[None, :, :]
    twice = _whitening(tl.sum(gram, 2), R)
    for first in range(0, n, B):
        v = _apply(twice, _apply(once, _rows(x, noise, length, first, n, rank, FRESH, R, B)))
        k = first + tl.arange(0, B)
        tl.store(out + js[:, None] * n + k[None, :], v.to(tl.float32), (js < rank)[:, None] & (k < n)[None, :])


@triton.jit
def _rows(x, noise, length, first, n, rank, FRESH: tl.constexpr, R: tl.constexpr, B: tl.constexpr):
    """Some columns of a factor's rows (R, B)."""
    js, k = tl.arange(0, R), first + tl.arange(0, B)
    at, inside = js[:, None] * n + k[None, :], (js < rank)[:, None] & (k < n)[None, :]
    v = tl.load(x + at, inside, 0.0).to(tl.float64)
    if FRESH:
        v = v * length[:, None] + _NOISE * tl.load(noise + at, inside, 0.0).to(tl.float64)
    return v


@triton.jit
def _apply(transform, v):
    """transform @ v for (R, R) and (R, B)."""
    return tl.sum(transform[:, :, None] * v[None, :, :], 1)


@triton.jit
def _whitening(gram, R: tl.constexpr):
    """T with T gram T^T = I: the inverse of the Cholesky factor, of rows scaled to length one and a shift."""
    js = tl.arange(0, R)
    diagonal = js[:, None] == js[None, :]
    scale = tl.sum(tl.where(diagonal, gram, 0.0), 1)
    scale = tl.where(scale == 0.0, 1.0, 1.0 / tl.sqrt(scale))
    rest = gram * scale[:, None] * scale[None, :] + tl.where(diagonal, _SHIFT, 0.0)
    inverse = tl.where(diagonal, 1.0, 0.0).to(tl.float64)
    for j in tl.static_range(R):
        column = tl.sum(tl.where(js[None, :] == j, rest, 0.0), 1)
        pivot = tl.sqrt(tl.sum(tl.where(js == j, column, 0.0), 0))
        column = tl.where(js >= j, column / pivot, 0.0)
        rest -= column[:, None] * column[None, :]
        row = tl.sum(tl.where(js[:, None] == j, inverse, 0.0), 0) / pivot
        below = inverse - tl.where(js > j, column, 0.0)[:, None] * row[None, :]
        inverse = tl.where(js[:, None] == j, row[None, :], below)
    return inverse * scale[None, :] * _BACK
