"""Estimators against numpy's lstsq and scikit-learn, in one process and in worlds of threads."""

from __future__ import annotations

import csv
import functools
import importlib
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
from sklearn.exceptions import ConvergenceWarning, SkipTestWarning
from sklearn.linear_model import Lasso, Ridge
from sklearn.linear_model import LogisticRegression as Reference
from sklearn.utils.estimator_checks import check_estimator

import unisono as un
from unisono.estimators import Files, LeastSquares, LogisticRegression
from unisono.launchers.engines.engine import Engine
from unisono.tables.map_reduce.map_reduce import Round, find_native
from unisono.tables.map_reduce.ray import run as map_reduce_on_ray
from unisono.tables.map_reduce.worker_data import split

HOUSING = Path(__file__).parents[3] / "shared" / "data" / "california_housing.csv"


def table(rows=300, columns=6, *, seed=0, noise=0.1):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, columns)) * 10.0 ** rng.integers(-2, 3, columns) + rng.integers(-5, 5, columns)
    y = x @ (1.0 / np.abs(x).mean(axis=0)) + 3.0 + noise * rng.standard_normal(rows)
    return x, y


def lstsq(x, y, weight=None):
    root = np.ones(len(x)) if weight is None else np.sqrt(weight)
    full = np.column_stack([x, np.ones(len(x))])
    found = np.linalg.lstsq(full * root[:, None], (y.T * root).T, rcond=None)[0]
    return found[:-1], found[-1]


# scikit-learn's own checks ------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "estimator",
    [
        LeastSquares(),
        LeastSquares(solver="lbfgs"),
        LeastSquares(solver="accelerated", max_iter=5000),
        LeastSquares(l1=0.01, l2=0.01),
        LogisticRegression(),
        LogisticRegression(l1=0.01, max_iter=5000),
    ],
    ids=str,
)
def test_scikit_learns_checks_pass(estimator):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SkipTestWarning)
        check_estimator(estimator)


# Least squares -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", ["normal", "lbfgs", "accelerated", "gradient"])
def test_every_solver_finds_lstsqs_coefficients(solver):
    x, y = table()
    model = LeastSquares(solver=solver, max_iter=20000).fit(x, y)
    coef, intercept = lstsq(x, y)
    np.testing.assert_allclose(model.coef_, coef, rtol=1e-6)
    assert model.intercept_ == pytest.approx(intercept, rel=1e-6)
    np.testing.assert_allclose(model.predict(x), x @ coef + intercept, rtol=1e-6)


def test_far_from_zero_no_digits_are_lost():
    x, y = table()
    model = LeastSquares().fit(x + 1e7, y)
    np.testing.assert_allclose(model.coef_, lstsq(x, y)[0], rtol=1e-6)


def test_nearly_dependent_columns_are_refined_by_the_true_residual():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((500, 4))
    x[:, 3] = x[:, 2] + 1e-6 * x[:, 3]
    y = x @ [1.0, -2.0, 3.0, 4.0]
    np.testing.assert_allclose(LeastSquares().fit(x, y).coef_, [1.0, -2.0, 3.0, 4.0], rtol=1e-6)


