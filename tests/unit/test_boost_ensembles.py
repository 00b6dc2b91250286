"""Forests and bagged boosting: models that workers grow apart, against means of models of the plain libraries."""

from __future__ import annotations

import numpy as np
import pytest

xgboost = pytest.importorskip("xgboost", reason="pip install 'unisono[boost]'")
lightgbm = pytest.importorskip("lightgbm", reason="pip install 'unisono[boost]'")

from unisono.boost import Bagged, Forest  # noqa: E402
from unisono.tables.boost.boosted import FOREST  # noqa: E402
from unisono.tables.boost.library import find_library  # noqa: E402
from unisono.world.virtual import run_threads  # noqa: E402

LIBRARIES = pytest.mark.parametrize("library", ["xgboost", "lightgbm"])
KINDS = pytest.mark.parametrize("kind", [Forest, Bagged])


def table(rows=301):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 40, (rows, 4)).astype(float)
    return x, x @ [3.0, -2.0, 1.0, 0.0] + x[:, 0] * x[:, 1] / 10 + rng.standard_normal(rows)


def members(kind, library, **more):
    """5 models: of one round for a forest, of 4 for bagging."""
    settings = {"library": library, "n_estimators": 5, "n_jobs": 1, "random_state": 7, **more}
    return kind(**settings) if kind is Forest else kind(bags=5, **{**settings, "n_estimators": 4})


def drawn(number, rows):
    """How often each row is in bootstrap `number`."""
    return np.bincount(np.random.default_rng([7, number]).integers(0, rows, rows), minlength=rows).astype(float)


def reference(kind, library, x, y, start):
    """The mean of 5 models that the plain library makes of x and y, in margins."""
    total = np.zeros(len(x))
    rounds, settings = (1, FOREST[library]) if kind is Forest else (4, {})
    for number in range(5):
        counts = drawn(number, len(x))
        if library == "xgboost":
            params = {"seed": 7 + number, "base_score": start, "nthread": 1, **settings}
            rows = xgboost.QuantileDMatrix(x, y)
            rows.set_weight(counts)
            total += xgboost.train(params, rows, rounds).predict(xgboost.DMatrix(x))
        else:
            params = {"seed": 7 + number, "num_threads": 1, "verbose": -1, "objective": "regression", **settings}
            keep = counts > 0
            rows = lightgbm.Dataset(x, y, params=params, free_raw_data=False).construct().subset(np.flatnonzero(keep))
            rows.construct().set_weight(counts[keep])
            total += lightgbm.train(params, rows, rounds).predict(x)
    return total / 5


@LIBRARIES
@KINDS
@pytest.mark.parametrize("size", [1, 2, 3])
def test_bootstraps_give_the_mean_of_the_plain_librarys_models_at_any_size(kind, library, size):
    x, y = table()
    expected = reference(kind, library, x, y, y.mean())
    for model in run_threads(lambda world: members(kind, library).fit(x, y), size):
        np.testing.assert_allclose(model.predict(x), expected, rtol=1e-5, atol=1e-4)


@LIBRARIES
@KINDS
def test_on_shards_each_rank_grows_from_its_own_rows(kind, library):
    x, y = table(300)

    def rank(world):
        mine = slice(150 * world.rank, 150 * (world.rank + 1))
        own = members(kind, library, sample="shard", own_rows=True).fit(x[mine], y[mine])
        return own, members(kind, library, sample="shard").fit(x, y)

    for own, whole in run_threads(rank, 2):
        np.testing.assert_array_equal(own.predict(x), whole.predict(x))
        assert (own.n_rows_, whole.n_rows_) == (300, 300)
        assert own.score(x, y) > 0.4


def test_a_tree_has_seen_only_the_rows_of_the_rank_that_grew_it():
    x, _ = table(150)

    def rank(world):
        return Forest(n_estimators=5, sample="shard", own_rows=True).fit(x, np.full(150, 10.0 * world.rank))

    # Ranks 0 and 1 grow 3 and 2 of 5 trees, of targets that are 0 and 10 everywhere.
    np.testing.assert_allclose(run_threads(rank, 2)[0].predict(x), 4.0, rtol=1e-3)


@LIBRARIES
@KINDS
@pytest.mark.parametrize("classes", [2, 3])
def test_a_merged_classifier_has_probabilities(kind, library, classes):
    x, y = table()
    labels = np.array(["x", "y", "z"])[np.digitize(y, np.quantile(y, np.arange(1, classes) / classes))]
    model = run_threads(lambda world: members(kind, library, task="classification").fit(x, labels), 2)[0]
    found = model.predict_proba(x)
    assert found.shape == (len(x), classes)
    np.testing.assert_allclose(found.sum(1), 1.0, rtol=1e-5)
    assert model.score(x, labels) > 0.75
    assert model.classes_.tolist() == sorted(set(labels))


@LIBRARIES
@KINDS
def test_the_merged_model_is_one_file_of_the_plain_library(kind, library, tmp_path):
    x, y = table()
    model = members(kind, library).fit(x, y)
    path = tmp_path / ("model.json" if library == "xgboost" else "model.txt")
    model.save(path)
    if library == "xgboost":
        loaded = xgboost.Booster(model_file=path)
        np.testing.assert_array_equal(loaded.predict(xgboost.DMatrix(x)), model.predict(x))
        shares = loaded.predict(xgboost.DMatrix(x), pred_contribs=True)
        assert loaded.num_boosted_rounds() == (1 if kind is Forest else 4)
    else:
        loaded = lightgbm.Booster(model_file=path)
        np.testing.assert_array_equal(loaded.predict(x), model.predict(x))
        shares = loaded.predict(x, pred_contrib=True)
        assert loaded.num_trees() == (5 if kind is Forest else 20)
    np.testing.assert_allclose(shares.sum(1), model.predict(x), rtol=1e-4, atol=1e-3)
    assert find_library(library).load(path.read_bytes()) is not None


@KINDS
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sample": "jackknife"}, "got sample='jackknife'; expected one of"),
        ({"random_state": None}, "got random_state=None; expected a whole number"),
        ({"own_rows": True}, 'use sample="shard"'),
        ({"library": "catboost"}, "got library='catboost'; expected one of"),
        ({"workers": 9}, "5 models to grow on 9 workers"),
        ({"booster": "dart"}, "gbtree"),
    ],
)
def test_settings_that_are_wrong_are_named(kind, settings, message):
    x, y = table(60)
    with pytest.raises(ValueError, match=message):
        members(kind, **{"library": "xgboost", **settings}).fit(x, y)
