"""Least squares, ridge and lasso on many workers."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from unisono.tables.estimators.conventions import MultiOutputMixin, RegressorMixin, set_columns
from unisono.tables.estimators.inputs import make_rows
from unisono.tables.estimators.linear import LinearModel
from unisono.tables.estimators.linear_fit import FitResult
from unisono.tables.estimators.moments import TableMoments, minimise


class LeastSquares(MultiOutputMixin, RegressorMixin, LinearModel):  # type: ignore[misc]
    """Linear least squares with ridge and L1 penalties, fitted by all workers together.

    Minimises, over n rows (or the sum of their weights),

        Σ (x w + b - y)² / 2n  +  l1 Σ |w|  +  l2 Σ w² / 2.

    scikit-learn's `Lasso(alpha)` is `l1=alpha`, its `Ridge(alpha)` is `l2=alpha/n`. The intercept b is not penalised.

    Arguments:
        l1, l2: the penalties.
        fit_intercept: whether the model has an intercept b.
        solver: "normal" (one pass, one all-reduce of XᵀX, exact; the best for up to some 2000 columns), "lbfgs",
            "accelerated" (FISTA with restarts), "gradient" (descent: the server sums the workers' gradients and
            steps; with `strategy`, any of ours through `un.parallel`), or "auto".
        strategy: of the solver "gradient", such as "local_sgd(every=8)". Its l1 makes coefficients small, not zero.
        learning_rate: of the gradient solvers; None: 1 / the largest second derivative, which is measured.
        momentum, batch_size: of a strategy's descent; batch_size is a worker's rows a step, None all of them.
        max_iter: rounds, or epochs of a strategy.
        tol: stop when the gradient is so small, relative to the first.
        workers: launch so many local workers; None: the world that this process is in.
        on: launch them there, as in `un.launch`.
        own_rows: in a running world each rank gives rows of its own; False: all give the same table, and each rank
            takes its part.
        speedup: measure the speed-up at 1, 2, ..., m workers for the report (a few more passes).

    After `fit`: `coef_`, `intercept_`, `n_iter_`, `n_rows_`, and `report_` with what it cost.

    >>> import numpy as np
    >>> X = np.array([[0.0, 1.0], [1.0, 0.0], [2.0, 2.0], [3.0, 5.0]])
    >>> model = LeastSquares().fit(X, X @ [2.0, -1.0] + 3.0)
    >>> model.coef_.round(6).tolist(), round(float(model.intercept_), 6)
    ([2.0, -1.0], 3.0)
    """

    _LOSS, _SOLVERS = "squares", ("auto", "normal", "lbfgs", "accelerated", "gradient")

    def __init__(
        self,
        *,
        l1: float = 0.0,
        l2: float = 0.0,
        fit_intercept: bool = True,
        solver: str = "auto",
        strategy: Any = None,
        learning_rate: float | None = None,
        momentum: float = 0.0,
        batch_size: int | None = None,
        max_iter: int = 1000,
        tol: float = 1e-10,
        workers: int | None = None,
        on: Any = None,
        own_rows: bool = False,
        speedup: bool = True,
    ) -> None:
        self.l1, self.l2, self.fit_intercept = l1, l2, fit_intercept
        self.solver, self.strategy, self.learning_rate = solver, strategy, learning_rate
        self.momentum, self.batch_size = momentum, batch_size
        self.max_iter, self.tol = max_iter, tol
        self.workers, self.on, self.own_rows, self.speedup = workers, on, own_rows, speedup

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> LeastSquares:
        """Fit to arrays (X dense or sparse, y of one or several columns), or to files.

        Files: `fit("data/*.parquet", "price")`, or `fit(Files(...))`; they are read by part, each worker its own.
        """
        source, single = self._find_source(X, y, sample_weight, reset=True)
        found = self._run_fit(self._read_settings(target=y if isinstance(y, str) else None), source)
        single = self._set_columns(found) if single is None else single
        self._moments = found.get("moments")
        return self._set_model(found["coef"], found["intercept"], single=single)

    def partial_fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> LeastSquares:
        """Fit to these rows and all those before: exact, as the sums of the normal equations add up.

        Runs in this process, or in the world that it is in; keeps (columns + targets)² numbers.
        """
        first = not hasattr(self, "coef_")
        before = getattr(self, "_moments", None)
        if not first and before is None:
            warnings.warn("partial_fit starts afresh: only a fit by the solver 'normal' can be continued", stacklevel=2)
        source, single = self._find_source(X, y, sample_weight, reset=first)
        settings = self._read_settings()
        found = self._fit_here(replace(settings, solver="normal", extra={}), source)
        if single is None:
            self._set_columns(found)
            single = True
        moments = TableMoments(*found["moments"])
        if before is not None:
            if len(before[2]) != len(moments.mean):
                raise ValueError(f"y has {len(moments.mean) - self.n_features_in_} targets, other than before")
            moments = TableMoments(*before).merge(moments)
        about = moments if settings.intercept else moments.center_at_zero()
        options: Any = {"l1": settings.l1, "l2": settings.l2, "tol": settings.tol, "max_iter": settings.max_iter}
        solved = minimise(about, self.n_features_in_, **options)
        self._moments = moments.to_list()
        self.n_iter_ = getattr(self, "n_iter_", 0) + 1
        self.report_, self.n_rows_ = found["report"], moments.count
        return self._set_model(solved.coef, solved.intercept, single=single)

    def predict(self, X: Any) -> npt.NDArray[np.float64]:
        """X coef_ + intercept_, of arrays or of files."""
        scores = self._compute_scores(X)
        return scores[:, 0] if self._single else scores

    def _find_source(self, X: Any, y: Any, sample_weight: Any, *, reset: bool) -> tuple[Any, bool | None]:
        """The rows, and whether there is one target; None if only the workers can tell."""
        elsewhere = self._find_elsewhere(X, y, sample_weight)
        if elsewhere is not None:
            return elsewhere, None
        X, y, weight = self._check_arrays(X, y, sample_weight, reset=reset, multi_output=True, y_numeric=True)
        y = np.asarray(y, dtype=np.float64)
        return make_rows(self, X, y, weight), y.ndim == 1

    def _set_columns(self, found: FitResult) -> bool:
        """Set what the workers found of the columns; returns whether there is one target."""
        set_columns(self, len(found["coef"]), found["names"])
        return bool(found["coef"].shape[1] == 1)

    def _set_model(self, coef: Any, intercept: Any, *, single: bool) -> LeastSquares:
        self._single = single
        self.coef_ = coef[:, 0].copy() if single else np.ascontiguousarray(coef.T)
        self.intercept_ = float(intercept[0]) if single else np.asarray(intercept)
        return self