@pytest.mark.parametrize("rows", [200, 4])
def test_dependent_columns_get_the_shortest_solution_as_lstsq_gives_it(rows):
    x, y = table(rows)
    x = np.column_stack([x, x[:, 1] + 2 * x[:, 2], np.full(rows, 7.0)])
    centred = np.linalg.lstsq(x - x.mean(axis=0), y - y.mean(), rcond=1e-12)[0]
    np.testing.assert_allclose(LeastSquares().fit(x, y).coef_, centred, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("solver", ["normal", "lbfgs", "accelerated"])
def test_ridge_equals_scikit_learns(solver):
    x, y = table()
    reference = Ridge(alpha=0.3 * len(x)).fit(x, y)
    model = LeastSquares(l2=0.3, solver=solver).fit(x, y)
    np.testing.assert_allclose(model.coef_, reference.coef_, rtol=1e-6)
    assert model.intercept_ == pytest.approx(reference.intercept_, rel=1e-6)


@pytest.mark.parametrize("solver", ["normal", "accelerated"])
@pytest.mark.parametrize("intercept", [True, False])
def test_lasso_equals_scikit_learns(solver, intercept):
    x, y = table(columns=8)
    reference = Lasso(alpha=0.2, tol=1e-12, max_iter=100_000, fit_intercept=intercept).fit(x, y)
    model = LeastSquares(l1=0.2, solver=solver, max_iter=20000, fit_intercept=intercept).fit(x, y)
    np.testing.assert_allclose(model.coef_, reference.coef_, rtol=1e-5, atol=1e-8)
    assert np.count_nonzero(model.coef_) == np.count_nonzero(reference.coef_) < 8


@pytest.mark.parametrize("solver", ["normal", "lbfgs"])
def test_weights_several_targets_and_no_intercept(solver):
    x, y = table()
    weight = np.random.default_rng(3).uniform(0, 2, len(x))
    both = np.column_stack([y, -2 * y + x[:, 0]])
    model = LeastSquares(solver=solver).fit(x, both, weight)
    coef, intercept = lstsq(x, both, weight)
    np.testing.assert_allclose(model.coef_, coef.T, rtol=1e-6)
    np.testing.assert_allclose(model.intercept_, intercept, rtol=1e-6)
    through_zero = LeastSquares(solver=solver, fit_intercept=False).fit(x, y)
    np.testing.assert_allclose(through_zero.coef_, np.linalg.lstsq(x, y, rcond=None)[0], rtol=1e-6)


@pytest.mark.parametrize("solver", ["normal", "lbfgs", "accelerated"])
def test_sparse_rows_equal_dense_ones(solver):
    x = scipy.sparse.random(400, 12, density=0.2, format="csr", random_state=0)
    y = x @ np.arange(12.0) + 1.0
    weight = np.linspace(0.5, 2, 400)
    model = LeastSquares(solver=solver).fit(x, y, weight)
    np.testing.assert_allclose(model.coef_, np.arange(12.0), atol=1e-6)
    np.testing.assert_allclose(model.predict(x), y, atol=1e-6)


@pytest.mark.skipif(not HOUSING.exists(), reason=f"{HOUSING} is not here")
@pytest.mark.parametrize("size", [1, 3])
def test_california_housing_equals_lstsq(size):
    with open(HOUSING, newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["total_bedrooms"]]
    names = [name for name in rows[0] if name not in ("median_house_value", "ocean_proximity")]
    x = np.array([[float(row[name]) for name in names] for row in rows])
    y = np.array([float(row["median_house_value"]) for row in rows])
    coef, intercept = lstsq(x, y)
    files = Files(HOUSING, target="median_house_value", columns=names, missing="drop", piece_bytes=1 << 18)
    for model in un.run_threads(lambda _: LeastSquares(speedup=False).fit(files), size):
        np.testing.assert_allclose(model.coef_, coef, rtol=1e-6)
        assert model.intercept_ == pytest.approx(intercept, rel=1e-6)
        assert model.n_rows_ == len(rows)
        assert list(model.feature_names_in_) == names


# Logistic regression -------------------------------------------------------------------------------------------


def classes(rows=400, count=2, *, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, 5)) * [1, 10, 0.1, 1, 1] + [0, 50, 0, 0, 1]
    scores = (x - x.mean(axis=0)) / x.std(axis=0) @ rng.standard_normal((5, count)) + rng.gumbel(size=(rows, count))
    return x, np.array(["a", "b", "c", "d"])[scores.argmax(axis=1)]


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("solver", ["lbfgs", "accelerated"])
def test_logistic_regression_equals_scikit_learns(count, solver):
    x, y = classes(count=count)
    weight = np.random.default_rng(1).uniform(0.5, 2, len(x))
    reference = Reference(C=1 / (0.01 * weight.sum()), tol=1e-10, max_iter=100_000, solver="newton-cg")
    reference.fit(x, y, weight)
    model = LogisticRegression(l2=0.01, solver=solver, tol=1e-9, max_iter=50_000).fit(x, y, weight)
    np.testing.assert_allclose(model.coef_, reference.coef_, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(model.predict_proba(x), reference.predict_proba(x), atol=1e-6)
    np.testing.assert_allclose(model.decision_function(x), reference.decision_function(x), atol=1e-4)
    assert (model.predict(x) == reference.predict(x)).all()
    assert list(model.classes_) == sorted(set(y))


def test_l1_leaves_coefficients_out_and_meets_the_conditions_of_a_minimum():
    x, y = classes()
    model = LogisticRegression(l1=0.05, l2=0.0, tol=1e-10, max_iter=50_000).fit(x, y)
    chance = model.predict_proba(x)[:, 1]
    slope = x.T @ (chance - (y == "b")) / len(x)
    coef = model.coef_[0]
    assert 0 < np.count_nonzero(coef) < 5
    np.testing.assert_allclose(slope[coef != 0], -0.05 * np.sign(coef[coef != 0]), atol=1e-6)
    assert (np.abs(slope[coef == 0]) <= 0.05 + 1e-6).all()
    assert abs((chance - (y == "b")).mean()) < 1e-8


def test_extreme_scores_overflow_nothing():
    x, y = classes()
    with np.errstate(all="raise", under="ignore"):
        model = LogisticRegression(l2=1e-8).fit(x * 1e6, y)
        assert np.isfinite(model.predict_proba(x * 1e9)).all()


# Many ranks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("solver", ["normal", "lbfgs", "accelerated"])
def test_ranks_that_share_the_rows_find_what_one_finds(size, solver):
    x, y = table(101)
    coef, intercept = lstsq(x, y)
    for model in un.run_threads(lambda _: LeastSquares(solver=solver, speedup=False).fit(x, y), size):
        np.testing.assert_allclose(model.coef_, coef, rtol=1e-6)
        assert model.intercept_ == pytest.approx(intercept, rel=1e-6)
        assert model.n_rows_ == 101


def test_ranks_with_rows_of_their_own_and_classes_that_only_one_has():
    x, y = classes(count=4)
    order = np.argsort(y, kind="stable")
    cuts = [0, 50, 60, 400]
    whole = LogisticRegression(l2=0.01, tol=1e-9).fit(x, y)

    def fit(world):
        mine = order[cuts[world.rank] : cuts[world.rank + 1]]
        return LogisticRegression(l2=0.01, tol=1e-9, own_rows=True, speedup=False).fit(x[mine], y[mine])

    for model in un.run_threads(fit, 3):
        assert list(model.classes_) == ["a", "b", "c", "d"]
        np.testing.assert_allclose(model.coef_, whole.coef_, rtol=1e-4, atol=1e-6)


def test_a_rank_may_have_no_rows_of_its_own_but_the_same_columns():
    x, y = table(30)

    def fit(world):
        mine = slice(0, 30 if world.rank == 1 else 0)
        model = LeastSquares(own_rows=True, speedup=False).fit(x[mine], y[mine])
        labels = LogisticRegression(own_rows=True, speedup=False).fit(x[mine], (y > y.mean())[mine]).classes_
        with pytest.raises(ValueError, match="some have 6 columns and 1 targets, others 5"):
            LeastSquares(own_rows=True).fit(x[:, world.rank :], y)
        return model.coef_, labels.tolist()

    for coef, labels in un.run_threads(fit, 2):
        np.testing.assert_allclose(coef, lstsq(x, y)[0], rtol=1e-6)
        assert labels == [False, True]


def test_more_ranks_than_rows():
    x, y = np.array([[1.0], [2.0]]), np.array([3.0, 5.0])
    for solver in ("normal", "lbfgs"):
        for model in un.run_threads(lambda _, s=solver: LeastSquares(solver=s, speedup=False).fit(x, y), 3):
            np.testing.assert_allclose(model.coef_, [2.0])


def test_different_tables_on_the_ranks_are_refused_on_all_of_them():
    x, y = table(40)

    def fit(world):
        with pytest.raises(ValueError, match="own_rows=True"):
            LeastSquares().fit(x[world.rank :], y[world.rank :])
        return True

    assert un.run_threads(fit, 2) == [True, True]


@pytest.mark.parametrize("solver", ["normal", "lbfgs"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_bad_value_is_named_by_column_and_row_on_every_rank(solver, value):
    x, y = table(90)
    x[77, 4] = value
    word = "NaN" if np.isnan(value) else "inf"

    def fit(_):
        with pytest.raises(ValueError, match=rf"X contains .*{word}.* in column 4 \(row 77\)"):
            LeastSquares(solver=solver).fit(x, y)
        with pytest.raises(ValueError, match=rf"X contains .*{word}.* in column 4 \(row 77\)"):
            LeastSquares(solver=solver).fit(scipy.sparse.csr_matrix(x), y)
        return True

    assert un.run_threads(fit, 2) == [True, True]


# Strategies ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
def test_gradient_descent_through_a_strategy_finds_the_minimum(size):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((60, 3)) * [1, 100, 1] + [5, 0, 0]
    y = x @ [1.0, 0.02, -3.0] + 2.0 + rng.standard_normal(60)
    coef, intercept = lstsq(x, y)

    def fit(_):
        return LeastSquares(strategy="allreduce", max_iter=300, tol=1e-14, speedup=False).fit(x, y)

    for model in un.run_threads(fit, size):
        np.testing.assert_allclose(model.coef_, coef, rtol=1e-5)
        assert model.intercept_ == pytest.approx(intercept, rel=1e-5)
        assert model.report_.solver == "gradient, allreduce"


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("strategy", ["local_sgd(every=3)", "topk(k=0.5)", "zero(stage=3)", "qadam"])
def test_other_strategies_learn_too_also_classes_and_batches(strategy):
    x, y = classes(count=4)

    def fit(_):
        settings = {"strategy": strategy, "batch_size": 50, "max_iter": 20, "momentum": 0.5, "l1": 1e-4}
        return LogisticRegression(**settings, speedup=False).fit(scipy.sparse.csr_matrix(x), y).score(x, y)

    best = LogisticRegression().fit(x, y).score(x, y)
    first, second = un.run_threads(fit, 2)
    assert first == second > best - 0.05


# Rows as they come ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"l2": 0.1}, {"l1": 0.2}, {"fit_intercept": False}])
def test_partial_fits_equal_one_fit_of_all_rows(settings):
    x, y = table(90)
    whole = LeastSquares(**settings).fit(x, y)
    model = LeastSquares(**settings)
    for start in (0, 20, 50):
        stop = {0: 20, 20: 50, 50: 90}[start]
        model.partial_fit(x[start:stop], y[start:stop])
    np.testing.assert_allclose(model.coef_, whole.coef_, rtol=1e-6, atol=1e-10)
    assert model.n_rows_ == 90
    after_fit = LeastSquares(**settings).fit(x[:50], y[:50]).partial_fit(x[50:], y[50:])
    np.testing.assert_allclose(after_fit.coef_, whole.coef_, rtol=1e-6, atol=1e-10)


def test_partial_fit_in_a_world_takes_every_ranks_part():
    x, y = table(90)

    def fit(_):
        return LeastSquares().partial_fit(x[:40], y[:40]).partial_fit(x[40:], y[40:]).coef_

    for coef in un.run_threads(fit, 3):
        np.testing.assert_allclose(coef, lstsq(x, y)[0], rtol=1e-6)


@pytest.mark.parametrize("count", [2, 4])
def test_classes_are_learned_from_rows_as_they_come(count):
    x, y = classes(3000, count)
    names = sorted(set(y))

    def fit(_):
        model = LogisticRegression(batch_size=50)
        for start in range(0, 3000, 500):
            model.partial_fit(x[start : start + 500], y[start : start + 500], classes=names)
        return model.score(x, y)

    best = LogisticRegression().fit(x, y).score(x, y)
    alone, together = un.run_threads(fit, 1)[0], un.run_threads(fit, 2)
    assert alone > best - 0.03
    assert together[0] == together[1] > best - 0.03


def test_partial_fit_checks_the_classes():
    x, y = classes()
    with pytest.raises(ValueError, match="first call"):
        LogisticRegression().partial_fit(x, y)
    with pytest.raises(ValueError, match=r"labels \['b'\] that are not among"):
        LogisticRegression().partial_fit(x, y, classes=["a", "c"])
    with pytest.warns(UserWarning, match="starts afresh"):
        LeastSquares(solver="lbfgs").fit(x, x[:, 0]).partial_fit(x, x[:, 0])


# What it cost, and what is refused -----------------------------------------------------------------------------


def test_the_report_counts_words_and_measures_the_rest():
    x, y = table(200)
    for model in un.run_threads(lambda _: LeastSquares().fit(x, y), 3):
        report = model.report_
        assert (report.workers, report.rounds, report.solver) == (3, 2, "normal")
        width = 7
        products = 2 * 2 / 3 * 3 * (width * width + width + 3)  # an all-reduce sends 2 (m - 1) / m of it from each rank
        assert products < report.words_sent < products + 1000
        modelled = report.words_sent / 3 / report.bandwidth_words_per_s + report.messages * report.latency_s
        assert report.communication_s == pytest.approx(modelled)
        assert report.latency_s > 0
        assert report.synchronisation_s >= 0
        assert 0 < report.compute_s <= report.wall_s
        assert set(report.speedup) == {1, 2, 3}
        assert report.speedup[1] == 1.0
        assert all(ratio > 0 for ratio in report.speedup.values())
        assert "speed-up" in str(report)
        assert report.as_dict()["communication_s"] == report.communication_s


def test_alone_nothing_is_sent():
    x, y = table()
    report = LeastSquares().fit(x, y).report_
    assert (report.words_sent, report.communication_s, report.speedup) == (0, 0, {1: 1.0})


def test_too_few_rounds_are_a_warning():
    x, y = table()
    with pytest.warns(ConvergenceWarning, match="max_iter=3"):
        LeastSquares(solver="gradient", max_iter=3).fit(x, y)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"solver": "magic"}, "got solver='magic'; expected one of 'auto', 'normal'"),
        ({"l1": -1.0}, "got l1=-1.0"),
        ({"max_iter": 0}, "got max_iter=0"),
        ({"workers": 0}, "got workers=0"),
        ({"strategy": "allreduce", "solver": "normal"}, 'needs solver="gradient"'),
        ({"solver": "lbfgs", "l1": 0.1}, 'use solver="accelerated"'),
        ({"learning_rate": 0.0}, "learning_rate=0.0; expected a number above 0"),
    ],
)
def test_settings_are_checked(settings, expected):
    x, y = table()
    with pytest.raises(ValueError, match=expected):
        LeastSquares(**settings).fit(x, y)


