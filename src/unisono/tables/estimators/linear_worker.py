"""A fit inside a world: every rank with its own rows, the same result on every rank. No scikit-learn in here."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from unisono.tables.estimators import losses
from unisono.tables.estimators.fit_report import count_sent, measure_link, measure_speedup, sum_costs
from unisono.tables.estimators.linear_fit import FitResult, FitSettings, make_program
from unisono.tables.estimators.row_blocks import Table, make_table
from unisono.tables.estimators.strategy_descent import fit_by_strategy
from unisono.tables.map_reduce.rounds import run_in_world
from unisono.tables.map_reduce.worker_data import split
from unisono.world import World

__all__ = ["fit_in_world", "fit_launched"]


def fit_in_world(settings: FitSettings, part: Any, world: World, *, speedup: bool) -> FitResult:
    """Fit with every rank's own `part`; adds what it cost as "report"."""
    before = world.ledger.sent()
    table = make_table(part, settings.target)
    if settings.extra.get("strategy"):
        found, rounds = fit_by_strategy(settings, table, world)
    else:
        found, rounds = run_in_world(replace(make_program(settings), prepare=None), table, world)
    report = sum_costs(rounds, world.size)
    report.solver = found["solver"]
    if world.size > 1:
        report.words_sent, report.messages = count_sent(world, before)
        report.latency_s, report.bandwidth_words_per_s = measure_link(world)
    if speedup:
        report.speedup = measure_speedup(functools.partial(_compute_round, table), world)
    return found | {"report": report}


def _compute_round(table: Table, fraction: float) -> torch.Tensor:
    """The compute of one gradient round: with the squared loss, on every rank alike."""
    coef, intercept = np.zeros((table.columns, table.targets)), np.zeros(table.targets)
    return torch.from_numpy(losses.compute_value_and_gradient(table, "squares", coef, intercept, fraction))


def fit_launched(asked: tuple[FitSettings, bool], source: Any, world: World) -> FitResult:
    """`fit_in_world` on a worker that was launched for the fit, which takes its part of the rows."""
    settings, speedup = asked
    return fit_in_world(settings, split(source, world.rank, world.size), world, speedup=speedup)
