"""Workers that grow different trees at the same time: random forests (Breiman, 2001) and bagged boosting (Breiman,
1996), merged into one model of the library."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from unisono.tables.boost.boosted import BoostedEstimator
from unisono.tables.boost.boosted_fit import fit_boosted
from unisono.tables.boost.library import BoostSettings
from unisono.tables.estimators.conventions import check_count

__all__ = ["Bagged", "Forest"]

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
            raise ValueError("Bagged: the models that are merged have equal rounds: leave early_stopping_rounds away")
        return self._share_out(settings, self.bags)
