"""XGBoost and LightGBM in worlds of threads, against the plain libraries in one process."""

from __future__ import annotations

import pickle
import sys

import numpy as np
import pytest
import scipy.sparse

xgboost = pytest.importorskip("xgboost", reason="pip install 'unisono[boost]'")
lightgbm = pytest.importorskip("lightgbm", reason="pip install 'unisono[boost]'")

from sklearn.base import clone, is_classifier, is_regressor  # noqa: E402
from sklearn.model_selection import GridSearchCV  # noqa: E402
from sklearn.utils.estimator_checks import check_estimator  # noqa: E402

from unisono.boost import LightGBM, XGBoost  # noqa: E402
from unisono.estimators import Files  # noqa: E402
from unisono.world.virtual import run_threads  # noqa: E402

BOTH = pytest.mark.parametrize("kind", [XGBoost, LightGBM])
SMALL = {"n_estimators": 10, "n_jobs": 1}
# Of several ranks, LightGBM estimates a leaf's rows from its hessian: then only this bound on leaves is exact.
BY_HESSIAN = {"min_child_samples": 1, "min_child_weight": 3.0}


def table(rows=601, values=64):
    """Features with few distinct values, sorted by the first of them."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, values, (rows, 5)).astype(float)
    x = x[np.argsort(x[:, 0])]
    return x, x @ [3.0, -2.0, 1.0, 0.5, 0.0] + x[:, 0] * x[:, 1] / 20 + rng.standard_normal(rows)


def plain(kind, x, y, **more):
    """The library's own estimator, fitted in one process."""
    if kind is XGBoost:
        return xgboost.XGBRegressor(**SMALL, **more).fit(x, y)
    return lightgbm.LGBMRegressor(**SMALL, verbose=-1, **more).fit(x, y)


@BOTH
@pytest.mark.parametrize("size", [2, 3])
def test_predictions_equal_those_of_the_library_in_one_process(kind, size):
    x, y = table()
    expected = plain(kind, x, y).predict(x)
    for model in run_threads(lambda world: kind(**SMALL).fit(x, y), size):
        np.testing.assert_allclose(model.predict(x), expected, rtol=1e-5, atol=1e-4)
        assert model.n_rows_ == len(x)


@BOTH
def test_every_rank_has_the_same_model(kind):
    x, y = table(300)
    one, other = run_threads(lambda world: kind(**SMALL).fit(x, y), 2)
    if kind is XGBoost:
        assert one.booster_.save_raw("json") == other.booster_.save_raw("json")
    else:
        assert one.booster_.model_to_string() == other.booster_.model_to_string()


def test_lightgbm_cuts_continuous_features_as_one_process_does():
    x = np.random.default_rng(1).standard_normal((800, 4))
    x = x[np.argsort(x[:, 0])]
    y = np.sin(2 * x[:, 0]) + x[:, 1]
    expected = plain(LightGBM, x, y).predict(x)
    assert len(np.unique(x[:, 0])) == 800
    for model in run_threads(lambda world: LightGBM(**SMALL).fit(x, y), 2):
        np.testing.assert_allclose(model.predict(x), expected, rtol=1e-6, atol=1e-9)


def test_lightgbm_takes_bins_from_a_sample_of_all_ranks_where_rows_are_many():
    x, y = table(1000)
    models = run_threads(lambda world: LightGBM(**SMALL, bin_construct_sample_cnt=300).fit(x, y), 2)
    assert models[0].score(x, y) == pytest.approx(plain(LightGBM, x, y).score(x, y), abs=0.02)


@BOTH
@pytest.mark.parametrize("labels", [["no", "yes"], ["a", "b", "c"]])
def test_classes_equal_those_of_one_process(kind, labels):
    x, y = table()
    names = np.array(labels)[np.digitize(y, np.quantile(y, np.arange(1, len(labels)) / len(labels)))]
    more = BY_HESSIAN if kind is LightGBM else {}
    library = xgboost.XGBClassifier if kind is XGBoost else lightgbm.LGBMClassifier
    quiet = {"verbose": -1} if kind is LightGBM else {}
    expected = library(**SMALL, **more, **quiet).fit(x, np.searchsorted(labels, names)).predict_proba(x)
    for model in run_threads(lambda world: kind(task="classification", **SMALL, **more).fit(x, names), 2):
        np.testing.assert_allclose(model.predict_proba(x), expected, atol=1e-5)
        assert model.classes_.tolist() == labels
        assert set(model.predict(x)) == set(labels)
        assert model.score(x, names) > 0.8


