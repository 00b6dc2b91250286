"""Boosting by real workers: launched by `fit`, in a world of `unisono run`, and when one is killed or stopped."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path

import numpy as np
import pytest

xgboost = pytest.importorskip("xgboost", reason="pip install 'unisono[boost]'")
lightgbm = pytest.importorskip("lightgbm", reason="pip install 'unisono[boost]'")

import unisono as un  # noqa: E402
from preloaded import Program  # noqa: E402
from unisono.boost import Forest, LightGBM, XGBoost  # noqa: E402

SMALL = {"n_estimators": 10, "n_jobs": 1}


def table(rows=40_001):
    """More than a megabyte, so that workers map it; few distinct values."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 64, (rows, 5)).astype(float)
    return x, x @ [3.0, -2.0, 1.0, 0.5, 0.0] + rng.standard_normal(rows)


@pytest.mark.parametrize("kind", [XGBoost, LightGBM])
def test_launched_workers_make_the_librarys_own_model(kind, tmp_path):
    x, y = table()
    own = xgboost.XGBRegressor(**SMALL) if kind is XGBoost else lightgbm.LGBMRegressor(**SMALL, verbose=-1)
    expected = own.fit(x, y).predict(x)
    model = kind(workers=2, **SMALL).fit(x, y)
    np.testing.assert_allclose(model.predict(x), expected, rtol=1e-4, atol=1e-3)
    path = tmp_path / ("model.json" if kind is XGBoost else "model.txt")
    model.save(path)
    if kind is XGBoost:
        loaded = xgboost.Booster(model_file=path).predict(xgboost.DMatrix(x))
    else:
        loaded = lightgbm.Booster(model_file=path).predict(x)
    np.testing.assert_array_equal(loaded, model.predict(x))


def test_a_mistake_in_the_data_is_raised_where_fit_was_called():
    x, y = table(100)
    x[70, 2] = np.inf
    with pytest.raises(ValueError, match=r"infinity .* in column 2 \(row 70\)"):
        XGBoost(workers=2).fit(x, y)


def test_a_running_world_boosts_and_grows_a_forest(run_script):
    run = run_script(
        """
        import json, numpy as np, unisono as un
        from unisono.boost import Forest, LightGBM, XGBoost
        x = np.random.default_rng(0).integers(0, 9, (501, 3)).astype(float)
        y = x @ [1.0, 2.0, 3.0]
        small = {"n_estimators": 4, "n_jobs": 1}
        models = [XGBoost(**small), LightGBM(**small), Forest(**small)]
        told = [model.fit(x, y).predict(x[:20]).tolist() for model in models]
        open(f"{un.join().rank}.json", "w").write(json.dumps(told))
        """,
        "-n",
        "2",
    )
    status, _, err = run.finish()
    assert status == 0, err
    x = np.random.default_rng(0).integers(0, 9, (501, 3)).astype(float)
    y = x @ [1.0, 2.0, 3.0]
    small = {"n_estimators": 4, "n_jobs": 1}
    expected = [
        xgboost.XGBRegressor(**small).fit(x, y).predict(x[:20]),
        lightgbm.LGBMRegressor(**small, verbose=-1).fit(x, y).predict(x[:20]),
        Forest(**small).fit(x, y).predict(x[:20]),
    ]
    for text in run.written("0.json", "1.json"):
        np.testing.assert_allclose(json.loads(text), expected, rtol=1e-4, atol=1e-4)


def dies_in_the_middle(kind):
    """A worker's program: rank 1 is killed while all boost."""
    world = un.join("cpu")
    x, y = table(500)
    kind(n_estimators=2, n_jobs=1).fit(x, y)
    if world.rank == 1:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    kind(n_estimators=10**7, n_jobs=1).fit(x, y)


def test_a_worker_that_dies_is_one_report():
    with pytest.raises(un.WorkerError, match="worker 1 of 2 failed"):
        un.launch(dies_in_the_middle, workers=2, args=(XGBoost,), threads=1, timeout_s=60)


ALONE = """
import os, sys, unisono as un, numpy as np
from pathlib import Path
from unisono.boost import LightGBM, XGBoost
kind = {"xgboost": XGBoost, "lightgbm": LightGBM}[sys.argv[1]]
world = un.join("cpu")
x = np.random.default_rng(0).integers(0, 32, (500, 4)).astype(float)
kind(n_estimators=2, n_jobs=1).fit(x, x.sum(1))
(Path(sys.argv[2]) / f"ready-{world.rank}").write_text("ready\\n")
try:
    kind(n_estimators=10**7, n_jobs=1, timeout_s=3).fit(x, x.sum(1))
except RuntimeError as error:
    print("raised", type(error).__name__, error, flush=True)
"""


@pytest.mark.parametrize(
    ("library", "signum", "victim", "words"),
    [
        ("xgboost", signal.SIGKILL, 0, "has died"),  # with it the tracker, and the store in which they met
        ("lightgbm", signal.SIGKILL, 1, "has died"),
        ("xgboost", signal.SIGSTOP, 1, "heard nothing"),
    ],
)
def test_without_a_launcher_the_others_end_by_themselves_in_time(tmp_path, library, signum, victim, words):
    """Two processes that nobody watches: what ends the survivor is the watch beside the library."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    sources = str(Path(un.__file__).parents[1])
    program = tmp_path / "program.py"
    program.write_text(ALONE)
    workers: list[Program] = []
    for rank in range(2):
        env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": sources}
        workers.append(Program(program, library, tmp_path, env=env, stderr=None))
    try:
        deadline = time.monotonic() + 60
        while not all((tmp_path / f"ready-{rank}").exists() for rank in range(2)):
            assert time.monotonic() < deadline
            assert all(worker.poll() is None for worker in workers)
            time.sleep(0.05)
        time.sleep(0.5)  # into the rounds
        workers[victim].send_signal(signum)
        out, _ = workers[1 - victim].communicate(timeout=60)
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    assert "raised" in out
    assert words in out
