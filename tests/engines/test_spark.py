"""Real Spark with two executors: the same program as local, its data where it lies, losses, and MapReduce."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from boost_functions import NAMES, check_model, table
from engine_cases import EVERYTHING, NETWORKED, check_network, network_options, right_loss, specs
from engine_commands import Command, only, unisono_run
from engine_functions import (
    ROWS,
    descend,
    dies_once,
    fail_on_rank_1,
    gradient,
    kill_the_engines_process,
    pids,
    shares,
    two_tables,
)

import unisono as un
from unisono.tables.map_reduce import mapreduce

pyspark = pytest.importorskip("pyspark", reason="PySpark is not installed: pip install 'unisono[spark]'")
if shutil.which("java") is None:
    pytest.skip("Spark needs Java: apt-get install openjdk-17-jre-headless", allow_module_level=True)
pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]  # Spark's own warnings are not ours

HOUSING = Path(__file__).parents[3] / "shared" / "data" / "california_housing.csv"
CLUSTER = "local-cluster[2,1,1024]"
QUIET = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false", "spark.log.level": "OFF"}


@pytest.fixture(scope="module")
def session() -> Iterator[Any]:
    """Two executors with one slot each."""
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.master(CLUSTER).appName("tests")
    for name, value in QUIET.items():
        builder = builder.config(name, value)
    made = builder.getOrCreate()
    yield made
    made.stop()


@pytest.fixture(scope="module", autouse=True)
def _nothing_left_in_the_package() -> Iterator[None]:
    """`local-cluster` keeps the executors' logs beside PySpark itself."""
    work = Path(pyspark.__file__).parent / "work"
    before = set(work.glob("*"))
    yield
    for folder in set(work.glob("*")) - before:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def frame(session: Any) -> Any:
    """Two partitions of different sizes: y = 0, 4, 5, ..., with a vector beside."""
    rows = session.sparkContext.parallelize([(float(i), [float(i), 1.0]) for i in range(ROWS)], 2)
    return session.createDataFrame(rows, "y double, x array<double>").where("y > 3 or y = 0")


VALUES = [0.0, *map(float, range(4, ROWS))]


def test_the_same_program_has_the_same_loss_and_every_strategy_runs(command: Command) -> None:
    wanted = specs()
    options = ("--on", "spark", "--master", "local[2]", "-n", "2", "script.py", json.dumps(wanted))
    found = only(command(*unisono_run(*options), script=EVERYTHING))
    assert found["loss"] == pytest.approx(right_loss(), rel=1e-12)
    assert found["size"] == 2
    assert set(found["strategies"]) == set(wanted)
    assert all(0 < loss < 20 for loss in found["strategies"].values())


def test_interface_ports_and_encryption_are_the_users(command: Command) -> None:
    words = unisono_run("--on", "spark", "--master", "local[2]", "-n", "2", *network_options(), "script.py")
    ended = command(*words, script=NETWORKED, env={"UNISONO_SHARED_MEMORY": "0"})
    assert ended.status == 0, ended
    check_network(ended.json())


def test_an_error_arrives_as_one_report(session: Any) -> None:
    with pytest.raises(un.WorkerError, match=r"worker 1 of 2 failed: KeyError") as caught:
        un.launch(fail_on_rank_1, workers=2, on=un.on.spark(session))
    assert (caught.value.rank, caught.value.exit_status) == (1, 1)
    assert str(caught.value).count("Traceback") == 1


