"""Which candidate is at work: decided from numbers that all ranks have agreed on. No clock, no processes.

Three phases:
1. the first round: the candidate predicted to be fastest is at work first, then each that is worth a trial;
2. watching: every few steps the measured times are compared with those of when it settled;
3. another round, after a drift: candidates that are now predicted to be faster are tried.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from unisono.predict.costs.network import LinearCost
from unisono.units import show_s

GAIN = 1.1  # how many times as fast another candidate must be
ABOUT = 1.03  # one that is named before is preferred where it takes at most so many times as long
DRIFT = 1.3  # how many times as much, or as little, a time must be to count as another
IN_A_ROW = 3  # checks with a drift, one after the other
SURE = 2.0  # a smaller gain after a drift is checked once more, against what was at work before
TOO_SLOW = 2.0  # a candidate predicted to take so many times as long is not tried
MOST_TRIALS = 6  # candidates in a round
TRIAL_SHARE = 0.05  # of all steps, for trials after the first round that led to nothing
FREE_TRIALS = 3  # of these, before the first share has come together
MOST_DWELLS = 32  # the longest time between two rounds, in those of the beginning
PROBE_SHARE = 0.01  # of the time, for measuring the link
MISFIT = 1.5  # of the link's line, at most
_SMALL = 0.05  # a part of a step that is smaller than this is no reason for anything
_KEPT = 5  # checks that what is usual is the median of


class Probed(NamedTuple):
    """The network between the ranks, as a probe found it: seconds that a collective takes, however small, and seconds
    a byte that a rank sends."""

    latency_s: float
    s_per_byte: float
    took_s: float = 0.0  # to find out

    def seconds(self, costs: Costs) -> float:
        """Seconds that all messages of a candidate's step take on this link."""
        return LinearCost(self.latency_s, self.s_per_byte).at(costs.bytes_sent, costs.messages)

    def slowness(self, other: Probed) -> float:
        """How many times as long a megabyte takes as on another link."""
        return (self.latency_s + 1e6 * self.s_per_byte) / max(1e-12, other.latency_s + 1e6 * other.s_per_byte)


class Costs(NamedTuple):
    """Of one step of a candidate: bytes and collectives of a rank, and seconds of compression."""

    bytes_sent: float
    messages: float = 1.0
    work_s: float = 0.0
    overlaps: bool = False  # some of it may run behind compute


class PricedCandidate(NamedTuple):
    """A strategy by its spec; without costs it is known only once it has been tried."""

    spec: str
    costs: Costs | None = None


class StepTimes(NamedTuple):
    """Medians over some steps, of the rank that decides: the slowest one's own time, and its wait for the others."""

    wall_s: float
    own_s: float  # compute and data
    hidden_s: float = 0.0  # communication behind compute
    bytes_sent: float = 0.0

    @property
    def communication_s(self) -> float:
        """The part of a step that is neither compute nor data."""
        return max(0.0, self.wall_s - self.own_s)


@dataclasses.dataclass(frozen=True)
class Decision:
    """What is to be done after a step: `to` is at work from then on.

    kind: "trial", "settle" (the end of the first round), "try" (another round begins), "change" or "back" (its end),
        "stay" (a drift after which nothing else is predicted to be faster).
    """

    kind: str
    step: int
    origin: str
    to: str
    why: str
    predicted: float | None = None  # times as fast
    achieved: float | None = None

    def __str__(self) -> str:
        move = self.to if self.origin == self.to else f"{self.origin} -> {self.to}"
        parts = [f"step {self.step}: {move}: {self.why}"]
        if self.achieved is not None:
            parts.append(f"achieved {self.achieved:.3g} times as fast")
        if self.predicted is not None:
            parts.append(f"predicted {self.predicted:.3g}" + (" times as fast" if self.achieved is None else ""))
        return "; ".join(parts)


