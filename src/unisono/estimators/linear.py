"""What the linear estimators share: their settings, how a fit runs, and scores from coefficients."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from unisono.estimators.conventions import (
    ConvergenceWarning,
    check_count,
    check_is_fitted,
    check_number,
    check_weights,
    validate_data,
)
from unisono.estimators.files import FilePlan, Files
from unisono.estimators.fit_report import CountingAsk, FitReport
from unisono.estimators.inputs import check_same_rows, names_files
from unisono.estimators.linear_fit import FitResult, FitSettings, make_program
from unisono.estimators.linear_worker import fit_in_world, work
from unisono.estimators.row_blocks import RowBlock, Rows, find_problem, is_finite
from unisono.estimators.workers import Workers
from unisono.map_reduce.map_reduce import find_native
from unisono.world import join

__all__ = ["LinearEstimator", "check_arrays", "compute_scores", "find_workers", "fit_here", "read_settings", "run_fit"]

Array = npt.NDArray[np.float64]


class LinearEstimator(Protocol):
    """The settings that every linear estimator has, and what it has after a fit."""

    l1: float
    l2: float
    fit_intercept: bool
    solver: str
    strategy: Any
    learning_rate: float | None
    momentum: float
    batch_size: int | None
    max_iter: int
    tol: float
    workers: int | None
    on: Any
    own_rows: bool
    speedup: bool
    coef_: Array
    intercept_: Any
    report_: FitReport
    n_iter_: int
    n_rows_: int


def find_workers(estimator: LinearEstimator) -> Workers:
    """The workers that fit this estimator."""
    return Workers(estimator.workers, estimator.on, estimator.own_rows)


def read_settings(estimator: LinearEstimator, loss: str, solvers: tuple[str, ...], **known: Any) -> FitSettings:
    """The settings, checked."""
    who = type(estimator).__name__
    for name in ("l1", "l2", "tol"):
        check_number(who, name, getattr(estimator, name))
    for name in ("max_iter", "workers", "batch_size"):
        check_count(who, name, getattr(estimator, name))
    strategy = estimator.strategy
    solver = "gradient" if strategy is not None and estimator.solver == "auto" else estimator.solver
    if solver not in solvers:
        raise ValueError(f"got solver={solver!r}; expected one of {', '.join(map(repr, solvers))}")
    if strategy is not None and solver != "gradient":
        raise ValueError(f'got strategy={strategy!r} with solver={solver!r}: a strategy needs solver="gradient"')
    if estimator.learning_rate is not None:
        check_number(who, "learning_rate", estimator.learning_rate, above_zero=True)
    return FitSettings(
        loss,
        solver,
        l1=float(estimator.l1),
        l2=float(estimator.l2),
        intercept=bool(estimator.fit_intercept),
        tol=float(estimator.tol),
        max_iter=int(estimator.max_iter),
        learning_rate=estimator.learning_rate,
        extra={"strategy": strategy, "batch_size": estimator.batch_size, "momentum": estimator.momentum},
        **known,
    )


# Where the fit runs ---------------------------------------------------------------------------------------------------


def run_fit(estimator: LinearEstimator, settings: FitSettings, source: Any) -> FitResult:
    """Fit where `workers` and `on` say, and set what every linear estimator has after a fit."""
    workers = find_workers(estimator)
    if not workers.are_launched:
        found = fit_here(estimator, settings, source)
    elif (engine := find_native(workers.on)) is not None and not settings.extra["strategy"]:
        found = _fit_on_engine(engine, settings, source, workers)
    else:
        found = workers.run(work, (settings, estimator.speedup), source)
    estimator.report_, estimator.n_iter_ = found["report"], max(1, int(found["iterations"]))
    estimator.n_rows_ = int(found["rows"])
    if not found["converged"]:
        warnings.warn(
            f"{type(estimator).__name__} stopped at max_iter={estimator.max_iter} before it reached "
            f"tol={estimator.tol}: raise max_iter, or take a faster solver",
            ConvergenceWarning,
            stacklevel=3,
        )
    return found


def fit_here(estimator: LinearEstimator, settings: FitSettings, source: Any) -> FitResult:
    """Fit in this process, or in the world that it is in."""
    world = join()
    if isinstance(source, Rows) and not estimator.own_rows:
        check_same_rows(source, world)
    part = find_workers(estimator).take_part(source, world)
    return fit_in_world(settings, part, world, speedup=estimator.speedup)


def _fit_on_engine(engine: Callable[..., Any], settings: FitSettings, source: Any, workers: Workers) -> FitResult:
    """Fit by the engine's own MapReduce; `drive` runs in this process."""
    program = make_program(settings)

    def drive(ask: Any) -> FitResult:
        counting = CountingAsk(ask)
        found: FitResult = program.drive(counting)
        return found | {"report": replace(counting.make_report(), solver=found["solver"])}

    found: FitResult = engine(replace(program, drive=drive), source, workers.count, workers.on)
    return found


# Data -----------------------------------------------------------------------------------------------------------------


def check_arrays(
    estimator: LinearEstimator, X: Any, y: Any, sample_weight: Any, *, reset: bool = True, **checks: Any
) -> tuple[Any, Any, Any]:
    """Check arrays as scikit-learn does, except for values that are not finite: the workers look for those."""
    options = {"accept_sparse": "csr", "dtype": np.float64, "ensure_all_finite": False}
    if estimator.own_rows and getattr(X, "shape", (1,))[0] == 0:  # the other ranks have rows
        X = validate_data(estimator, X, reset=reset, ensure_min_samples=0, **options)
        return X, np.asarray(y), None if sample_weight is None else np.zeros(0)
    X, y = validate_data(estimator, X, y, reset=reset, **options, **checks)
    return X, y, check_weights(sample_weight, X)


def compute_scores(estimator: Any, X: Any, columns: list[str] | None) -> Array:
    """X coef + intercept: rows × outputs. `columns`: the columns that were learned from, if that was from files."""
    check_is_fitted(estimator)
    coef, intercept = np.atleast_2d(estimator.coef_).T, estimator.intercept_
    if names_files(X):
        known = getattr(estimator, "feature_names_in_", columns)
        plan = (X if isinstance(X, Files) else Files(X)).plan(columns=known)
        if len(plan.features) != len(coef):
            raise ValueError(f"{X!r} has {len(plan.features)} columns, the model was fitted to {len(coef)}")
        return np.concatenate([block.x @ coef + intercept for block in _read_all(plan)])
    X = validate_data(estimator, X, accept_sparse="csr", dtype=np.float64, reset=False)
    return np.asarray(X @ coef + intercept)


def _read_all(plan: FilePlan) -> Iterator[RowBlock]:
    """All rows of files; ValueError where a value is not a finite number."""
    table = plan.part(0, 1)
    for block in table.read_blocks():
        if not is_finite(block):
            raise ValueError(find_problem(block, table.names))
        yield block