def test_values_whose_squares_overflow_are_refused_with_what_to_do():
    with pytest.raises(ValueError, match="scale the columns first"):
        LeastSquares().fit(np.array([[1e200], [-1e200]]), [1.0, 2.0])


def test_without_scikit_learn_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.base", None)
    monkeypatch.delitem(sys.modules, "unisono.tables.estimators.conventions")
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'unisono\[sklearn\]'"):
        importlib.import_module("unisono.tables.estimators.conventions")


def test_a_table_of_an_engine_needs_the_engine():
    frame = type("DataFrame", (), {"__module__": "pyspark.sql"})()
    with pytest.raises(ValueError, match=r"give on= \(the engine where it lies\)"):
        LeastSquares().fit(frame, "price")


def test_one_class_only_is_refused():
    x, _ = classes()
    with pytest.raises(ValueError, match="one class only"):
        LogisticRegression().fit(x, ["a"] * len(x))


# An engine's own MapReduce --------------------------------------------------------------------------------------------


class Sequential:
    """A server that maps the parts one after the other, as an engine's backend would on its workers."""

    def __init__(self, job, data, workers):
        self.job, self.workers, self.log = job, workers, []
        self.parts = [job.prepare(split(data, rank, workers)) for rank in range(workers)]

    def __call__(self, state, *, reduce=None):
        values = [self.job.map(part, state) for part in self.parts]
        self.log.append(Round(1.0, [0.25] * self.workers))
        return functools.reduce(added if reduce == "sum" else self.job.reduce, values)


