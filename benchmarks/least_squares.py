"""Least squares on 2 workers: time to 1e-6 relative error against scikit-learn and Spark MLlib, and what parts cost.

Keys:
  sklearn_over_ours    seconds of scikit-learn's LinearRegression over those of LeastSquares, both with the rows in
                       memory: ours in 2 workers of one thread that run already, theirs in one process with 2 threads.
  sklearn_over_launched_ours
                       the same, with ours from nothing: workers launched, rows handed over, and workers gone again.
  sklearn_cholesky_over_ours
                       against Ridge(solver="cholesky"), scikit-learn's own normal equations.
  speedup_2_workers    of a gradient round: one worker with all rows over two with half of them each.
  speedup_2_ceiling    the same two products in plain NumPy, without any exchange: what the machine itself allows two
                       processes (they share its memory, and maybe a core). The median of rounds in turn with ours.
  speedup_2_ceiling_in_cache
                       the same with rows that stay in the cache: what the cores allow, memory apart.
  gradient_round_s     a round of L-BFGS: broadcast, map, all-reduce.
  mllib_over_ours      Spark MLlib's LinearRegression on cached rows, local[2], over ours. Where PySpark is installed.
  spark_mapreduce_s    an iteration of our MapReduce on Spark, n = 1e6, d = 20. Where PySpark is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from measure import finish, interleaved

import unisono as un
from unisono.estimators import LeastSquares
from unisono.tables.estimators.row_blocks import BLOCK_BYTES
from unisono.tables.map_reduce import mapreduce
from unisono.tables.map_reduce.worker_data import open_shared, share_arrays, split

Rows = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]
TOLERANCE = 1e-6


def made(rows: int, columns: int) -> Rows:
    """Columns of different sizes about different means, and noise as large as the signal."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, columns))
    x *= 10.0 ** rng.uniform(-1, 1, columns)
    x += rng.uniform(-2, 2, columns)
    return x, x @ rng.standard_normal(columns) + 3.0 + rng.standard_normal(rows)


# In workers that run already ----------------------------------------------------------------------------------------


def in_workers(sent: Any, repeats: int) -> dict[str, Any]:
    """Seconds of fits by a standing world, and of a gradient round."""
    from unisono.tables.estimators.fit_report import measure_speedup
    from unisono.tables.estimators.linear_answers import compute_value_and_gradient
    from unisono.tables.estimators.row_blocks import ArrayTable, Rows

    world = un.join("cpu")
    x, y = split(open_shared(sent), world.rank, world.size)

    def fit(solver: str) -> LeastSquares:
        return LeastSquares(own_rows=True, speedup=False, solver=solver, tol=1e-8).fit(x, y)

    seconds = interleaved(
        {name: partial(fit, name) for name in ("normal", "lbfgs")}, repeats=repeats, warmup=1, before=world.barrier
    )
    model, descended = fit("normal"), fit("lbfgs")
    table = ArrayTable(Rows(x, y[:, None], None))

    def work(fraction: float) -> Any:
        import torch

        return torch.from_numpy(
            compute_value_and_gradient(table, "squares", np.zeros((x.shape[1], 1)), np.zeros(1), fraction)
        )

    speedups: dict[str, list[float]] = {"ours": [], "ceiling": [], "in_cache": []}
    for _ in range(2 * repeats + 1):
        speedups["ours"].append(measure_speedup(work, world, budget_s=1e9)[2])
        speedups["ceiling"].append(ceiling(partial(products, x, y), world))
        speedups["in_cache"].append(ceiling(partial(products, x, y, same=True), world))
    report = descended.report_
    return {
        "normal_s": seconds["normal"],
        "lbfgs_s": seconds["lbfgs"],
        "coef": model.coef_,
        "lbfgs_coef": descended.coef_,
        "round_s": report.wall_s / report.rounds,
        **{f"speedup_{name}": statistics.median(found) for name, found in speedups.items()},
        "report": str(report),
    }


def products(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any], *, same: bool = False) -> None:
    """The two products of a gradient, block by block (the `same` block again and again) and nothing else."""
    w = np.zeros(x.shape[1])
    rows = BLOCK_BYTES // (8 * x.shape[1])
    if same:
        rows //= 2  # well inside a core's own cache
    for start in range(0, len(x), rows):
        at = slice(0, rows) if same else slice(start, start + rows)
        (x[at] @ w - y[at]) @ x[at]


def ceiling(work: Any, world: Any, repeats: int = 3) -> float:
    """Seconds of a worker that does the work twice, alone, over those of two that do it once each at the same time.

    The best of a few, as in `measure_speedup`.
    """

    def slowest_s(times: int) -> float:
        world.barrier()
        start = time.perf_counter()
        for _ in range(times):
            work()
        return float(max(world.gather_objects(time.perf_counter() - start)))

    seconds = [(slowest_s(2 if world.rank == 0 else 0), slowest_s(1)) for _ in range(repeats)]
    alone, both = zip(*seconds, strict=True)
    return min(alone) / min(both)


# Spark ----------------------------------------------------------------------------------------------------------------


def has_spark() -> bool:
    """PySpark, Java, and our launcher for them."""
    return bool(importlib.util.find_spec("pyspark") and shutil.which("java") and hasattr(un.on, "spark"))


