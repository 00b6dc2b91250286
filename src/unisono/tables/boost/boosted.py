"""The boosted estimators, with scikit-learn's interface: one model by all workers (XGBoost, LightGBM), or models that
workers grow apart and that are merged: random forests (Breiman, 2001) and bagged boosting (Breiman, 1996)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unisono.launchers.runtime.files import local_path
from unisono.tables.boost.boosted_fit import fit_boosted
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


class _SharedModel(BoostedEstimator):
    """One model by all workers."""

    def __init__(
        self,
        *,
        task: str = "regression",
        n_estimators: int = 100,
        workers: int | None = None,
        on: Any = None,
        own_rows: bool = False,
        timeout_s: float = 60.0,
        **params: Any,
    ) -> None:
        self.task, self.n_estimators = task, n_estimators
        self.workers, self.on, self.own_rows, self.timeout_s = workers, on, own_rows, timeout_s
        self.keep_library_params(params)

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None, *, eval_set: Any = None) -> Any:
        """Fit to arrays (X dense or sparse, NaN for a missing value), or to files: `fit("data/*.parquet", "price")`.

        `eval_set`: pairs (X, y), whose metrics are in `evals_result_` after each round; early_stopping_rounds= needs
        one of them.
        """
        fit_boosted(self, self.read_settings(), X, y, sample_weight, eval_set)
        return self


class XGBoost(_SharedModel):
    """XGBoost by all workers: each holds some rows, and they sum histograms through XGBoost's own collective.

    The model is the one that XGBoost would make alone, to the last digits, if no feature has more than `max_bin`
    different values; with more, the borders of bins are estimated from all workers' rows and differ slightly.

    Arguments:
        task: "regression" or "classification".
        n_estimators: rounds of boosting.
        workers: launch so many local workers; None: the world that this process is in.
        on: launch them there, as in `un.launch`.
        own_rows: in a running world each rank gives rows of its own; False: all give the same table, and each rank
            takes its part.
        timeout_s: a rank that is silent for so long is an error on all others.
        **params: XGBoost's own settings, such as max_depth=6, learning_rate=0.1, subsample=0.8, n_jobs=2.

    After `fit`: `booster_` (XGBoost's own), `classes_`, `feature_importances_`, `evals_result_`, `n_rows_`; `save`
    writes XGBoost's own file.

    >>> import numpy as np
    >>> X = np.arange(40.0).reshape(20, 2) // 10
    >>> model = XGBoost(task="classification", n_estimators=20).fit(X, np.where(X[:, 0] > 1, "high", "low"))
    >>> model.predict([[0.0, 0.0], [3.0, 3.0]]).tolist()
    ['low', 'high']
    """

    library_name = "xgboost"


class LightGBM(_SharedModel):
    """LightGBM by all workers: each holds some rows, and they sum histograms through LightGBM's own network.

    Every rank cuts features into the same bins, found from a sample of all ranks' rows: all of them up to 200,000
    (`bin_construct_sample_cnt`; fewer if these take more than 256 MB). Up to there the model is the one that
    LightGBM would make alone, to the last digits, but for two things: what is drawn by row (bagging, GOSS) is drawn by
    each rank for itself; and with weights or classes it estimates a leaf's rows from their hessians, so that
    min_child_samples acts slightly otherwise (min_child_weight does not).

    Arguments:
        task, n_estimators, workers, on, own_rows, timeout_s: as of `XGBoost`.
        **params: LightGBM's own settings, such as num_leaves=31, learning_rate=0.1, min_child_samples=20, n_jobs=2;
            tree_learner="voting" sends less than "data", and approximates.

    After `fit`: `booster_` (LightGBM's own), `classes_`, `feature_importances_`, `evals_result_`, `n_rows_`; `save`
    writes LightGBM's own file.

    >>> import numpy as np
    >>> X = np.arange(400.0).reshape(200, 2) // 50
    >>> LightGBM(n_estimators=50).fit(X, X[:, 0]).predict([[3.0, 3.0]]).round(1).tolist()
    [3.0]
    """

    library_name = "lightgbm"


SAMPLES = ("bootstrap", "shard")
# A node chooses from a random part of the columns.
FOREST = {
    "xgboost": {"learning_rate": 1.0, "colsample_bynode": 0.8, "reg_lambda": 1e-5},
    "lightgbm": {"learning_rate": 1.0, "feature_fraction_bynode": 0.8},
}


class _Ensemble(BoostedEstimator):
    """Models that each worker grows by itself."""

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Any:
        """Fit to arrays (X dense or sparse, NaN for a missing value), or to files: `fit("data/*.parquet", "price")`."""
        fit_boosted(self, self.read_settings(), X, y, sample_weight)
        return self

    def _share_out(self, settings: BoostSettings, members: int) -> BoostSettings:
        """The settings with `members` models to grow apart, and which rows each is grown on."""
        who = type(self).__name__
        if self.sample not in SAMPLES:
            raise ValueError(f"{who}: got sample={self.sample!r}; expected one of {', '.join(map(repr, SAMPLES))}")
        if isinstance(self.random_state, bool) or not isinstance(self.random_state, int | np.integer):
            raise ValueError(f"{who}: got random_state={self.random_state!r}; expected a whole number")
        if self.random_state < 0:
            raise ValueError(f"{who}: got random_state={self.random_state}; expected a whole number from 0 up")
        if self.sample == "bootstrap" and self.own_rows:
            raise ValueError(f'{who}: with own_rows=True no rank sees all rows: use sample="shard"')
        return replace(settings, members=members, shards=self.sample == "shard", seed=int(self.random_state))


class Forest(_Ensemble):
    """A random forest: each worker grows its own trees, and the trees are merged into one model.

    Every tree sees a bootstrap, as many rows as there are, drawn with repetition. Nothing is exchanged while trees
    grow. With sample="bootstrap" a tree depends on its number alone, so any number of workers gives the same forest.

    Arguments:
        task: "regression" or "classification".
        n_estimators: trees.
        library: "xgboost" or "lightgbm", of which the merged model is one.
        sample: what a tree's rows are drawn from: "bootstrap" all rows, "shard" those of the worker that grows it,
            which need not see the others'.
        random_state: which rows and columns are drawn.
        workers, on, own_rows, timeout_s: as of `XGBoost`.
        **params: the library's own settings, such as max_depth=12. Other than its defaults: learning_rate is 1, a node
            chooses from 0.8 of the columns, and XGBoost's reg_lambda is 1e-5.

    A classifier's forest takes one Newton step from the prior and averages margins, as the libraries' own forests do.
    """

    def __init__(
        self,
        *,
        task: str = "regression",
        n_estimators: int = 100,
        library: str = "xgboost",
        sample: str = "bootstrap",
        random_state: int = 0,
        workers: int | None = None,
        on: Any = None,
        own_rows: bool = False,
        timeout_s: float = 60.0,
        **params: Any,
    ) -> None:
        self.task, self.n_estimators, self.library, self.sample = task, n_estimators, library, sample
        self.random_state, self.timeout_s = random_state, timeout_s
        self.workers, self.on, self.own_rows = workers, on, own_rows
        self.keep_library_params(params)

    def read_settings(self) -> BoostSettings:
        """The settings, checked: every tree is a model of one round."""
        settings = self._share_out(super().read_settings(), self.n_estimators)
        return replace(settings, rounds=1, params={**FOREST[settings.library], **settings.params})


class Bagged(_Ensemble):
    """Bagged boosting: each worker boosts its own models, each on a bootstrap, and all are merged into one model.

    The merged model predicts the mean of their margins. Nothing is exchanged while models grow.

    Arguments:
        bags: models.
        n_estimators: rounds of boosting of each.
        task, library, sample, random_state, workers, on, own_rows, timeout_s: as of `Forest`.
        **params: the library's own settings.
    """

    def __init__(
        self,
        *,
        task: str = "regression",
        bags: int = 10,
        n_estimators: int = 100,
        library: str = "xgboost",
        sample: str = "bootstrap",
        random_state: int = 0,
        workers: int | None = None,
        on: Any = None,
        own_rows: bool = False,
        timeout_s: float = 60.0,
        **params: Any,
    ) -> None:
        self.task, self.bags, self.n_estimators = task, bags, n_estimators
        self.library, self.sample, self.random_state, self.timeout_s = library, sample, random_state, timeout_s
        self.workers, self.on, self.own_rows = workers, on, own_rows
        self.keep_library_params(params)

    def read_settings(self) -> BoostSettings:
        """The settings, checked."""
        check_count("Bagged", "bags", self.bags, optional=False)
        settings = super().read_settings()
        if settings.params.get("early_stopping_rounds") is not None:
            raise ValueError("Bagged: the models that are merged have equal rounds: leave early_stopping_rounds out")
        return self._share_out(settings, self.bags)
