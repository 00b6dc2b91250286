"""scikit-learn's conventions for all estimators here: the names they use of it, and checks of settings and labels."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from unisono.world import World

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, MultiOutputMixin, RegressorMixin
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.metrics import accuracy_score, r2_score
    from sklearn.utils import ClassifierTags, RegressorTags
    from sklearn.utils.metaestimators import available_if
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"the estimators have scikit-learn's interface and need it ({missing}): pip install 'unisono[sklearn]'"
    ) from missing

__all__ = [
    "BaseEstimator",
    "ClassifierMixin",
    "ClassifierTags",
    "ConvergenceWarning",
    "MultiOutputMixin",
    "RegressorMixin",
    "RegressorTags",
    "accuracy_score",
    "available_if",
    "check_classification_targets",
    "check_count",
    "check_is_fitted",
    "check_number",
    "check_weights",
    "gather_labels",
    "r2_score",
    "set_columns",
    "validate_data",
]


def check_number(who: str, name: str, value: object, *, above_zero: bool = False) -> None:
    """Refuse a setting of the estimator `who` that is not a finite number from 0 up."""
    good = isinstance(value, int | float | np.number) and not isinstance(value, bool) and np.isfinite(float(value))
    if not good or float(value) < 0 or (above_zero and not float(value)):  # type: ignore[arg-type]
        raise ValueError(f"{who}: got {name}={value!r}; expected a number {'above 0' if above_zero else 'from 0 up'}")


def check_count(who: str, name: str, value: object, *, optional: bool = True) -> None:
    """Refuse a setting of the estimator `who` that is not a whole number from 1 up; None is allowed if `optional`."""
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{who}: got {name}={value!r}; expected a whole number from 1 up")


def check_weights(sample_weight: Any, X: Any) -> Any:
    """The weights of the rows of X as an array, or None; refuses negative ones."""
    if sample_weight is None:
        return None
    return _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)


def set_columns(estimator: Any, count: int, names: list[str] | None) -> None:
    """Set the number and the names of the columns, as the workers found them in files or in an engine's table."""
    estimator.n_features_in_ = count
    if names is not None:
        estimator.feature_names_in_ = np.array(names, dtype=object)
    elif hasattr(estimator, "feature_names_in_"):
        del estimator.feature_names_in_


def gather_labels(labels: npt.NDArray[Any], world: World) -> npt.NDArray[Any]:
    """The labels of all ranks, each once, sorted."""
    if world.size == 1 or not any(world.gather_objects(len(labels))):
        return labels
    return np.unique(np.concatenate([np.asarray(each) for each in world.gather_objects(labels.tolist()) if each]))
