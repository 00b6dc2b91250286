"""What a worker answers in a linear fit: sums over its own rows, or the first problem with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from unisono.tables.estimators import losses
from unisono.tables.estimators.moments import peek, sum_products
from unisono.tables.estimators.row_blocks import RowBlock, Table, find_problem, is_finite, is_sparse

__all__ = ["answer", "merge_peeks"]

Array = npt.NDArray[np.float64]


def answer(table: Table, request: dict[str, Any]) -> Any:
    """The `map` of the fit: compute what the server asks for from this worker's rows.

    An error of reading rows is an answer too, so that no rank waits for one that has given up: its text, if the server
    takes text there, else sums that are marked as bad. The server then asks for the problem.
    """
    do = request["do"]
    if do == "gradient":
        rows = table if "batch" not in request else table.take_batch(*request["batch"])
        rows = rows if request.get("labels") is None else _LabelledTable(rows, request["labels"])
        return losses.compute_value_and_gradient(rows, request["loss"], request["coef"], request["b"])
    if do == "curvature":
        return losses.compute_curvature(table, request["v"], request["shift"])
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


def _answer_problem(table: Table, request: dict[str, Any]) -> str:
    return next(filter(None, (find_problem(block, table.names) for block in table.read_blocks())), "")


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
    "problem": _answer_problem,
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
