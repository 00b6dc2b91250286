"""Which workers do a fit: those of the world that this process is in, or ones that are launched for it.

Alone, a fit runs in this process. In a running world (`unisono run -n 4 script.py`) every rank calls `fit` and takes
its own rows; with `workers=` or `on=`, `fit` launches workers, hands them their rows, and returns when they are done.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from unisono.tables.map_reduce.map_reduce import launch_workers
from unisono.tables.map_reduce.worker_data import open_shared, split
from unisono.world import World, join

__all__ = ["Workers"]

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
