"""Hosts that fail now and then: how much of the training is left, by both ways to go on."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from unisono.units import show_duration

__all__ = ["Failures"]

_FAILURES = 2000  # that a simulation sees
_MEASURED_RECOVERY_S = 0.13  # from a worker's end to the next step: benchmarks/results, "faults"


@dataclass(frozen=True)
class Failures:
    """How often a host fails, and what happens then.

    mtbf_s: mean time between failures of one host; times are exponential. inf: none.
    way: "elastic": the others wait until the loss is noticed and a new generation begins, then go on as fewer, until
        the replacement has started and joins (a new generation again). "restart": all begin again at the last
        checkpoint.
    detect_s: until the loss is noticed (a host that falls silent: the heartbeat).
    recover_s: what a new generation takes.
    start_s: until a replacement is ready: a host found, the program started.
    checkpoint_every_s, checkpoint_s: training between two checkpoints, and how long one is waited for.
    """

    mtbf_s: float = math.inf
    way: Literal["elastic", "restart"] = "elastic"
    detect_s: float = 10.0
    recover_s: float = _MEASURED_RECOVERY_S
    start_s: float = 60.0
    checkpoint_every_s: float = 1800.0
    checkpoint_s: float = 5.0

    def keep(self, hosts: int, seed: int, *, waits: bool = True) -> float:
        """The share of the undisturbed training that is left. `waits`: the others stand still for a lost worker."""
        if math.isinf(self.mtbf_s) and self.way == "elastic":
            return 1.0
        return self._keep_elastic(hosts, seed, waits) if self.way == "elastic" else self._keep_restarting(hosts)

    def _keep_restarting(self, hosts: int) -> float:
        """Expected time of a checkpoint's interval S with its cost d, where a failure costs R and the work since the
        last checkpoint, and may come at any time: exp(R/m) (exp((S + d)/m) - 1) m, with m the time between failures of
        any host (Daly, 2006)."""
        useful, whole = self.checkpoint_every_s, self.checkpoint_every_s + self.checkpoint_s
        if math.isinf(self.mtbf_s):
            return useful / whole
        between = self.mtbf_s / hosts
        exponent = (self.detect_s + self.start_s) / between
        if exponent + whole / between > 500:
            return 0.0
        return useful / (math.exp(exponent) * math.expm1(whole / between) * between)

    def best_interval(self, hosts: int) -> float:
        """The time between checkpoints that leaves the most training, about sqrt(2 d m) (Young, 1974)."""
        between = self.mtbf_s / hosts
        if math.isinf(between) or not self.checkpoint_s:
            return math.inf if math.isinf(between) else 0.0
        # the root of exp((S + d)/m) (1 - S/m) = 1, by halving
        low, high = 0.0, between
        for _ in range(100):
            s = (low + high) / 2
            if math.exp((s + self.checkpoint_s) / between) * (1 - s / between) > 1:
                low = s
            else:
                high = s
        return low

    def _keep_elastic(self, hosts: int, seed: int, waits: bool) -> float:
        """By events: failures at a rate of the hosts that are up, and replacements."""
        rng = np.random.default_rng([seed, hosts])
        now = busy_until = done = 0.0
        up, back = hosts, [math.inf]  # when replacements come
        waits_s: list[float] = rng.exponential(self.mtbf_s, _FAILURES).tolist()
        draws = iter(waits_s)
        failed = next(draws) / hosts
        while True:
            event = min(failed, back[0])
            done += up / hosts * max(0.0, event - max(now, busy_until))
            now = event
            if event == back[0]:
                heapq.heappop(back)
                up += 1
                pause = self.recover_s
            else:
                up -= 1
                heapq.heappush(back, now + self.start_s)
                pause = self.detect_s + self.recover_s
            if waits:
                busy_until = max(busy_until, now + pause)
            if event == failed:
                wait = next(draws, None)
                if wait is None:
                    return done / now
                failed = now + (wait / up if up else math.inf)
            elif math.isinf(failed) and up:
                failed = now + float(rng.exponential(self.mtbf_s)) / up

    def as_json(self) -> dict[str, Any] | None:
        """Plain values; None: no failures."""
        return None if math.isinf(self.mtbf_s) else dict(vars(self))

    def describe(self, hosts: int) -> str:
        """How often hosts fail and what happens then, in words."""
        if math.isinf(self.mtbf_s):
            return "no failures"
        some = f"a host fails every {show_duration(self.mtbf_s)}, one of {hosts} every "
        some += show_duration(self.mtbf_s / hosts)
        if self.way == "elastic":
            return f"{some}; the others go on after {show_duration(self.detect_s + self.recover_s)}"
        return f"{some}; all begin again at a checkpoint, one every {show_duration(self.checkpoint_every_s)}"
