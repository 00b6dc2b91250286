"""The bins of LightGBM's features, found by several ranks, against those of one process."""

from __future__ import annotations

import json

import numpy as np
import pytest
import scipy.sparse

lightgbm = pytest.importorskip("lightgbm", reason="pip install 'unisono[boost]'")

from unisono.boost import LightGBM  # noqa: E402
from unisono.tables.boost.boosting_worker import RankRows  # noqa: E402
from unisono.tables.boost.lgbm import sample_columns  # noqa: E402
from unisono.world.virtual import run_threads  # noqa: E402

SMALL = {"n_estimators": 10, "n_jobs": 1}


def table(rows=701):
    """Continuous and missing values, zeros, categories; sorted, so that no rank's rows are like the others'."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, 4))
    x[:, 3] = rng.integers(0, 6, rows)
    x[rng.random(rows) < 0.2, 1] = np.nan
    x[rng.random(rows) < 0.5, 2] = 0.0
    x = x[np.argsort(x[:, 0])]
    return x, np.sin(2 * x[:, 0]) + np.nan_to_num(x[:, 1]) + x[:, 2] + (x[:, 3] % 2) * 3


@pytest.mark.parametrize("size", [2, 3, 5])  # 5: one rank finds no feature's bins
def test_categories_and_missing_values_are_cut_as_in_one_process(size):
    x, y = table()
    more = {**SMALL, "categorical_feature": [3]}
    own = lightgbm.train(
        {"num_threads": 1, "verbosity": -1}, lightgbm.Dataset(x, y, categorical_feature=[3]), SMALL["n_estimators"]
    )
    assert "num_cat=1" in own.model_to_string()
    for model in run_threads(lambda world: LightGBM(**more).fit(x, y), size):
        np.testing.assert_allclose(model.predict(x), own.predict(x), rtol=1e-6, atol=1e-9)


def test_forced_bins_are_those_of_their_feature(tmp_path):
    x, y = table()
    path = tmp_path / "bins.json"
    path.write_text(json.dumps([{"feature": 2, "bin_upper_bound": [-0.25, 0.25]}]))
    more = {"forcedbins_filename": str(path), "max_bin": 6}
    own = lightgbm.LGBMRegressor(**SMALL, **more, verbose=-1).fit(x, y)
    without = lightgbm.LGBMRegressor(**SMALL, max_bin=6, verbose=-1).fit(x, y)
    assert not np.allclose(own.predict(x), without.predict(x))
    for model in run_threads(lambda world: LightGBM(**SMALL, **more).fit(x, y), 2):
        np.testing.assert_allclose(model.predict(x), own.predict(x), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("form", [np.asarray, scipy.sparse.csr_matrix])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_a_sample_of_all_rows_is_every_rows_values_in_order(form, dtype):
    x, y = table(50)
    x = x.astype(dtype)

    def rank(world):
        mine = slice(0, 20) if world.rank == 0 else slice(20, 50)
        return sample_columns(RankRows(form(x[mine]), y[mine], None, None, str), 200, world)

    for columns, sample, total in run_threads(rank, 2):
        assert (sample, total) == (50, 50)
        for number, (values, rows) in enumerate(columns):
            kept = np.flatnonzero(x[:, number] != 0)
            assert rows.tolist() == kept.tolist()
            np.testing.assert_array_equal(values, x[kept, number])


def test_a_sample_of_some_rows_has_each_ranks_share():
    x, y = np.arange(1.0, 1001).reshape(-1, 1), np.zeros(1000)

    def rank(world):
        mine = slice(0, 250) if world.rank == 0 else slice(250, 1000)
        return sample_columns(RankRows(x[mine], y[mine], None, None, str), 100, world)

    for [(values, rows)], sample, total in run_threads(rank, 2):
        assert (sample, total, rows.tolist()) == (100, 1000, list(range(100)))
        assert (np.sort(values) == values).all()
        assert [(values <= 250).sum(), len(set(values.tolist()))] == [25, 100]