@BOTH
def test_ranks_with_rows_of_their_own_and_a_label_that_one_of_them_lacks(kind):
    x, y = table(400)
    names = np.where(np.arange(400) < 300, np.where(y > np.median(y), "high", "low"), "rare")
    whole = kind(task="classification", **SMALL).fit(x, names)

    def rank(world):
        mine = slice(0, 200) if world.rank == 0 else slice(200, 400)
        return kind(task="classification", own_rows=True, **SMALL).fit(x[mine], names[mine])

    for model in run_threads(rank, 2):
        assert model.classes_.tolist() == ["high", "low", "rare"]
        assert model.n_rows_ == 400
        np.testing.assert_allclose(model.score(x, names), whole.score(x, names), atol=0.05)


@BOTH
@pytest.mark.parametrize("case", ["weights", "missing", "sparse"])
def test_weights_missing_values_and_sparse_rows_are_as_in_one_process(kind, case):
    x, y = table()
    weight = np.random.default_rng(2).integers(1, 4, len(y)).astype(float) if case == "weights" else None
    if case == "missing":
        x[::7, 2] = np.nan
    elif case == "sparse":
        x = scipy.sparse.csr_matrix(np.where(x > 32, x, 0.0))
    more = BY_HESSIAN if kind is LightGBM else {}
    library = xgboost.XGBRegressor(**SMALL) if kind is XGBoost else lightgbm.LGBMRegressor(**SMALL, **more, verbose=-1)
    expected = library.fit(x, y, sample_weight=weight).predict(x)
    model = run_threads(lambda world: kind(**SMALL, **more).fit(x, y, sample_weight=weight), 2)[0]
    np.testing.assert_allclose(model.predict(x), expected, rtol=1e-4, atol=1e-3)


@BOTH
def test_evaluation_sets_and_early_stopping_are_as_in_one_process(kind):
    x, y = table()
    noise = np.random.default_rng(3).standard_normal(601) * 30
    held = (x[::2], y[::2] + noise[::2])
    settings = {"n_estimators": 60, "learning_rate": 0.5, "early_stopping_rounds": 3, "n_jobs": 1}
    alone = kind(**settings).fit(x[1::2], (y + noise)[1::2], eval_set=[held])
    models = run_threads(lambda world: kind(**settings).fit(x[1::2], (y + noise)[1::2], eval_set=[held]), 2)
    name = "rmse" if kind is XGBoost else "l2"
    history = alone.evals_result_["validation_0"][name]
    assert len(history) < 60
    np.testing.assert_allclose(models[1].evals_result_["validation_0"][name], history, rtol=1e-4)
    np.testing.assert_allclose(models[1].predict(x), alone.predict(x), rtol=1e-4, atol=1e-3)


@BOTH
def test_the_saved_file_loads_in_the_plain_library(kind, tmp_path):
    x, y = table(300)
    model = run_threads(lambda world: kind(**SMALL).fit(x, y), 2)[0]
    if kind is XGBoost:
        for name in ("model.json", "model.ubj"):
            model.save(tmp_path / name)
            loaded = xgboost.XGBRegressor()
            loaded.load_model(tmp_path / name)
            np.testing.assert_array_equal(loaded.predict(x), model.predict(x))
    else:
        model.save(tmp_path / "model.txt")
        assert "machines" not in (tmp_path / "model.txt").read_text()
        np.testing.assert_array_equal(lightgbm.Booster(model_file=tmp_path / "model.txt").predict(x), model.predict(x))
    with pytest.raises(ValueError, match=r"writes .* files"):
        model.save(tmp_path / "model.pt")


