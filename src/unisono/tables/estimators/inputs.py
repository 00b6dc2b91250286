"""What `fit` and `predict` are given: arrays of this process, files, or a table that lies in an engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from unisono.tables.estimators.addresses import list_files, read_size
from unisono.tables.estimators.files import FilePlan, Files
from unisono.tables.estimators.formats import ENDINGS, FilePiece
from unisono.tables.estimators.row_blocks import Rows
from unisono.tables.estimators.workers import Workers
from unisono.world import World, join

__all__ = ["check_same_rows", "find_rows_elsewhere", "make_rows", "names_files"]


def find_rows_elsewhere(X: Any, y: Any, sample_weight: Any, workers: Workers) -> Any:
    """Rows that are not arrays of this process: files, or a table in an engine. None if X is an array."""
    if type(X).__module__.split(".")[0] not in ("pyspark", "ray"):
        return _plan_files(X, y, sample_weight, workers)
    if workers.on is None or not isinstance(y, str) or sample_weight is not None:
        raise ValueError(
            f"got a {type(X).__module__}.{type(X).__name__}: give on= (the engine where it lies) and as y the name "
            "of its column to learn, fit(table, 'price')"
        )
    return X


def names_files(X: Any) -> bool:
    """Whether it names files: `Files`, an address, or a list of addresses."""
    if isinstance(X, Files | str | Path):
        return True
    return isinstance(X, Sequence) and len(X) > 0 and all(isinstance(item, str | Path) for item in X)


def make_rows(estimator: Any, X: Any, y: Any, weight: Any) -> Rows:
    """Checked arrays as rows, with the names of the columns if scikit-learn found any."""
    names = getattr(estimator, "feature_names_in_", None)
    return Rows(X, y[:, None] if y.ndim == 1 else y, weight, None if names is None else [str(n) for n in names])


def check_same_rows(rows: Rows, world: World) -> None:
    """Refuse ranks that were given different tables, judged by the shape and by some rows."""
    if world.size == 1:
        return
    count = rows.x.shape[0]
    with np.errstate(all="ignore"):
        probes = [float(np.nan_to_num(rows.x[i].sum() + rows.y[i].sum())) for i in {0, count // 2, count - 1}]
    seen = world.gather_objects([list(rows.x.shape), sorted(probes)])
    if any(other != seen[0] for other in seen):
        raise ValueError(
            f"the ranks were given different tables (shapes {[tuple(shape) for shape, _ in seen]}): each rank gives "
            "the whole table and takes its part of the rows; where each has rows of its own, say own_rows=True"
        )


def _plan_files(X: Any, y: Any, sample_weight: Any, workers: Workers) -> FilePlan | None:
    """Files that hold the rows, or None if X is an array."""
    if not names_files(X):
        return None
    if sample_weight is not None:
        raise ValueError("got sample_weight with files: name a column of theirs, Files(..., weight='name')")
    files = X if isinstance(X, Files) else Files(X, target=y)
    if isinstance(X, Files) and y is not None:
        raise ValueError("got y with Files: name the target there, Files(paths, target='name')")
    if files.target is None:
        raise ValueError(f"got files and no target: fit({str(X)!r}, 'name of a column'), or Files(..., target=...)")
    return files.plan() if workers.are_launched else _plan_alike(files, join())


def _plan_alike(files: Files, world: World) -> FilePlan:
    """The plan that rank 0 makes, which reads CSV files once; if the ranks see different files, all of them refuse."""
    if world.size == 1:
        return files.plan()
    mine: dict[str, Any] = {"problem": "", "files": [], "plan": {}}
    try:
        mine["files"] = [[file, read_size(file)] for file in list_files(files.paths, ENDINGS)]
        if world.rank == 0:
            plan = files.plan()
            mine["plan"] = {**vars(plan), "pieces": [list(piece) for piece in plan.pieces]}
    except (ValueError, OSError) as error:
        mine["problem"] = str(error)
    seen = world.gather_objects(mine)
    problem = next((f"rank {rank}: {each['problem']}" for rank, each in enumerate(seen) if each["problem"]), "")
    if not problem and any(each["files"] != seen[0]["files"] for each in seen):
        problem = f"the ranks see different files at {files.paths}"
    if problem:
        raise ValueError(problem)
    made = seen[0]["plan"]
    return FilePlan(**{**made, "pieces": [FilePiece(*piece) for piece in made["pieces"]]})
