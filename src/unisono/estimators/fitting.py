"""The fit as a MapReduce program: what a worker answers, and the server's program that asks.

1. Peek: a value near the columns' means, so that sums about it lose no digits.
2. Normal equations: one all-reduce of the products of [X, y]; or, for the other solvers, one of the columns' sums and
   squares, and then rounds of values and gradients in columns scaled to mean 0 and deviation 1.
3. Where a value is not a finite number: one more round names its column and place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from unisono.estimators import losses, solvers
from unisono.estimators.moments import Moments, measured, minimise, peeked
from unisono.estimators.table import Block, Table, is_finite, is_sparse, problem_in
from unisono.map_reduce import Ask

__all__ = ["Fitted", "Scaling", "Task", "answer", "fit", "merged", "surveyed"]

Array = npt.NDArray[np.float64]
NORMAL_COLUMNS = 2048  # from here on the products of all columns cost more than some passes over the rows
REFINE = 1e5  # columns with this condition number have lost 10 of 16 digits in their products


@dataclass(frozen=True)
class Task:
    """What to fit, and how."""

    loss: str  # "squares" or "logistic"
    solver: str
    l1: float
    l2: float
    intercept: bool
    tol: float
    max_iter: int
    learning_rate: float | None = None
    classes: int = 0  # of the logistic loss; 0: numbers in y itself, which the workers look up
    target: str | None = None  # the column to learn, of an engine's table
    extra: dict[str, Any] = field(default_factory=dict)


Fitted = dict[str, Any]  # plain values and arrays: coef (columns × outputs), intercept, iterations, ...


# What workers answer --------------------------------------------------------------------------------------------


def answer(table: Table, request: dict[str, Any]) -> Any:
    """Map: what the server asks for, on my rows.

    Rows that cannot be read are an answer too, so that no rank waits for one that has given up: text where text fits,
    else sums that are marked as bad, upon which the server asks for the problem.
    """
    do = request["do"]
    if do == "gradient":
        rows = table if "batch" not in request else table.batch(*request["batch"])
        return losses.value_and_gradient(_labelled(rows, request), request["loss"], request["coef"], request["b"])
    if do == "curvature":
        return losses.curvature(table, request["v"], request["shift"])
    try:
        return _ANSWERS[do](table, request)
    except (ValueError, OSError) as error:
        if do in ("peek", "problem"):
            return str(error)
        width = table.columns + table.targets
        return 1, 0, 0.0, np.zeros(width), np.zeros((width, width) if do == "moments" else width)


def _peeked(table: Table, request: dict[str, Any]) -> list[Any]:
    names = None if table.names is None else list(table.names)
    labels = _labels(table) if request["labels"] else []
    return [table.columns, table.targets, peeked(table).tolist(), labels, names]


def _problem(table: Table, request: dict[str, Any]) -> str:
    return next(filter(None, (problem_in(block, table.names) for block in table.blocks())), "")


def merged(a: Any, b: Any) -> Any:
    """Reduce: of two peeks both; of two problems, or of a peek and a problem, the first problem."""
    if isinstance(a, str) or isinstance(b, str):
        return a if isinstance(a, str) and (a or not isinstance(b, str)) else b
    if a[:2] != b[:2]:
        return f"the workers' rows differ: some have {a[0]} columns and {a[1]} targets, others {b[0]} and {b[1]}"
    if a[4] != b[4]:
        return f"the workers' columns differ: some have {a[4]}, others {b[4]}"
    both = np.array(a[2]) + np.array(b[2])
    return [a[0], a[1], both.tolist(), sorted(set(a[3]) | set(b[3])), a[4]]


def _scales(table: Table, request: dict[str, Any]) -> tuple[int, int, float, Array, Array]:
    """As `measured`, but only the diagonal of the products."""
    width, d, shift = table.columns + table.targets, table.columns, request["shift"]
    bad, count, weight, sums, squared = 0, 0, 0.0, np.zeros(width), np.zeros(width)
    with np.errstate(all="ignore"):
        for block in table.blocks():
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


def _labels(table: Table) -> list[float]:
    """The distinct values of y among my rows."""
    found: set[float] = set()
    for block in table.blocks():
        found.update(np.unique(block.y[np.isfinite(block.y)]).tolist())
        if len(found) > 1000:
            raise ValueError(
                "the target has more than 1000 distinct values: expected classes; use LeastSquares for numbers"
            )
    return sorted(found)


_ANSWERS: dict[str, Callable[[Table, dict[str, Any]], Any]] = {
    "peek": _peeked,
    "moments": lambda table, request: measured(table, request["shift"]),
    "scales": _scales,
    "problem": _problem,
}


class _Labelled:
    """A table whose y holds labels, with the number of the class in their place."""

    def __init__(self, table: Table, labels: Array) -> None:
        self.table, self.labels = table, labels
        self.names, self.columns, self.targets, self.rows = table.names, table.columns, table.targets, table.rows

    def blocks(self) -> Iterator[Block]:
        for block in self.table.blocks():
            yield block._replace(y=np.searchsorted(self.labels, block.y).astype(np.float64))

    def batch(self, index: int, of: int) -> Table:
        return _Labelled(self.table.batch(index, of), self.labels)


def _labelled(table: Table, request: dict[str, Any]) -> Table:
    labels = request.get("labels")
    return table if labels is None else _Labelled(table, labels)


# The server's program -------------------------------------------------------------------------------------------


def fit(task: Task, ask: Ask) -> Fitted:
    """Fit; `ask` runs a round of `answer` on every worker."""
    columns, targets, shift, labels, names = _peek(task, ask)
    solver = chosen(task, columns)
    if solver == "normal":
        return _normal(task, ask, shift, columns) | {"names": names}
    scaling = Scaling.of(*_sums(ask, "scales", shift), shift, columns, _outputs(task, targets, labels), task)
    smooth = Smooth(ask, scaling, _loss(task, labels), task.l2, _lookup(task, labels))
    return _descend(task, solver, smooth, scaling) | {"labels": labels, "names": names}


def surveyed(task: Task) -> tuple[Any, ...]:
    """A `MapReduce`'s fields: what a solver outside of this file needs to know, in one result."""

    def drive(ask: Ask) -> Fitted:
        columns, targets, shift, labels, names = _peek(task, ask)
        scaling = Scaling.of(*_sums(ask, "scales", shift), shift, columns, _outputs(task, targets, labels), task)
        smooth = Smooth(ask, scaling, _loss(task, labels), task.l2, None)
        fields = [scaling.count, scaling.weight, scaling.mean, scaling.deviation, scaling.outputs, scaling.intercept]
        steepest = smooth.steepest() if task.learning_rate is None else 0.0
        known = {"labels": labels, "names": names, "look_up": _lookup(task, labels) is not None, "loss": smooth.loss}
        return {"scaling": fields, "steepest": steepest, **known}

    return answer, merged, drive


