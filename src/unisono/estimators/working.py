"""A fit inside a world: every rank with its own rows, the same result on every rank. No scikit-learn in here."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from unisono.estimators import descent, losses
from unisono.estimators.fitting import Fitted, Task, answer, fit, merged
from unisono.estimators.report import costs, measured_link, measured_speedup, sent_since
from unisono.estimators.table import Table, as_table
from unisono.map_reduce import MapReduce
from unisono.map_reduce.rounds import run_in_world
from unisono.map_reduce.worker_data import open_shared, split
from unisono.world import World, join

__all__ = ["fit_in_world", "job_of", "work"]


def job_of(task: Task) -> MapReduce:
    """The fit as a MapReduce program, for an engine that has its own."""
    return MapReduce(answer, merged, functools.partial(fit, task), functools.partial(as_table, target=task.target))


def fit_in_world(task: Task, part: Any, world: World, *, speedup: bool) -> Fitted:
    """Fit with every rank's own `part`; adds what it cost as "report"."""
    since = world.ledger.clock()
    table = as_table(part, task.target)
    if task.extra.get("strategy"):
        found, rounds = descent.fit(task, table, world)
    else:
        job = job_of(task)
        found, rounds = run_in_world(MapReduce(job.map, job.reduce, job.drive), table, world)
    report = costs(rounds, world.size)
    report.solver = found["solver"]
    if world.size > 1:
        report.words_sent, report.messages = sent_since(world, since)
        report.latency_s, report.bandwidth_words_per_s = measured_link(world)
    if speedup:
        report.speedup = measured_speedup(functools.partial(_round, found, table), world)
    return found | {"report": report}


def _round(found: Fitted, table: Table, fraction: float) -> torch.Tensor:
    """The compute of one gradient round: with the squared loss, on every rank alike."""
    coef = np.zeros((table.columns, table.targets))
    return torch.from_numpy(losses.value_and_gradient(table, "squares", coef, np.zeros(table.targets), fraction))


def work(settings: tuple[Task, bool], data: Any) -> tuple[str, Any]:
    """What a launched worker runs. A mistake in the data comes back as text, to be raised where `fit` was called."""
    task, speedup = settings
    world = join("cpu")
    try:
        return "fitted", fit_in_world(task, split(open_shared(data), world.rank, world.size), world, speedup=speedup)
    except ValueError as error:
        return "refused", str(error)
