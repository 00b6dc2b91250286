"""The sums that determine least squares: the number of rows, the mean and the centred products of [X, y].

They are small (the square of the number of columns), they add up over workers and over time, and every penalty is
solved from them without another pass over the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from unisono.tables.estimators.row_blocks import RowBlock, Table, is_finite, is_sparse

Array = npt.NDArray[np.float64]


@dataclass
class TableMoments:
    """count: rows; weight: sum of weights; mean: of every column of Z = [X, Y]; products: Zᵀ Z about the mean.

    noise: a standard deviation below it is rounding, and the column constant.
    """

    count: int
    weight: float
    mean: Array  # columns + targets
    products: Array  # (columns + targets) squared
    noise: Array  # columns + targets

    @classmethod
    def from_sums(cls, count: int, weight: float, sums: Array, products: Array, shift: Array) -> TableMoments:
        """From sums of Z - shift and of its products."""
        away = sums / weight
        mean, eps = shift + away, np.finfo(np.float64).eps
        noise = 4 * np.sqrt(eps) * np.abs(away) + 4 * eps * np.abs(mean)
        return cls(count, weight, mean, products - weight * np.outer(away, away), noise)

    def merge(self, other: TableMoments) -> TableMoments:
        """The moments of both sets of rows together (Chan, Golub and LeVeque, 1983)."""
        weight = self.weight + other.weight
        away = other.mean - self.mean
        mean = self.mean + away * (other.weight / weight)
        between = np.outer(away, away) * (self.weight * other.weight / weight)
        products, noise = self.products + other.products + between, np.maximum(self.noise, other.noise)
        return TableMoments(self.count + other.count, weight, mean, products, noise)

    def to_list(self) -> list[Any]:
        """Its fields, as a message carries them."""
        return [self.count, self.weight, self.mean, self.products, self.noise]

    def center_at_zero(self) -> TableMoments:
        """The products about 0, for a model without intercept."""
        products = self.products + self.weight * np.outer(self.mean, self.mean)
        return TableMoments(self.count, self.weight, np.zeros_like(self.mean), products, np.zeros_like(self.noise))


def peek(table: Table) -> Array:
    """A value near each column's mean, from the first rows: sums of differences from it lose no digits.

    The last number is 1 if there are rows, else 0. For sparse columns the value is 0: shifted, they would be dense.
    """
    width = table.columns + table.targets
    out = np.zeros(width + 1)
    for block in table.read_blocks():
        if len(block.y) and is_finite(block):
            x = np.zeros(table.columns) if is_sparse(block.x) else block.x[:4096].mean(axis=0)
            out[:-1] = np.concatenate([x, block.y[:4096].mean(axis=0)])
            out[-1] = 1
            break
    return out


def sum_products(table: Table, shift: Array) -> tuple[int, int, float, Array, Array]:
    """Sums about `shift` over a table's rows: whether a value is not finite, rows, weight, Σ z, Σ z zᵀ.

    A column of ones beside z makes Σ z a part of the products, and anything that is not finite shows in them.
    """
    d, width = table.columns, table.columns + table.targets
    count, total = 0, np.zeros((width + 1, width + 1))
    scratch = np.empty((0, width + 1))
    with np.errstate(all="ignore"):
        for block in table.read_blocks():
            count += len(block.y)
            if is_sparse(block.x):
                _add_sparse(block, shift, total)
                continue
            if len(scratch) < len(block.y):
                scratch = np.ones((len(block.y), width + 1))
            z = scratch[: len(block.y)]
            np.subtract(block.x, shift[:d], out=z[:, :d])
            np.subtract(block.y, shift[d:], out=z[:, d:width])
            total += z.T @ (z if block.weight is None else z * block.weight[:, None])
        bad = not np.isfinite(total).all()
    return int(bad), count, float(total[width, width]), total[width, :width].copy(), total[:width, :width].copy()


def _add_sparse(block: RowBlock, shift: Array, total: Array) -> None:
    """Add a sparse block to `total` as `sum_products` does, with the columns of x about 0."""
    d = block.x.shape[1]
    rest = np.column_stack([block.y - shift[d:], np.ones(len(block.y))])
    x, weighted = block.x, rest
    if block.weight is not None:
        x, weighted = block.x.multiply(block.weight[:, None]).tocsr(), rest * block.weight[:, None]
    cross = np.asarray(block.x.T @ weighted)
    total[:d, :d] += (block.x.T @ x).toarray()
    total[:d, d:] += cross
    total[d:, :d] += cross.T
    total[d:, d:] += rest.T @ weighted


@dataclass
class Solution:
    """coef: columns × targets; condition: of the columns scaled to length 1; iterations of the solver."""

    coef: Array
    intercept: Array
    condition: float
    rank: int
    iterations: int = 1


def minimise(moments: TableMoments, columns: int, *, l1: float, l2: float, tol: float, max_iter: int) -> Solution:
    """The minimiser of Σ (z w - y)² / 2n + l1 |w| + l2 w² / 2 from the moments (n: the sum of weights).

    Columns are first scaled to length 1. If they depend on each other, it is the solution of least length, as from
    `numpy.linalg.lstsq`.
    """
    gram, cross = moments.products[:columns, :columns] / moments.weight, moments.products[:columns, columns:]
    cross = cross / moments.weight
    lengths = np.sqrt(np.maximum(np.diag(gram), 0.0))
    lengths[lengths <= moments.noise[:columns]] = 0.0  # a constant column says nothing
    scale = np.where(lengths > 0, lengths, 1.0)
    used = lengths > 0
    scaled = np.where(np.outer(used, used), gram / np.outer(scale, scale), 0.0)
    target = np.where(used[:, None], cross / scale[:, None], 0.0)
    iterations = 1
    if l1:
        v, iterations = _solve_lasso(scaled, target, l1 / scale, l2 / scale**2, tol, max_iter)
        condition, rank = float("nan"), int(used.sum())
    else:
        v, condition, rank = _solve_ridge(scaled, target, scale, l2)
    coef = v / scale[:, None]
    return Solution(coef, moments.mean[columns:] - moments.mean[:columns] @ coef, condition, rank, iterations)


def _solve_ridge(gram: Array, target: Array, scale: Array, l2: float) -> tuple[Array, float, int]:
    values, vectors = np.linalg.eigh(gram + np.diag(l2 / scale**2))
    largest = float(values[-1]) if len(values) else 0.0
    kept = values > largest * len(values) * np.finfo(np.float64).eps * 4
    rank = int(kept.sum())
    if rank == 0:
        return np.zeros_like(target), 1.0, 0
    good = vectors[:, kept]
    v = good @ ((good.T @ target) / values[kept, None])
    condition = float(np.sqrt(largest / values[kept][0]))
    if rank < len(values):  # of all solutions the shortest in the columns' own units
        null = vectors[:, ~kept] / scale[:, None]
        basis, _ = np.linalg.qr(null)
        w = v / scale[:, None]
        v = (w - basis @ (basis.T @ w)) * scale[:, None]
    return v, condition, rank


def _solve_lasso(gram: Array, target: Array, l1: Array, l2: Array, tol: float, max_iter: int) -> tuple[Array, int]:
    """Coordinate descent on the quadratic; needs no pass over the rows. Returns v and the number of sweeps."""
    v = np.zeros_like(target)
    left = target.copy()  # target - gram v
    diagonal = np.diag(gram) + l2
    sweeps = 0
    for sweeps in range(1, max_iter + 1):  # noqa: B007
        largest = 0.0
        for j in np.flatnonzero(diagonal > 0):
            pull = left[j] + gram[j, j] * v[j]
            new = np.sign(pull) * np.maximum(np.abs(pull) - l1[j], 0.0) / diagonal[j]
            change = new - v[j]
            if np.any(change):
                left -= np.outer(gram[:, j], change)
                v[j] = new
                largest = max(largest, float(np.abs(change).max()))
        if largest <= tol * max(float(np.abs(v).max(initial=0.0)), 1e-300):
            break
    return v, sweeps
