"""Boosting on 2 workers of one thread against one process with 2 threads of the same library: data to model.

All sides run in turn in the same two standing workers, rows in memory: for the library alone, worker 0 has 2 threads
and worker 1 sleeps; its own ranks are the two workers with plain calls of the library, as its manual has them, and
nothing of ours. Continuous features, 256 bins, binary classification, 100 rounds (trees of the forest): the default.

Keys:
  xgboost_one_process_over_ours     seconds of XGBoost alone over those of un.boost.XGBoost
  lightgbm_one_process_over_ours    the same of LightGBM
  xgboost_own_ranks_over_ours, lightgbm_own_ranks_over_ours
                                    seconds of the library's own 2 ranks over ours: what its network leaves to win
  xgboost_forest_one_process_over_ours
                                    un.boost.Forest in one process with 2 threads over the same in 2 workers
  xgboost_forest_bins_s             of its seconds, those in which a worker cuts all rows into bins: XGBoost gives no
                                    way to take them over from another process, so that all workers do the same here
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
from unisono.tables.boost.supervision import reserve_port
from unisono.tables.map_reduce.worker_data import open_shared, share_arrays, split

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


def ranked(kind: Any, rows: Rows, rounds: int, world: Any) -> None:
    """The library by itself, as 2 ranks of one thread."""
    x, y = rows
    if kind is XGBoost:
        import xgboost

        tracker = xgboost.tracker.RabitTracker(2, "127.0.0.1", sortby="task") if world.rank == 0 else None
        if tracker is not None:
            tracker.start()
        address = world.broadcast_object({} if tracker is None else tracker.worker_args())
        quiet = xgboost.config_context(verbosity=0)
        with quiet, xgboost.collective.CommunicatorContext(**address, dmlc_task_id=str(world.rank)):
            matrix = xgboost.QuantileDMatrix(x, y, nthread=1)
            xgboost.train({"objective": "binary:logistic", "nthread": 1}, matrix, rounds)
        if tracker is not None:
            tracker.wait_for(60)
        return
    import lightgbm

    with reserve_port() as (port, held):
        machines = world.gather_objects(f"127.0.0.1:{port}")
        held.close()
        params = {"objective": "binary", "num_threads": 1, "verbosity": -1, "tree_learner": "data", "num_machines": 2}
        params |= {"machines": ",".join(machines), "local_listen_port": port}
        lightgbm.train(params, lightgbm.Dataset(x, y, params=params), rounds).free_network()


def area(scores: Any, y: Any) -> float:
    """Under the ROC curve."""
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(y, scores))


def in_workers(sent: Any, rounds: int, repeats: int, kinds: list[str]) -> dict[str, float]:
    """Every ratio, measured in a standing world of two."""
    world = un.join("cpu")
    whole: Rows = open_shared(sent)
    held = len(whole[0]) // 10
    train, test = (whole[0][held:], whole[1][held:]), (whole[0][:held], whole[1][:held])
    results: dict[str, float] = {}
    for kind in (XGBoost, LightGBM):
        if kind.__name__.lower() in kinds:
            results |= boosted(kind, world, train, test, rounds, repeats)
    if "forest" in kinds:
        results |= forests(world, train, rounds, repeats)
    return results


def by_first(world: Any, run: Callable[[], Any]) -> Callable[[], Any]:
    """A side that worker 0 runs while worker 1 sleeps."""

    def side() -> Any:
        found = run() if world.rank == 0 else None
        world.barrier()
        return found

    return side


def boosted(kind: Any, world: Any, train: Rows, test: Rows, rounds: int, repeats: int) -> dict[str, float]:
    """The ratios of one library."""
    name = kind.__name__.lower()
    x, y = split(train, world.rank, world.size)
    kept: dict[str, Any] = {}
    times: dict[str, list[tuple[float, float]]] = {"alone": [], "a worker of ours": []}

    def timed(side: str, run: Callable[[], Any]) -> Any:
        wall, cpu = time.perf_counter(), time.process_time()
        found = run()
        taken = time.perf_counter() - wall
        times[side].append((taken, (time.process_time() - cpu) / taken))
        return found

    def ours() -> None:
        model = kind(task="classification", n_estimators=rounds, own_rows=True, n_jobs=1)
        kept["ours"] = timed("a worker of ours", lambda: model.fit(x, y))

    def library() -> None:
        kept["alone"] = timed("alone", lambda: alone(kind, train, rounds))

    sides = {"ours": ours, "alone": by_first(world, library), "ranks": lambda: ranked(kind, (x, y), rounds, world)}
    seconds = interleaved(sides, repeats=repeats, warmup=1, before=world.barrier)
    results = {f"{name}_one_process_over_ours": seconds["alone"] / seconds["ours"]}
    results[f"{name}_own_ranks_over_ours"] = seconds["ranks"] / seconds["ours"]
    results[f"{name}_s"] = seconds["ours"]
    if world.rank == 0:
        theirs = area(kept["alone"].predict(_rows(kind, test[0])), test[1])
        results[f"{name}_quality"] = area(kept["ours"].predict_proba(test[0])[:, 1], test[1]) - theirs
        results[f"{name}_busy_cores"] = statistics.median(cores for _, cores in times["alone"][1:])
        for side, told in times.items():
            print(f"{name}, {side}: " + ", ".join(f"{taken:.2f} s on {cores:.2f} cores" for taken, cores in told))
    return results


def forests(world: Any, train: Rows, trees: int, repeats: int) -> dict[str, float]:
    """A forest: by 2 workers, and in one process with 2 threads."""
    from dataclasses import replace

    import xgboost

    from unisono.tables.boost.boosting_worker import fit_in_world
    from unisono.tables.estimators.row_blocks import Rows as Table
    from unisono.world import World

    model = Forest(task="classification", n_estimators=trees)
    table = Table(train[0], train[1].reshape(-1, 1), None)

    def grown(threads: int, where: Any) -> Any:
        settings = model.set_params(n_jobs=threads).read_settings()
        return fit_in_world(replace(settings, classes=2), table, where)

    def bins() -> None:
        xgboost.QuantileDMatrix(*train, nthread=1)

    sides = {"ours": lambda: grown(1, world), "alone": by_first(world, lambda: grown(2, World())), "bins": bins}
    seconds = interleaved(sides, repeats=repeats, warmup=1, before=world.barrier)
    ratio = {"xgboost_forest_one_process_over_ours": seconds["alone"] / seconds["ours"]}
    return {**ratio, "xgboost_forest_s": seconds["ours"], "xgboost_forest_bins_s": seconds["bins"]}


def _rows(kind: Any, x: Any) -> Any:
    if kind is not XGBoost:
        return x
    import xgboost

    return xgboost.DMatrix(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--columns", type=int, default=28)
    parser.add_argument("--rounds", type=int, default=100)
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
    with share_arrays(made(asked.rows, asked.columns)) as sent:
        arguments = (sent, asked.rounds, asked.repeats, asked.kinds.split(","))
        [results, _] = un.launch(in_workers, workers=2, args=arguments, threads=2)
    for name, value in results.items():
        print(f"{name}: {value:.3f}")
    finish(results)


if __name__ == "__main__":
    main()
