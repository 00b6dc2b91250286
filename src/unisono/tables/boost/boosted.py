"""The base of the boosted estimators: scikit-learn's interface, the library's settings, and its model after a fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unisono.launchers.runtime.files import local_path
from unisono.tables.boost.library import BoostSettings, find_library
from unisono.tables.estimators.conventions import (
    BaseEstimator,
    ClassifierTags,
    RegressorTags,
    accuracy_score,
    available_if,
    check_count,
    check_is_fitted,
    r2_score,
    validate_data,
)

__all__ = ["BoostedEstimator"]

Array = npt.NDArray[Any]
TASKS = ("regression", "classification")


class BoostedEstimator(BaseEstimator):  # type: ignore[misc]
    """Trees by XGBoost or LightGBM; the subclasses say how the workers share the work.

    Settings that are not ours are the library's, kept under their own names as attributes. After a fit: `booster_`,
    `n_rows_`, `evals_result_`, and `classes_` of a classification.
    """

    # Settings -----------------------------------------------------------------------------------------------------

    @property
    def library_name(self) -> str:
        """The library that grows the trees: "xgboost" or "lightgbm"."""
        return str(self.library)

    def keep_library_params(self, params: dict[str, Any]) -> None:
        """Keep the library's own settings as attributes."""
        for name, value in params.items():
            if name.endswith("_") or name.startswith("_") or hasattr(type(self), name):
                raise TypeError(f"{type(self).__name__} has no setting {name!r}")
            setattr(self, name, value)

    def _find_library_params(self) -> dict[str, Any]:
        ours = set(self._get_param_names())
        return {k: v for k, v in vars(self).items() if k not in ours and not k.endswith("_") and k[0] != "_"}

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Our settings, and the library's that were given."""
        return {**super().get_params(deep=deep), **self._find_library_params()}

    def set_params(self, **params: Any) -> BoostedEstimator:
        """Change settings, of ours or the library's; the library's are checked by `fit`."""
        ours = set(self._get_param_names())
        super().set_params(**{k: v for k, v in params.items() if k in ours})
        self.keep_library_params({k: v for k, v in params.items() if k not in ours})
        return self

    def read_settings(self) -> BoostSettings:
        """The settings, checked as far as they are ours."""
        who = type(self).__name__
        if self.task not in TASKS:
            raise ValueError(f"{who}: got task={self.task!r}; expected one of {', '.join(map(repr, TASKS))}")
        check_count(who, "n_estimators", self.n_estimators, optional=False)
        check_count(who, "workers", self.workers)
        if isinstance(self.timeout_s, bool) or not isinstance(self.timeout_s, int | float) or not self.timeout_s > 0:
            raise ValueError(f"{who}: got timeout_s={self.timeout_s!r}; expected seconds above 0")
        find_library(self.library_name)
        return BoostSettings(
            self.library_name,
            self._classifies,
            self.n_estimators,
            self._find_library_params(),
            timeout_s=float(self.timeout_s),
        )

    @property
    def _classifies(self) -> bool:
        return bool(self.task == "classification")

    # Use ------------------------------------------------------------------------------------------------------------

    def _predict_raw(self, X: Any) -> Any:
        check_is_fitted(self)
        X = validate_data(
            self, X, reset=False, accept_sparse="csr", dtype=[np.float64, np.float32], ensure_all_finite="allow-nan"
        )
        return find_library(self.library_name).predict(self.booster_, X, self._find_library_params())

    def predict(self, X: Any) -> Array:
        """Numbers, or the likeliest class; a missing value is NaN."""
        if not self._classifies:
            return np.asarray(self._predict_raw(X))
        likeliest = np.argmax(self.predict_proba(X), axis=1)
        labels: Array = self.classes_[likeliest]
        return labels

    @available_if(lambda self: self._classifies)  # type: ignore[untyped-decorator]
    def predict_proba(self, X: Any) -> Array:
        """The probability of each class, in the order of `classes_`; only of a classification."""
        found = np.asarray(self._predict_raw(X))
        return np.column_stack([1.0 - found, found]) if found.ndim == 1 else found

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """R² of a regression, the share of right answers of a classification."""
        measure = accuracy_score if self._classifies else r2_score
        return float(measure(y, self.predict(X), sample_weight=sample_weight))

    @property
    def feature_importances_(self) -> Array:
        """The gain of each column, as a share of all gain."""
        check_is_fitted(self)
        gains: Array = find_library(self.library_name).compute_importances(self.booster_, self.n_features_in_)
        return gains / max(float(gains.sum()), 1e-300)

    def save(self, path: str | Path) -> None:
        """Write the model as the library's own file, which the plain library loads; labels are their numbers in
        `classes_` there."""
        check_is_fitted(self)
        endings = find_library(self.library_name).SAVED_ENDINGS
        if local_path(path).suffix not in endings:
            raise ValueError(f"got {str(path)!r}: {self.library_name} writes {' or '.join(endings)} files")
        self.booster_.save_model(str(path))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.estimator_type = "classifier" if self._classifies else "regressor"
        tags.classifier_tags = ClassifierTags() if self._classifies else None
        tags.regressor_tags = None if self._classifies else RegressorTags()
        tags.target_tags.required = True
        tags.input_tags.sparse = tags.input_tags.allow_nan = True
        return tags