class Predictor:
    """Seconds of a step of each candidate: own + fit * what its bytes take on the link + the rest.

    `fit` and the rest come from when it was last measured. A misfit of the link's line goes into `fit`, up to a factor;
    what is left is its compression (more), or what hides behind compute (less). Before it has been measured the rest is
    what a dry run took, less what hides behind compute of others that overlap.
    """

    def __init__(self, candidates: Sequence[PricedCandidate], link: Probed) -> None:
        self.costs: list[Costs | None] = [c.costs for c in candidates]
        self.link, self.own_s = link, 0.0
        self._hidden_s = 0.0
        self._fits: dict[int, tuple[float, float]] = {}  # fit and rest

    def learn(self, index: int, measured: StepTimes) -> None:
        """Take in what was measured under a candidate."""
        known = self.costs[index]
        if known is None:
            known = self.costs[index] = Costs(measured.bytes_sent)
        self.own_s = measured.own_s
        if known.overlaps:
            self._hidden_s = measured.hidden_s
        link_s = max(1e-9, self.link.seconds(known))
        fit = min(MISFIT, max(1 / MISFIT, (measured.communication_s - known.work_s) / link_s))
        self._fits[index] = fit, measured.communication_s - fit * link_s

    def predict(self, index: int) -> float | None:
        """Seconds of a step; None where nothing is known."""
        costs = self.costs[index]
        if costs is None:
            return None
        fit, rest = self._fits.get(index, (1.0, costs.work_s - (self._hidden_s if costs.overlaps else 0.0)))
        return self.own_s + max(0.0, fit * self.link.seconds(costs) + rest)


class _Usual:
    """The usual value of a time over the last checks, and how long it has been another."""

    def __init__(self, *known: float) -> None:
        self._kept: deque[float] = deque(known, maxlen=_KEPT)
        self._others: list[float] = []
        self.since = 0

    @property
    def value(self) -> float:
        """The usual value."""
        return median(self._kept) if self._kept else math.nan

    @property
    def in_a_row(self) -> int:
        """How many of the last checks found another value, all in the same direction."""
        return len(self._others)

    @property
    def now(self) -> float:
        """The value since it has changed, or the usual one."""
        return median(self._others) if self._others else self.value

    def note(self, value: float, whole: float, since: int) -> None:
        """Once more, as a part of a `whole`: what is small beside that is never another."""
        usual = self.value
        is_usual = value <= DRIFT * usual and usual <= DRIFT * value
        if usual != usual or is_usual or max(value, usual) < _SMALL * whole:
            self._kept.append(value)
            self._others = []
            return
        if self._others and (value > usual) != (self._others[-1] > usual):
            self._others = []
        if not self._others:
            self.since = since
        self._others.append(value)

    def settle(self) -> None:
        """Take the new value as the usual one."""
        if self._others:
            self._kept = deque(self._others, maxlen=_KEPT)
            self._others = []