def _peek(task: Task, ask: Ask) -> tuple[int, int, Array, list[float], list[str] | None]:
    look_up = task.loss == "logistic" and not task.classes
    found = ask({"do": "peek", "labels": look_up})
    if isinstance(found, str):
        raise ValueError(found)
    columns, targets, peeks, labels, names = found
    if not peeks[-1]:
        _raise_problem(ask, "there are no rows to fit")
    shift = np.array(peeks[:-1]) / peeks[-1]
    return columns, targets, shift if task.intercept else np.zeros_like(shift), labels, names


def _lookup(task: Task, labels: list[float]) -> Array | None:
    return np.array(labels) if task.loss == "logistic" and not task.classes else None


def _classes(task: Task, labels: list[float]) -> int:
    count = task.classes or len(labels)
    if count < 2:
        raise ValueError(f"the target has one class only ({labels or 'the same for all rows'}): expected 2 or more")
    return count


def _loss(task: Task, labels: list[float]) -> str:
    return "squares" if task.loss == "squares" else "binary" if _classes(task, labels) == 2 else "multinomial"


def _outputs(task: Task, targets: int, labels: list[float]) -> int:
    if task.loss == "squares":
        return targets
    return 1 if _classes(task, labels) == 2 else _classes(task, labels)


def chosen(task: Task, columns: int) -> str:
    """The solver that "auto" stands for."""
    if task.solver != "auto":
        return task.solver
    if task.loss == "squares" and columns <= NORMAL_COLUMNS:
        return "normal"
    return "accelerated" if task.l1 else "lbfgs"


