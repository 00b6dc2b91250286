"""Logistic regression, binary and multinomial, on many workers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from unisono.tables.estimators.conventions import (
    ClassifierMixin,
    check_classification_targets,
    gather_labels,
    set_columns,
)
from unisono.tables.estimators.inputs import make_rows
from unisono.tables.estimators.linear import LinearModel
from unisono.tables.estimators.linear_fit import FitSettings, MeanLoss, Scaling, make_survey
from unisono.tables.estimators.row_blocks import make_table
from unisono.tables.map_reduce import Ask
from unisono.tables.map_reduce.map_reduce import run_in_world
from unisono.world import World, join

Array = npt.NDArray[np.float64]
LEARNING_RATE = 0.5


@dataclass(frozen=True)
class OnlineModel:
    """A model in training: coef (columns × outputs), intercept, squared gradients, and the columns' running scales."""

    coef: Array
    intercept: Array
    squared: Array
    weight: float
    mean: Array
    variance: Array

    @classmethod
    def start(cls, columns: int, classes: int, coef: Array | None, intercept: Array | None) -> OnlineModel:
        """From nothing, or from a fitted model."""
        outputs = 1 if classes == 2 else classes
        start = np.zeros((columns, outputs)) if coef is None else coef.T.copy()
        bias = np.zeros(outputs) if intercept is None else np.array(intercept)
        return cls(start, bias, np.zeros((columns + 1) * outputs), 0.0, np.zeros(columns), np.zeros(columns))

    def improve(self, settings: FitSettings, part: Any, world: World) -> OnlineModel:
        """The model after one pass over every rank's `part`."""
        table = make_table(part)
        known, _ = run_in_world(make_survey(replace(settings, learning_rate=1.0)), table, world)
        scaling = Scaling(*known["scaling"])
        scaled = self._include_scales(scaling)
        most = max(world.gather_objects(table.rows))
        steps = -(-most // settings.extra["batch_size"])
        survey = make_survey(settings)
        program = replace(survey, drive=lambda ask: scaled._run_pass(settings, ask, scaling, known["loss"], steps))
        (coef, intercept, squared), _ = run_in_world(program, table, world)
        return replace(scaled, coef=coef, intercept=intercept, squared=squared)

    def _include_scales(self, new: Scaling) -> OnlineModel:
        """This model with scales that include the new rows."""
        weight = self.weight + new.weight
        away = new.mean - self.mean
        between = away * away * (self.weight * new.weight / weight)
        variance = (self.variance * self.weight + new.deviation**2 * new.weight + between) / weight
        return replace(self, weight=weight, mean=self.mean + away * (new.weight / weight), variance=variance)

    def _run_pass(
        self, settings: FitSettings, ask: Ask, rows: Scaling, loss: str, steps: int
    ) -> tuple[Array, Array, Array]:
        """Take a step for every batch, in scaled columns: one step length then suits all of them."""
        scaling = replace(rows, mean=self.mean * settings.intercept, deviation=np.sqrt(self.variance))
        bias = self.intercept + scaling.mean @ self.coef
        theta = np.concatenate([(self.coef * scaling.deviation[:, None]).ravel(), bias if settings.intercept else []])
        squared = self.squared[: len(theta)].copy()
        rate = settings.learning_rate or LEARNING_RATE
        for step in range(steps):
            smooth = MeanLoss(ask, scaling, loss, settings.l2, None, batch=(step, steps))
            _, gradient = smooth(theta)
            squared += gradient * gradient
            theta = theta - rate * gradient / np.sqrt(np.maximum(squared, 1e-300))
            if settings.l1:
                shrink = np.zeros(len(theta))
                lengths = np.repeat(settings.l1 / scaling.deviation, scaling.outputs)
                shrink[: len(lengths)] = rate * lengths / np.sqrt(np.maximum(squared[: len(lengths)], 1e-300))
                theta = np.sign(theta) * np.maximum(np.abs(theta) - shrink, 0.0)
        coef, intercept = scaling.unscale(theta)
        out = np.zeros(len(self.squared))
        out[: len(squared)] = squared
        return coef, intercept, out


BATCH_ROWS = 256  # of partial_fit without a batch_size


class LogisticRegression(ClassifierMixin, LinearModel):  # type: ignore[misc]
    """Logistic regression with ridge and L1 penalties, fitted by all workers together.

    Minimises, over n rows (or the sum of their weights),

        - Σ log p(y | x) / n  +  l1 Σ |w|  +  l2 Σ w² / 2,

    where p is the logistic function of x w + b for two classes, and the softmax for more. scikit-learn's
    `LogisticRegression(C=C)` is `l2=1/(C n)`. The intercepts are not penalised. Without any penalty, classes that a
    plane separates have no minimiser: hence the small default of l2.

    Arguments: those of `LeastSquares`; the solvers are "lbfgs", "accelerated" and "gradient", and "auto" is "lbfgs",
    or "accelerated" with l1.

    After `fit`: `classes_`, `coef_` (1 or classes × columns), `intercept_`, `n_iter_`, `n_rows_`, and `report_` with
    what it cost.

    >>> import numpy as np
    >>> X = np.array([[-2.0], [-1.0], [0.5], [1.0], [2.0]])
    >>> LogisticRegression(l2=0.01).fit(X, ["low", "low", "low", "high", "high"]).predict([[-1.5], [1.5]]).tolist()
    ['low', 'high']
    """

    _LOSS, _SOLVERS = "logistic", ("auto", "lbfgs", "accelerated", "gradient")

    def __init__(
        self,
        *,
        l1: float = 0.0,
        l2: float = 1e-4,
        fit_intercept: bool = True,
        solver: str = "auto",
        strategy: Any = None,
        learning_rate: float | None = None,
        momentum: float = 0.0,
        batch_size: int | None = None,
        max_iter: int = 1000,
        tol: float = 1e-6,
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

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> LogisticRegression:
        """Fit to arrays (X dense or sparse, y of labels), or to files whose target column holds numbers."""
        elsewhere = self._find_elsewhere(X, y, sample_weight)
        if elsewhere is not None:
            found = self._run_fit(self._read_settings(target=y if isinstance(y, str) else None), elsewhere)
            set_columns(self, len(found["coef"]), found["names"])
            labels = np.array(found["labels"])  # read as numbers: integers if all of them are whole
            self.classes_ = labels.astype(np.int64) if np.array_equal(labels, np.round(labels)) else labels
        else:
            X, y, weight = self._check_arrays(X, y, sample_weight)
            check_classification_targets(y)
            self.classes_ = self._find_labels(np.unique(y))
            rows = make_rows(self, X, np.searchsorted(self.classes_, y).astype(np.float64), weight)
            found = self._run_fit(self._read_settings(classes=len(self.classes_)), rows)
        self._online: OnlineModel | None = None
        return self._set_model(found["coef"], found["intercept"])

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> LogisticRegression:
        """Improve the model by one pass over these rows, in batches of `batch_size` (256) rows.

        AdaGrad (Duchi et al., 2011) in columns scaled by what has been seen so far. The first call needs `classes`,
        all that will ever come. Runs in this process, or in the world that it is in; `learning_rate` is 0.5 by
        default.
        """
        first = not hasattr(self, "classes_")
        if first and classes is None:
            raise ValueError("classes must be passed on the first call to partial_fit: all labels that will ever come")
        X, y, weight = self._check_arrays(X, y, sample_weight, reset=first)
        check_classification_targets(y)
        self._check_classes(np.unique(y), None if classes is None else np.unique(classes))
        online = getattr(self, "_online", None) or OnlineModel.start(
            X.shape[1], len(self.classes_), getattr(self, "coef_", None), getattr(self, "intercept_", None)
        )
        world = join()
        rows = make_rows(self, X, np.searchsorted(self.classes_, y).astype(np.float64), weight)
        settings = self._read_settings(classes=len(self.classes_))
        settings = replace(settings, extra={"batch_size": self.batch_size or BATCH_ROWS})
        online = self._online = online.improve(settings, self._fitting_workers.take_part(rows, world), world)
        self.n_iter_ = getattr(self, "n_iter_", 0) + 1
        return self._set_model(online.coef, online.intercept)

    def decision_function(self, X: Any) -> Array:
        """Scores: above 0 for the second of two classes; rows × classes for more than two."""
        scores = self._compute_scores(X)
        return scores[:, 0] if scores.shape[1] == 1 else scores

    def predict_proba(self, X: Any) -> Array:
        """The chance of each class: rows × classes."""
        scores = self._compute_scores(X)
        if scores.shape[1] == 1:
            scores = np.hstack([np.zeros_like(scores), scores])
        chances = np.exp(scores - scores.max(axis=1, keepdims=True))
        return np.asarray(chances / chances.sum(axis=1, keepdims=True))

    def predict(self, X: Any) -> npt.NDArray[Any]:
        """The likeliest class of each row."""
        scores = self._compute_scores(X)
        best = scores.argmax(axis=1) if scores.shape[1] > 1 else (scores[:, 0] > 0).astype(np.intp)
        return np.asarray(self.classes_[best])

    def _find_labels(self, labels: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if self.own_rows and not self._fitting_workers.are_launched:
            labels = gather_labels(labels, join())
        if len(labels) < 2:
            raise ValueError(f"got one class only ({labels.tolist()}): a classifier needs rows of 2 classes or more")
        return labels

    def _check_classes(self, seen: npt.NDArray[Any], given: npt.NDArray[Any] | None) -> None:
        if not hasattr(self, "classes_"):
            assert given is not None
            self.classes_ = given
        elif given is not None and not np.array_equal(given, self.classes_):
            raise ValueError(f"got classes={given.tolist()}, before they were {self.classes_.tolist()}")
        if len(self.classes_) < 2:
            raise ValueError(f"got one class only ({self.classes_.tolist()}): a classifier needs 2 classes or more")
        unknown = np.setdiff1d(seen, self.classes_)
        if len(unknown):
            raise ValueError(f"y has labels {unknown.tolist()} that are not among classes={self.classes_.tolist()}")

    def _set_model(self, coef: Array, intercept: Array) -> LogisticRegression:
        self.coef_, self.intercept_ = np.ascontiguousarray(coef.T), np.array(intercept)
        return self
