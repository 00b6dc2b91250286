"""Which workers do a fit: those of the world that this process is in, or ones that are launched for it.

Alone, a fit runs in this process. In a running world (`unisono run -n 4 script.py`) every rank calls `fit` and takes
its own rows; with `workers=` or `on=`, `fit` launches workers, hands them their rows, and returns when they are done.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from unisono.map_reduce.map_reduce import launch_workers, take_part
from unisono.world import World

__all__ = ["Workers"]

Work = Callable[[Any, Any], "tuple[str, Any] | None"]


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
        return take_part(source, world, own=self.own_rows)

    def run(self, work: Work, settings: Any, source: Any) -> Any:
        """Launch workers that run `work(settings, source)`, and return what was fitted.

        `work` returns ("fitted", result); or ("refused", text) for a mistake in the data, which is raised here. A
        worker that had another part to play, such as a parameter server, has no result.
        """
        results = launch_workers(work, settings, source, workers=self.count, on=self.on)
        kind, value = next(result for result in results if result is not None)
        if kind == "refused":
            raise ValueError(value)
        return value