def _sums(ask: Ask, do: str, shift: Array) -> tuple[int, float, Array, Array]:
    bad, count, weight, sums, products = ask({"do": do, "shift": shift}, reduce="sum")
    if bad:
        _raise_problem(ask, "the squares of some values are too large for 64-bit numbers: scale the columns first")
    if weight <= 0:
        raise ValueError("the sum of the weights is 0: at least one row needs a weight above 0")
    return count, weight, sums, products


def _raise_problem(ask: Ask, otherwise: str) -> None:
    raise ValueError(ask({"do": "problem"}) or otherwise)


def _normal(task: Task, ask: Ask, shift: Array, columns: int) -> Fitted:
    """Normal equations, and where the columns are nearly dependent a step with the true residual."""
    moments = Moments.from_sums(*_sums(ask, "moments", shift), shift)
    options: Any = {"l1": task.l1, "l2": task.l2, "tol": task.tol, "max_iter": task.max_iter}
    about = moments if task.intercept else moments.about_zero()
    found = minimise(about, columns, **options)
    rounds = 0
    if not task.l1 and REFINE < found.condition < 1e9 and found.rank == columns:
        for rounds in (1, 2):  # noqa: B007
            request = {"do": "gradient", "loss": "squares", "coef": found.coef, "b": found.intercept}
            slope = ask(request, reduce="sum")
            by_coef = -slope[1:][: found.coef.size].reshape(found.coef.shape)
            by_coef += np.outer(about.mean[:columns], slope[1 + found.coef.size : -1])
            left = Moments(about.count, about.weight, about.mean * 0, about.products.copy(), about.noise)
            left.products[:columns, columns:] = by_coef - task.l2 * about.weight * found.coef
            found.coef = found.coef + minimise(left, columns, **options).coef
            found.intercept = about.mean[columns:] - about.mean[:columns] @ found.coef
    return {
        "coef": found.coef,
        "intercept": found.intercept,
        "iterations": max(found.iterations, 1 + rounds),
        "converged": found.iterations < task.max_iter or not task.l1,
        "rows": moments.count,
        "solver": "normal",
        "moments": moments.plain(),
        "condition": found.condition,
    }


@dataclass(frozen=True)
class Scaling:
    """Between the columns as they are and columns of mean 0 and deviation 1, in which the solvers work."""

    count: int
    weight: float
    mean: Array
    deviation: Array
    outputs: int
    intercept: bool

    @classmethod
    def of(
        cls,
        count: int,
        weight: float,
        sums: Array,
        squares: Array,
        shift: Array,
        columns: int,
        outputs: int,
        task: Task,
    ) -> Scaling:
        """From sums of z - shift and of its squares."""
        away, eps = sums[:columns] / weight, np.finfo(np.float64).eps
        variance = squares[:columns] / weight
        mean, noise = np.zeros(columns), np.zeros(columns)
        if task.intercept:
            mean, variance = shift[:columns] + away, variance - away * away
            noise = 4 * np.sqrt(eps) * np.abs(away) + 4 * eps * np.abs(mean)
        deviation = np.sqrt(np.maximum(variance, 0.0))
        # With the penalty in it, all columns have about the same second derivative.
        scale = np.sqrt(np.where(deviation > noise, variance, 0.0 if task.l2 else 1.0) + task.l2)
        return cls(count, weight, mean, scale, outputs, task.intercept)

    def model(self, theta: Array) -> tuple[Array, Array]:
        """Coefficients and intercept for the columns as they are."""
        d, k = len(self.mean), self.outputs
        coef = theta[: d * k].reshape(d, k) / self.deviation[:, None]
        return coef, (theta[d * k :] if self.intercept else np.zeros(k)) - self.mean @ coef

    def gradient(self, by_coef: Array, by_intercept: Array) -> Array:
        scaled = (by_coef - np.outer(self.mean, by_intercept)) / self.deviation[:, None]
        return np.concatenate([scaled.ravel(), by_intercept if self.intercept else []])

    @property
    def unknowns(self) -> int:
        return (len(self.mean) + self.intercept) * self.outputs


