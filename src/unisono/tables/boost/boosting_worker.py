"""A fit inside a world: every rank with its own rows, the same model on every rank. No scikit-learn in here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from unisono.tables.boost.library import BoostSettings, EvalSets, TrainedModel, find_library
from unisono.tables.boost.rank_rows import RankRows, agree_on_rows, collect_rows
from unisono.tables.map_reduce.worker_data import open_shared, split
from unisono.world import World

__all__ = ["FitResult", "fit_in_world", "fit_launched"]

FitResult = dict[str, Any]


def fit_in_world(settings: BoostSettings, part: Any, world: World, evals: EvalSets = ()) -> FitResult:
    """Fit with every rank's own `part` of the rows."""
    library = find_library(settings.library)
    data = collect_rows(part, settings.target)
    labels = agree_on_rows(data, world, labels=settings.classification, classes=settings.classes)
    if labels is not None:
        settings = replace(settings, classes=len(labels))
    found = _grow_members(settings, data, world) if settings.members else library.train(settings, data, world, evals)
    return {
        "model": found.model,
        "evals": found.evals,
        "classes": labels,
        "columns": int(data.x.shape[1]),
        "names": None if data.names is None else list(data.names),
        "rows": data.rows if settings.sees_all_rows else sum(world.gather_objects(data.rows)),
    }


def _grow_members(settings: BoostSettings, data: RankRows, world: World) -> TrainedModel:
    """Grow models apart, and merge them: rank k mod N grows model k, on a bootstrap that k and its rows decide."""
    library = find_library(settings.library)
    grow = library.make_member_trainer(settings, data, _compute_mean(settings, data, world))
    grown = []
    for number in range(world.rank, settings.members, world.size):
        drawn = np.random.default_rng([settings.seed, number]).integers(0, data.rows, data.rows)
        counts = np.bincount(drawn, minlength=data.rows).astype(np.float64)  # how often each row is drawn
        grown.append(grow(number, counts))
    every = world.gather_objects([torch.frombuffer(bytearray(model), dtype=torch.uint8) for model in grown])
    models = [every[number % world.size][number // world.size].numpy().tobytes() for number in range(settings.members)]
    return TrainedModel(library.merge_models(models), {})


def _compute_mean(settings: BoostSettings, data: RankRows, world: World) -> float:
    weight = np.ones(data.rows) if data.weight is None else data.weight
    sums = [float(data.y @ weight), float(weight.sum())]
    every = [sums] if not settings.shards else world.gather_objects(sums)
    return sum(each[0] for each in every) / max(sum(each[1] for each in every), 1e-300)


def fit_launched(asked: tuple[BoostSettings, Any], source: Any, world: World) -> FitResult | None:
    """`fit_in_world` on a worker that was launched for the fit; rank 0 alone returns the model, which all have."""
    settings, evals = asked
    part = split(source, 0, 1) if settings.sees_all_rows else split(source, world.rank, world.size)
    found = fit_in_world(settings, part, world, open_shared(evals))
    return found if world.rank == 0 else None