def added(a, b):
    return tuple(map(added, a, b)) if isinstance(a, tuple) else a + b


def test_a_fit_runs_on_an_engines_own_mapreduce(monkeypatch):
    x, y = table(100)
    asked = []

    def engine(job, data, workers, on):
        asked.append((workers, on))
        return job.drive(Sequential(job, data, workers))

    monkeypatch.setattr("unisono.tables.estimators.linear.find_native", lambda on: engine)
    model = LeastSquares(workers=3, on="somewhere").fit(x, y)
    assert asked == [(3, "somewhere")]
    np.testing.assert_allclose(model.coef_, lstsq(x, y)[0], rtol=1e-6)
    report = model.report_
    assert (report.workers, report.rounds, report.latency_s) == (3, 2, 0.75)
    assert report.communication_s == 2 * 0.75  # the bandwidth is not known
    assert report.words_sent > 3 * 7 * 7
    labels = np.where(y > y.mean(), "high", "low")
    model = LogisticRegression(workers=2, on="somewhere").fit(x, labels)
    np.testing.assert_allclose(model.coef_, LogisticRegression().fit(x, labels).coef_, rtol=1e-4)


def test_engines_are_found_by_the_name_of_a_file():
    class Unknown(Engine):
        name = "No such engine"

    assert find_native(Unknown()) is None
    assert find_native(un.on.mpi()) is None
    assert find_native(None) is None
    assert find_native(un.on.ray()) is map_reduce_on_ray
