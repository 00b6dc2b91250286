"""XGBoost and LightGBM as estimators: one model by all workers, who sum their histograms."""

from __future__ import annotations

from typing import Any

from unisono.tables.boost.boosted import BoostedEstimator
from unisono.tables.boost.boosted_fit import fit_boosted

__all__ = ["LightGBM", "XGBoost"]


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
        task: "regression" or "classification".
        n_estimators: rounds of boosting.
        workers: launch so many local workers; None: the world that this process is in.
        on: launch them there, as in `un.launch`.
        own_rows: in a running world each rank gives rows of its own; False: all give the same table, and each rank
            takes its part.
        timeout_s: a rank that is silent for so long is an error on all others.
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
