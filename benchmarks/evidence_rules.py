"""Part of evidence.py: what was measured, and the rules that say whether a claim holds.

A row has checks. What training reaches (`as_good`, `better`, `equal`) and other checks of what the paper is about are
its main ones; the others are what it costs (bytes, time). A row

    holds                if every check that was measured does,
    does not hold here   if none of its main checks does,
    holds in part        otherwise,
    not measured         if no main check was.

On digits a variant is judged by its accuracy, on the others by its held-out loss: the mean over the seeds. The margin
is 0.5 points of accuracy, or 1 % of the other's loss. A variant is as good as another if it is not worse by more than
the margin, or than the other's standard deviation over the seeds if that is more: its own spread is no excuse. It is
better if it is better by more than the margin, and than both standard deviations. A run that diverged (loss not finite,
or above 20) is worse than all. A step is faster than another if that one takes 5 % longer, or more.

Only runs of one place are compared: one machine, torch and Python. The text is Python's own standard library, so that
another version of Python has other samples.
"""

from __future__ import annotations

import copy
import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from evidence_tasks import STEPS, Run, Variant

POINTS, SHARE = 0.005, 0.01  # of the margin: accuracy, loss
FASTER = 1.05  # below this, two times are about the same
DIVERGED = 20.0
HOLDS, PART, NOT, UNKNOWN = "holds", "holds in part", "does not hold here", "not measured"


class Value(NamedTuple):
    """Over the seeds."""

    mean: float
    spread: float  # standard deviation
    seeds: int


class Results:
    """The lines of a results file, by what they are about; of each the last counts."""

    def __init__(self, lines: Iterable[dict[str, Any]], variants: dict[str, Variant]) -> None:
        self.variants = variants
        self.sessions: dict[str, dict[str, Any]] = {}
        self.runs: dict[str, dict[str, Any]] = {}
        self.places: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}  # the runs, by where they were made
        self.links: dict[tuple[str, float], dict[str, Any]] = {}
        self.errors: dict[str, str] = {}
        lines = list(lines)
        self.sessions |= {line["session"]: line for line in lines if line["kind"] == "session"}
        for line in lines:
            if line["kind"] == "run":
                self.runs[line["key"]] = line
                self.places.setdefault(self.place(line), {})[line["key"]] = line
            elif line["kind"] == "link":
                self.links[line["variant"], line["mbit"]] = line
            elif line["kind"] == "error":
                self.errors[line["key"]] = line["error"]
        for key in [*self.runs, *(f"{name} at {mbit:g} Mbit/s" for name, mbit in self.links)]:
            self.errors.pop(key, None)  # it came right in another attempt
        self.steps = {task: max((r["steps"] for r in self.runs.values() if r["task"] == task), default=n)
                      for task, n in STEPS.items()}  # fmt: skip

    def place(self, line: dict[str, Any]) -> tuple[str, ...]:
        """Machine, torch and Python of a line."""
        session = self.sessions.get(line["session"], {})
        return tuple(str(session.get(name, "")) for name in ("machine", "torch", "python"))

    def of_one_place(self, wanted: Sequence[tuple[str, str]]) -> Results:
        """With the runs of one place alone: the one that has most of these variants and tasks, of several the last."""
        best, most = self, -1
        for runs in self.places.values():
            here = copy.copy(self)
            here.runs = runs
            count = sum(len(here.of(name, task)) for name, task in wanted)
            if count >= most:
                best, most = here, count
        return best

    def of(self, name: str, task: str) -> list[dict[str, Any]]:
        """The runs of a variant on a task, by seed."""
        keys = (Run(task, self.variants[name], seed, self.steps[task]).key for seed in range(20))
        return [self.runs[key] for key in keys if key in self.runs]

    def value(self, name: str, task: str, field: str) -> Value | None:
        """Mean and spread of what a variant came to; a diverged run makes the loss infinite."""
        found = [run[field] for run in self.of(name, task) if field in run]
        if not found:
            return None
        if any(x is None or (field == "loss" and x > DIVERGED) for x in found):
            return Value(math.inf, 0.0, len(found))
        return Value(statistics.mean(found), statistics.stdev(found) if len(found) > 1 else 0.0, len(found))

    def badness(self, name: str, task: str) -> Value | None:
        """What is compared: lower is better."""
        loss = self.value(name, task, "loss")
        if task != "digits" or loss is None or not math.isfinite(loss.mean):
            return loss
        right = self.value(name, task, "accuracy")
        assert right is not None
        return right._replace(mean=1 - right.mean)

    def step_s(self, name: str, mbit: float) -> float | None:
        line = self.links.get((name, mbit))
        return None if line is None else line["step_s"]


class Outcome(NamedTuple):
    holds: bool | None  # None: not measured
    told: str


class Check(NamedTuple):
    """One thing that must be so; `judge` says whether it is."""

    text: str
    main: bool
    judge: Callable[[Results], Outcome]


