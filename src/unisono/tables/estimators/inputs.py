"""What `fit` and `predict` are given (arrays of this process, files, or a table that lies in an engine), and who fits.

Alone, a fit runs in this process. In a running world (`unisono run -n 4 script.py`) every rank calls `fit` and takes
its own rows; with `workers=` or `on=`, `fit` launches workers, hands them their rows, and returns when they are done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unisono.tables.estimators.files import FilePlan, Files
from unisono.tables.estimators.formats import ENDINGS, FilePiece, list_files, read_size
from unisono.tables.estimators.row_blocks import Rows
from unisono.tables.map_reduce.map_reduce import launch_workers
from unisono.tables.map_reduce.worker_data import open_shared, split
from unisono.world import World, join

Fit = Callable[[Any, Any, World], Any]


@dataclass(frozen=True)
class Workers:
    """The settings `workers`, `on` and `own_rows` of an estimator."""

    count: int | None
    on: Any
    own_rows: bool

    @property
    def are_launched(self) -> bool:
        """Whether `fit` starts them; otherwise they are the ranks of the running world."""
        return self.count is not None or self.on is not None

    def take_part(self, source: Any, world: World) -> Any:
        """This rank's part of the rows in a running world."""
        return source if self.own_rows else split(source, world.rank, world.size)

    def run(self, fit: Fit, settings: Any, source: Any) -> Any:
        """Launch workers, of which each calls `fit(settings, source, world)`, and return what the first one fitted.

        A ValueError of `fit`, which is about the data, is raised here. A worker that had another part to play, such as
        a parameter server, has no result.
        """
        results = launch_workers(_work, (fit, settings), source, workers=self.count, on=self.on)
        problem, fitted = next(result for result in results if result is not None)
        if problem is not None:
            raise ValueError(problem)
        return fitted


def _work(asked: tuple[Fit, Any], source: Any) -> tuple[str | None, Any]:
    """What a launched worker runs: what is wrong with the data, and what was fitted."""
    fit, settings = asked
    try:
        return None, fit(settings, open_shared(source), join("cpu"))
    except ValueError as error:
        return str(error), None


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
            "the whole table and takes its part of the rows; if each has rows of its own, pass own_rows=True"
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
