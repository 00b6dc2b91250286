"""Estimators and MapReduce on real workers: launched by `fit`, and in a world that `unisono run` has started."""

from __future__ import annotations

import json

import numpy as np
import pytest

from unisono.estimators import LeastSquares, LogisticRegression
from unisono.tables.map_reduce import mapreduce


def table(rows=60_000, columns=8):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, columns)) + 3.0
    return x, x @ np.arange(columns) + 5.0 + rng.standard_normal(rows)


def test_launched_workers_share_mapped_rows_and_report_what_it_cost():
    x, y = table()
    expected = np.linalg.lstsq(np.column_stack([x, np.ones(len(x))]), y, rcond=None)[0]
    model = LeastSquares(workers=2).fit(x, y)
    np.testing.assert_allclose([*model.coef_, model.intercept_], expected, rtol=1e-6)
    report = model.report_
    assert (report.workers, report.rounds) == (2, 2)
    assert report.words_sent > 9 * 9
    assert set(report.speedup) == {1, 2}


def test_rounds_of_mapreduce_on_launched_workers():
    x, y = table(2000, 3)

    def gradient(part, w):
        x, y = part
        return (x - 3.0).T @ ((x - 3.0) @ w - y)

    found = mapreduce(
        gradient, "sum", (x, y), state=np.zeros(3), update=lambda w, g: w - g / 2000, rounds=60, workers=2
    )
    np.testing.assert_allclose(found, np.linalg.lstsq(x - 3.0, y, rcond=None)[0], rtol=1e-6)


def test_a_mistake_in_the_data_is_raised_where_fit_was_called(tmp_path):
    x, y = table(100, 3)
    x[70, 2] = np.nan
    with pytest.raises(ValueError, match=r"NaN .* in column 2 \(row 70\)"):
        LeastSquares(workers=2).fit(x, y)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_a_strategy_on_launched_workers():
    x, y = table(400, 3)
    labels = np.where(y > np.median(y), "high", "low")
    model = LogisticRegression(strategy="local_sgd(every=2)", workers=2, max_iter=40, tol=1e-3, speedup=False)
    best = LogisticRegression().fit(x, labels).score(x, labels)
    assert model.fit(x, labels).score(x, labels) > best - 0.02 > 0.8
    assert model.report_.words_sent > 0


def test_in_a_running_world_every_rank_calls_fit_on_the_whole_table(run_script):
    run = run_script(
        """
        import json, numpy as np, unisono as un
        from unisono.estimators import LeastSquares
        x = np.random.default_rng(0).standard_normal((501, 4))
        y = x @ [1.0, 2.0, 3.0, 4.0] + 5.0
        model = LeastSquares(solver="lbfgs").fit(x, y)
        try:
            LeastSquares(workers=2).fit(x, y)
        except ValueError as error:
            refused = str(error)
        world = un.join()
        told = {"coef": model.coef_.tolist(), "rows": model.n_rows_, "refused": refused}
        open(f"{world.rank}.json", "w").write(json.dumps(told))
        """,
        "-n",
        "2",
    )
    status, _, err = run.finish()
    assert status == 0, err
    for text in run.written("0.json", "1.json"):
        told = json.loads(text)
        np.testing.assert_allclose(told["coef"], [1.0, 2.0, 3.0, 4.0], rtol=1e-6)
        assert told["rows"] == 501
        assert "already runs on 2 workers" in told["refused"]
