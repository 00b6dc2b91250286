"""The losses, as every worker computes them on a block: their sum over rows, and its derivative by the scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from unisono.tables.estimators.row_blocks import Table, is_sparse

__all__ = ["LOSSES", "compute_curvature", "compute_value_and_gradient"]

Array = npt.NDArray[np.float64]
Loss = Callable[[Array, Array], tuple[Array, Array]]


def _compute_squares(scores: Array, y: Array) -> tuple[Array, Array]:
    """Half the squared error: per row its value, and its derivative by the scores."""
    residual = scores - y
    return 0.5 * np.einsum("ij,ij->i", residual, residual), residual


def _compute_binary(scores: Array, y: Array) -> tuple[Array, Array]:
    """Logistic loss of classes 0 and 1: log(1 + e^s) - y s."""
    s, label = scores[:, 0], y[:, 0]
    small = np.exp(-np.abs(s))
    value = np.maximum(s, 0.0) + np.log1p(small) - label * s
    chance = np.where(s >= 0, 1.0, small) / (1.0 + small)
    return value, (chance - label)[:, None]


def _compute_multinomial(scores: Array, y: Array) -> tuple[Array, Array]:
    """Cross entropy of the softmax; y holds the number of the class."""
    label = y[:, 0].astype(np.intp)
    rows = np.arange(len(label))
    shifted = scores - scores.max(axis=1, keepdims=True)
    chances = np.exp(shifted)
    total = chances.sum(axis=1, keepdims=True)
    value = np.log(total[:, 0]) - shifted[rows, label]
    chances /= total
    chances[rows, label] -= 1.0
    return value, chances


LOSSES: dict[str, Loss] = {"squares": _compute_squares, "binary": _compute_binary, "multinomial": _compute_multinomial}
# How much larger than the mean of x xᵀ the second derivative can be.
STEEPNESS = {"squares": 1.0, "binary": 0.25, "multinomial": 0.5}


def compute_value_and_gradient(table: Table, loss: str, coef: Array, intercept: Array, fraction: float = 1.0) -> Array:
    """Over a table's rows, as one vector: the sum of losses, its gradient by coef (columns × outputs) and by intercept,
    and the sum of weights.

    fraction: the share of the rows to go over; less than 1 to measure speed.
    """
    of = LOSSES[loss]
    total, weight, by_coef, by_intercept = 0.0, 0.0, np.zeros(coef.shape), np.zeros(coef.shape[1])
    enough, done = fraction * table.rows, 0
    for block in table.read_blocks():
        if done >= enough and fraction < 1.0:
            break
        done += len(block.y)
        value, slope = of(np.asarray(block.x @ coef) + intercept, block.y)
        if block.weight is not None:
            value, slope = value * block.weight, slope * block.weight[:, None]
        total += float(value.sum())
        weight += len(block.y) if block.weight is None else float(block.weight.sum())
        by_coef += _multiply_transposed(block.x, slope)
        by_intercept += slope.sum(axis=0)
    return np.concatenate([[total], by_coef.ravel(), by_intercept, [weight]])


def compute_curvature(table: Table, direction: Array, shift: float) -> Array:
    """Xᵀ (X v + shift) and Σ (X v + shift) over a table's rows: a step of power iteration."""
    by_coef, by_intercept = np.zeros(direction.shape), 0.0
    for block in table.read_blocks():
        score = np.asarray(block.x @ direction) + shift
        if block.weight is not None:
            score = score * block.weight
        by_coef += _multiply_transposed(block.x, score)
        by_intercept += float(score.sum())
    return np.concatenate([by_coef, [by_intercept]])


def _multiply_transposed(x: Any, right: Array) -> Array:
    """Xᵀ R."""
    return np.asarray(x.T @ right if is_sparse(x) else (right.T @ x).T)
