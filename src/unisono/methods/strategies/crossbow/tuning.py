"""How many learners a worker runs, and how often they meet: decisions from what was measured, and nothing else.

The tuners see only numbers that all ranks share, so that all ranks decide alike.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch

from unisono.world.ledger import Ledger

_NEW_ON_GPU = 4  # rounds: op by op, and captured


class LearnersTuner:
    """One more learner while the last one paid for itself; then one fewer, and settled.

    gain: the least part by which one more learner must raise the throughput.
    most: learners on a worker at most.

    >>> tuner = LearnersTuner(1)
    >>> [tuner.observe(throughput) for throughput in (100.0, 180.0, 184.0, 500.0)]
    [2, 3, 2, 2]
    """

    def __init__(self, learners: int = 1, *, gain: float = 0.05, most: int = 16) -> None:
        self.learners, self.gain, self.most = learners, gain, most
        self.settled = False
        self.before: float | None = None  # the throughput with one learner fewer
        self.why = "the start"

    def observe(self, throughput: float, *, has_room: bool = True) -> int:
        """How many learners from now on, where with those so far `throughput` was measured. `has_room`: another one
        would fit into memory."""
        if self.settled:
            return self.learners
        if not math.isfinite(throughput) or throughput <= 0.0:
            self.why = "nothing was measured"
            return self.learners
        rose = self.before is None or throughput > self.before * (1.0 + self.gain)
        if rose and not has_room:
            self.settled, self.why = True, "one more would not fit into memory"
        elif rose and self.learners < self.most:
            why = "try one more" if self.before is None else "the last one raised the throughput enough"
            self.before, self.learners, self.why = throughput, self.learners + 1, why
        elif rose:
            self.settled, self.why = True, "as many as there may be"
        else:
            self.learners, self.settled, self.why = self.learners - 1, True, "the last one did not pay for itself"
        return self.learners

    def state_dict(self) -> dict[str, Any]:
        """What a later run needs to go on."""
        return {"learners": self.learners, "settled": self.settled, "before": self.before}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a former run's decisions."""
        self.learners, self.settled, self.before = state["learners"], state["settled"], state["before"]


class PeriodTuner:
    """Meet half as often while communication costs more than `high` of compute, twice as often below `low`.

    What an exchange costs is shared by all windows of a period, so the ratio of communication to compute goes with
    1 / period. `low` is less than half of `high`: one step back never brings the ratio above `high` again, and for
    costs that stay the same the period comes to rest.

    >>> tuner = PeriodTuner(1)
    >>> [tuner.observe(0.5 / tuner.every, 1.0) for _ in range(5)]
    [2, 4, 8, 8, 8]
    """

    def __init__(self, every: int = 1, *, high: float = 0.1, low: float = 0.025, most: int = 64) -> None:
        if not 0.0 <= low < high / 2:
            raise ValueError(f"low must be less than half of high, or periods would go up and down: got {low}, {high}")
        self.every, self.high, self.low, self.most = every, high, low, most
        self.why = "the start"

    def observe(self, communication: float, compute: float) -> int:
        """The period from now on, where these seconds were measured with the one so far."""
        ratio = communication / compute if compute > 0.0 else math.nan
        before = self.every
        if ratio > self.high:
            self.every = min(2 * self.every, self.most)
        elif ratio < self.low:
            self.every = max(self.every // 2, 1)
        kept = "kept: " if self.every == before else ""
        self.why = f"{kept}communication is {ratio:.3f} of compute, wanted from {self.low:g} to {self.high:g}"
        return self.every

    def state_dict(self) -> dict[str, Any]:
        """What a later run needs to go on."""
        return {"every": self.every}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a former run's decisions."""
        self.every = state["every"]


class Tuning:
    """Both tuners, one at a time: the learners first, and how often they meet when their number is settled.

    A number that is given stays; where it is "auto", it begins at 1. Learners that take turns raise no throughput: only
    those that run side by side are tuned. `interval`: windows from decision to decision.
    """

    def __init__(self, learners: int | Literal["auto"], every: int | Literal["auto"], interval: int) -> None:
        self._learners = LearnersTuner() if learners == "auto" else None
        self._every = PeriodTuner() if every == "auto" else None
        self.learners = learners if learners != "auto" else 1
        self.every = every if every != "auto" else 1
        self.interval = interval
        self._device: torch.device | None = None
        self._new = 0  # rounds since the last decision
        self._mark: tuple[int, float] | None = None  # window and moment at which measuring began

    def measure_on(self, device: torch.device) -> None:
        """Rounds compute on a GPU, which may be behind the program; the first of them take longer."""
        self._device = device

    def _clock(self, ledger: Ledger) -> float:
        if self._device is not None:
            torch.cuda.synchronize(self._device)
        return ledger.clock()

    @property
    def under_way(self) -> bool:
        """Whether there is anything left to decide."""
        return self._every is not None or (self._learners is not None and not self._learners.settled)

    def observe(self, step: int, ledger: Ledger) -> list[float] | None:
        """Called after every round. At the end of an interval: this rank's windows a second, and the seconds that it
        stood still for communication and that it computed. The first round is left out: its memory is new; on a GPU
        the first four, as they are captured."""
        if not self.under_way:
            return None
        self._new += 1
        if self._mark is None and self._new < (_NEW_ON_GPU if self._device is not None else 1):
            return None
        if self._mark is None:
            self._mark = step, self._clock(ledger)
        windows, since = step - self._mark[0], self._mark[1]
        if windows < self.interval:
            return None
        now = self._clock(ledger)
        self._mark, self._new = None, 0
        totals = ledger.totals(last=windows)
        return [windows / max(now - since, 1e-9), totals.communication, totals.compute]

    def decide(
        self, throughput: float, communication: float, compute: float, *, side_by_side: bool, has_room: bool = True
    ) -> str:
        """Set `learners` and `every` from all ranks' sums; says why, if anything was decided."""
        if self._learners is not None and not self._learners.settled and side_by_side:
            self.learners = self._learners.observe(throughput, has_room=has_room)
            return self._learners.why
        if self._every is not None:
            self.every = self._every.observe(communication, compute)
            return self._every.why
        return ""

    def state_dict(self) -> dict[str, Any]:
        """What a later run needs to go on; the same on every rank."""
        tuners = {"learners": self._learners, "every": self._every}
        return {name: None if tuner is None else tuner.state_dict() for name, tuner in tuners.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a former run's decisions, where they are still to be taken here."""
        self._mark, self._new = None, 0
        if self._learners is not None and state["learners"] is not None:
            self._learners.load_state_dict(state["learners"])
            self.learners = self._learners.learners
        if self._every is not None and state["every"] is not None:
            self._every.load_state_dict(state["every"])
            self.every = self._every.every
