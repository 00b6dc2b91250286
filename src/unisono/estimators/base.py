"""What the estimators share: scikit-learn's conventions, and where the workers of a fit are.

Alone, a fit runs in this process. In a running world (`unisono run -n 4 script.py`) every rank calls `fit` and takes
its own rows; with `workers=` or `on=`, `fit` launches workers, hands them their rows, and returns when they are done.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unisono.estimators.fitting import Fitted, Task
from unisono.estimators.report import Counted
from unisono.estimators.table import Block, Rows, is_finite, problem_in
from unisono.estimators.working import fit_in_world, job_of, work
from unisono.map_reduce import MapReduce
from unisono.map_reduce.map_reduce import find_native, launch_workers, take_part
from unisono.world import World, join

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, MultiOutputMixin, RegressorMixin
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"the estimators have scikit-learn's interface and need it ({missing}): pip install 'unisono[sklearn]'"
    ) from missing

__all__ = [
    "ClassifierMixin",
    "LinearEstimator",
    "MultiOutputMixin",
    "RegressorMixin",
    "check_classification_targets",
    "union_of_labels",
]

Array = npt.NDArray[np.float64]
SOLVERS = ("auto", "normal", "lbfgs", "accelerated", "gradient")


class LinearEstimator(BaseEstimator):  # type: ignore[misc]
    """A linear model that many workers fit together; the subclasses say with which loss."""

    _solvers: tuple[str, ...] = SOLVERS

    def _task(self, loss: str, **known: Any) -> Task:
        """The settings, checked."""
        for name in ("l1", "l2", "tol"):
            _check_number(type(self).__name__, name, getattr(self, name))
        for name in ("max_iter", "workers", "batch_size"):
            _check_count(type(self).__name__, name, getattr(self, name))
        solver = "gradient" if self.strategy is not None and self.solver == "auto" else self.solver
        if solver not in self._solvers:
            raise ValueError(f"got solver={solver!r}; expected one of {', '.join(map(repr, self._solvers))}")
        if self.strategy is not None and solver != "gradient":
            raise ValueError(
                f'got strategy={self.strategy!r} with solver={solver!r}: a strategy needs solver="gradient"'
            )
        if self.learning_rate is not None:
            _check_number(type(self).__name__, "learning_rate", self.learning_rate, above_zero=True)
        extra = {"strategy": self.strategy, "batch_size": self.batch_size, "momentum": self.momentum}
        return Task(
            loss,
            solver,
            l1=float(self.l1),
            l2=float(self.l2),
            intercept=bool(self.fit_intercept),
            tol=float(self.tol),
            max_iter=int(self.max_iter),
            learning_rate=self.learning_rate,
            extra=extra,
            **known,
        )

    # Where the fit runs ------------------------------------------------------------------------------------------

    def _run(self, task: Task, source: Any) -> Fitted:
        """The fitted model; sets what every estimator has after a fit."""
        if self.workers is None and self.on is None:
            found = self._here(task, source)
        elif (engine := find_native(self.on)) is not None and not task.extra["strategy"]:
            found = self._on_engine(engine, task, source)
        else:
            results = launch_workers(work, (task, self.speedup), source, workers=self.workers, on=self.on)
            # A worker that had another part to play, such as a parameter server, has no result.
            kind, value = next(result for result in results if result is not None)
            if kind == "refused":
                raise ValueError(value)
            found = value
        self.report_, self.n_iter_ = found["report"], max(1, int(found["iterations"]))
        self.n_rows_ = int(found["rows"])
        if not found["converged"]:
            warnings.warn(
                f"{type(self).__name__} stopped at max_iter={self.max_iter} before it reached tol={self.tol}: "
                "raise max_iter, or take a faster solver",
                ConvergenceWarning,
                stacklevel=3,
            )
        return found

    def _here(self, task: Task, source: Any) -> Fitted:
        world = join()
        if isinstance(source, Rows) and not self.own_rows:
            _check_same_everywhere(source, world)
        return fit_in_world(task, take_part(source, world, own=self.own_rows), world, speedup=self.speedup)

    def _on_engine(self, engine: Callable[..., Any], task: Task, source: Any) -> Fitted:
        """By the engine's own MapReduce; `drive` runs in this process."""
        job = job_of(task)

        def drive(ask: Any) -> Fitted:
            counted = Counted(ask)
            found: Fitted = job.drive(counted)
            return found | {"report": replace(counted.report(), solver=found["solver"])}

        found: Fitted = engine(MapReduce(job.map, job.reduce, drive, job.prepare), source, self.workers, self.on)
        return found

    # Data ---------------------------------------------------------------------------------------------------------

    def _checked(
        self, X: Any, y: Any, sample_weight: Any, *, reset: bool = True, **checks: Any
    ) -> tuple[Any, Any, Any]:
        """Arrays as scikit-learn checks them; finite or not is for the workers to see."""
        options = {"accept_sparse": "csr", "dtype": np.float64, "ensure_all_finite": False}
        if self.own_rows and getattr(X, "shape", (1,))[0] == 0:  # the other ranks have rows
            X = validate_data(self, X, reset=reset, ensure_min_samples=0, **options)
            return X, np.asarray(y), None if sample_weight is None else np.zeros(0)
        X, y = validate_data(self, X, y, reset=reset, **options, **checks)
        if sample_weight is not None:
            sample_weight = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        return X, y, sample_weight

    def _rows(self, X: Any, y: Array, weight: Array | None) -> Rows:
        names = getattr(self, "feature_names_in_", None)
        y = y[:, None] if y.ndim == 1 else y
        return Rows(X, y, weight, None if names is None else [str(n) for n in names])

    def _files(self, X: Any, y: Any, sample_weight: Any) -> Any:
        """Files that hold the rows, or None where X is an array."""
        from unisono.estimators.files import Files

        if not (isinstance(X, Files) or _is_address(X)):
            return None
        if sample_weight is not None:
            raise ValueError("got sample_weight with files: name a column of theirs, Files(..., weight='name')")
        files = X if isinstance(X, Files) else Files(X, target=y)
        if isinstance(X, Files) and y is not None:
            raise ValueError("got y with Files: name the target there, Files(paths, target='name')")
        if files.target is None:
            raise ValueError(f"got files and no target: fit({str(X)!r}, 'name of a column'), or Files(..., target=...)")
        plan = self._planned(files)
        self._file_columns = plan.features
        return plan

    def _planned(self, files: Any) -> Any:
        """Where the files' parts are; in a running world all ranks see the same, or all of them refuse."""
        world = join() if self.workers is None and self.on is None else None
        if world is None or world.size == 1:
            return files.planned()
        plan: Any = None
        try:
            plan = files.planned()
            mine_seen = ["", [list(piece) for piece in plan.pieces]]
        except (ValueError, OSError) as error:
            mine_seen = [str(error), []]
        seen = world.gather_objects(mine_seen)
        problem = next((f"rank {rank}: {text}" for rank, (text, _) in enumerate(seen) if text), "")
        if not problem and any(pieces != seen[0][1] for _, pieces in seen):
            problem = f"the ranks see different files at {files.paths}"
        if problem:
            raise ValueError(problem)
        return plan

    def _learned_columns(self, found: Fitted) -> None:
        """Of files, and of tables that lie in an engine: only the workers have seen their columns."""
        self.n_features_in_ = len(found["coef"])
        if found["names"] is not None:
            self.feature_names_in_ = np.array(found["names"], dtype=object)
        elif hasattr(self, "feature_names_in_"):
            del self.feature_names_in_

    def _elsewhere(self, X: Any, y: Any, sample_weight: Any) -> Any:
        """Rows that are not arrays of this process: files, or a table that lies in an engine; None for arrays."""
        if type(X).__module__.split(".")[0] not in ("pyspark", "ray"):
            return self._files(X, y, sample_weight)
        if self.on is None or not isinstance(y, str) or sample_weight is not None:
            raise ValueError(
                f"got a {type(X).__module__}.{type(X).__name__}: give on= (the engine where it lies) and as y the name "
                "of its column to learn, fit(table, 'price')"
            )
        return X

    def _scores(self, X: Any) -> Array:
        """X coef + intercept: rows × outputs."""
        check_is_fitted(self)
        coef = np.atleast_2d(self.coef_).T
        if hasattr(X, "planned") or _is_address(X):
            return np.concatenate([block.x @ coef + self.intercept_ for block in self._read(X)])
        X = validate_data(self, X, accept_sparse="csr", dtype=np.float64, reset=False)
        return np.asarray(X @ coef + self.intercept_)

    def _read(self, X: Any) -> Iterator[Block]:
        """All rows of files, of the columns that were learned from."""
        from unisono.estimators.files import Files

        known = getattr(self, "feature_names_in_", getattr(self, "_file_columns", None))
        plan = (X if isinstance(X, Files) else Files(X)).planned(columns=known)
        if len(plan.features) != self.n_features_in_:
            raise ValueError(f"{X!r} has {len(plan.features)} columns, the model was fitted to {self.n_features_in_}")
        table = plan.part(0, 1)
        for block in table.blocks():
            if not is_finite(block):
                raise ValueError(problem_in(block, table.names))
            yield block

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags


