"""A fit inside a world: every rank with its own rows, the same model on every rank. No scikit-learn in here.

Rows are gathered in memory, checked, and labels are numbered alike on every rank. A missing value (NaN) in a feature is
not an error: both libraries learn which way to send it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from unisono.tables.boost.library import BoostSettings, EvalSets, TrainedModel, find_library
from unisono.tables.estimators.row_blocks import Rows, Table, format_column, is_sparse, make_table
from unisono.tables.map_reduce.worker_data import open_shared, split
from unisono.world import World

Array = npt.NDArray[Any]
MOST_CLASSES = 10_000


@dataclass
class RankRows:
    """x: rows × columns, dense or CSR; y: rows."""

    x: Any
    y: Array
    weight: Array | None
    names: Sequence[str] | None
    where: Callable[[int], str]  # names the place of a row, for errors

    @property
    def rows(self) -> int:
        return int(self.x.shape[0])


def collect_rows(part: Any, target: str | None) -> RankRows:
    """The rows of a part of arrays, of files, or of an engine's table."""
    if isinstance(part, Rows):
        return RankRows(part.x, part.y[:, 0], part.weight, part.names, lambda row: f"row {part.first + row}")
    return _collect_blocks(make_table(part, target))


def _collect_blocks(table: Table) -> RankRows:
    xs, ys, weights, places, ends = [], [], [], [], [0]
    for block in table.read_blocks():
        xs.append(np.array(block.x))
        ys.append(np.array(block.y[:, 0]))
        if block.weight is not None:
            weights.append(np.array(block.weight))
        places.append(block.where)
        ends.append(ends[-1] + len(ys[-1]))

    def where(row: int) -> str:
        block = int(np.searchsorted(ends, row, side="right")) - 1
        return places[block](row - ends[block])

    x = np.concatenate(xs) if xs else np.empty((0, table.columns))
    y = np.concatenate(ys) if ys else np.empty(0)
    return RankRows(x, y, np.concatenate(weights) if weights else None, table.names, where)


def find_bad_value(rows: RankRows) -> str:
    """The first value that neither library can learn from, named by column and place; empty if there is none."""
    values = rows.x.data if is_sparse(rows.x) else rows.x
    if values.dtype.kind == "f" and np.isinf(values).any():
        row, column = np.argwhere(np.isinf(rows.x.toarray() if is_sparse(rows.x) else rows.x))[0].tolist()
        return f"Input X contains infinity (inf) in {format_column(rows.names, column)} ({rows.where(row)})"
    for name, line in (("Input y", rows.y), ("sample_weight", rows.weight)):
        if line is not None and line.dtype.kind == "f" and not np.isfinite(line).all():
            row = int(np.flatnonzero(~np.isfinite(line))[0])
            called = "NaN (a missing value)" if np.isnan(line[row]) else "infinity (inf)"
            return f"{name} contains {called} ({rows.where(row)})"
    if rows.weight is not None and (rows.weight < 0).any():
        row = int(np.flatnonzero(rows.weight < 0)[0])
        return f"sample_weight is negative: {rows.weight[row]} ({rows.where(row)})"
    return ""


def agree_on_rows(rows: RankRows, world: World, *, labels: bool, classes: int | None = None) -> list[float] | None:
    """Check that every rank has rows to learn from, and number labels alike on all ranks.

    labels: whether y holds labels. classes: how many classes y is numbered by already; None: y holds labels as they are
    in files, which are replaced by their numbers.

    Returns the sorted labels of all ranks, or None if there were none to number. If one rank has data that cannot be
    learned from, every rank raises ValueError.
    """
    mine: dict[str, Any] = {"problem": find_bad_value(rows), "shape": list(rows.x.shape)}
    mine["weighted"] = rows.weight is not None
    if labels and classes is None and not mine["problem"]:
        mine["labels"] = np.unique(rows.y).tolist()
    every = world.gather_objects(mine)
    problem = next((each["problem"] for each in every if each["problem"]), "") or _find_disagreement(every)
    if problem:
        raise ValueError(problem)
    if not labels or classes is not None:
        return None
    found = sorted({label for each in every for label in each["labels"]})
    if len(found) < 2:
        raise ValueError(f"the target has one class only ({found[0]:g}): expected 2 or more")
    if len(found) > MOST_CLASSES:
        raise ValueError(
            f'the target has {len(found)} different values: is it a class? task="regression" is for numbers'
        )
    rows.y = np.searchsorted(np.array(found), rows.y).astype(np.float64)
    return found


def _find_disagreement(every: Sequence[dict[str, Any]]) -> str:
    shapes = [tuple(each["shape"]) for each in every]
    if len({columns for _, columns in shapes}) > 1:
        return f"the ranks have different numbers of columns: {[columns for _, columns in shapes]}"
    empty = [rank for rank, (rows, _) in enumerate(shapes) if not rows]
    if empty:
        total = sum(rows for rows, _ in shapes)
        return f"rank {empty[0]} of {len(shapes)} has no rows, of {total} in all: use fewer workers, or more files"
    if len({each["weighted"] for each in every}) > 1:
        return "some ranks have weights and others have none: give sample_weight on every rank, or on none"
    return ""


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