class Tuner:
    """The decisions so far. `due` is the step after which `look` is to be called, with what was measured since the last
    call, and with the link as it is where `wants_link` asks for it. Then `at_work` is the candidate to go on with."""

    def __init__(
        self,
        candidates: Sequence[PricedCandidate],
        link: Probed,
        *,
        trial_steps: int,
        check_every: int,
        step: int = 0,
        at_work: int | None = None,
    ) -> None:
        self.candidates = list(candidates)
        self.check_every = check_every
        self.predictor = Predictor(candidates, link)
        self.at_work = self._guess_fastest() if at_work is None else at_work
        self._links = [link]  # of the first round
        self.wasted = 0  # steps of trials that led to nothing, after the first round
        self._trial_steps = trial_steps + 1  # the first one begins with new buckets, and is not measured
        self._began = self._looked = step
        self._home: StepTimes | None = None  # of what was at work before this round; None: in the first
        self._origin = self.at_work
        self._tried: dict[int, StepTimes] = {}
        self._in_round = self.wants_link = len(candidates) > 1
        self._is_checked = False  # what was at work before has been tried once more
        self._promised: float | None = None
        self._left: set[int] = set()  # those that a round has replaced
        self._dwell, self._rests_until = check_every, step
        self._wanted = ""  # a drift that had no round yet, and what it was
        self._checks = 0  # since the link was measured
        self._forget()
        self._set_due(step)

    def _forget(self) -> None:
        """Times under one candidate say nothing of those under another."""
        self._communication, self._compute, self._slowness = _Usual(), _Usual(), _Usual(1.0)

    def _guess_fastest(self) -> int:
        """Before the first step, while compute is not known: one that is named later must communicate much less."""
        best = 0
        for i in range(1, len(self.candidates)):
            mine, other = self.predictor.predict(best), self.predictor.predict(i)
            if mine is None or (other is not None and TOO_SLOW * other < mine):
                best = i
        return best

    def _set_due(self, step: int) -> None:
        self._looked = step
        self.due = step + (self._trial_steps if self._in_round else self.check_every)

    # Looking ---------------------------------------------------------------------------------------------------

    def look(self, step: int, measured: StepTimes, link: Probed | None = None) -> list[Decision]:
        """Decide what to do next, from what was measured since the last call under the candidate at work."""
        if self._in_round:
            made = self._go_on(step, measured, link)
        else:
            made = self._watch(step, measured, link)
        self._set_due(step)
        return made

    def _watch(self, step: int, measured: StepTimes, link: Probed | None) -> list[Decision]:
        since, wall = self._looked, measured.wall_s
        self._communication.note(measured.communication_s + measured.hidden_s, wall, since)
        self._compute.note(measured.own_s, wall, since)
        if link is not None:
            self._slowness.note(link.slowness(self.predictor.link), 0.0, since)
            self._checks = 0
        self._checks += 1
        drift = self._describe_drift(measured)
        if drift:
            if link is not None:
                self.predictor.link = link
                self._slowness = _Usual(1.0)
            self._communication.settle()
            self._compute.settle()
            self._wanted = drift
        self.predictor.learn(self.at_work, measured)
        self.wants_link = self._is_link_asked_for(measured)
        if not self._wanted or step < self._rests_until:
            return []
        return self._reconsider(step, measured)

    def _describe_drift(self, measured: StepTimes) -> str:
        """In words; empty where nothing has changed for long enough."""
        wall, comm, own, link = measured.wall_s, self._communication, self._compute, self._slowness
        if comm.in_a_row >= IN_A_ROW or (comm.in_a_row and link.in_a_row >= IN_A_ROW):
            return (
                f"communication takes {show_s(comm.now)} of {show_s(wall)} per step since step {comm.since} "
                f"({show_s(comm.value)} before)"
            )
        if own.in_a_row >= IN_A_ROW:
            return f"compute takes {show_s(own.now)} since step {own.since} ({show_s(own.value)} before)"
        if link.in_a_row >= IN_A_ROW and not comm.in_a_row:
            factor = link.now
            change = f"{factor:.2g} times as slow" if factor > 1 else f"{1 / factor:.2g} times as fast"
            return f"the link is {change} since step {link.since}"
        return ""

    def _is_link_asked_for(self, measured: StepTimes) -> bool:
        """At the next check: where a drift is about to be certain, and else as often as it costs little."""
        if self._slowness.in_a_row or max(self._communication.in_a_row, self._compute.in_a_row) >= IN_A_ROW - 1:
            return True
        interval_s = max(1e-9, measured.wall_s * self.check_every)
        return self._checks >= max(1.0, self.predictor.link.took_s / (PROBE_SHARE * interval_s))

    # Rounds ----------------------------------------------------------------------------------------------------

    def _reconsider(self, step: int, measured: StepTimes) -> list[Decision]:
        """After a drift: begin a round, where something is predicted to be faster now."""
        why, self._wanted = self._wanted, ""
        self._home, self._origin, self._tried = measured, self.at_work, {self.at_work: measured}
        name = self.candidates[self.at_work].spec
        found = self._find_next(step)
        if found is None:
            return [Decision("stay", step, name, name, why)]
        self._in_round, self._is_checked = True, False
        return [self._try("try", step, found, why)]

    def _links_by_speed(self) -> list[Probed]:
        return sorted(self._links, key=lambda link: link.slowness(self._links[0]))

    def _find_next(self, step: int) -> int | None:
        """The next candidate worth a trial."""
        allowed = FREE_TRIALS * self._trial_steps + TRIAL_SHARE * (step - self._began)
        if len(self._tried) > MOST_TRIALS or (self._home is not None and self.wasted + self._trial_steps > allowed):
            return None
        best = min(m.wall_s for m in self._tried.values())
        guesses = {i: self.predictor.predict(i) for i in range(len(self.candidates)) if i not in self._tried}
        # How much of the best time so far a candidate may be predicted to take.
        limits = [TOO_SLOW if self._home is None else ABOUT if i < self._origin else 1 / GAIN for i in guesses]
        pairs = zip(guesses.items(), limits, strict=True)
        known = {i: s for (i, s), limit in pairs if s is not None and s <= best * limit}
        if known:
            return min(known, key=lambda i: (known[i], i))
        return next((i for i, s in guesses.items() if s is None), None)

    def _try(self, kind: str, step: int, index: int, why: str) -> Decision:
        before, self.at_work = self.candidates[self.at_work].spec, index
        guess = self.predictor.predict(index)
        best = min(m.wall_s for m in self._tried.values())
        gain = best / max(guess, 1e-9) if guess is not None and index not in self._tried else None
        self._promised = gain if kind == "try" else self._promised
        return Decision(kind, step, before, self.candidates[index].spec, why, gain)

    def _go_on(self, step: int, measured: StepTimes, link: Probed | None) -> list[Decision]:
        """A trial has ended: on to the next, or the end of the round. In the first one the link counts as the fastest
        that it was seen to be: what looks too slow for a trial is never measured, so that must not be chance."""
        if link is not None:
            self._links.append(link)
            self.predictor.link = self._links_by_speed()[0]
        self.predictor.learn(self.at_work, measured)
        self._tried[self.at_work] = measured
        self.predictor.own_s = min(m.own_s for m in self._tried.values())  # a trial may have been held up
        if self._home is not None:
            self.wasted += step - self._looked
        found = self._find_next(step)
        if found is not None:
            return [self._try("trial", step, found, "a trial")]
        if self._home is not None and not self._is_checked:
            best = self._find_winner()
            if best > self._origin and self._home.wall_s < SURE * self._tried[best].wall_s:
                self._is_checked = True  # what was at work before may have been measured in a bad moment
                return [self._try("trial", step, self._origin, "once more, to be sure")]
        self._in_round = False
        made = self._settle(step) if self._home is None else self._end_round(step)
        self._forget()
        self._checks = 0
        self.wants_link = False
        return [made]

    def _settle(self, step: int) -> Decision:
        """Those named first are preferred: one further on must be faster by as much as pays a change."""
        times = {i: m.wall_s for i, m in self._tried.items()}
        best = min(times)
        for i in sorted(times):
            if GAIN * times[i] < times[best]:
                best = i
        self.at_work, name = best, self.candidates[best].spec
        self.predictor.link = self._links_by_speed()[len(self._links) // 2]
        for i in sorted(times, key=lambda i: i == best):
            self.predictor.learn(i, self._tried[i])
        others = [f"{self.candidates[i].spec} {show_s(times[i])}" for i in sorted(times) if i != best]
        left = [
            f"{c.spec} (predicted {show_s(self.predictor.predict(i) or 0.0)})"
            for i, c in enumerate(self.candidates)
            if i not in times
        ]
        why = f"{show_s(times[best])} per step"
        why += f"; tried {', '.join(others)}" if others else ""
        why += f"; not tried {', '.join(left)}" if left else ""
        return Decision("settle", step, name, name, why)

    def _find_winner(self) -> int:
        """Of a round after a drift: what was at work before, unless another is faster by enough."""
        times = {i: m.wall_s for i, m in self._tried.items()}
        before, origin = times[self._origin], self._origin
        better = {i: s for i, s in times.items() if (s <= ABOUT * before if i < origin else GAIN * s <= before)}
        fastest = min(better.values(), default=before)
        return min((i for i, s in better.items() if s <= GAIN * fastest), default=origin)

    def _end_round(self, step: int) -> Decision:
        origin, last, best = self._origin, self.at_work, self._find_winner()
        self.at_work = best
        specs = [candidate.spec for candidate in self.candidates]
        if best == origin:
            self._rest(step, longer=True)
            took = ", ".join(f"{specs[i]} {show_s(m.wall_s)}" for i, m in self._tried.items())
            return Decision("back", step, specs[last], specs[origin], f"nothing is faster by a tenth ({took})")
        wall, before = self._tried[best].wall_s, self._tried[origin].wall_s
        self.wasted -= self._trial_steps  # its own
        self._rest(step, longer=best in self._left)
        self._left.add(origin)
        why = f"{show_s(wall)} per step, {show_s(before)} under {specs[origin]}"
        return Decision("change", step, specs[last], specs[best], why, self._promised, before / wall)

    def _rest(self, step: int, *, longer: bool) -> None:
        """No round before so many steps; more of them after each change back."""
        if longer:
            self._dwell = min(2 * self._dwell, MOST_DWELLS * self.check_every)
        self._rests_until = step + self._dwell
