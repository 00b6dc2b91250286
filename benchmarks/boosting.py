"""Boosting on 2 workers of one thread against one process with 2 threads of the same library: data to model.

Both sides run in turn in the same two standing workers, rows in memory: for the library alone, worker 0 has 2 threads
and worker 1 sleeps. Continuous features, 256 bins, binary classification.

Keys:
  xgboost_one_process_over_ours     seconds of XGBoost alone over those of un.boost.XGBoost
  lightgbm_one_process_over_ours    the same of LightGBM
  xgboost_forest_one_process_over_ours
                                    un.boost.Forest in one process with 2 threads over the same in 2 workers
  xgboost_quality, lightgbm_quality area under the curve of ours less that of the library alone, on rows held out
  xgboost_busy_cores, lightgbm_busy_cores
                                    CPU seconds of the library alone over its wall seconds, of 2 at most. Two threads
                                    that must share cores with other programs wait for each other at every step:
                                    where this is much below 2 on an idle machine, the ratio above says nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from measure import finish, interleaved

import unisono as un
from unisono.boost import Forest, LightGBM, XGBoost
from unisono.map_reduce.parcel import handed_over, opened, split

Rows = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


def made(rows: int, columns: int) -> Rows:
    """Classes by a rule that greedy trees find (of a plain product they do only by luck), and noise."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, columns))
    score = np.maximum(x[:, 0], x[:, 1]) + np.sin(2 * x[:, 2]) + 0.5 * x[:, 3] - (x[:, 4] > 0.5) * x[:, 5]
    return x, (score + rng.standard_normal(rows) > 0.5).astype(float)


def alone(kind: Any, rows: Rows, rounds: int) -> Any:
    """The library by itself, with 2 threads."""
    x, y = rows
    if kind is XGBoost:
        import xgboost

        matrix = xgboost.QuantileDMatrix(x, y, nthread=2)
        return xgboost.train({"objective": "binary:logistic", "nthread": 2}, matrix, rounds)
    import lightgbm

    params = {"objective": "binary", "num_threads": 2, "verbosity": -1}
    return lightgbm.train(params, lightgbm.Dataset(x, y, params=params), rounds)


def area(scores: Any, y: Any) -> float:
    """Under the ROC curve."""
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(y, scores))


def in_workers(sent: Any, rounds: int, repeats: int, kinds: list[str]) -> dict[str, float]:
    """Every ratio, measured in a standing world of two."""
    world = un.join("cpu")
    whole: Rows = opened(sent)
    held = len(whole[0]) // 10
    train, test = (whole[0][held:], whole[1][held:]), (whole[0][:held], whole[1][:held])
    x, y = split(train, world.rank, world.size)
    results: dict[str, float] = {}

    def first_alone(run: Callable[[], Any]) -> Callable[[], Any]:
        def side() -> Any:
            found = run() if world.rank == 0 else None
            world.barrier()
            return found

        return side

    for kind in (XGBoost, LightGBM):
        name = kind.__name__.lower()
        if name not in kinds:
            continue
        kept: dict[str, Any] = {}

        def ours(kind: Any = kind, kept: dict[str, Any] = kept) -> None:
            model = kind(task="classification", n_estimators=rounds, own_rows=True, n_jobs=1)
            wall, cpu = time.perf_counter(), time.process_time()
            kept["ours"] = model.fit(x, y)
            taken = time.perf_counter() - wall
            kept.setdefault("ours_times", []).append((taken, (time.process_time() - cpu) / taken))

        def library(kind: Any = kind, kept: dict[str, Any] = kept) -> None:
            wall, cpu = time.perf_counter(), time.process_time()
            kept["alone"] = alone(kind, train, rounds)
            taken = time.perf_counter() - wall
            kept.setdefault("times", []).append((taken, (time.process_time() - cpu) / taken))

        sides = {"ours": ours, "alone": first_alone(library)}
        seconds = interleaved(sides, repeats=repeats, warmup=1, before=world.barrier)
        results[f"{name}_one_process_over_ours"] = seconds["alone"] / seconds["ours"]
        results[f"{name}_s"] = seconds["ours"]
        if world.rank == 0:
            theirs = kept["alone"].predict(_rows(kind, test[0]))
            gain = area(kept["ours"].predict_proba(test[0])[:, 1], test[1]) - area(theirs, test[1])
            results[f"{name}_quality"] = gain
            results[f"{name}_busy_cores"] = statistics.median(cores for _, cores in kept["times"][1:])
            for side, key in (("alone", "times"), ("a worker of ours", "ours_times")):
                told = ", ".join(f"{taken:.2f} s on {cores:.2f} cores" for taken, cores in kept[key])
                print(f"{name}, {side}: {told}")
    if "forest" in kinds:
        results |= forests(world, train, first_alone, repeats)
    return results


def forests(world: Any, train: Rows, first_alone: Callable[..., Any], repeats: int) -> dict[str, float]:
    """A forest of 16 trees: by 2 workers, and in one process with 2 threads."""
    from dataclasses import replace

    from unisono.boost.working import fit_in_world
    from unisono.estimators.table import Rows as Table
    from unisono.world import World

    model = Forest(task="classification", n_estimators=16)
    table = Table(train[0], train[1].reshape(-1, 1), None)

    def grown(threads: int, where: Any) -> Any:
        task = model.set_params(n_jobs=threads)._settings()
        return fit_in_world(replace(task, classes=2), table, where)

    sides = {"ours": lambda: grown(1, world), "alone": first_alone(lambda: grown(2, World()))}
    seconds = interleaved(sides, repeats=repeats, warmup=1, before=world.barrier)
    return {"xgboost_forest_one_process_over_ours": seconds["alone"] / seconds["ours"]}


def _rows(kind: Any, x: Any) -> Any:
    if kind is not XGBoost:
        return x
    import xgboost

    return xgboost.DMatrix(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--columns", type=int, default=28)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kinds", default="xgboost,lightgbm,forest")
    asked = parser.parse_args()
    missing = [name for name in ("xgboost", "lightgbm") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"{' and '.join(missing)} not installed here (pip install 'unisono[boost]'): nothing is measured")
        finish({})
        return
    # threads=2: XGBoost takes no more threads than OpenMP's limit in the environment, whatever nthread says, and the
    # library alone must have its 2. Ours has n_jobs=1.
    with handed_over(made(asked.rows, asked.columns)) as sent:
        arguments = (sent, asked.rounds, asked.repeats, asked.kinds.split(","))
        [results, _] = un.launch(in_workers, workers=2, args=arguments, threads=2)
    for name, value in results.items():
        print(f"{name}: {value:.3f}")
    finish(results)


if __name__ == "__main__":
    main()
