"""What a worker answers in a linear fit: sums over its own rows (losses and their gradients among them), or the first
problem with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from unisono.tables.estimators.moments import peek, sum_products
from unisono.tables.estimators.row_blocks import RowBlock, Table, find_problem, is_finite, is_sparse

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


def answer(table: Table, request: dict[str, Any]) -> Any:
    """The `map` of the fit: compute what the server asks for from this worker's rows.

    An error of reading rows is an answer too, so that no rank waits for one that has given up: its text, if the server
    takes text there, else sums that are marked as bad. The server then asks for the problem.
    """
    do = request["do"]
    if do == "gradient":
        rows = table if "batch" not in request else table.take_batch(*request["batch"])
        rows = rows if request.get("labels") is None else _LabelledTable(rows, request["labels"])
        return compute_value_and_gradient(rows, request["loss"], request["coef"], request["b"])
    if do == "curvature":
        return compute_curvature(table, request["v"], request["shift"])
    try:
        return _ANSWERS[do](table, request)
    except (ValueError, OSError) as error:
        if do in ("peek", "problem"):
            return str(error)
        width = table.columns + table.targets
        return 1, 0, 0.0, np.zeros(width), np.zeros((width, width) if do == "moments" else width)


def _answer_peek(table: Table, request: dict[str, Any]) -> list[Any]:
    names = None if table.names is None else list(table.names)
    labels = _find_labels(table) if request["labels"] else []
    return [table.columns, table.targets, peek(table).tolist(), labels, names]


def merge_peeks(a: Any, b: Any) -> Any:
    """The `reduce` of the fit: two peeks become one. If one of them is a problem, that remains; of two, the first."""
    if isinstance(a, str) or isinstance(b, str):
        return a if isinstance(a, str) and (a or not isinstance(b, str)) else b
    if a[:2] != b[:2]:
        return f"the workers' rows differ: some have {a[0]} columns and {a[1]} targets, others {b[0]} and {b[1]}"
    if a[4] != b[4]:
        return f"the workers' columns differ: some have {a[4]}, others {b[4]}"
    both = np.array(a[2]) + np.array(b[2])
    return [a[0], a[1], both.tolist(), sorted(set(a[3]) | set(b[3])), a[4]]


def _answer_scales(table: Table, request: dict[str, Any]) -> tuple[int, int, float, Array, Array]:
    """As `sum_products`, but only the diagonal of the products."""
    width, d, shift = table.columns + table.targets, table.columns, request["shift"]
    bad, count, weight, sums, squared = 0, 0, 0.0, np.zeros(width), np.zeros(width)
    with np.errstate(all="ignore"):
        for block in table.read_blocks():
            bad += not is_finite(block)
            count += len(block.y)
            row = np.ones(len(block.y)) if block.weight is None else block.weight
            weight += float(row.sum())
            y = block.y - shift[d:]
            x = block.x if is_sparse(block.x) else block.x - shift[:d]
            sums += np.concatenate([np.asarray(row @ x).ravel(), row @ y])
            x2 = x.multiply(x) if is_sparse(x) else x * x
            squared += np.concatenate([np.asarray(row @ x2).ravel(), row @ (y * y)])
    return bad, count, weight, sums, squared


def _find_labels(table: Table) -> list[float]:
    """The distinct values of y in this worker's rows."""
    found: set[float] = set()
    for block in table.read_blocks():
        found.update(np.unique(block.y[np.isfinite(block.y)]).tolist())
        if len(found) > 1000:
            raise ValueError(
                "the target has more than 1000 distinct values: expected classes; use LeastSquares for numbers"
            )
    return sorted(found)


_ANSWERS: dict[str, Callable[[Table, dict[str, Any]], Any]] = {
    "peek": _answer_peek,
    "moments": lambda table, request: sum_products(table, request["shift"]),
    "scales": _answer_scales,
    "problem": lambda table, _: next(filter(None, (find_problem(b, table.names) for b in table.read_blocks())), ""),
}


class _LabelledTable:
    """A table whose labels in y are replaced by the number of their class."""

    def __init__(self, table: Table, labels: Array) -> None:
        self.table, self.labels = table, labels
        self.names, self.columns, self.targets, self.rows = table.names, table.columns, table.targets, table.rows

    def read_blocks(self) -> Iterator[RowBlock]:
        for block in self.table.read_blocks():
            yield block._replace(y=np.searchsorted(self.labels, block.y).astype(np.float64))

    def take_batch(self, index: int, of: int) -> Table:
        return _LabelledTable(self.table.take_batch(index, of), self.labels)
