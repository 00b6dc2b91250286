"""A fit inside a world: every rank with its own rows, the same result on every rank; by rounds, or by gradient descent
through `un.parallel` under any strategy of ours. No scikit-learn in here."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unisono.methods.spec import build
from unisono.methods.strategies.qadam import qadam
from unisono.methods.strategy import parallel
from unisono.tables.estimators.fit_report import count_sent, measure_link, measure_speedup, sum_costs
from unisono.tables.estimators.linear_answers import compute_value_and_gradient
from unisono.tables.estimators.linear_fit import FitResult, FitSettings, Scaling, make_program, make_survey
from unisono.tables.estimators.row_blocks import Table, is_sparse, make_table
from unisono.tables.map_reduce.map_reduce import Round, run_in_world
from unisono.tables.map_reduce.worker_data import split
from unisono.world import World

CHECK_EPOCHS = 10  # between two looks at the loss of all rows


class _LinearModule(nn.Module):
    """The linear model, with parameters for columns of mean 0 and deviation 1; its input is in the columns as given."""

    def __init__(self, scaling: Scaling) -> None:
        super().__init__()
        self.coef = nn.Parameter(torch.zeros(len(scaling.mean), scaling.outputs, dtype=torch.float64))
        self.bias = nn.Parameter(torch.zeros(scaling.outputs, dtype=torch.float64)) if scaling.intercept else None
        self.mean, self.deviation = torch.from_numpy(scaling.mean), torch.from_numpy(scaling.deviation)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Scores, and the coefficients for the penalty: a strategy may hold parameters only during forward."""
        coef, intercept = self.unscale()
        return x @ coef + intercept, coef

    def unscale(self) -> tuple[Tensor, Tensor]:
        """Coefficients and intercept for the columns as given."""
        coef = self.coef / self.deviation[:, None]
        bias = self.bias if self.bias is not None else torch.zeros(coef.shape[1], dtype=coef.dtype)
        return coef, bias - self.mean @ coef


def fit_by_strategy(settings: FitSettings, table: Table, world: World) -> tuple[FitResult, list[Round]]:
    """Train for some epochs over every rank's own rows, a batch a step; each rank takes the same number of steps."""
    found, rounds = run_in_world(make_survey(settings), table, world)
    scaling, labels = Scaling(*found["scaling"]), found["labels"]
    model = _LinearModule(scaling)
    step = settings.learning_rate or 1.0 / found["steepest"]
    optimizer: torch.optim.Optimizer
    if isinstance(build(settings.extra["strategy"]), qadam):  # which is a form of Adam
        optimizer = torch.optim.Adam(model.parameters(), lr=settings.learning_rate or 0.05)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=step, momentum=settings.extra.get("momentum", 0.0))
    replica = parallel(model, optimizer, settings.extra["strategy"], world=world)
    rows = int(world.all_reduce(torch.tensor([table.rows]), "max", tag="fit").wait())
    steps = -(-rows // (settings.extra.get("batch_size") or max(rows, 1)))
    share = world.size * steps / scaling.weight  # a rank's sum over a batch, as its part of the mean over all
    lookup = np.array(labels) if labels else None
    before, converged, epoch = np.inf, False, 0
    for epoch in range(1, settings.max_iter + 1):
        start = time.perf_counter()
        total = 0.0
        for x, y, weight in _make_batches(table, steps, lookup):
            optimizer.zero_grad()
            scores, coef = model(x)
            loss = share * (_compute_loss(found["loss"], scores, y) * weight).sum()
            penalised = loss + 0.5 * settings.l2 * (coef**2).sum() + settings.l1 * coef.abs().sum()
            penalised.backward()
            optimizer.step()
            total += float(loss.detach()) / steps
        rounds.append(Round(time.perf_counter() - start))
        if epoch % CHECK_EPOCHS == 0:
            now = float(world.all_reduce(torch.tensor([total], dtype=torch.float64), "mean", tag="loss").wait())
            if abs(before - now) <= settings.tol * max(abs(now), 1e-300):
                converged = True
                break
            before = now
    final = _LinearModule(scaling)
    final.load_state_dict(replica.consolidate().state_dict())  # all values, also if the ranks hold parts of it
    replica.close()
    whole = world.broadcast_object([t.detach().numpy() for t in final.unscale()])
    return {
        "coef": whole[0],
        "intercept": whole[1],
        "iterations": epoch,
        "converged": converged,
        "labels": labels,
        "names": found["names"],
        "rows": scaling.count,
        "solver": f"gradient, {settings.extra['strategy']}",
    }, rounds


def _make_batches(table: Table, steps: int, labels: Any) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The table's rows in `steps` batches of about equal size; some may be empty."""
    borders = [table.rows * (i + 1) // steps for i in range(steps)]
    held: list[tuple[Any, ...]] = []
    done = 0
    for x, y, weight, _ in table.read_blocks():
        dense = x.toarray() if is_sparse(x) else x
        codes = y if labels is None else np.searchsorted(labels, y).astype(np.float64)
        rows = np.ones(len(y)) if weight is None else weight
        at = 0
        while at < len(y):
            take = min(len(y) - at, borders[0] - done)
            held.append((dense[at : at + take], codes[at : at + take], rows[at : at + take]))
            at, done = at + take, done + take
            while borders and done == borders[0]:
                yield _concatenate(held, table)
                held, borders = [], borders[1:]
    for _ in borders:
        yield _concatenate([], table)


def _concatenate(held: list[tuple[Any, ...]], table: Table) -> tuple[Tensor, Tensor, Tensor]:
    empty = (np.zeros((0, table.columns)), np.zeros((0, table.targets)), np.zeros(0))
    columns = list(zip(*(held or [empty]), strict=True))
    x, y, weight = (np.concatenate(c) if len(c) > 1 else np.array(c[0]) for c in columns)
    return torch.from_numpy(x), torch.from_numpy(y), torch.from_numpy(weight)


def _compute_loss(loss: str, scores: Tensor, y: Tensor) -> Tensor:
    """The loss of each row."""
    if loss == "squares":
        return 0.5 * ((scores - y) ** 2).sum(dim=1)
    if loss == "binary":
        return nn.functional.binary_cross_entropy_with_logits(scores[:, 0], y[:, 0], reduction="none")
    return nn.functional.cross_entropy(scores, y[:, 0].long(), reduction="none")


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

        def compute(fraction: float) -> torch.Tensor:
            """The compute of one gradient round: with the squared loss, on every rank alike."""
            coef, intercept = np.zeros((table.columns, table.targets)), np.zeros(table.targets)
            return torch.from_numpy(compute_value_and_gradient(table, "squares", coef, intercept, fraction))

        report.speedup = measure_speedup(compute, world)
    return found | {"report": report}


def fit_launched(asked: tuple[FitSettings, bool], source: Any, world: World) -> FitResult:
    """`fit_in_world` on a worker that was launched for the fit, which takes its part of the rows."""
    settings, speedup = asked
    return fit_in_world(settings, split(source, world.rank, world.size), world, speedup=speedup)
