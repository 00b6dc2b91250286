"""How many workers an elastic run aims at: as `unisono scale` asks for, or as the run finds by measuring."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from unisono.launchers.adaptation import Adaptation, Meter
from unisono.launchers.coordinator import Coordinator
from unisono.launchers.job import ElasticSettings

__all__ = ["Scaling"]


class Scaling:
    """The number of workers that one run aims at. `say` puts a line on standard error."""

    def __init__(
        self, coordinator: Coordinator, elastic: ElasticSettings, program: str, say: Callable[[str], None]
    ) -> None:
        self._coordinator, self._elastic, self._say = coordinator, elastic, say
        self._program = program
        self._step: int | None = None
        self._generation = -1
        self._adaptation: Adaptation | None = None
        if elastic.adapt is not None:
            self._meter = Meter(elastic.adapt.window_s)
            self._adaptation = Adaptation(elastic.least, elastic.most, target=elastic.adapt.target)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a request that came over the run's socket (control.py); ValueError refuses it."""
        match request:
            case {"do": "status"}:
                pass
            case {"do": "scale", "workers": int(count)} if not isinstance(count, bool):
                self._scale(count)
            case _:
                raise ValueError("got a request that is not known; expected status, or scale with a number of workers")
        coordinator = self._coordinator
        return {
            "pid": os.getpid(),
            "program": self._program,
            "workers": len(coordinator.members),
            "wanted": coordinator.wanted,
            "least": self._elastic.least,
            "most": self._elastic.most,
            "step": self._step,
            "adapts": self._adaptation is not None,
        }

    def _scale(self, count: int) -> None:
        least, most = self._elastic.least, self._elastic.most
        if not least <= count <= most:
            raise ValueError(f"got {count} workers; this run takes {least} to {most} (-n {least}:{most})")
        if self._coordinator.ending or self._coordinator.too_few:
            raise ValueError("the run is about to end")
        if self._adaptation is not None:
            self._adaptation = None
            self._say("unisono: the number of workers was asked for, and is not adapted any more")
        if count != self._coordinator.wanted:
            self._say(f"unisono: the number of workers asked for is {count}, after {self._coordinator.wanted}")
        self._coordinator.aim_at(count)

    def look(self, step: int | None, step_at: float) -> None:
        """The first worker has made `step` at this time: measure, and aim at another number where that is due."""
        self._step = step
        coordinator = self._coordinator
        if self._adaptation is None or coordinator.ending or coordinator.too_few or step is None:
            return
        if not coordinator.replaces:
            self._adaptation = None
            self._say("unisono: workers that were to join have failed: the number of workers is not adapted any more")
            coordinator.wanted = len(coordinator.members)
            return
        count = len(coordinator.members)
        settled = count == coordinator.wanted and not coordinator.newcomers and not coordinator.waiting
        if not settled or coordinator.generation != self._generation:
            self._generation = coordinator.generation
            self._meter.restart()
            return
        rate = self._meter.take(step, step_at)
        if rate is None:
            return
        decision = self._adaptation.take(count, rate)
        if decision.why:
            self._say(f"unisono: {decision.why}")
        if decision.workers != count:
            coordinator.aim_at(decision.workers)
