"""A boosted fit, seen from its caller: the input becomes rows, the workers fit, the estimator gets the model."""

from __future__ import annotations

import contextlib
import zlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from unisono.tables.boost.boosting_worker import FitResult, fit_in_world, fit_launched
from unisono.tables.boost.library import BoostSettings, EvalSets, find_library
from unisono.tables.estimators.conventions import (
    check_classification_targets,
    check_weights,
    gather_labels,
    set_columns,
    validate_data,
)
from unisono.tables.estimators.files import FilePlan
from unisono.tables.estimators.inputs import Workers, find_rows_elsewhere, make_rows
from unisono.tables.estimators.row_blocks import Rows, is_sparse
from unisono.tables.map_reduce.worker_data import share_arrays, split
from unisono.world import World, join

if TYPE_CHECKING:
    from unisono.tables.boost.boosted import BoostedEstimator

Array = npt.NDArray[Any]
Labels = npt.NDArray[Any]
_ARRAYS = {"accept_sparse": "csr", "dtype": [np.float64, np.float32], "ensure_all_finite": False}


def fit_boosted(
    estimator: BoostedEstimator, settings: BoostSettings, X: Any, y: Any, sample_weight: Any, eval_set: Any = None
) -> None:
    """Fit the estimator, and set what it has after a fit."""
    workers = Workers(estimator.workers, estimator.on, estimator.own_rows)
    source, settings, classes = _find_source(estimator, settings, workers, X, y, sample_weight)
    _check_members(settings, source, workers)
    evals = _check_eval_sets(estimator, eval_set, classes)
    if settings.params.get("early_stopping_rounds") is not None and not evals:
        raise ValueError("early_stopping_rounds needs rows to look at: fit(X, y, eval_set=[(X_valid, y_valid)])")
    found = _run(settings, source, evals, workers)
    estimator.booster_ = find_library(settings.library).load(found["model"])
    estimator.n_rows_, estimator.evals_result_ = int(found["rows"]), found["evals"]
    if settings.classification:
        estimator.classes_ = classes if classes is not None else np.array(found["classes"])
    if not isinstance(source, Rows):
        set_columns(estimator, int(found["columns"]), found["names"])


def _run(settings: BoostSettings, source: Any, evals: EvalSets, workers: Workers) -> FitResult:
    if workers.are_launched:
        with share_arrays(evals) if workers.on is None else contextlib.nullcontext(evals) as sent:
            found: FitResult = workers.run(fit_launched, (settings, sent), source)
        return found
    world = join()
    _check_same(source, evals, workers, world)
    part = split(source, 0, 1) if settings.sees_all_rows else workers.take_part(source, world)
    return fit_in_world(settings, part, world, evals)


# Data -----------------------------------------------------------------------------------------------------------------


def _find_source(
    estimator: BoostedEstimator, settings: BoostSettings, workers: Workers, X: Any, y: Any, sample_weight: Any
) -> tuple[Any, BoostSettings, Labels | None]:
    """The rows, the settings completed by what the rows say, and the sorted labels (None: not known yet)."""
    elsewhere = find_rows_elsewhere(X, y, sample_weight, workers)
    if elsewhere is not None:
        return elsewhere, replace(settings, target=y if isinstance(y, str) else None), None
    numeric = {} if settings.classification else {"y_numeric": True}
    try:
        X, y = validate_data(estimator, X, y, **_ARRAYS, **numeric)
    except ValueError as error:
        raise _add_row(error, y) from None
    weight = check_weights(sample_weight, X)
    classes = None
    if settings.classification:
        check_classification_targets(y)
        classes = _find_labels(y, workers)
        y = np.searchsorted(classes, y)
        settings = replace(settings, classes=len(classes))
    y = np.asarray(y, dtype=np.float64)
    find_library(settings.library).check(settings, *_choose_few(X, y))
    return make_rows(estimator, X, y, weight), settings, classes