def test_a_lost_task_ends_in_one_report_and_is_repeated_where_asked(
    session: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(un.WorkerError, match=r"worker 1 of 2 failed: connection lost") as caught:
        un.launch(kill_the_engines_process, workers=2, args=(str(tmp_path / "one"),), on=un.on.spark(session))
    assert caught.value.rank == 1
    engine = un.on.spark(session, max_restarts=1)
    found = un.launch(kill_the_engines_process, workers=2, args=(str(tmp_path / "two"),), on=engine)
    assert [rank for rank, _ in found] == [0, 1]
    assert len({attempt for _, attempt in found}) == 1
    assert "all workers start again (restart 1 of 1)" in capfd.readouterr().err


def test_too_few_slots_are_named_at_once(session: Any) -> None:
    with pytest.raises(un.EngineError, match="too few slots for 3 workers: 2 tasks can run at once"):
        un.launch(fail_on_rank_1, workers=3, on=un.on.spark(session, wait_s=0.1))


def test_a_frame_is_read_where_it_lies(session: Any, frame: Any) -> None:
    found = un.launch(shares, workers=2, args=(frame,), on=un.on.spark(session))
    seen = [y for worker in found for values, weight in worker["batches"] if weight for y in values]
    assert sorted(seen) == VALUES  # each row once
    assert [worker["rows"] for worker in found] == [8, 11]  # where they were
    sizes = [sum(len(worker["batches"][i][0]) for worker in found) for i in range(5)]
    assert sizes == [4, 4, 4, 4, 3]
    # Unequal parts train as the whole table would.
    assert [worker["mean"] for worker in found] == pytest.approx([np.mean(VALUES)] * 2, rel=1e-12)


def test_partitions_that_fit_are_not_moved(session: Any) -> None:
    rdd = session.sparkContext.parallelize([(float(i),) for i in range(ROWS)], 2)
    wanted = [[value for (value,) in part] for part in rdd.glom().collect()]
    found = un.launch(two_tables, workers=2, args=(rdd, {"check": []}), on=un.on.spark(session))
    assert [[value for (value,) in train] for train, _ in found] == wanted


def test_a_frame_and_an_rdd_reach_the_workers_together(session: Any, frame: Any) -> None:
    rdd = session.sparkContext.parallelize([(f"text {i}", np.full(2, i)) for i in range(5)], 3)
    found = un.launch(two_tables, workers=2, args=(frame, {"check": rdd}), on=un.on.spark(session))
    assert sorted((row["y"], row["x"].tolist()) for train, _ in found for row in train) == [
        (y, [y, 1.0]) for y in VALUES
    ]
    assert sorted((text, array.tolist()) for _, others in found for text, array in others) == [
        (f"text {i}", [i, i]) for i in range(5)
    ]


def test_missing_values_are_named_by_column(session: Any) -> None:
    bad = session.createDataFrame([(1.0, 2.0), (None, 3.0)], "income double, age double")
    with pytest.raises(un.EngineError, match="column 'income' has 1 missing values"):
        un.launch(shares, workers=2, args=(bad,), on=un.on.spark(session))


def test_mapreduce_is_gradient_descent_on_blocks_that_stay(session: Any) -> None:
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(1000, 3)), np.array([1.0, -2.0, 3.0])
    engine = un.on.spark(session)
    found = mapreduce(
        gradient, "sum", (x, x @ w), state=np.zeros(3), update=lambda w, g: w - g / 1000, rounds=3, workers=2,
        on=engine,
    )  # fmt: skip
    assert found == pytest.approx(descend(x, x @ w, 3), rel=1e-12)
    where: list[Any] = []
    mapreduce(
        pids, lambda a, b: a + b, session.sparkContext.parallelize(range(10), 2), state=0,
        update=lambda state, seen: where.append(seen) or state + 1, rounds=8, on=engine,
    )  # fmt: skip
    assert where[-1] in where[:-1]  # where an executor has two processes, either may come
    assert len({pid for seen in where for pid, _ in seen}) >= 2


def test_mapreduce_makes_a_lost_block_again(session: Any, tmp_path: Path) -> None:
    flag = str(tmp_path / "flag")
    found = mapreduce(
        dies_once, "sum", list(range(10)), state=(flag, 0), update=lambda state, total: (flag, state[1] + total // 10),
        rounds=4, workers=2, on=un.on.spark(session),
    )  # fmt: skip
    assert found == (flag, 4)
    assert Path(flag).exists()


def test_least_squares_on_a_frame_finds_the_same_line(session: Any) -> None:
    estimators = pytest.importorskip("unisono.estimators", reason="the estimators need scikit-learn")
    pandas = pytest.importorskip("pandas")
    if not HOUSING.exists():
        pytest.skip(f"{HOUSING} is not there")
    names = HOUSING.read_text().partition("\n")[0].split(",")
    schema = ", ".join(f"{name} {'string' if name == 'ocean_proximity' else 'double'}" for name in names)
    table = session.read.csv(str(HOUSING), header=True, schema=schema).drop("ocean_proximity").na.drop()
    found = estimators.LeastSquares(on=un.on.spark(session), workers=2).fit(table, "median_house_value")
    rows = pandas.read_csv(HOUSING).drop(columns="ocean_proximity").dropna()
    y = rows.pop("median_house_value").to_numpy()
    x = np.column_stack([rows.to_numpy(dtype=np.float64), np.ones(len(y))])
    wanted = np.linalg.lstsq(x, y, rcond=None)[0]
    assert found.coef_ == pytest.approx(wanted[:-1], rel=1e-6)
    assert found.intercept_ == pytest.approx(wanted[-1], rel=1e-6)
    assert list(found.feature_names_in_) == list(rows.columns)


def test_a_frame_is_boosted_where_it_lies_to_the_librarys_own_model(session: Any) -> None:
    pytest.importorskip("xgboost", reason="XGBoost is not installed: pip install 'unisono[boost]'")
    x, y = table()
    rows = [(*row, target) for row, target in zip(x.tolist(), y.tolist(), strict=True)]
    frame = session.createDataFrame(session.sparkContext.parallelize(rows, 3), [*NAMES, "y"])
    check_model(un.on.spark(session), frame)


def test_an_address_where_nothing_listens_is_named(command: Command) -> None:
    ended = command(*unisono_run("--on", "spark", "--master", "spark://127.0.0.1:9", "-n", "2", "script.py"), script="")
    assert ended.status == 1
    assert ended.err.startswith(
        "unisono run: Spark is not reachable at spark://127.0.0.1:9: a connection to 127.0.0.1:9"
    )
