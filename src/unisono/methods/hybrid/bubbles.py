"""How long each rank of a pipeline stands still, beside what its schedule would cost at best, and what makes the rest.

A schedule's time in a step is from the first computation on any rank to the last one on any. What lies around it
(inputs cut into microbatches, the loss told to all ranks) is not the schedule's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from unisono.predict.costs.pipelines import UNITS, Action, replay_schedule, say_formula
from unisono.world.ledger import Ledger

__all__ = ["Bubble", "StepTimes"]

WARM_UP = 3  # steps that do not count once there are more: ranks meet, shapes are learnt
_EVERY_S = 0.25  # how often a step is taken apart
_KINDS = {"forward_one_chunk": "F", "backward_one_chunk": "B", "backward_weight_one_chunk": "W"}


class StepTimes:
    """Numbers of one step, of all ranks of the pipeline, as they travel: when each began and ended, how long each
    action took."""

    def __init__(self, order: Mapping[int, Sequence[Action]]) -> None:
        self.order = order
        self._ranks = sorted(order)
        self._slots = {action: i for i, action in enumerate(a for r in self._ranks for a in order[r])}
        self.size = 2 * len(self._ranks) + len(self._slots)

    def fill(self, numbers: Tensor, rank: int, done: Sequence[tuple[Action, float, float]]) -> None:
        """Write what a rank did in this step into the numbers."""
        if not done:
            return
        at, cells = 2 * self._ranks.index(rank), numbers.numpy()  # the same memory, faster to write one by one
        cells[at], cells[at + 1] = min(a for _, a, _ in done), max(b for _, _, b in done)
        begin = 2 * len(self._ranks)
        for action, start, end in done:
            if (slot := self._slots.get(action)) is not None:
                cells[begin + slot] += end - start

    def find_ends(self, numbers: Sequence[float], *, one_clock: bool) -> tuple[float, float]:
        """When the first rank began and the last one ended; of several clocks, those of the longest rank."""
        ends = [(numbers[2 * i], numbers[2 * i + 1]) for i in range(len(self._ranks))]
        if one_clock:
            return min(a for a, _ in ends), max(b for _, b in ends)
        return max(ends, key=lambda pair: pair[1] - pair[0])

    def list_seconds(self, numbers: Sequence[float]) -> dict[Action, float]:
        """How long each action took."""
        begin = 2 * len(self._ranks)
        return {action: numbers[begin + slot] for action, slot in self._slots.items()}


class Bubble:
    """How long this rank stood still in the schedule's time; the first steps do not count once there are more.

    steps, seconds, idle_s: how many steps, how long their schedules took, and how long of that nothing was computed
    here. outside_s: how long the steps took beside that.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._done: list[tuple[Action, float, float]] = []
        self._all_steps = 0
        self._about: dict[str, Any] = {}
        self._times: StepTimes | None = None
        self._rank, self._one_clock, self._ideal = 0, True, 0.0
        self.clear()

    def clear(self) -> None:
        """Forget all steps so far."""
        self.steps, self.seconds, self.idle_s, self.outside_s = 0, 0.0, 0.0, 0.0
        self._taken, self._due = 0, float("-inf")
        self._parts = {"bubble": 0.0, "imbalance": 0.0, "uneven": 0.0, "messages": 0.0}
        self._stage_s: dict[int, list[float]] = {}

    @property
    def fraction(self) -> float:
        """The idle part of the schedule's time."""
        return self.idle_s / self.seconds if self.seconds else 0.0

    @property
    def ideal(self) -> float:
        """What it would be of equal stages, and messages that take no time."""
        return self._ideal

    # Watching -------------------------------------------------------------------------------------------------------

    def follow(
        self, order: Mapping[int, Sequence[Action]], *, rank: int, one_clock: bool, schedule: str, chunks: int
    ) -> StepTimes:
        """The schedule of the steps to come."""
        self._times = StepTimes(order)
        self._rank, self._one_clock = rank, one_clock
        self._ideal = replay_schedule(order, lambda action: UNITS[action[1]]).bubble
        micro = 1 + max(m for actions in order.values() for _, _, m in actions)
        self._about = {"schedule": schedule, "chunks": chunks, "microbatches": micro, "ranks": len(order)}
        self._about["here"] = sorted({stage for stage, _, _ in order[rank]})
        self._about["formula"] = say_formula(schedule.lower(), chunks=chunks)
        self._ledger.accounts["pipeline"] = self.describe
        return self._times

    def watch(self, stage: Any) -> None:
        """Note when a stage computes."""
        for name, kind in _KINDS.items():
            run = getattr(stage, name)

            def timed(*args: Any, _run: Any = run, _kind: str = kind, **kwargs: Any) -> Any:
                half = _kind == "B" and not kwargs.get("full_backward", True)
                with_action = (stage.stage_index, "I" if half else _kind, args[0])
                start = self._ledger.clock()
                try:
                    return _run(*args, **kwargs)
                finally:
                    self._done.append((with_action, start, self._ledger.clock()))

            setattr(stage, name, timed)

    def time_loss(self, loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        """The loss is computed too: it counts to the forward before it."""

        def timed(output: Tensor, target: Tensor) -> Tensor:
            start = self._ledger.clock()
            try:
                return loss(output, target)
            finally:
                if self._done:
                    self._done.append((self._done[-1][0], start, self._ledger.clock()))

        return timed

    def begin_step(self) -> None:
        """What was computed between steps (an evaluation) does not count."""
        self._done = []

    def fill(self, numbers: Tensor) -> None:
        """Enter what this rank did, for all ranks."""
        assert self._times is not None
        self._times.fill(numbers, self._rank, self._done)

    def end_step(self, start: float, end: float, numbers: Sequence[float]) -> None:
        """A step is over, from `start` to `end` of this rank's call; `numbers` are those of all ranks. The time between
        computations goes into the ledger as "bubble"."""
        assert self._times is not None
        begin, finish = self._times.find_ends(numbers, one_clock=self._one_clock)
        length, busy = finish - begin, 0.0
        at, until = (begin, finish) if self._one_clock else (start, end)
        for _, a, b in [*sorted(self._done, key=lambda one: one[1]), (None, until, until)]:
            if a > at:
                self._ledger.close_span("bubble", at, a)
            busy += b - a
            at = max(at, b)
        if self._all_steps == WARM_UP:
            self.clear()
        self._all_steps += 1
        self.steps, self.seconds = self.steps + 1, self.seconds + length
        self.idle_s += max(0.0, length - busy)
        self.outside_s += max(0.0, end - start - length)
        if end >= self._due:
            self._due = end + _EVERY_S
            self._take_apart(length, self._times.list_seconds(numbers))

    # What makes the difference --------------------------------------------------------------------------------------

    def _take_apart(self, length: float, seconds: Mapping[Action, float]) -> None:
        """The bubble of this step: at best, by stages that differ, by microbatches that differ, and by messages."""
        assert self._times is not None
        sums: dict[tuple[int, str], list[float]] = {}
        for (stage, kind, _), took in seconds.items():
            sums.setdefault((stage, kind), []).append(took)
        means = {key: sum(found) / len(found) for key, found in sums.items()}
        kinds: dict[int, list[float]] = {}
        for (stage, kind), mean in means.items():
            kinds.setdefault(stage, [0.0, 0.0])[0 if kind == "F" else 1] += mean
        order = self._times.order
        even = replay_schedule(order, lambda action: means[action[:2]])
        actual = replay_schedule(order, lambda action: seconds[action])
        if not length or not even.length:
            return
        bubble = 1.0 - sum(actual.busy) / len(actual.busy) / length
        parts = {
            "bubble": bubble,
            "imbalance": even.bubble - self._ideal,
            "uneven": actual.bubble - even.bubble,
            "messages": bubble - actual.bubble,
        }
        for name, part in parts.items():
            self._parts[name] += part
        for stage, pair in kinds.items():
            before = self._stage_s.get(stage, (0.0, 0.0))
            self._stage_s[stage] = [x + y for x, y in zip(before, pair, strict=True)]
        self._taken += 1

    def describe(self) -> dict[str, Any]:
        """All of it as plain numbers: for this rank, and of the whole pipeline in the steps that were taken apart."""
        taken, steps = max(1, self._taken), max(1, self.steps)
        return {
            **self._about,
            "rank": self._rank,
            "steps": self.steps,
            "schedule_s": self.seconds / steps,
            "busy_s": (self.seconds - self.idle_s) / steps,
            "outside_s": self.outside_s / steps,
            "fraction": self.fraction,
            "ideal": self._ideal,
            **{name: part / taken for name, part in self._parts.items()},
            "stages": {str(s): [x / taken for x in pair] for s, pair in sorted(self._stage_s.items())},
        }