def _find_labels(y: Array, workers: Workers) -> Labels:
    labels = np.unique(y)
    if workers.own_rows and not workers.are_launched:
        labels = gather_labels(labels, join())
    if len(labels) < 2:
        raise ValueError(f"the target has one class only ({labels[0]}): expected 2 or more")
    return labels


def _check_members(settings: BoostSettings, source: Any, workers: Workers) -> None:
    """Refuse models that are grown apart if a worker has none to grow, or does not see the rows they are drawn from."""
    if not settings.members:
        return
    if settings.sees_all_rows and not isinstance(source, Rows | FilePlan):
        raise ValueError('no worker sees all rows of a table that lies in an engine: use sample="shard"')
    if settings.members < (workers.count or 1):
        raise ValueError(
            f"got {settings.members} models to grow on {workers.count} workers: expected at least one each"
        )


def _check_eval_sets(estimator: BoostedEstimator, eval_set: Any, classes: Labels | None) -> EvalSets:
    """The evaluation sets as checked arrays. Every rank evaluates all of them, as one process would."""
    found = []
    for number, pair in enumerate(() if eval_set is None else eval_set):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise ValueError(f"got eval_set[{number}]={type(pair).__name__}; expected pairs, eval_set=[(X, y)]")
        x, y = validate_data(estimator, *pair, reset=False, **_ARRAYS)
        if classes is not None:
            strange = np.setdiff1d(y, classes)
            if len(strange):
                raise ValueError(f"eval_set[{number}] has the label {strange[0]!r}, which y does not have")
            y = np.searchsorted(classes, y)
        found.append((x, np.asarray(y, dtype=np.float64)))
    return tuple(found)


def _check_same(source: Any, evals: EvalSets, workers: Workers, world: World) -> None:
    """Refuse ranks of a running world that give different tables (unless own_rows) or evaluation sets."""
    if world.size == 1:
        return
    mine: list[Any] = [_compute_checksum(x) + _compute_checksum(y) for x, y in evals]
    if isinstance(source, Rows) and not workers.own_rows:
        mine.append(_compute_checksum(source.x, few=True) + _compute_checksum(source.y, few=True))
    if any(other != mine for other in world.gather_objects(mine)):
        raise ValueError(
            "the ranks were given different tables, files or evaluation sets: each rank gives the whole table and "
            "takes its part of the rows; if each has rows of its own, pass own_rows=True (eval_set is the same "
            "on all ranks then too)"
        )


def _add_row(error: ValueError, y: Any) -> ValueError:
    """Add the row to scikit-learn's error, which says what is wrong with y, but not in which row."""
    line = np.asarray(y) if "Input y contains" in str(error) else np.empty(0)
    if line.dtype.kind != "f" or line.ndim != 1 or np.isfinite(line).all():
        return error
    return ValueError(f"{error} (row {np.flatnonzero(~np.isfinite(line))[0]})")


def _choose_few(x: Any, y: Array) -> tuple[Any, Array]:
    """A few rows to try the settings on, among them the first row of each of the lowest 64 classes."""
    chosen = np.unique(np.concatenate([np.arange(min(8, len(y))), np.unique(y, return_index=True)[1][:64]]))
    rows = x[chosen]
    return (rows if is_sparse(rows) else np.where(np.isinf(rows), 0.0, rows)), np.nan_to_num(y[chosen])


def _compute_checksum(x: Any, *, few: bool = False) -> list[Any]:
    """Shape and checksums of an array or a sparse matrix; `few`: of three of its rows only."""
    shape = list(x.shape)
    rows = x[sorted({0, shape[0] // 2, shape[0] - 1})] if few else x
    lines = [rows.data, rows.indices, rows.indptr] if is_sparse(rows) else [rows]
    return [shape, *(zlib.crc32(np.ascontiguousarray(line).data.cast("B")) for line in lines)]