def _descend(task: Task, solver: str, smooth: Smooth, scaling: Scaling) -> Fitted:
    start, options = np.zeros(scaling.unknowns), cast(Any, {"tol": task.tol, "max_iter": task.max_iter})
    if solver == "lbfgs":
        if task.l1:
            raise ValueError('solver="lbfgs" cannot do l1, which has corners: use solver="accelerated" or "auto"')
        found = solvers.lbfgs(smooth, start, **options)
    else:
        step = task.learning_rate or 1.0 / smooth.steepest()
        l1 = np.zeros(scaling.unknowns)
        l1[: len(scaling.mean) * scaling.outputs] = np.repeat(task.l1 / scaling.deviation, scaling.outputs)
        method = solvers.accelerated if solver == "accelerated" else solvers.gradient_descent
        found = method(smooth, start, l1=l1, step=step, **options)
    coef, intercept = scaling.model(found.at)
    return {
        "coef": coef,
        "intercept": intercept,
        "iterations": found.iterations,
        "converged": found.converged,
        "rows": scaling.count,
        "solver": solver,
        "value": found.value,
    }


class Smooth:
    """Mean loss plus l2 |w|² / 2 in scaled columns; each call is a round of all workers."""

    def __init__(
        self,
        ask: Ask,
        scaling: Scaling,
        loss: str,
        l2: float,
        labels: Array | None,
        batch: tuple[int, int] | None = None,
    ) -> None:
        self.ask, self.scaling, self.loss, self.l2 = ask, scaling, loss, l2
        self.asked: dict[str, Any] = {"do": "gradient", "loss": loss}
        if labels is not None:
            self.asked["labels"] = labels
        if batch is not None:  # part so and so of so many, of each worker's rows
            self.asked["batch"] = batch

    def __call__(self, theta: Array) -> tuple[float, Array]:
        coef, intercept = self.scaling.model(theta)
        sums = self.ask({**self.asked, "coef": coef, "b": intercept}, reduce="sum")
        weight, sums = (self.scaling.weight if "batch" not in self.asked else sums[-1]), sums[:-1]
        sums = sums / max(weight, 1e-300)
        gradient = self.scaling.gradient(sums[1 : 1 + coef.size].reshape(coef.shape), sums[1 + coef.size :])
        gradient[: coef.size] += (self.l2 * coef / self.scaling.deviation[:, None]).ravel()
        return float(sums[0] + 0.5 * self.l2 * np.sum(coef * coef)), gradient

    def steepest(self) -> float:
        """An upper estimate of the largest second derivative: 12 rounds of power iteration, and a tenth more."""
        s, size = self.scaling, 1.0
        v = np.sqrt(1.0 + np.arange(len(s.mean)) % 7)  # any direction that is not blind to a column
        for _ in range(12):
            v = v / max(float(np.linalg.norm(v)), 1e-300)
            w = v / s.deviation
            request = {"do": "curvature", "v": w, "shift": -float(s.mean @ w)}
            sums = self.ask(request, reduce="sum") / s.weight
            v = (sums[:-1] - s.mean * sums[-1]) / s.deviation
            size = float(np.linalg.norm(v))
        flat = 1.0 if s.intercept else 0.0
        return losses.STEEPNESS[self.loss] * max(1.1 * size, flat) + self.l2 * float((1 / s.deviation**2).max())