@contextlib.contextmanager
def spark_session() -> Iterator[Any]:
    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.master("local[2]").config("spark.driver.memory", "8g")
    builder = builder.config("spark.ui.enabled", "false").config("spark.ui.showConsoleProgress", "false")
    session = builder.config("spark.log.level", "ERROR").getOrCreate()
    try:
        yield session
    finally:
        session.stop()


def mllib_s(session: Any, rows: Rows, repeats: int) -> tuple[float, np.ndarray[Any, Any]]:
    """Seconds of MLlib's own fit, on rows that Spark has cached, and its coefficients."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from pyspark.ml.functions import array_to_vector
    from pyspark.ml.regression import LinearRegression

    x, y = rows
    with tempfile.TemporaryDirectory() as folder:
        for i, part in enumerate(np.array_split(np.arange(len(x)), 8)):
            vectors = pa.FixedSizeListArray.from_arrays(pa.array(x[part].ravel()), x.shape[1])
            table = pa.table({"x": vectors.cast(pa.list_(pa.float64())), "label": y[part]})
            pq.write_table(table, f"{folder}/{i}.parquet")
        frame = session.read.parquet(folder)
        frame = frame.select(array_to_vector("x").alias("features"), "label").repartition(2).cache()
        frame.count()
        times = []
        for _ in range(repeats + 1):
            start = time.perf_counter()
            model = LinearRegression(solver="normal").fit(frame)
            times.append(time.perf_counter() - start)
        frame.unpersist()
    return statistics.median(times[1:]), np.asarray(model.coefficients.toArray())


def gradient(part: Rows, w: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """What a worker maps in the textbook's gradient descent."""
    x, y = part
    return np.asarray((x @ w - y) @ x)


def spark_iteration_s(session: Any, rounds: int) -> float:
    """Seconds between two updates of the server."""
    x, y = made(1_000_000, 20)
    moments = []

    def update(w: np.ndarray[Any, Any], g: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        moments.append(time.perf_counter())
        return w - 1e-9 * g

    on = un.on.spark(session=session)
    mapreduce(gradient, "sum", (x, y), state=np.zeros(20), update=update, rounds=rounds, workers=2, on=on)
    if not moments:  # the server ran in a worker
        return float("nan")
    return statistics.median(np.diff(moments)[3:].tolist())


# All ------------------------------------------------------------------------------------------------------------------


def error_of(coef: Any, exact: Any) -> float:
    return float(np.linalg.norm(coef - exact) / np.linalg.norm(exact))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--columns", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    from sklearn.linear_model import LinearRegression, Ridge

    x, y = rows = made(asked.rows, asked.columns)
    fitted: dict[str, Any] = {}

    def keep(name: str, model: Any) -> None:
        fitted[name] = model.fit(x, y)

    with share_arrays(rows) as sent:
        [inside, _] = un.launch(in_workers, workers=2, args=(sent, asked.repeats), threads=1)
    seconds = interleaved(
        {
            "sklearn": lambda: keep("sklearn", LinearRegression()),
            "cholesky": lambda: keep("cholesky", Ridge(alpha=1e-6, solver="cholesky")),
            "launched": lambda: keep("launched", LeastSquares(workers=2, speedup=False)),
        },
        repeats=asked.repeats,
        warmup=1,
    )
    exact = fitted["sklearn"].coef_  # a singular value decomposition of the rows
    errors = {"normal": inside["coef"], "lbfgs": inside["lbfgs_coef"], "launched": fitted["launched"].coef_}
    print("relative errors:", {name: f"{error_of(coef, exact):.1e}" for name, coef in errors.items()})
    assert all(error_of(coef, exact) <= TOLERANCE for coef in errors.values())
    print(f"scikit-learn {seconds['sklearn']:.3f} s, its Cholesky {seconds['cholesky']:.3f} s; ours launched")
    print(
        f"{seconds['launched']:.3f} s, in running workers {inside['normal_s']:.3f} s, L-BFGS {inside['lbfgs_s']:.3f} s"
    )
    print(inside["report"])
    results = {
        "sklearn_over_ours": seconds["sklearn"] / inside["normal_s"],
        "sklearn_over_launched_ours": seconds["sklearn"] / seconds["launched"],
        "sklearn_cholesky_over_ours": seconds["cholesky"] / inside["normal_s"],
        "sklearn_over_lbfgs": seconds["sklearn"] / inside["lbfgs_s"],
        "speedup_2_workers": inside["speedup_ours"],
        "speedup_2_ceiling": inside["speedup_ceiling"],
        "speedup_2_ceiling_in_cache": inside["speedup_in_cache"],
        "gradient_round_s": inside["round_s"],
    }
    if has_spark():
        with spark_session() as session:
            theirs_s, coef = mllib_s(session, rows, asked.repeats)
            print(f"Spark MLlib {theirs_s:.3f} s, relative error {error_of(coef, exact):.1e}")
            results["mllib_over_ours"] = theirs_s / inside["normal_s"]
            results["spark_mapreduce_s"] = spark_iteration_s(session, 20)
    else:
        print("Spark is not installed here (pip install 'unisono[spark]', and Java): its keys are left out")
    finish(results)


if __name__ == "__main__":
    main()
