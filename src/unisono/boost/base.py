"""What the boosted estimators share: scikit-learn's conventions, the libraries' settings, and where a fit runs.

Alone, a fit runs in this process. In a running world (`unisono run -n 4 script.py`) every rank calls `fit` and takes
its own rows; with `workers=` or `on=`, `fit` launches workers, hands them their rows, and returns when they are done.
"""

from __future__ import annotations

import contextlib
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unisono.boost.task import Evals, Task, library_of
from unisono.boost.working import fit_in_world, work
from unisono.estimators.base import check_classification_targets, union_of_labels
from unisono.estimators.files import Files
from unisono.estimators.table import Rows
from unisono.map_reduce.map_reduce import launch_workers, take_part
from unisono.map_reduce.worker_data import share_arrays
from unisono.world import World, join

try:
    from sklearn.base import BaseEstimator
    from sklearn.metrics import accuracy_score, r2_score
    from sklearn.utils import ClassifierTags, RegressorTags
    from sklearn.utils.metaestimators import available_if
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"the estimators have scikit-learn's interface and need it ({missing}): pip install 'unisono[boost]'"
    ) from missing

__all__ = ["BoostedEstimator", "Labels"]

Array = npt.NDArray[Any]
Labels = npt.NDArray[Any]
TASKS = ("regression", "classification")


