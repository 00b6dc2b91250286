"""Learning from rows as they come: AdaGrad (Duchi, Hazan and Singer, 2011) in columns scaled by what was seen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from unisono.estimators.fitting import Scaling, Smooth, Task, answer, merged, surveyed
from unisono.estimators.table import as_table
from unisono.map_reduce import Ask, MapReduce
from unisono.map_reduce.rounds import run_in_world
from unisono.world import World

__all__ = ["Online"]

Array = npt.NDArray[np.float64]
LEARNING_RATE = 0.5


@dataclass(frozen=True)
class Online:
    """A model so far: coef (columns × outputs), intercept, squared gradients, and the columns' running scales."""

    coef: Array
    intercept: Array
    squared: Array
    weight: float
    mean: Array
    variance: Array

    @classmethod
    def begun(cls, columns: int, classes: int, coef: Array | None, intercept: Array | None) -> Online:
        """From nothing, or from a fitted model."""
        outputs = 1 if classes == 2 else classes
        start = np.zeros((columns, outputs)) if coef is None else coef.T.copy()
        bias = np.zeros(outputs) if intercept is None else np.array(intercept)
        return cls(start, bias, np.zeros((columns + 1) * outputs), 0.0, np.zeros(columns), np.zeros(columns))

    def improved(self, task: Task, part: Any, world: World) -> Online:
        """After one pass over every rank's `part`."""
        table = as_table(part)
        known, _ = run_in_world(MapReduce(*surveyed(replace(task, learning_rate=1.0))), table, world)
        scaling = Scaling(*known["scaling"])
        grown = self._grown(scaling)
        most = max(world.gather_objects(table.rows))
        steps = -(-most // task.extra["batch_size"])
        job = MapReduce(answer, merged, lambda ask: grown._pass(task, ask, scaling, known["loss"], steps))
        (coef, intercept, squared), _ = run_in_world(job, table, world)
        return replace(grown, coef=coef, intercept=intercept, squared=squared)

    def _grown(self, new: Scaling) -> Online:
        """With the scales of the new rows taken in."""
        weight = self.weight + new.weight
        away = new.mean - self.mean
        between = away * away * (self.weight * new.weight / weight)
        variance = (self.variance * self.weight + new.deviation**2 * new.weight + between) / weight
        return replace(self, weight=weight, mean=self.mean + away * (new.weight / weight), variance=variance)

    def _pass(self, task: Task, ask: Ask, rows: Scaling, loss: str, steps: int) -> tuple[Array, Array, Array]:
        """A step for every batch; in scaled columns, as a step has one length for all."""
        scaling = replace(rows, mean=self.mean * task.intercept, deviation=np.sqrt(self.variance))
        bias = self.intercept + scaling.mean @ self.coef
        theta = np.concatenate([(self.coef * scaling.deviation[:, None]).ravel(), bias if task.intercept else []])
        squared = self.squared[: len(theta)].copy()
        rate = task.learning_rate or LEARNING_RATE
        for step in range(steps):
            smooth = Smooth(ask, scaling, loss, task.l2, None, batch=(step, steps))
            _, gradient = smooth(theta)
            squared += gradient * gradient
            theta = theta - rate * gradient / np.sqrt(np.maximum(squared, 1e-300))
            if task.l1:
                shrink = np.zeros(len(theta))
                lengths = np.repeat(task.l1 / scaling.deviation, scaling.outputs)
                shrink[: len(lengths)] = rate * lengths / np.sqrt(np.maximum(squared[: len(lengths)], 1e-300))
                theta = np.sign(theta) * np.maximum(np.abs(theta) - shrink, 0.0)
        coef, intercept = scaling.model(theta)
        out = np.zeros(len(self.squared))
        out[: len(squared)] = squared
        return coef, intercept, out
