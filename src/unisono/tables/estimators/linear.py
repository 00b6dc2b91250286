"""The base of the linear estimators: their settings, how a fit runs, and scores from coefficients."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from unisono.tables.estimators.conventions import (
    BaseEstimator,
    ConvergenceWarning,
    check_count,
    check_is_fitted,
    check_number,
    check_weights,
    validate_data,
)
from unisono.tables.estimators.files import FilePlan, Files
from unisono.tables.estimators.fit_report import CountingAsk
from unisono.tables.estimators.inputs import Workers, check_same_rows, find_rows_elsewhere, names_files
from unisono.tables.estimators.linear_fit import FitResult, FitSettings, make_program
from unisono.tables.estimators.linear_worker import fit_in_world, fit_launched
from unisono.tables.estimators.row_blocks import RowBlock, Rows, find_problem, is_finite
from unisono.tables.map_reduce.map_reduce import find_native
from unisono.world import join

Array = npt.NDArray[np.float64]


class LinearModel(BaseEstimator):  # type: ignore[misc]
    """The base of `LeastSquares` and `LogisticRegression`, which have the same settings.

    A subclass says which `_LOSS` it minimises, and by which `_SOLVERS`.
    """

    _LOSS: str
    _SOLVERS: tuple[str, ...]
    _file_columns: list[str] | None = None  # the columns that were learned from, if the rows were in files

    @property
    def _fitting_workers(self) -> Workers:
        return Workers(self.workers, self.on, self.own_rows)

    def _read_settings(self, **known: Any) -> FitSettings:
        """The settings, checked."""
        who = type(self).__name__
        for name in ("l1", "l2", "tol"):
            check_number(who, name, getattr(self, name))
        for name in ("max_iter", "workers", "batch_size"):
            check_count(who, name, getattr(self, name))
        strategy = self.strategy
        solver = "gradient" if strategy is not None and self.solver == "auto" else self.solver
        if solver not in self._SOLVERS:
            raise ValueError(f"got solver={solver!r}; expected one of {', '.join(map(repr, self._SOLVERS))}")
        if strategy is not None and solver != "gradient":
            raise ValueError(f'got strategy={strategy!r} with solver={solver!r}: a strategy needs solver="gradient"')
        if self.learning_rate is not None:
            check_number(who, "learning_rate", self.learning_rate, above_zero=True)
        return FitSettings(
            self._LOSS,
            solver,
            l1=float(self.l1),
            l2=float(self.l2),
            intercept=bool(self.fit_intercept),
            tol=float(self.tol),
            max_iter=int(self.max_iter),
            learning_rate=self.learning_rate,
            extra={"strategy": strategy, "batch_size": self.batch_size, "momentum": self.momentum},
            **known,
        )

    # Where the fit runs -----------------------------------------------------------------------------------------------

    def _run_fit(self, settings: FitSettings, source: Any) -> FitResult:
        """Fit on the workers that the settings name, and set what every linear model has after a fit."""
        workers = self._fitting_workers
        if not workers.are_launched:
            found = self._fit_here(settings, source)
        elif (engine := find_native(workers.on)) is not None and not settings.extra["strategy"]:
            found = _fit_on_engine(engine, settings, source, workers)
        else:
            found = workers.run(fit_launched, (settings, self.speedup), source)
        self.report_, self.n_iter_ = found["report"], max(1, int(found["iterations"]))
        self.n_rows_ = int(found["rows"])
        if not found["converged"]:
            warnings.warn(
                f"{type(self).__name__} stopped at max_iter={self.max_iter} before it reached "
                f"tol={self.tol}: raise max_iter, or take a faster solver",
                ConvergenceWarning,
                stacklevel=3,
            )
        return found

    def _fit_here(self, settings: FitSettings, source: Any) -> FitResult:
        """Fit in this process, or in the world that it is in."""
        world = join()
        if isinstance(source, Rows) and not self.own_rows:
            check_same_rows(source, world)
        part = self._fitting_workers.take_part(source, world)
        return fit_in_world(settings, part, world, speedup=self.speedup)

    # Data -------------------------------------------------------------------------------------------------------------

    def _find_elsewhere(self, X: Any, y: Any, sample_weight: Any) -> Any:
        """Rows in files or in an engine's table; None if X is an array."""
        elsewhere = find_rows_elsewhere(X, y, sample_weight, self._fitting_workers)
        self._file_columns = elsewhere.features if isinstance(elsewhere, FilePlan) else None
        return elsewhere

    def _check_arrays(
        self, X: Any, y: Any, sample_weight: Any, *, reset: bool = True, **checks: Any
    ) -> tuple[Any, Any, Any]:
        """Check arrays as scikit-learn does, except for values that are not finite: the workers look for those."""
        options = {"accept_sparse": "csr", "dtype": np.float64, "ensure_all_finite": False}
        if self.own_rows and getattr(X, "shape", (1,))[0] == 0:  # the other ranks have rows
            X = validate_data(self, X, reset=reset, ensure_min_samples=0, **options)
            return X, np.asarray(y), None if sample_weight is None else np.zeros(0)
        X, y = validate_data(self, X, y, reset=reset, **options, **checks)
        return X, y, check_weights(sample_weight, X)

    def _compute_scores(self, X: Any) -> Array:
        """X coef + intercept, of arrays or of files: rows × outputs."""
        check_is_fitted(self)
        coef, intercept = np.atleast_2d(self.coef_).T, self.intercept_
        if names_files(X):
            known = getattr(self, "feature_names_in_", self._file_columns)
            plan = (X if isinstance(X, Files) else Files(X)).plan(columns=known)
            if len(plan.features) != len(coef):
                raise ValueError(f"{X!r} has {len(plan.features)} columns, the model was fitted to {len(coef)}")
            return np.concatenate([block.x @ coef + intercept for block in _read_all(plan)])
        X = validate_data(self, X, accept_sparse="csr", dtype=np.float64, reset=False)
        return np.asarray(X @ coef + intercept)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags


def _fit_on_engine(engine: Callable[..., Any], settings: FitSettings, source: Any, workers: Workers) -> FitResult:
    """Fit by the engine's own MapReduce; the server's side runs in this process."""
    program = make_program(settings)

    def drive(ask: Any) -> FitResult:
        counting = CountingAsk(ask)
        found: FitResult = program.drive(counting)
        return found | {"report": replace(counting.make_report(), solver=found["solver"])}

    found: FitResult = engine(replace(program, drive=drive), source, workers.count, workers.on)
    return found


def _read_all(plan: FilePlan) -> Iterator[RowBlock]:
    """All rows of files; ValueError if a value is not a finite number."""
    table = plan.part(0, 1)
    for block in table.read_blocks():
        if not is_finite(block):
            raise ValueError(find_problem(block, table.names))
        yield block