class BoostedEstimator(BaseEstimator):  # type: ignore[misc]
    """Trees by XGBoost or LightGBM; the subclasses say how the workers share the work.

    Settings that are not ours are the library's, kept under their own names as attributes.
    """

    _rounds_name = "n_estimators"

    # Settings -----------------------------------------------------------------------------------------------------

    def _keep(self, params: dict[str, Any]) -> None:
        for name, value in params.items():
            if name.endswith("_") or name.startswith("_") or hasattr(type(self), name):
                raise TypeError(f"{type(self).__name__} has no setting {name!r}")
            setattr(self, name, value)

    def _library_params(self) -> dict[str, Any]:
        ours = set(self._get_param_names())
        return {k: v for k, v in vars(self).items() if k not in ours and not k.endswith("_") and k[0] != "_"}

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Our settings, and the library's that were given."""
        return {**super().get_params(deep=deep), **self._library_params()}

    def set_params(self, **params: Any) -> BoostedEstimator:
        """Change settings, of ours or the library's; the library's are checked by `fit`."""
        ours = set(self._get_param_names())
        super().set_params(**{k: v for k, v in params.items() if k in ours})
        self._keep({k: v for k, v in params.items() if k not in ours})
        return self

    def _library_name(self) -> str:
        return str(self.library)

    @property
    def _classifies(self) -> bool:
        return bool(self.task == "classification")

    def _settings(self) -> Task:
        """The settings, checked as far as they are ours."""
        who = type(self).__name__
        if self.task not in TASKS:
            raise ValueError(f"{who}: got task={self.task!r}; expected one of {', '.join(map(repr, TASKS))}")
        for name in ("n_estimators", "workers"):
            value = getattr(self, name)
            if (value is None and name == "n_estimators") or not _is_count(value):
                raise ValueError(f"{who}: got {name}={value!r}; expected a whole number from 1 up")
        if isinstance(self.timeout_s, bool) or not isinstance(self.timeout_s, int | float) or not self.timeout_s > 0:
            raise ValueError(f"{who}: got timeout_s={self.timeout_s!r}; expected seconds above 0")
        params = self._library_params()
        library_of(self._library_name())
        return Task(self._library_name(), self._classifies, self.n_estimators, params, timeout_s=float(self.timeout_s))

    # Fit ------------------------------------------------------------------------------------------------------------

    def _fit(self, X: Any, y: Any, sample_weight: Any, eval_set: Any) -> Any:
        task = self._settings()
        source, task, classes = self._source(task, X, y, sample_weight)
        evals = self._evals(eval_set, classes)
        if task.params.get("early_stopping_rounds") is not None and not evals:
            raise ValueError("early_stopping_rounds needs rows to look at: fit(X, y, eval_set=[(X_valid, y_valid)])")
        found = self._run(task, source, evals)
        self._learned(found, classes, arrays=isinstance(source, Rows))
        return self

    def _run(self, task: Task, source: Any, evals: Evals) -> dict[str, Any]:
        if self.workers is None and self.on is None:
            world = join()
            self._check_same(source, evals, world)
            apart = bool(task.members) and not task.shards
            part = (source.part(0, 1) if hasattr(source, "part") else source) if apart else None
            return fit_in_world(task, part if apart else take_part(source, world, own=self.own_rows), world, evals)
        with share_arrays(evals) if self.on is None else contextlib.nullcontext(evals) as sent:
            results = launch_workers(work, (task, sent), source, workers=self.workers, on=self.on)
        kind, value = results[0]
        if kind == "refused":
            raise ValueError(value)
        found: dict[str, Any] = value
        return found

    def _learned(self, found: dict[str, Any], classes: Labels | None, *, arrays: bool) -> None:
        library = library_of(self._library_name())
        self.booster_ = library.load(found["model"])
        self.n_rows_, self.evals_result_ = int(found["rows"]), found["evals"]
        if self._classifies:
            self.classes_ = classes if classes is not None else np.array(found["classes"])
        if not arrays:
            self.n_features_in_ = int(found["columns"])
            if found["names"] is not None:
                self.feature_names_in_ = np.array(found["names"], dtype=object)
            elif hasattr(self, "feature_names_in_"):
                del self.feature_names_in_

    # Data -----------------------------------------------------------------------------------------------------------

    def _source(self, task: Task, X: Any, y: Any, sample_weight: Any) -> tuple[Any, Task, Labels | None]:
        """The rows, the task with what is known of them, and the labels in order, where they are known."""
        elsewhere = self._elsewhere(X, y, sample_weight)
        if elsewhere is not None:
            return elsewhere, replace(task, target=y if isinstance(y, str) else None), None
        X, y, weight = self._arrays(X, y, sample_weight)
        classes = None
        if self._classifies:
            check_classification_targets(y)
            classes = self._all_labels(y)
            y = np.searchsorted(classes, y)
            task = replace(task, classes=len(classes))
        y = np.asarray(y, dtype=np.float64)
        library_of(task.library).check(task, *_few(X, y))
        names = getattr(self, "feature_names_in_", None)
        rows = Rows(X, y.reshape(-1, 1), weight, None if names is None else [str(n) for n in names])
        return rows, task, classes

    def _arrays(self, X: Any, y: Any, sample_weight: Any) -> tuple[Any, Any, Array | None]:
        numeric = {} if self._classifies else {"y_numeric": True}
        options = {"accept_sparse": "csr", "dtype": [np.float64, np.float32], "ensure_all_finite": False}
        try:
            X, y = validate_data(self, X, y, **options, **numeric)
        except ValueError as error:
            raise _with_row(error, y) from None
        if sample_weight is not None:
            sample_weight = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        return X, y, sample_weight

    def _all_labels(self, y: Array) -> Labels:
        labels = np.unique(y)
        if self.workers is None and self.on is None and self.own_rows:
            labels = union_of_labels(labels, join())
        if len(labels) < 2:
            raise ValueError(f"the target has one class only ({labels[0]}): expected 2 or more")
        return labels

    def _elsewhere(self, X: Any, y: Any, sample_weight: Any) -> Any:
        """Rows that are not arrays of this process: files, or a table that lies in an engine; None for arrays."""
        if type(X).__module__.split(".")[0] in ("pyspark", "ray"):
            if self.on is None or not isinstance(y, str) or sample_weight is not None:
                raise ValueError(
                    f"got a {type(X).__module__}.{type(X).__name__}: give on= (the engine where it lies) and as y the "
                    "name of its column to learn, fit(table, 'price')"
                )
            return X
        if isinstance(X, Files):
            files = X
            if y is not None or sample_weight is not None:
                raise ValueError(
                    "got y or sample_weight with Files: name columns, Files(paths, target=..., weight=...)"
                )
        elif isinstance(X, str | Path):
            files = Files(X, target=y)
        else:
            return None
        if files.target is None:
            raise ValueError(f"got files and no target: fit({str(X)!r}, 'name of a column'), or Files(..., target=...)")
        return files.planned()

    def _evals(self, eval_set: Any, classes: Labels | None) -> Evals:
        """Evaluation sets as arrays. Every rank looks at all of them: so all see the same, as one process does."""
        found = []
        for number, pair in enumerate(() if eval_set is None else eval_set):
            if not isinstance(pair, list | tuple) or len(pair) != 2:
                raise ValueError(f"got eval_set[{number}]={type(pair).__name__}; expected pairs, eval_set=[(X, y)]")
            x, y = validate_data(
                self, *pair, reset=False, accept_sparse="csr", dtype=[np.float64, np.float32], ensure_all_finite=False
            )
            if self._classifies and classes is not None:
                strange = np.setdiff1d(y, classes)
                if len(strange):
                    raise ValueError(f"eval_set[{number}] has the label {strange[0]!r}, which y does not have")
                y = np.searchsorted(classes, y)
            found.append((x, np.asarray(y, dtype=np.float64)))
        return tuple(found)

    def _check_same(self, source: Any, evals: Evals, world: World) -> None:
        """In a running world all ranks give the same table (but for own_rows) and the same evaluation sets."""
        if world.size == 1:
            return
        told: list[Any] = [_mark(x) + _mark(y) for x, y in evals]
        if isinstance(source, Rows) and not self.own_rows:
            told.append(_mark(source.x, few=True) + _mark(source.y, few=True))
        elif hasattr(source, "pieces"):
            told.append([list(piece) for piece in source.pieces])
        every = world.gather_objects(told)
        if any(other != told for other in every):
            raise ValueError(
                "the ranks were given different tables, files or evaluation sets: each rank gives the whole table and "
                "takes its part of the rows; where each has rows of its own, say own_rows=True (eval_set is the same "
                "on all ranks then too)"
            )

    # Use ------------------------------------------------------------------------------------------------------------

    def _predicted(self, X: Any) -> Any:
        check_is_fitted(self)
        X = validate_data(
            self, X, reset=False, accept_sparse="csr", dtype=[np.float64, np.float32], ensure_all_finite="allow-nan"
        )
        return library_of(self._library_name()).predict(self.booster_, X, self._library_params())

    def predict(self, X: Any) -> Array:
        """Numbers, or the likeliest class; a missing value is NaN."""
        if not self._classifies:
            return np.asarray(self._predicted(X))
        likeliest = np.argmax(self.predict_proba(X), axis=1)
        labels: Array = self.classes_[likeliest]
        return labels

    @available_if(lambda self: self._classifies)  # type: ignore[untyped-decorator]
    def predict_proba(self, X: Any) -> Array:
        """The probability of each class, in the order of `classes_`; only where task="classification"."""
        found = np.asarray(self._predicted(X))
        return np.column_stack([1.0 - found, found]) if found.ndim == 1 else found

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """R² of a regression, the share of right answers of a classification."""
        measure = accuracy_score if self._classifies else r2_score
        return float(measure(y, self.predict(X), sample_weight=sample_weight))

    @property
    def feature_importances_(self) -> Array:
        """The gain of each column, of a sum of 1."""
        check_is_fitted(self)
        gains: Array = library_of(self._library_name()).importances(self.booster_, self.n_features_in_)
        return gains / max(float(gains.sum()), 1e-300)

    def save(self, path: str | Path) -> None:
        """Write the model as the library's own file, which the plain library loads; labels are their numbers in
        `classes_` there."""
        check_is_fitted(self)
        endings = library_of(self._library_name()).saved_endings
        if Path(path).suffix not in endings:
            raise ValueError(f"got {str(path)!r}: {self._library_name()} writes {' or '.join(endings)} files")
        self.booster_.save_model(str(path))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.estimator_type = "classifier" if self._classifies else "regressor"
        tags.classifier_tags = ClassifierTags() if self._classifies else None
        tags.regressor_tags = None if self._classifies else RegressorTags()
        tags.target_tags.required = True
        tags.input_tags.sparse = tags.input_tags.allow_nan = True
        return tags


