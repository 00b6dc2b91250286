"""How many workers an elastic run aims at: as `unisono scale` asks for, or as the run finds by measuring.

The decisions (Adaptation) have no processes and no clock of their own. Speeds are steps a second; the global batch does
not depend on the number of workers. What the n-th worker is worth is the share of one worker's part that it added:
(r_n / r_(n-1) - 1) (n - 1), which is 1 where n are n/(n-1) times as fast.

1. One more is tried as long as training is slower than asked for, and the last one was worth at least PAYS.
2. The last one is removed where it was worth less than HELPS; or where training is so much faster than asked for that
   the rest is expected to exceed it by MARGIN.
3. A number that did not pay is not tried again for a while, which doubles each time. After that, a worker that helped
   and did not pay is removed to measure again what it is worth.
4. When the speed of the same workers changes much, what was found before is forgotten. If it has fallen, one worker is
   removed to see what it is worth now, and taken back where it helps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf, sqrt
from statistics import fmean, median
from typing import Any

from unisono.launchers.coordinator import Coordinator
from unisono.launchers.job import ElasticSettings

__all__ = ["Adaptation", "Decision", "Meter", "Scaling"]

PAYS, HELPS, MARGIN = 0.3, 0.1, 0.1
FEW, MANY = 3, 12  # windows that a speed is taken from: at least, and where a decision is close
DRIFT = 0.25  # a change of speed that is not noise
PAUSE, LONGEST_PAUSE = 16, 1024  # windows
WARM_UP_STEPS, WINDOW_STEPS = 2, 4
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")


class Meter:
    """Steps a second, over windows of at least `window_s` and WINDOW_STEPS; the beginning is not counted.

    >>> meter = Meter(window_s=1.0)
    >>> [meter.take(step, 0.5 * step) for step in range(9)]
    [None, None, None, None, None, None, 2.0, None, None]
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._from: tuple[int, float] | None = None
        self._is_warm = False

    def restart(self) -> None:
        """Something has changed."""
        self._from, self._is_warm = None, False

    def take(self, step: int, at: float) -> float | None:
        """`step` was made at this time, in seconds; the speed, where a window ends here."""
        if self._from is None or step < self._from[0]:
            self._from, self._is_warm = (step, at), False
            return None
        steps, seconds = step - self._from[0], at - self._from[1]
        if not self._is_warm:
            if steps >= WARM_UP_STEPS and seconds >= self._window_s / 2:
                self._from, self._is_warm = (step, at), True
            return None
        if steps < WINDOW_STEPS or seconds < self._window_s:
            return None
        self._from = step, at
        return steps / seconds


@dataclass(frozen=True)
class Decision:
    """Aim at so many workers. `why` is a line for the log; "" where there is nothing new to say."""

    workers: int
    why: str = ""