@BOTH
def test_files_are_read_by_part_and_named_columns_are_kept(kind, tmp_path):
    x, y = table(400)
    header = "a,b,c,d,e,price"
    for i, part in enumerate(np.split(np.column_stack([x, y]), 4)):
        np.savetxt(tmp_path / f"{i}.csv", part, delimiter=",", header=header, comments="", fmt="%.17g")
    expected = plain(kind, x, y).predict(x)
    for model in run_threads(lambda world: kind(**SMALL).fit(str(tmp_path / "*.csv"), "price"), 2):
        with pytest.warns(UserWarning, match="fitted with feature names"):
            np.testing.assert_allclose(model.predict(x), expected, rtol=1e-5, atol=1e-4)
        assert model.feature_names_in_.tolist() == ["a", "b", "c", "d", "e"]
    (tmp_path / "1.csv").write_text(header + "\n1,2,inf,4,5,6\n")
    with pytest.raises(ValueError, match=r"infinity.* column 'c' .*1\.csv"):
        kind(**SMALL).fit(Files(str(tmp_path / "*.csv"), target="price"))


@BOTH
def test_it_is_a_scikit_learn_estimator(kind):
    known = dict.fromkeys(
        ["check_sample_weight_equivalence_on_dense_data", "check_sample_weight_equivalence_on_sparse_data"],
        "bins are made without weights",
    )
    if kind is XGBoost:
        check_estimator(kind(n_estimators=3), expected_failed_checks=known, on_skip=None)
        check_estimator(kind(task="classification", n_estimators=10), expected_failed_checks=known, on_skip=None)
    assert is_classifier(kind(task="classification"))
    assert is_regressor(kind())
    assert not hasattr(kind(), "predict_proba")
    model = clone(kind(max_depth=3, **SMALL)).set_params(max_depth=2, workers=None)
    assert model.get_params()["max_depth"] == 2
    x, y = table(200)
    searched = GridSearchCV(model, {"max_depth": [1, 4]}, cv=2).fit(x, y)
    assert searched.best_params_ == {"max_depth": 4}
    again = pickle.loads(pickle.dumps(searched.best_estimator_))
    np.testing.assert_array_equal(again.predict(x), searched.predict(x))
    assert again.feature_importances_.sum() == pytest.approx(1.0)


@BOTH
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_dept": 3}, "max_dept"),
        ({"max_depth": "deep"}, "refuses its settings"),
        ({"objective": "reg:nothing"}, "refuses its settings"),
        ({"task": "ranking"}, "got task='ranking'; expected one of"),
        ({"n_estimators": 0}, "got n_estimators=0; expected a whole number"),
        ({"timeout_s": 0}, "got timeout_s=0; expected seconds above 0"),
        ({"early_stopping_rounds": 3}, "needs rows to look at"),
        ({"objective": print}, "cannot be sent"),
    ],
)
def test_settings_that_are_wrong_are_named_before_anything_runs(kind, settings, message):
    x, y = table(60)
    with pytest.raises(ValueError, match=message):
        kind(**settings).fit(x, y)


@BOTH
def test_data_that_is_wrong_is_named(kind):
    x, y = table(60)
    bad = x.copy()
    bad[41, 3] = np.inf

    def refused(match, *args, **settings):
        def rank(world):
            with pytest.raises(ValueError, match=match):
                kind(**SMALL, **settings).fit(*args)

        run_threads(rank, 2)

    refused(r"infinity \(inf\) in column 3 \(row 41\)", bad, y)
    refused(r"Input y contains NaN.*\(row 7\)", x, np.where(np.arange(60) == 7, np.nan, y))
    refused("one class only", x, np.zeros(60), task="classification")
    refused("rank 0 of 2 has no rows, of 1 in all", x[:1], y[:1])
    with pytest.raises(ValueError, match="different tables"):
        run_threads(lambda world: kind(**SMALL).fit(x + world.rank, y), 2)
    with pytest.raises(ValueError, match=r"eval_set\[0\] has the label"):
        kind(task="classification").fit(x, y > 0, eval_set=[(x, np.full(60, 7))])


@pytest.mark.parametrize(("kind", "name"), [(XGBoost, "xgboost"), (LightGBM, "lightgbm")])
def test_a_library_that_is_not_installed_names_the_extra(kind, name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'unisono\[boost\]'"):
        kind().fit(*table(60))
