"""A fit inside a world: every rank with its own rows, the same model on every rank. No scikit-learn in here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from unisono.boost.rows import Shard, agreed, shard_of
from unisono.boost.task import Boosted, Evals, Task, library_of
from unisono.data.tables import TablePart
from unisono.map_reduce.worker_data import open_shared, split
from unisono.world import World, join

__all__ = ["fit_in_world", "work"]

Found = dict[str, Any]


def fit_in_world(task: Task, part: Any, world: World, evals: Evals = ()) -> Found:
    """Fit with every rank's own `part` of the rows."""
    library = library_of(task.library)
    shard, labels = agreed(shard_of(part, task.target), world, labels=task.classification, classes=task.classes)
    if labels is not None:
        task = replace(task, classes=len(labels))
    found = _members(task, shard, world) if task.members else library.train(task, shard, world, evals)
    columns, names = int(shard.x.shape[1]), None if shard.names is None else list(shard.names)
    rows = shard.rows if task.members and not task.shards else sum(world.gather_objects(shard.rows))
    return {
        "model": found.model,
        "evals": found.evals,
        "classes": labels,
        "columns": columns,
        "names": names,
        "rows": rows,
    }


def _members(task: Task, shard: Shard, world: World) -> Boosted:
    """Member k is grown by rank k mod the size of the world, from counts that depend on k alone (and its rows)."""
    library = library_of(task.library)
    grow = library.member_trainer(task, shard, _mean(task, shard, world))
    grown = []
    for number in range(world.rank, task.members, world.size):
        draws = np.random.default_rng([task.seed, number])
        grown.append(grow(number, _bootstrap(draws, shard.rows)))
    every = world.gather_objects([torch.frombuffer(bytearray(model), dtype=torch.uint8) for model in grown])
    models = [every[number % world.size][number // world.size].numpy().tobytes() for number in range(task.members)]
    return Boosted(library.merged(models), {})


def _bootstrap(draws: np.random.Generator, rows: int) -> Any:
    """How often each row is drawn, of as many draws as there are rows."""
    return np.bincount(draws.integers(0, rows, rows), minlength=rows).astype(np.float64)


def _mean(task: Task, shard: Shard, world: World) -> float:
    weight = np.ones(shard.rows) if shard.weight is None else shard.weight
    sums = [float(shard.y @ weight), float(weight.sum())]
    every = [sums] if not task.shards else world.gather_objects(sums)
    return sum(each[0] for each in every) / max(sum(each[1] for each in every), 1e-300)


def work(settings: tuple[Task, Any], data: Any) -> tuple[str, Any]:
    """What a launched worker runs. A mistake in the data comes back as text, to be raised where `fit` was called."""
    task, evals = settings
    world = join("cpu")
    try:
        data = open_shared(data)
        apart = task.members and not task.shards and not isinstance(data, TablePart)
        part = split(data, 0, 1) if apart else split(data, world.rank, world.size)
        found = fit_in_world(task, part, world, open_shared(evals))
    except ValueError as error:
        return "refused", str(error)
    return "fitted", found if world.rank == 0 else None
