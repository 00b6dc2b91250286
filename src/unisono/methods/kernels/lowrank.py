"""Low-rank factors of many matrices at once: M ~ P Q^T with orthonormal P. Torch here, Triton on CUDA.

The matrices lie in a line of memory, as in a bucket. Factors are kept transposed, (rank, rows) and (rank,
columns), in lines of their own where those of equal shape are neighbours: they are orthonormalised as a batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

_CHUNK = 1 << 20  # bytes of a matrix worked on at a time: it stays in the cache between two steps
_SHIFT = 1e-12  # added to the diagonal of a Gram matrix with ones on it: Cholesky never meets a zero
_NOISE = 1e-15  # too little to turn a direction of length one, enough where there is none


class Matrix(NamedTuple):
    """A matrix in a line of memory, row after row, to be approximated by `rank` columns."""

    start: int
    rows: int
    columns: int
    rank: int


class Factors:
    """Which matrices of a line are approximated, and where their factors lie in lines of their own: `p_at` and `q_at`
    are where each matrix's factors begin, in lines of `p_size` and `q_size` numbers.

    `rest`: the parts of the line (start, length) that travel as they are, one after the other.

    >>> layout = Factors([Matrix(0, 6, 5, 2), Matrix(32, 3, 4, 2), Matrix(48, 6, 5, 2)])
    >>> layout.p_at, layout.p_size, layout.q_size
    ([6, 0, 18], 30, 28)
    """

    def __init__(self, matrices: Sequence[Matrix], rest: Sequence[tuple[int, int]] = ()) -> None:
        self.matrices, self.rest = list(matrices), list(rest)
        self.rest_sizes = [length for _, length in rest]
        self.tables: dict[Any, Any] = {}  # by device: what its kernels need to know of this layout
        self.kernels: dict[Any, Any] = {}  # by dtype of the factors
        order = sorted(range(len(matrices)), key=lambda i: matrices[i][1:])
        self.groups = [list(same) for _, same in groupby(order, key=lambda i: matrices[i][1:])]
        self.p_at, self.p_size = _place(order, [m.rank * m.rows for m in matrices])
        self.q_at, self.q_size = _place(order, [m.rank * m.columns for m in matrices])

    def view_p(self, line: Tensor) -> list[Tensor]:
        """Each matrix's P^T, (rank, rows), in a line."""
        pairs = zip(self.matrices, self.p_at, strict=True)
        return [line[at : at + m.rank * m.rows].view(m.rank, -1) for m, at in pairs]

    def view_q(self, line: Tensor) -> list[Tensor]:
        """Each matrix's Q^T, (rank, columns), in a line."""
        pairs = zip(self.matrices, self.q_at, strict=True)
        return [line[at : at + m.rank * m.columns].view(m.rank, -1) for m, at in pairs]

    def view_rest(self, line: Tensor) -> list[Tensor]:
        """The parts of a line that travel as they are."""
        return [line[start : start + length] for start, length in self.rest]

    def batches(self, line: Tensor, *, p: bool) -> Iterator[Tensor]:
        """The factors in a line, (count, rank, n) for each group of equal shapes."""
        for group in self.groups:
            first, at = self.matrices[group[0]], (self.p_at if p else self.q_at)[group[0]]
            shape = (len(group), first.rank, first.rows if p else first.columns)
            yield line[at : at + math.prod(shape)].view(shape)


def _place(order: list[int], sizes: list[int]) -> tuple[list[int], int]:
    ends = list(accumulate((sizes[i] for i in order), initial=0))
    places = dict(zip(order, ends, strict=False))
    return [places[i] for i in range(len(sizes))], ends[-1]


# The interface -----------------------------------------------------------------------------------------------


def make_basis(layout: Factors, q: Tensor, noise: Tensor, out: Tensor) -> None:
    """Orthonormal columns that span those of every Q. Where Q has no direction left (it is zero after a
    gradient of zero), `noise` gives one: otherwise it would stay zero for ever."""
    if fast := _triton(layout, q):
        fast.orthonormalise(layout, q, noise, out, p=False)
        return
    lines = [layout.batches(line, p=False) for line in (q, noise, out)]
    for x, fresh, target in zip(*lines, strict=True):
        target.copy_(_orthonormalise(_normalise(x.double()) + _NOISE * fresh.double()))


def orthonormalise(layout: Factors, p: Tensor, out: Tensor) -> None:
    """Every P with its columns made orthonormal; zero stays zero, what is not finite stays so."""
    if fast := _triton(layout, p):
        fast.orthonormalise(layout, p, None, out, p=True)
        return
    for x, target in zip(layout.batches(p, p=True), layout.batches(out, p=True), strict=True):
        target.copy_(_orthonormalise(x.double()))


def multiply_left(layout: Factors, flat: Tensor, residual: Tensor | None, q: Tensor, out: Tensor, rest: Tensor) -> None:
    """P = M Q into `out`, for M = flat + residual; and that sum into `rest` for what is no matrix.

    Where `flat` has the dtype of the factors, its matrices are M after.
    """
    if fast := _triton(layout, q):
        fast.multiply_left(layout, flat, residual, q, out, rest)
        return
    for m, p_t, q_t in zip(layout.matrices, layout.view_p(out), layout.view_q(q), strict=True):
        for g, e, part in _chunks(m, flat, residual, p_t):
            if e is not None and g.dtype == q.dtype:
                g.add_(e)
            torch.mm(q_t, _add_residual(g, e, q.dtype).t(), out=part)
    if layout.rest:
        parts = list(rest.split(layout.rest_sizes))
        torch._foreach_copy_(parts, layout.view_rest(flat))
        if residual is not None:
            torch._foreach_add_(parts, layout.view_rest(residual))