def verdict(checks: Sequence[Check], results: Results) -> str:
    outcomes = [(check, check.judge(results).holds) for check in checks]
    main = [holds for check, holds in outcomes if check.main and holds is not None]
    if not main:
        return UNKNOWN
    if not any(main):
        return NOT
    return HOLDS if all(holds is not False for _, holds in outcomes) else PART


def read(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """All lines; one that a cut run left half written is left out."""
    return [json.loads(line) for path in paths for line in path.read_text("utf-8").splitlines() if line.endswith("}")]


def speed(mbit: float) -> str:
    return f"{mbit / 1000:g} Gbit/s" if mbit >= 1000 else f"{mbit:g} Mbit/s"


def all_of(*checks: list[Check]) -> list[Check]:
    return list(chain.from_iterable(checks))


# The checks --------------------------------------------------------------------------------------------------


def margin(other: Value, task: str) -> float:
    return POINTS if task == "digits" else SHARE * other.mean


def told(results: Results, name: str, task: str) -> str:
    """As in 98.3 ± 0.2 %, or 2.241 ± 0.004."""
    loss = results.value(name, task, "loss")
    if loss is None:
        return "not measured"
    if not math.isfinite(loss.mean):
        return "diverged"
    right = results.value(name, task, "accuracy")
    if task == "digits" and right is not None:
        return f"{right.mean * 100:.1f} ± {right.spread * 100:.1f} %"
    return f"{loss.mean:.3f} ± {loss.spread:.3f}"


def _compared(a: str, b: str, task: str, rule: Callable[[float, Value, Value], bool]) -> Callable[[Results], Outcome]:
    """`rule` of how much worse a is than b, and of both."""

    def judge(results: Results) -> Outcome:
        x, y = results.badness(a, task), results.badness(b, task)
        if x is None or y is None:
            return Outcome(None, "not measured")
        text = f"{told(results, a, task)} against {told(results, b, task)}"
        if not math.isfinite(y.mean):
            return Outcome(rule(-math.inf if math.isfinite(x.mean) else math.inf, x, Value(0.0, 0.0, y.seeds)), text)
        return Outcome(rule(x.mean - y.mean, x, y), text)

    return judge


def as_good(a: str, b: str, *tasks: str) -> list[Check]:
    def check(task: str) -> Check:
        judge = _compared(a, b, task, lambda worse, _, other: worse <= max(margin(other, task), other.spread))
        return Check(f"{task}: `{a}` is as good as `{b}`", True, judge)

    return [check(task) for task in tasks]


def better(a: str, b: str, *tasks: str) -> list[Check]:
    def check(task: str) -> Check:
        judge = _compared(a, b, task, lambda worse, x, y: -worse > max(margin(y, task), x.spread, y.spread))
        return Check(f"{task}: `{a}` is better than `{b}`", True, judge)

    return [check(task) for task in tasks]


def close(a: str, b: str, task: str, most: float) -> list[Check]:
    """Stricter than `as_good`: neither spread counts. For runs with equal seeds."""

    def judge(results: Results) -> Outcome:
        x, y = results.badness(a, task), results.badness(b, task)
        if x is None or y is None:
            return Outcome(None, "not measured")
        text = f"{told(results, a, task)} against {told(results, b, task)}, {100 * (x.mean / y.mean - 1):+.2f} %"
        return Outcome(x.mean <= (1 + most) * y.mean, text)

    return [Check(f"{task}: the loss of `{a}` is at most {100 * most:g} % above that of `{b}`", True, judge)]


def equal(a: str, b: str, task: str, within: float) -> list[Check]:
    """The losses of every seed, to rounding."""

    def judge(results: Results) -> Outcome:
        ours = {r["seed"]: r["loss"] for r in results.of(a, task)}
        theirs = {r["seed"]: r["loss"] for r in results.of(b, task)}
        both = sorted(set(ours) & set(theirs))
        if not both:
            return Outcome(None, "not measured")
        if any(ours[s] is None or theirs[s] is None for s in both):
            return Outcome(False, "diverged")
        apart = max(abs(ours[s] - theirs[s]) / abs(theirs[s]) for s in both)
        return Outcome(apart <= within, f"losses differ by {apart:.1e} of their size at most")

    return [Check(f"{task}: the losses of `{a}` are those of `{b}` to {within:g}", True, judge)]


def _share(a: str, b: str, task: str, field: str, least: float, most: float, unit: str) -> Callable[[Results], Outcome]:
    def judge(results: Results) -> Outcome:
        x, y = results.value(a, task, field), results.value(b, task, field)
        if x is None or y is None or not y.mean:
            return Outcome(None, "not measured")
        share = x.mean / y.mean
        return Outcome(least <= share <= most, f"{share:.3g} {unit}")

    return judge


def fewer_bytes(a: str, b: str, most: float, task: str = "text") -> list[Check]:
    text = f"{task}: `{a}` sends at most {most:g} of the bytes of `{b}`"
    return [Check(text, False, _share(a, b, task, "bytes", 0.0, most, "of its bytes"))]


def ring_bytes(a: str, workers: int, task: str = "text") -> list[Check]:
    """A rank sends 2(N-1)/N of 4 bytes a parameter in a step, and little beside."""

    def judge(results: Results) -> Outcome:
        runs = results.of(a, task)
        if not runs:
            return Outcome(None, "not measured")
        share = runs[0]["bytes"] / (2 * (workers - 1) / workers * 4 * runs[0]["parameters"] * runs[0]["steps"])
        return Outcome(0.999 <= share <= 1.02, f"{share:.4f} of 2(N-1)/N times 4 bytes a parameter")

    return [Check(f"`{a}` sends 2(N-1)/N of the gradients' bytes", True, judge)]


def less_kept(a: str, b: str, most: float, task: str = "text") -> list[Check]:
    text = f"a rank keeps at most {most:g} of parameters and optimizer state under `{a}`"
    return [Check(text, True, _share(a, b, task, "kept_bytes", 0.0, most, f"of those under `{b}`"))]


def at_most(a: str, task: str, field: str, most: float, text: str) -> list[Check]:
    def judge(results: Results) -> Outcome:
        value = results.value(a, task, field)
        return Outcome(None, "not measured") if value is None else Outcome(value.mean <= most, f"{value.mean:.3g}")

    return [Check(text, True, judge)]


def less_noise(a: str, b: str) -> list[Check]:
    text = f"the noise of `{a}` is below that of `{b}` on Gaussian numbers"

    def judge(results: Results) -> Outcome:
        x, y = results.value(a, "noise", "noise"), results.value(b, "noise", "noise")
        if x is None or y is None:
            return Outcome(None, "not measured")
        return Outcome(x.mean < y.mean, f"{x.mean:.3g} against {y.mean:.3g} of the squared norm")

    return [Check(text, True, judge)]


def unbiased(a: str) -> list[Check]:
    """The mean of n roundings is off by about 1/n of one rounding's noise, as it is without a bias."""

    def judge(results: Results) -> Outcome:
        one, mean = results.value(a, "noise", "noise"), results.value(a, "noise", "bias")
        if one is None or mean is None:
            return Outcome(None, "not measured")
        share = mean.mean / one.mean * results.steps["noise"]
        return Outcome(share <= 1.3, f"{share:.2f} times what n unbiased roundings leave")

    return [Check(f"`{a}` is unbiased: the mean of many roundings comes to the number", True, judge)]


def more_windows(a: str, b: str, factor: float) -> list[Check]:
    text = f"one worker 4 times as slow: `{a}` makes {factor:g} times the windows a second of `{b}`"
    return [Check(text, True, _share(a, b, "slow", "windows_s", factor, math.inf, "times as many"))]


def faster(a: str, b: str, mbit: float, factor: float = FASTER, main: bool = False) -> list[Check]:
    times = "faster than" if factor == FASTER else f"at least {factor:g} times as fast as"

    def judge(results: Results) -> Outcome:
        ours, theirs = results.step_s(a, mbit), results.step_s(b, mbit)
        if ours is None or theirs is None:
            return Outcome(None, "not measured")
        told = f"{theirs / ours:.2f} times as fast ({ours * 1e3:.0f} ms against {theirs * 1e3:.0f} ms)"
        return Outcome(theirs / ours > factor, told)

    return [Check(f"{speed(mbit)}: a step of `{a}` is {times} one of `{b}`", main, judge)]


def at_the_bound(a: str, mbit: float, nbytes: float, factor: float) -> list[Check]:
    """The step against the time that `nbytes` need on the link."""
    text = f"{speed(mbit)}: a step of `{a}` takes at most {factor:g} times what its bytes need on the link"

    def judge(results: Results) -> Outcome:
        ours, bound = results.step_s(a, mbit), nbytes * 8 / (mbit * 1e6)
        if ours is None:
            return Outcome(None, "not measured")
        return Outcome(
            ours <= factor * bound, f"{ours / bound:.2f} times ({ours * 1e3:.0f} ms against {bound * 1e3:.0f} ms)"
        )

    return [Check(text, False, judge)]


def near_best(a: str, others: Sequence[str], mbit: float, factor: float) -> list[Check]:
    text = f"{speed(mbit)}: a step of `{a}` takes at most {factor:g} times that of the fastest it chooses from"

    def judge(results: Results) -> Outcome:
        ours, theirs = results.step_s(a, mbit), [results.step_s(b, mbit) for b in others]
        if ours is None or None in theirs:
            return Outcome(None, "not measured")
        best = min(x for x in theirs if x is not None)
        return Outcome(
            ours <= factor * best, f"{ours / best:.2f} times ({ours * 1e3:.0f} ms against {best * 1e3:.0f} ms)"
        )

    return [Check(text, True, judge)]
