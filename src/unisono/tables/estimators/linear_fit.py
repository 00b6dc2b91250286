"""The linear fit as a MapReduce program: what the server asks of the workers, round by round.

1. Peek: a value near the columns' means, so that sums about it lose no digits.
2. Normal equations: one all-reduce of the products of [X, y]; or, for the other solvers, one of the columns' sums and
   squares, and then rounds of values and gradients in columns scaled to mean 0 and deviation 1.
3. If a value is not a finite number: one more round names its column and place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from unisono.tables.estimators.linear_answers import STEEPNESS, answer, merge_peeks
from unisono.tables.estimators.moments import TableMoments, minimise
from unisono.tables.estimators.row_blocks import make_table
from unisono.tables.map_reduce import Ask, MapReduce

Array = npt.NDArray[np.float64]
NORMAL_COLUMNS = 2048  # with more, the products of all columns cost more than some passes over the rows
REFINE = 1e5  # columns with this condition number have lost 10 of 16 digits in their products


@dataclass(frozen=True)
class FitSettings:
    """The loss, the penalties and the solver of a fit, as the workers need them."""

    loss: str  # "squares" or "logistic"
    solver: str
    l1: float
    l2: float
    intercept: bool
    tol: float
    max_iter: int
    learning_rate: float | None = None
    classes: int = 0  # of the logistic loss; 0: y holds labels, which the workers number
    target: str | None = None  # the column to learn, of an engine's table
    extra: dict[str, Any] = field(default_factory=dict)


FitResult = dict[str, Any]  # plain values and arrays: coef (columns × outputs), intercept, iterations, ...


def make_program(settings: FitSettings) -> MapReduce:
    """The fit as a MapReduce program, whose parts become tables first."""
    to_table = functools.partial(make_table, target=settings.target)
    return MapReduce(answer, merge_peeks, functools.partial(_fit, settings), to_table)


def make_survey(settings: FitSettings) -> MapReduce:
    """A program that finds scales, labels and the loss, for solvers outside of this file; its parts are tables."""
    return MapReduce(answer, merge_peeks, functools.partial(_survey, settings))


def _fit(settings: FitSettings, ask: Ask) -> FitResult:
    """Fit; `ask` runs a round of `answer` on every worker."""
    peeked = _peek(settings, ask)
    solver = settings.solver
    if solver == "auto":
        small = settings.loss == "squares" and peeked.columns <= NORMAL_COLUMNS
        solver = "normal" if small else "accelerated" if settings.l1 else "lbfgs"
    if solver == "normal":
        return _solve_normal(settings, ask, peeked.shift, peeked.columns) | {"names": peeked.names}
    smooth = _scale(settings, ask, peeked)
    return _descend(settings, solver, smooth) | {"labels": peeked.labels, "names": peeked.names}


def _survey(settings: FitSettings, ask: Ask) -> FitResult:
    peeked = _peek(settings, ask)
    smooth = _scale(settings, ask, peeked)
    scaling = smooth.scaling
    return {
        "scaling": [scaling.count, scaling.weight, scaling.mean, scaling.deviation, scaling.outputs, scaling.intercept],
        "steepest": smooth.estimate_steepest() if settings.learning_rate is None else 0.0,
        "labels": peeked.labels,
        "names": peeked.names,
        "loss": smooth.loss,
    }


class _Peek(NamedTuple):
    """What a first look at the rows shows. shift: a value near the mean of every column; labels: those of a target
    that the workers have to number."""

    columns: int
    targets: int
    shift: Array
    labels: list[float]
    names: list[str] | None


def _peek(settings: FitSettings, ask: Ask) -> _Peek:
    found = ask({"do": "peek", "labels": settings.loss == "logistic" and not settings.classes})
    if isinstance(found, str):
        raise ValueError(found)
    columns, targets, peeks, labels, names = found
    if not peeks[-1]:
        _raise_problem(ask, "there are no rows to fit")
    shift = np.array(peeks[:-1]) / peeks[-1]
    return _Peek(columns, targets, shift if settings.intercept else np.zeros_like(shift), labels, names)


def _scale(settings: FitSettings, ask: Ask, peeked: _Peek) -> MeanLoss:
    """The function to minimise, in scaled columns."""
    loss, outputs = "squares", peeked.targets
    if settings.loss == "logistic":
        classes = settings.classes or len(peeked.labels)
        if classes < 2:
            called = peeked.labels or "the same for all rows"
            raise ValueError(f"the target has one class only ({called}): expected 2 or more")
        loss, outputs = ("binary", 1) if classes == 2 else ("multinomial", classes)
    sums = _ask_sums(ask, "scales", peeked.shift)
    scaling = Scaling.from_sums(*sums, peeked.shift, peeked.columns, outputs, settings)
    return MeanLoss(ask, scaling, loss, settings.l2, np.array(peeked.labels) if peeked.labels else None)


def _ask_sums(ask: Ask, do: str, shift: Array) -> tuple[int, float, Array, Array]:
    bad, count, weight, sums, products = ask({"do": do, "shift": shift}, reduce="sum")
    if bad:
        _raise_problem(ask, "the squares of some values are too large for 64-bit numbers: scale the columns first")
    if weight <= 0:
        raise ValueError("the sum of the weights is 0: at least one row needs a weight above 0")
    return count, weight, sums, products


def _raise_problem(ask: Ask, otherwise: str) -> None:
    raise ValueError(ask({"do": "problem"}) or otherwise)


def _solve_normal(settings: FitSettings, ask: Ask, shift: Array, columns: int) -> FitResult:
    """Solve the normal equations; if columns are nearly dependent, refine twice by the gradient over all rows."""
    moments = TableMoments.from_sums(*_ask_sums(ask, "moments", shift), shift)
    options: Any = {"l1": settings.l1, "l2": settings.l2, "tol": settings.tol, "max_iter": settings.max_iter}
    about = moments if settings.intercept else moments.center_at_zero()
    found = minimise(about, columns, **options)
    rounds = 0
    if not settings.l1 and REFINE < found.condition < 1e9 and found.rank == columns:
        for rounds in (1, 2):  # noqa: B007
            request = {"do": "gradient", "loss": "squares", "coef": found.coef, "b": found.intercept}
            slope = ask(request, reduce="sum")
            by_coef = -slope[1:][: found.coef.size].reshape(found.coef.shape)
            by_coef += np.outer(about.mean[:columns], slope[1 + found.coef.size : -1])
            left = TableMoments(about.count, about.weight, about.mean * 0, about.products.copy(), about.noise)
            left.products[:columns, columns:] = by_coef - settings.l2 * about.weight * found.coef
            found.coef = found.coef + minimise(left, columns, **options).coef
            found.intercept = about.mean[columns:] - about.mean[:columns] @ found.coef
    return {
        "coef": found.coef,
        "intercept": found.intercept,
        "iterations": max(found.iterations, 1 + rounds),
        "converged": found.iterations < settings.max_iter or not settings.l1,
        "rows": moments.count,
        "solver": "normal",
        "moments": moments.to_list(),
        "condition": found.condition,
    }


@dataclass(frozen=True)
class Scaling:
    """Converts between the columns as given and columns of mean 0 and deviation 1, in which the solvers work."""

    count: int
    weight: float
    mean: Array
    deviation: Array
    outputs: int
    intercept: bool

    @classmethod
    def from_sums(
        cls,
        count: int,
        weight: float,
        sums: Array,
        squares: Array,
        shift: Array,
        columns: int,
        outputs: int,
        settings: FitSettings,
    ) -> Scaling:
        """From sums of z - shift and of its squares."""
        away, eps = sums[:columns] / weight, np.finfo(np.float64).eps
        variance = squares[:columns] / weight
        mean, noise = np.zeros(columns), np.zeros(columns)
        if settings.intercept:
            mean, variance = shift[:columns] + away, variance - away * away
            noise = 4 * np.sqrt(eps) * np.abs(away) + 4 * eps * np.abs(mean)
        deviation = np.sqrt(np.maximum(variance, 0.0))
        # With the penalty in it, all columns have about the same second derivative.
        scale = np.sqrt(np.where(deviation > noise, variance, 0.0 if settings.l2 else 1.0) + settings.l2)
        return cls(count, weight, mean, scale, outputs, settings.intercept)

    def unscale(self, theta: Array) -> tuple[Array, Array]:
        """Coefficients and intercept for the columns as they are."""
        d, k = len(self.mean), self.outputs
        coef = theta[: d * k].reshape(d, k) / self.deviation[:, None]
        return coef, (theta[d * k :] if self.intercept else np.zeros(k)) - self.mean @ coef

    def scale_gradient(self, by_coef: Array, by_intercept: Array) -> Array:
        scaled = (by_coef - np.outer(self.mean, by_intercept)) / self.deviation[:, None]
        return np.concatenate([scaled.ravel(), by_intercept if self.intercept else []])

    @property
    def unknowns(self) -> int:
        return (len(self.mean) + self.intercept) * self.outputs


def _descend(settings: FitSettings, solver: str, smooth: MeanLoss) -> FitResult:
    scaling = smooth.scaling
    start, options = np.zeros(scaling.unknowns), cast(Any, {"tol": settings.tol, "max_iter": settings.max_iter})
    if solver == "lbfgs":
        if settings.l1:
            raise ValueError('solver="lbfgs" cannot do l1, which has corners: use solver="accelerated" or "auto"')
        found = run_lbfgs(smooth, start, **options)
    else:
        step = settings.learning_rate or 1.0 / smooth.estimate_steepest()
        l1 = np.zeros(scaling.unknowns)
        l1[: len(scaling.mean) * scaling.outputs] = np.repeat(settings.l1 / scaling.deviation, scaling.outputs)
        found = run_descent(smooth, start, l1=l1, step=step, accelerate=solver == "accelerated", **options)
    coef, intercept = scaling.unscale(found.at)
    return {
        "coef": coef,
        "intercept": intercept,
        "iterations": found.iterations,
        "converged": found.converged,
        "rows": scaling.count,
        "solver": solver,
        "value": found.value,
    }


class MeanLoss:
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
        self.request: dict[str, Any] = {"do": "gradient", "loss": loss}
        if labels is not None:
            self.request["labels"] = labels
        if batch is not None:  # (i, n): part i of n of each worker's rows
            self.request["batch"] = batch

    def __call__(self, theta: Array) -> tuple[float, Array]:
        coef, intercept = self.scaling.unscale(theta)
        sums = self.ask({**self.request, "coef": coef, "b": intercept}, reduce="sum")
        weight, sums = (self.scaling.weight if "batch" not in self.request else sums[-1]), sums[:-1]
        sums = sums / max(weight, 1e-300)
        gradient = self.scaling.scale_gradient(sums[1 : 1 + coef.size].reshape(coef.shape), sums[1 + coef.size :])
        gradient[: coef.size] += (self.l2 * coef / self.scaling.deviation[:, None]).ravel()
        return float(sums[0] + 0.5 * self.l2 * np.sum(coef * coef)), gradient

    def estimate_steepest(self) -> float:
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
        return STEEPNESS[self.loss] * max(1.1 * size, flat) + self.l2 * float((1 / s.deviation**2).max())


SmoothFunction = Callable[[Array], tuple[float, Array]]


@dataclass
class SolverResult:
    """The point at which a solver stopped."""

    at: Array
    value: float
    iterations: int
    converged: bool


def run_descent(
    smooth: SmoothFunction, start: Array, *, l1: Array, step: float, tol: float, max_iter: int, accelerate: bool = False
) -> SolverResult:
    """x ← prox(x - step ∇f(x)), where prox shrinks by step · l1; stops when that moves x by less than `tol`
    relative to the first move.

    With `accelerate`, each step starts from a point beyond x (Beck and Teboulle, 2009); the momentum starts anew
    whenever it points uphill (O'Donoghue and Candès, 2015). If the value explodes, the step is halved.
    """
    x, ahead, momentum = start, start, 1.0
    first, lowest, value, move = 0.0, np.inf, np.inf, np.zeros_like(start)
    for iteration in range(1, max_iter + 1):
        value, gradient = smooth(ahead)
        if not np.isfinite(value) or value > 10 * max(lowest, 0.0) + 1e-3 * abs(lowest):
            step, ahead, momentum = step / 2, x, 1.0
            lowest = np.inf if not np.isfinite(lowest) else lowest
            continue
        lowest = min(lowest, value)
        new = ahead - step * gradient
        if np.any(l1):
            new = np.sign(new) * np.maximum(np.abs(new) - step * l1, 0.0)
        move = (new - ahead) / step
        size = float(np.abs(move).max(initial=0.0))
        first = first or size
        if size <= tol * first:
            return SolverResult(new, value, iteration, True)
        if not accelerate:
            x = ahead = new
            continue
        if float(move @ (new - x)) < 0:  # uphill
            momentum = 1.0
        following = (1 + np.sqrt(1 + 4 * momentum**2)) / 2
        ahead = new + (momentum - 1) / following * (new - x)
        x, momentum = new, following
    return SolverResult(x, value, max_iter, False)


def run_lbfgs(smooth: SmoothFunction, start: Array, *, tol: float, max_iter: int) -> SolverResult:
    """Limited-memory BFGS (scipy's) on the gradients of all workers; stops as `run_descent` does."""
    from scipy.optimize import minimize

    _, gradient = smooth(start)
    first = float(np.abs(gradient).max(initial=0.0))
    if first == 0.0:
        return SolverResult(start, 0.0, 1, True)
    options = {"maxiter": max_iter, "maxfun": 2 * max_iter, "gtol": tol * first, "ftol": 0.0, "maxcor": 10}
    ended = minimize(smooth, start, jac=True, method="L-BFGS-B", options=options)
    # A line search that finds nothing lower has come to the end of the digits.
    converged = ended.status == 0 or (ended.status == 2 and float(np.abs(ended.jac).max()) <= 1e-4 * first)
    return SolverResult(np.asarray(ended.x), float(ended.fun), int(ended.nit) or 1, bool(converged))