def multiply_right(layout: Factors, flat: Tensor, residual: Tensor | None, p: Tensor, out: Tensor) -> None:
    """Q = M^T P into `out`, after `multiply_left`."""
    if fast := _triton(layout, p):
        fast.multiply_right(layout, flat, residual, p, out)
        return
    for m, p_t, q_t in zip(layout.matrices, layout.view_p(p), layout.view_q(out), strict=True):
        q_t.zero_()
        for g, e, part in reversed(_chunks(m, flat, residual, p_t)):  # the last rows are still in the cache
            q_t.addmm_(part, _add_residual(g, e, p.dtype))


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
    """After `multiply_left`: flat = P Q^T and `rest`; `after`, the residual that follows, is M - P mine^T, and zero
    for the rest; kept = Q, unless `overflow` (one number) is NaN."""
    if fast := _triton(layout, p):
        fast.finish(layout, flat, residual, after, p, mine, q, rest, kept, overflow)
        return
    for m, p_t, mine_t, q_t in zip(
        layout.matrices, layout.view_p(p), layout.view_q(mine), layout.view_q(q), strict=True
    ):
        parts = _chunks(m, flat, residual, p_t)
        for (g, e, part), (_, new, _) in zip(parts, _chunks(m, flat, after, p_t), strict=True):
            if new is not None:
                _keep(_add_residual(g, e, p.dtype), part, mine_t, new)
            if g.dtype == p.dtype:
                torch.mm(part.t(), q_t, out=g)
            else:
                g.copy_(part.t() @ q_t)
    torch.where(overflow == 0, q, kept, out=kept)
    if layout.rest:
        torch._foreach_copy_(layout.view_rest(flat), list(rest.split(layout.rest_sizes)))
        if after is not None:
            torch._foreach_zero_(layout.view_rest(after))


def multiply_factors(layout: Factors, p: Tensor, q: Tensor, rest: Tensor, flat: Tensor) -> None:
    """Every P Q^T, and the rest, into their places in a line."""
    for m, p_t, q_t in zip(layout.matrices, layout.view_p(p), layout.view_q(q), strict=True):
        flat[m.start : m.start + m.rows * m.columns].view(m.rows, -1).copy_(p_t.t() @ q_t)
    if layout.rest:
        torch._foreach_copy_(layout.view_rest(flat), list(rest.split(layout.rest_sizes)))


# With torch --------------------------------------------------------------------------------------------------


def _orthonormalise(x: Tensor) -> Tensor:
    """The rows of every x[i] made orthonormal: Cholesky QR twice, in float64.

    With rows of length one, the shift is relative to each: P P^T <= I holds for rows of any scale, dependent
    rows and zero rows, so a residual cannot grow. `cholesky_ex` neither raises nor synchronises.
    """
    if x.shape[-2] == 1:
        return _normalise(x)
    for _ in range(2):
        x = _normalise(x)
        gram = x @ x.mT
        gram.diagonal(dim1=-2, dim2=-1).add_(_SHIFT)
        factor = torch.linalg.cholesky_ex(gram)[0]
        x = torch.linalg.solve_triangular(factor, x, upper=False).mul_(math.sqrt(1 + _SHIFT))
    return x


def _normalise(x: Tensor) -> Tensor:
    """Rows of length one; zero rows as they are."""
    x = x / _replace_zeros(x.abs().amax(-1, keepdim=True))  # their squares neither overflow nor vanish
    return x.div_(_replace_zeros(torch.linalg.vector_norm(x, dim=-1, keepdim=True)))


def _replace_zeros(x: Tensor) -> Tensor:
    return x.masked_fill_(x == 0, 1.0)


def _chunks(
    m: Matrix, flat: Tensor, residual: Tensor | None, p_t: Tensor
) -> list[tuple[Tensor, Tensor | None, Tensor]]:
    """Some rows of a matrix at a time: of the line, of the residual, of P."""
    step = m.rows if flat.is_cuda else max(1, _CHUNK // (m.columns * p_t.element_size()))
    lines = [None if x is None else x[m.start : m.start + m.rows * m.columns] for x in (flat, residual)]
    g, e = (None if x is None else x.view(m.rows, -1).split(step) for x in lines)
    assert g is not None
    return list(zip(g, e or [None] * len(g), p_t.split(step, 1), strict=True))


def _keep(whole: Tensor, p_t: Tensor, mine_t: Tensor, e: Tensor) -> None:
    """e = M - P mine^T."""
    if len(p_t) == 1:
        torch.addr(whole, p_t[0], mine_t[0], alpha=-1, out=e)  # in one pass
    else:
        torch.addmm(whole, p_t.t(), mine_t, alpha=-1, out=e)


def _add_residual(g: Tensor, e: Tensor | None, dtype: torch.dtype) -> Tensor:
    """M, in the factors' dtype: `g` holds it if it has that dtype, else it is the sum."""
    if g.dtype == dtype:
        return g
    return g.to(dtype) if e is None else e + g


def _triton(layout: Factors, x: Tensor) -> Any:
    """The Triton kernels where they can be used: float32 factors on CUDA, of no more columns than they hold."""
    if not x.is_cuda:
        return None
    if x.dtype not in layout.kernels:
        layout.kernels[x.dtype] = None
        if x.dtype == torch.float32 and layout.matrices and find_spec("triton") is not None:
            from unisono.methods.kernels import lowrank_triton

            if max(m.rank for m in layout.matrices) <= lowrank_triton.MOST:
                layout.kernels[x.dtype] = lowrank_triton
    return layout.kernels[x.dtype]
