"""Boosting on real Ray and Spark: tables where they lie, arrays that are sent, and a worker that is killed."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from boost_functions import killed_while_boosting, table

import unisono as un

xgboost = pytest.importorskip("xgboost", reason="XGBoost is not installed: pip install 'unisono[boost]'")
lightgbm = pytest.importorskip("lightgbm", reason="LightGBM is not installed: pip install 'unisono[boost]'")
from unisono.boost import LightGBM, XGBoost  # noqa: E402

pytestmark = [pytest.mark.timeout(200), pytest.mark.filterwarnings("ignore")]  # the engines' own warnings are not ours
SMALL = {"n_estimators": 8, "n_jobs": 1}
NAMES = ["a", "b", "c", "d"]


@pytest.fixture(scope="module")
def on_ray() -> Iterator[Any]:
    """A Ray on this host, and a Dataset of it in three blocks."""
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'unisono[ray]'")
    data = pytest.importorskip("ray.data", reason="Ray's data is not installed: pip install 'unisono[ray]'")
    ray.init(address="local", num_cpus=3, include_dashboard=False, logging_level="error", log_to_driver=False)
    data.DataContext.get_current().enable_progress_bars = False
    x, y = table()
    rows = [{**dict(zip(NAMES, row, strict=True)), "y": target} for row, target in zip(x.tolist(), y, strict=True)]
    yield un.on.ray(), data.from_items(rows, override_num_blocks=3)
    ray.shutdown()


@pytest.fixture(scope="module")
def on_spark() -> Iterator[Any]:
    """Two slots on this host, and a DataFrame in three partitions."""
    pytest.importorskip("pyspark", reason="PySpark is not installed: pip install 'unisono[spark]'")
    if shutil.which("java") is None:
        pytest.skip("Spark needs Java: apt-get install openjdk-17-jre-headless")
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.master("local[2]").appName("boosting")
    for name, value in (("ui.enabled", "false"), ("ui.showConsoleProgress", "false"), ("log.level", "OFF")):
        builder = builder.config(f"spark.{name}", value)
    session = builder.getOrCreate()
    x, y = table()
    rows = [(*row, target) for row, target in zip(x.tolist(), y.tolist(), strict=True)]
    frame = session.createDataFrame(session.sparkContext.parallelize(rows, 3), [*NAMES, "y"])
    yield un.on.spark(session), frame
    session.stop()


@pytest.mark.parametrize("engine", ["on_ray", "on_spark"])
def test_a_table_is_boosted_where_it_lies_to_the_librarys_own_model(engine: str, request: Any) -> None:
    on, rows = request.getfixturevalue(engine)
    x, y = table()
    model = XGBoost(workers=2, on=on, **SMALL).fit(rows, "y")
    expected = xgboost.XGBRegressor(**SMALL).fit(x, y).predict(x)
    np.testing.assert_allclose(model.predict(x), expected, rtol=1e-4, atol=1e-3)
    assert (model.n_rows_, list(model.feature_names_in_)) == (len(y), NAMES)


def test_arrays_are_sent_to_the_workers_and_classes_come_back(on_ray: Any) -> None:
    on, _ = on_ray
    x, y = table()
    labels = np.where(y > np.median(y), "high", "low")
    settings = {**SMALL, "min_child_samples": 1, "min_child_weight": 3.0}  # a leaf's rows are estimated otherwise
    model = LightGBM(task="classification", workers=2, on=on, **settings).fit(x, labels)
    own = lightgbm.LGBMClassifier(**settings, verbose=-1).fit(x, labels)
    np.testing.assert_allclose(model.predict_proba(x), own.predict_proba(x), rtol=1e-5, atol=1e-6)
    assert model.classes_.tolist() == ["high", "low"]


def test_a_worker_that_is_killed_while_boosting_is_one_report(on_ray: Any) -> None:
    on, _ = on_ray
    with pytest.raises(un.WorkerError, match="worker 1 of 2 failed") as caught:
        un.launch(killed_while_boosting, workers=2, on=on)
    assert caught.value.rank == 1


def test_a_table_without_the_name_of_its_target_is_refused(on_ray: Any) -> None:
    on, rows = on_ray
    with pytest.raises(ValueError, match=r"give on= .* and as y the name of its column to learn"):
        XGBoost(workers=2, on=on).fit(rows)
