"""Learning from rows as they come: AdaGrad (Duchi, Hazan and Singer, 2011), in columns scaled by the rows so far."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from unisono.tables.estimators.linear_fit import FitSettings, MeanLoss, Scaling, make_survey
from unisono.tables.estimators.row_blocks import make_table
from unisono.tables.map_reduce import Ask
from unisono.tables.map_reduce.rounds import run_in_world
from unisono.world import World

__all__ = ["OnlineModel"]

Array = npt.NDArray[np.float64]
LEARNING_RATE = 0.5


@dataclass(frozen=True)
class OnlineModel:
    """A model in training: coef (columns × outputs), intercept, squared gradients, and the columns' running scales."""

    coef: Array
    intercept: Array
    squared: Array
    weight: float
    mean: Array
    variance: Array

    @classmethod
    def start(cls, columns: int, classes: int, coef: Array | None, intercept: Array | None) -> OnlineModel:
        """From nothing, or from a fitted model."""
        outputs = 1 if classes == 2 else classes
        start = np.zeros((columns, outputs)) if coef is None else coef.T.copy()
        bias = np.zeros(outputs) if intercept is None else np.array(intercept)
        return cls(start, bias, np.zeros((columns + 1) * outputs), 0.0, np.zeros(columns), np.zeros(columns))

    def improve(self, settings: FitSettings, part: Any, world: World) -> OnlineModel:
        """The model after one pass over every rank's `part`."""
        table = make_table(part)
        known, _ = run_in_world(make_survey(replace(settings, learning_rate=1.0)), table, world)
        scaling = Scaling(*known["scaling"])
        scaled = self._include_scales(scaling)
        most = max(world.gather_objects(table.rows))
        steps = -(-most // settings.extra["batch_size"])
        survey = make_survey(settings)
        program = replace(survey, drive=lambda ask: scaled._run_pass(settings, ask, scaling, known["loss"], steps))
        (coef, intercept, squared), _ = run_in_world(program, table, world)
        return replace(scaled, coef=coef, intercept=intercept, squared=squared)

    def _include_scales(self, new: Scaling) -> OnlineModel:
        """This model with scales that include the new rows."""
        weight = self.weight + new.weight
        away = new.mean - self.mean
        between = away * away * (self.weight * new.weight / weight)
        variance = (self.variance * self.weight + new.deviation**2 * new.weight + between) / weight
        return replace(self, weight=weight, mean=self.mean + away * (new.weight / weight), variance=variance)

    def _run_pass(
        self, settings: FitSettings, ask: Ask, rows: Scaling, loss: str, steps: int
    ) -> tuple[Array, Array, Array]:
        """Take a step for every batch, in scaled columns: one step length then suits all of them."""
        scaling = replace(rows, mean=self.mean * settings.intercept, deviation=np.sqrt(self.variance))
        bias = self.intercept + scaling.mean @ self.coef
        theta = np.concatenate([(self.coef * scaling.deviation[:, None]).ravel(), bias if settings.intercept else []])
        squared = self.squared[: len(theta)].copy()
        rate = settings.learning_rate or LEARNING_RATE
        for step in range(steps):
            smooth = MeanLoss(ask, scaling, loss, settings.l2, None, batch=(step, steps))
            _, gradient = smooth(theta)
            squared += gradient * gradient
            theta = theta - rate * gradient / np.sqrt(np.maximum(squared, 1e-300))
            if settings.l1:
                shrink = np.zeros(len(theta))
                lengths = np.repeat(settings.l1 / scaling.deviation, scaling.outputs)
                shrink[: len(lengths)] = rate * lengths / np.sqrt(np.maximum(squared[: len(lengths)], 1e-300))
                theta = np.sign(theta) * np.maximum(np.abs(theta) - shrink, 0.0)
        coef, intercept = scaling.unscale(theta)
        out = np.zeros(len(self.squared))
        out[: len(squared)] = squared
        return coef, intercept, out