def _is_count(value: object) -> bool:
    return value is None or (isinstance(value, int | np.integer) and not isinstance(value, bool) and int(value) >= 1)


def _with_row(error: ValueError, y: Any) -> ValueError:
    """scikit-learn names what is wrong with y, but not where."""
    line = np.asarray(y) if "Input y contains" in str(error) else np.empty(0)
    if line.dtype.kind != "f" or line.ndim != 1 or np.isfinite(line).all():
        return error
    return ValueError(f"{error} (row {np.flatnonzero(~np.isfinite(line))[0]})")


def _few(x: Any, y: Array) -> tuple[Any, Array]:
    """Some rows, with the first of each of the lowest classes among them: to see whether settings are taken."""
    chosen = np.unique(np.concatenate([np.arange(min(8, len(y))), np.unique(y, return_index=True)[1][:64]]))
    rows = x[chosen]
    return (rows if hasattr(rows, "tocsr") else np.where(np.isinf(rows), 0.0, rows)), np.nan_to_num(y[chosen])


def _mark(x: Any, *, few: bool = False) -> list[Any]:
    """Shape and checksum, of all or of three rows."""
    shape = list(x.shape)
    rows = x[sorted({0, shape[0] // 2, shape[0] - 1})] if few else x
    lines = [rows.data, rows.indices, rows.indptr] if hasattr(rows, "tocsr") else [rows]
    return [shape, *(zlib.crc32(np.ascontiguousarray(line).data.cast("B")) for line in lines)]