def _is_address(x: Any) -> bool:
    if isinstance(x, str | Path):
        return True
    return isinstance(x, Sequence) and len(x) > 0 and all(isinstance(item, str | Path) for item in x)


def _check_number(who: str, name: str, value: object, *, above_zero: bool = False) -> None:
    good = isinstance(value, int | float | np.number) and not isinstance(value, bool) and np.isfinite(float(value))
    if not good or float(value) < 0 or (above_zero and not float(value)):  # type: ignore[arg-type]
        raise ValueError(f"{who}: got {name}={value!r}; expected a number {'above 0' if above_zero else 'from 0 up'}")


def _check_count(who: str, name: str, value: object) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1):
        raise ValueError(f"{who}: got {name}={value!r}; expected a whole number from 1 up")


def _check_same_everywhere(rows: Rows, world: World) -> None:
    """Every rank was given the same table, of which it takes its part: look at the shape and some rows."""
    if world.size == 1:
        return
    count = rows.x.shape[0]
    with np.errstate(all="ignore"):
        probes = [float(np.nan_to_num(rows.x[i].sum() + rows.y[i].sum())) for i in {0, count // 2, count - 1}]
    seen = world.gather_objects([list(rows.x.shape), sorted(probes)])
    if any(other != seen[0] for other in seen):
        raise ValueError(
            f"the ranks were given different tables (shapes {[tuple(shape) for shape, _ in seen]}): each rank gives "
            "the whole table and takes its part of the rows; where each has rows of its own, say own_rows=True"
        )


def union_of_labels(labels: npt.NDArray[Any], world: World) -> npt.NDArray[Any]:
    """The labels of all ranks, in order."""
    if world.size == 1 or not any(world.gather_objects(len(labels))):
        return labels
    return np.unique(np.concatenate([np.asarray(each) for each in world.gather_objects(labels.tolist()) if each]))
