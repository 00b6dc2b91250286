"""The server's side: the outer model, and delayed Nesterov momentum on the differences that workers bring."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from unisono.methods.strategies._serving.server import Answer, Grads, Server, Settings, Values


class DelayedNesterov(Optimizer):
    """Nesterov's momentum that follows every N-th gradient, with the mean of these N; each moves the parameters at 1/N.

    `workers` is N; `spread` says how much of the momentum's step goes with the gradients in between (0: none).
    """

    def __init__(self, params: Iterable[Parameter], *, lr: float, momentum: float, spread: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "spread": spread, "workers": 1})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take in the gradients that there are; there is no closure."""
        for group in self.param_groups:
            n, spread = group["workers"], group["spread"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state |= {"momentum": torch.zeros_like(param), "sum": torch.zeros_like(param), "count": 0}
                state["sum"] += param.grad
                state["count"] += 1
                share = spread / n
                if state["count"] >= n:
                    share += 1.0 - spread
                    state["momentum"].mul_(group["momentum"]).add_(state["sum"], alpha=1.0 / state["count"])
                    state["sum"].zero_()
                    state["count"] = 0
                if share:
                    param.add_(state["momentum"], alpha=-group["lr"] * group["momentum"] * share)
                param.add_(param.grad, alpha=-group["lr"] / n)


class Visit(NamedTuple):
    """What a worker says of itself when it comes with a difference."""

    samples: float  # behind the difference, in mean batches
    windows: int
    seconds: float  # that these took


class OuterServer(Server):
    """Differences, taken in when a quorum of them is there and its grace is over; too old ones are dropped.

    A difference counts by its samples over the mean of what the workers had behind theirs when they came last.
    """

    def __init__(
        self, params: Sequence[Tensor], optimizer: DelayedNesterov, workers: Iterable[int], settings: Any
    ) -> None:
        """`settings`: those of the strategy."""
        self._strategy = settings
        self._visits: dict[int, Visit] = {}  # of each worker, the last
        self._due: float | None = None  # when the grace of a quorum is over
        super().__init__(params, optimizer, workers)
        [self._options] = self._settings[self._all[0]]

    def push(
        self, worker: int, grads: Grads | None, settings: Settings | None = None, written: Values | None = None
    ) -> Answer:
        """Take a difference in, or drop it; `settings` has the worker's `Visit`. Instead of how far it is ahead, the
        worker hears how many windows to make until its next visit; below zero if its difference was dropped."""
        with self._changed:
            self._raise_failure()
            self.note_written(worker, written or [])
            self._clocks[worker] += 1
            if settings is not None:
                self._visits[worker] = Visit(**settings[0])
            missed, bound = self.version - self._seen[worker], self._strategy.staleness
            counted = grads is not None and (bound is None or missed <= bound * len(self._clocks))
            if counted:
                number = self._rounds
                self._round[worker] = grads
                self._look_again()
                while self._rounds == number:
                    self._raise_failure()
                    self._changed.wait(None if self._due is None else max(0.0, self._due - time.monotonic()))
                    if self._due is not None and time.monotonic() >= self._due:
                        self._look_again()
            clocks = [self._clocks.get(w, -1) for w in self._all]
            windows = self._count_windows(worker)
            return Answer(windows if counted else -windows, missed, clocks)

    def look_at_round(self) -> None:
        """Take the round in: at once if all are in it, else when a quorum has had its grace."""
        active = self._active()
        if active <= set(self._round):
            self._take_in()
        elif len(self._round) >= min(self._strategy.quorum, len(active)):
            if self._due is None:
                self._due = time.monotonic() + self._strategy.grace_s
            if time.monotonic() >= self._due:
                self._take_in()

    def put_values(self, written: Values) -> None:
        super().put_values(written)
        for i, _, _ in written:  # the momentum was that of another model
            self._optimizer.state.pop(self._params[i], None)

    def _take_in(self) -> None:
        given, self._round, self._due = self._round, {}, None
        every = [visit.samples for worker, visit in self._visits.items() if worker in {*self._clocks, *given}]
        mean = sum(every) / len(every)
        for worker, grads in sorted(given.items()):
            weight = self._visits[worker].samples / mean if mean else 0.0
            scaled = [None if g is None else g * weight for g in grads or ()]
            self._step(scaled, [{**self._options, "workers": max(1, len(self._clocks))}], share=1.0)
        self._rounds += 1

    def _count_windows(self, worker: int) -> int:
        """How many a worker is to make until it comes again: `every`, times its speed over the fastest's."""
        speeds = {w: v.windows / max(v.seconds, 1e-9) for w, v in self._visits.items() if w in self._clocks}
        every: int = self._strategy.every
        if not self._strategy.pace or worker not in speeds:
            return every
        return max(1, round(every * speeds[worker] / max(speeds.values())))