class Adaptation:
    """Of one run of `least` to `most` workers; `target` steps a second are asked for (None: as many as pay)."""

    def __init__(self, least: int, most: int, *, target: float | None = None) -> None:
        self._least, self._most = least, most
        self._target = inf if target is None else target
        self._windows = 0
        self._workers = 0
        self._rates: deque[float] = deque(maxlen=MANY)  # of these workers
        self._before: tuple[int, list[float]] | None = None  # other workers, just before; until compared
        self._gains: dict[int, deque[float]] = {}  # how many times as fast n were as n - 1, each time that it was seen
        self._usual: float | None = None  # the speed at which these workers were left as they are
        self._barred: dict[int, int] = {}  # workers: the window from which on so many may be tried again
        self._pauses: dict[int, int] = {}  # workers: windows of the last pause
        self._looks = False  # the last was removed to see what it is worth
        self._look_from, self._look_pause = 0, PAUSE // 2  # the window from which on it may be; the last pause
        self._said: tuple[int, str] | None = None

    def take(self, workers: int, rate: float) -> Decision:
        """So many workers were so fast, in a window; what to aim at."""
        self._windows += 1
        if workers != self._workers:
            known = len(self._rates) >= FEW and abs(workers - self._workers) == 1
            self._before = (self._workers, list(self._rates)) if known else None
            self._workers, self._usual = workers, None
            self._rates.clear()
        self._rates.append(rate)
        if len(self._rates) < FEW:
            return Decision(workers)
        if self._before is None:
            return self._decide(f"{_count(workers)}: {self._speed:.3g} steps/s")
        count, rates = self._before
        speeds = (self._rates, rates) if workers > count else (rates, self._rates)
        gain, error = median(speeds[0]) / median(speeds[1]), sqrt(_error(speeds[0]) ** 2 + _error(speeds[1]) ** 2)
        last = max(workers, count)  # the worker that they differ in
        gains = self._gains.setdefault(last, deque(maxlen=MANY))
        gains.append(gain)
        worth, doubt = self._worth(last), gain * error * (last - 1) / sqrt(len(gains))
        if len(self._rates) < MANY and min(abs(worth - HELPS), abs(worth - PAYS)) < 2 * doubt:
            gains.pop()
            return Decision(workers)  # a few windows more
        self._before = None
        text = (
            f"{_count(workers)}: {self._speed:.3g} steps/s, {self._speed / median(rates):.2f}x that of {count} "
            f"(the {_name(last)} was worth {worth:.2f} of a worker)"
        )
        return self._judge(workers, last, worth, text)

    def _judge(self, workers: int, last: int, worth: float, text: str) -> Decision:
        """The first decision after a change by one."""
        looks, self._looks = self._looks, False
        if worth < HELPS:
            self._bar(last)
            if workers == last and workers > self._least:
                return self._change(-1, f"{text}: one less, and no more for {self._pauses[last]} windows")
            if looks:
                self._look_pause = PAUSE // 2
                if workers > self._least and self._speed < self._target:
                    self._looks = True
                    return self._change(-1, f"{text}: one less again, to see what it is worth")
        elif looks and self._speed < self._target:
            return self._change(1, f"{text}: it is taken back")
        elif workers == last and worth < PAYS:
            self._bar(last + 1)
        elif workers == last:
            self._pauses.pop(last, None)
        return self._decide(text)

    def _decide(self, text: str) -> Decision:
        """Where nothing is to be judged."""
        workers, speed, target = self._workers, self._speed, self._target
        if self._usual is not None and abs(median(list(self._rates)[-FEW:]) / self._usual - 1) > DRIFT:
            return self._start_anew()
        asked = "" if target == inf else f", {target:.3g} are asked for"
        if speed < target and workers < self._most and self._windows >= self._barred.get(workers + 1, 0):
            if workers > self._least and workers in self._gains and self._worth(workers) < PAYS:
                self._looks = True
                return self._change(-1, f"{text}{asked}: one less, to see again what it is worth")
            return self._change(1, f"{text}{asked}: one more")
        rest = speed / fmean(self._gains[workers]) if workers in self._gains else speed * (workers - 1) / workers
        if workers > self._least and rest > target * (1 + MARGIN):
            return self._change(-1, f"{text}{asked}, and {workers - 1} are expected to make {rest:.3g}: one less")
        if self._usual is None:
            self._usual = speed
        if speed >= target:
            return self._stay("fast", f"{text}{asked}: it stays at that")
        if workers == self._most:
            return self._stay("most", f"{text}{asked}: there are no more")
        left = self._barred[workers + 1] - self._windows
        return self._stay("barred", f"{text}{asked}: no more for {left} windows")

    def _start_anew(self) -> Decision:
        """The speed of the same workers has changed: what was found does not hold any more."""
        assert self._usual is not None
        recent = list(self._rates)[-FEW:]
        self._rates = deque(recent, maxlen=MANY)
        before, self._usual = self._usual, None
        self._gains.clear()
        self._barred.clear()
        self._pauses.clear()
        text = f"{_count(self._workers)}: {self._speed:.3g} steps/s, and {before:.3g} before"
        may_look = self._workers > self._least and self._windows >= self._look_from
        if self._speed > before or self._speed >= self._target or not may_look:
            return self._stay("anew", f"{text}: what was found before is forgotten")
        self._looks = True
        self._look_pause = min(LONGEST_PAUSE, 2 * self._look_pause)
        self._look_from = self._windows + self._look_pause
        return self._change(-1, f"{text}: one less, to see what it is worth now")

    def _worth(self, number: int) -> float:
        """Of the worker of this number, as far as it was seen: 1 where it added as much as one before it made."""
        return (fmean(self._gains[number]) - 1) * (number - 1)

    def _bar(self, workers: int) -> None:
        """Do not try so many for a while; longer each time."""
        if self._windows >= self._barred.get(workers, 0):
            self._pauses[workers] = min(LONGEST_PAUSE, 2 * self._pauses.get(workers, PAUSE // 2))
            self._barred[workers] = self._windows + self._pauses[workers]

    def _change(self, by: int, why: str) -> Decision:
        self._said = None
        return Decision(self._workers + by, why)

    def _stay(self, kind: str, why: str) -> Decision:
        """`kind`: what is said once of these workers."""
        is_new = self._said != (self._workers, kind)
        self._said = self._workers, kind
        return Decision(self._workers, why if is_new else "")

    @property
    def _speed(self) -> float:
        """That of these workers; one window with a pause in it does not count."""
        return median(self._rates)


def _error(rates: deque[float] | list[float]) -> float:
    """The standard error of their median, as a share of it."""
    middle = median(rates)
    return 1.25 * 1.48 * median(abs(rate - middle) for rate in rates) / sqrt(len(rates)) / middle


def _count(workers: int) -> str:
    return "1 worker" if workers == 1 else f"{workers} workers"


def _name(number: int) -> str:
    """
    >>> _name(3), _name(12)
    ('third', '12th')
    """
    return _ORDINALS[number - 1] if number <= len(_ORDINALS) else f"{number}th"


class Scaling:
    """The number of workers that one run aims at. `say` puts a line on standard error."""

    def __init__(self, coordinator: Coordinator, elastic: ElasticSettings, say: Callable[[str], None]) -> None:
        self._coordinator, self._elastic, self._say = coordinator, elastic, say
        self._step: int | None = None
        self._generation = -1
        self._adaptation: Adaptation | None = None
        if elastic.adapt is not None:
            self._meter = Meter(elastic.adapt.window_s)
            self._adaptation = Adaptation(elastic.least, elastic.most, target=elastic.adapt.target)

    def describe(self) -> dict[str, Any]:
        """What `unisono scale` shows: see RunStatus (control.py)."""
        coordinator = self._coordinator
        return {
            "workers": len(coordinator.members),
            "wanted": coordinator.wanted,
            "least": self._elastic.least,
            "most": self._elastic.most,
            "step": self._step,
            "adapts": self._adaptation is not None,
        }

    def scale(self, count: int) -> None:
        """Aim at so many workers, as somebody asks for. Raises ValueError where that cannot be."""
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
