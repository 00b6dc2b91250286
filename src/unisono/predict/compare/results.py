"""What the runs of a comparison amount to: all ranks' steps as one curve, a row for each method and number of workers,
and a sentence. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

PARTS = ("compute", "communication", "waiting", "compression", "data")
STEP_FIELDS = (
    *("step", "end", "wall", "compute", "communication", "waiting", "compression", "data", "hidden"),
    *("bytes_sent", "loss", "finite", "samples", "arrivals"),
)
Arrival = tuple[str, float, float, float]  # of a collective: its name, arrived at, the program stood still from and to
SMOOTHED = 10  # steps over which a loss is smoothed


@dataclass
class RankSteps:
    """What one rank wrote: about itself, and each field of its steps as a column."""

    about: dict[str, Any]
    columns: dict[str, list[Any]]

    def __len__(self) -> int:
        return len(self.columns["step"])


@dataclass
class Curve:
    """All ranks' steps as one, an entry a step; None where something is not known.

    A step is over when the last rank has made it; its loss and the parts of its time are means over the ranks; samples
    are those of all ranks, bytes those that one rank sends.
    """

    times: list[float] = field(default_factory=list)  # since the first step began
    losses: list[float | None] = field(default_factory=list)
    samples: list[int | None] = field(default_factory=list)  # so far
    sent: list[float] = field(default_factory=list)  # so far
    parts: dict[str, list[float]] = field(default_factory=dict)
    not_measured: frozenset[str] = frozenset()
    bytes_by_formula: bool = False
    broke_at: int | None = None  # the first step whose loss is nan or inf
    about: dict[str, Any] = field(default_factory=dict)  # what rank 0, or the first that trained, wrote of itself

    def __len__(self) -> int:
        return len(self.times)


def merge_ranks(ranks: Sequence[RankSteps]) -> Curve:
    """One curve of those ranks that trained (a server of parameters has no steps), as long as the shortest."""
    trained = [rank for rank in ranks if len(rank)]
    if not trained:
        return Curve()
    count, each = min(map(len, trained)), len(trained)
    names = frozenset(name for rank in trained for name in rank.about["not_measured"])
    curve = Curve(not_measured=names, about=trained[0].about)
    curve.bytes_by_formula = any(rank.about["bytes_by_formula"] for rank in trained)
    curve.parts = {name: [] for name in PARTS}
    sent = 0.0
    for i in range(count):
        row = {name: [rank.columns[name][i] for rank in trained] for name in STEP_FIELDS}
        curve.times.append(max(rank.columns["end"][i] - rank.about["start"] for rank in trained))
        finite = all(row["finite"])
        if not finite and curve.broke_at is None:
            curve.broke_at = i + 1
        known = finite and None not in row["loss"]
        curve.losses.append(sum(row["loss"]) / each if known else math.nan if not finite else None)
        curve.samples.append(None if None in row["samples"] else max(row["samples"]))
        sent += sum(row["bytes_sent"]) / each
        curve.sent.append(sent)
        late = _find_waits(row["arrivals"])
        for name in PARTS:
            curve.parts[name].append(sum(row[name]) / each)
        # The ledger counts a reducer's own work as a part of communication, and waits whose end it does not know.
        exchanged = curve.parts["communication"][-1] - curve.parts["compression"][-1]
        waited = min(sum(late) / each, exchanged)
        curve.parts["communication"][-1] = exchanged - waited
        curve.parts["waiting"][-1] += waited
    return curve


def _find_waits(arrivals: Sequence[Sequence[Arrival]]) -> list[float]:
    """How long each rank stood still until the last one arrived, over one step's collectives. All ranks are on one
    machine, so that their clocks are one.

    >>> _find_waits([[("gradients/1", 10.0, 10.0, 14.0)], [("gradients/1", 13.0, 13.0, 14.0)]])
    [3.0, 0.0]
    """
    last: dict[str, float] = {}
    for key, at, _, _ in (arrival for mine in arrivals for arrival in mine):
        last[key] = max(last.get(key, at), at)
    return [sum(max(0.0, min(last[key], end) - start) for key, _, start, end in mine) for mine in arrivals]


def smooth(losses: Sequence[float | None], window: int = SMOOTHED) -> list[float | None]:
    """The mean of the last `window` steps, of fewer at the beginning; None where one of them is not known.

    >>> smooth([4.0, 2.0, 0.0], window=2)
    [4.0, 3.0, 1.0]
    """
    smoothed: list[float | None] = []
    for i in range(len(losses)):
        last = [x for x in losses[max(0, i - window + 1) : i + 1] if x is not None]
        smoothed.append(sum(last) / len(last) if len(last) == min(window, i + 1) else None)
    return smoothed


ONE_WORKER = "one worker"  # the method of the run that speed-ups are measured against
WARM_UP = 5  # steps at the beginning of each run that are not measured
_ALIKE = 0.02  # methods that differ by less are not told apart
_LONG = 3  # times as many steps as a method's beginning has


@dataclass
class Trial:
    """One run of the script."""

    method: str
    workers: int
    round: int
    curve: Curve
    failure: str = ""  # the first line of why it failed
    output: str = ""  # where its output lies

    def describe(self) -> str:
        """Method and number of workers."""
        return _name(self)


@dataclass
class Row:
    """A method on so many workers, over all rounds; None where something is not known.

    Times of a step, and samples a second, are those of one round, the middle one by its step time, so that the parts
    add up. All else is the median over the rounds.
    """

    method: str
    workers: int
    steps: int = 0
    step_s: float | None = None
    parts_s: dict[str, float | None] = field(default_factory=dict)  # of a step
    bytes_a_step: float | None = None  # that one worker sends
    bytes_by_formula: bool = False
    samples_a_second: float | None = None
    speed_up: float | None = None
    efficiency: float | None = None
    loss_at_time: float | None = None
    loss_at_samples: float | None = None
    time_to_target_s: float | None = None
    reached: int = 0  # rounds in which the target was reached
    rounds: int = 0
    note: str = ""  # why it failed, or that it diverged
    failed: bool = False
    diverged: bool = False
    is_best: bool = False


@dataclass
class Comparison:
    """The rows of a comparison, the runs that they come from, and what they are compared at."""

    rows: list[Row]
    trials: list[Trial]
    target: float | None = None
    equal_time_s: float | None = None
    equal_samples: float | None = None
    finding: str = ""

    @property
    def best(self) -> Row | None:
        """The best row; None if no method has run to its end and learned."""
        return next((row for row in self.rows if row.is_best), None)


def compare(trials: Sequence[Trial], target: float | None = None) -> Comparison:
    """Make the rows of a comparison from its runs, and find the best."""
    keys = list(dict.fromkeys((trial.method, trial.workers) for trial in trials))
    groups = {key: [t for t in trials if (t.method, t.workers) == key] for key in keys}
    rows = {key: _measure(*key, group, target) for key, group in groups.items()}
    sound = [t for key, group in groups.items() if not (rows[key].failed or rows[key].diverged) for t in group]
    ends = [trial.curve for trial in sound if len(trial.curve)]
    found = Comparison(list(rows.values()), list(trials), target)
    if ends:
        found.equal_time_s = min(curve.times[-1] for curve in ends)
        counts = [curve.samples[-1] for curve in ends]
        known = [count for count in counts if count is not None]
        found.equal_samples = min(known) if len(known) == len(counts) else None
    for key, group in groups.items():
        if not rows[key].failed:
            _place(rows[key], [trial.curve for trial in group], found)
    base = next((row.samples_a_second for row in found.rows if row.workers == 1), None)
    for row in found.rows:  # the ratio of the times that the same samples take: one worker's over each row's
        if base and row.samples_a_second is not None:
            row.speed_up = row.samples_a_second / base
            row.efficiency = row.speed_up / row.workers
    _judge(found)
    return found


def _measure(method: str, workers: int, trials: Sequence[Trial], target: float | None) -> Row:
    row = Row(method, workers, rounds=len(trials))
    failures = [trial.failure for trial in trials if trial.failure]
    row.failed, row.note = bool(failures), next(iter(failures), "")
    curves = [trial.curve for trial in trials if not trial.failure and len(trial.curve)]
    if not curves:
        return row
    row.steps = min(map(len, curves))
    middle = sorted(curves, key=lambda curve: _per_step(curve, curve.times))[(len(curves) - 1) // 2]
    row.step_s = _per_step(middle, middle.times)
    row.bytes_a_step = median(_per_step(curve, curve.sent) for curve in curves)
    row.bytes_by_formula = any(curve.bytes_by_formula for curve in curves)
    for name in PARTS:
        unknown = any(name in curve.not_measured for curve in curves)
        row.parts_s[name] = None if unknown else fmean(middle.parts[name][_warm_up(middle) :])
    first, seconds = _warm_up(middle), row.step_s * (len(middle) - _warm_up(middle))
    begin, end = (middle.samples[first - 1] if first else 0), middle.samples[-1]
    row.samples_a_second = None if begin is None or end is None or seconds <= 0 else (end - begin) / seconds
    if target is not None:
        times = [found for curve in curves if (found := find_target(curve, target)) is not None]
        row.reached = len(times)
        row.time_to_target_s = median(times) if len(times) == len(curves) else None
    row.note = row.note or next(filter(None, map(_find_divergence, curves)), "")
    row.diverged = bool(row.note) and not row.failed
    row.note = row.note or _find_short(curves[0].about.get("begins"), row.steps)
    return row


def _find_short(begins: Sequence[Any] | None, steps: int) -> str:
    """What is to be said where a run was mostly, or only, the beginning of a method (its setting, and its length)."""
    if not begins or steps >= _LONG * begins[1]:
        return ""
    name, count = begins
    return (
        f"its first {count} steps exchange as allreduce does ({name}={count}), and the run had {steps}: compare it "
        f"over more steps, or with a smaller {name}="
    )


def _warm_up(curve: Curve) -> int:
    return min(WARM_UP, len(curve) // 2)


def _per_step(curve: Curve, so_far: Sequence[float]) -> float:
    """The mean of a step, after warm-up. A mean, as methods that exchange now and then have steps of two kinds."""
    first = _warm_up(curve)
    return (so_far[-1] - (so_far[first - 1] if first else 0.0)) / (len(so_far) - first)


def _find_divergence(curve: Curve) -> str:
    if curve.broke_at is not None:
        return f"diverged: its loss is not a finite number from step {curve.broke_at} on"
    smoothed = smooth(curve.losses)
    start, end = curve.losses[0], smoothed[-1]
    if len(curve) >= SMOOTHED and start is not None and end is not None and end > start:
        return f"diverged: its loss began at {start:.4g} and ended at {end:.4g}"
    return ""


def find_target(curve: Curve, target: float) -> float | None:
    """When the loss, smoothed over ten steps, was first at or below the target; None: never."""
    for i, loss in enumerate(smooth(curve.losses)):
        if i >= SMOOTHED - 1 and loss is not None and loss <= target:
            return curve.times[i]
    return None


def loss_at(curve: Curve, along: Sequence[float | None], at: float) -> float | None:
    """The smoothed loss where `along` (times, or samples so far) is `at`: on the line between two steps."""
    smoothed = smooth(curve.losses)
    before: tuple[float, float | None] | None = None
    for x, loss in zip(along, smoothed, strict=True):
        if x is None:
            return None
        if x >= at:
            if x == at or before is None or before[1] is None or loss is None:
                return loss if x == at else None
            share = (at - before[0]) / (x - before[0])
            return before[1] + share * (loss - before[1])
        before = (x, loss)
    return None


def _place(row: Row, curves: Sequence[Curve], found: Comparison) -> None:
    """Set the row's losses at the largest time, and number of samples, that all runs have reached."""

    def middle(along: Callable[[Curve], Sequence[float | None]], at: float | None) -> float | None:
        if at is None or row.diverged:
            return None
        losses = [loss_at(curve, along(curve), at) for curve in curves]
        known = [loss for loss in losses if loss is not None]
        return median(known) if known and len(known) == len(losses) else None

    row.loss_at_time = middle(lambda curve: curve.times, found.equal_time_s)
    row.loss_at_samples = middle(lambda curve: curve.samples, found.equal_samples)


# What was found ----------------------------------------------------------------------------------------------------


def _judge(found: Comparison) -> None:
    """Mark the best row and say so in a sentence."""
    rows = [row for row in found.rows if not row.failed and not row.diverged and row.step_s is not None]
    if not rows:
        found.finding = "No method has run to its end and learned."
        return
    criteria: list[tuple[str, Callable[[Row], float | None]]] = [
        ("target", lambda row: row.time_to_target_s),
        ("loss", lambda row: row.loss_at_time),
        ("samples", lambda row: None if row.samples_a_second is None else -row.samples_a_second),
        ("step", lambda row: row.step_s),
    ]
    for kind, key in criteria:
        known = [(value, row) for row in rows if (value := key(row)) is not None]
        if known and (kind == "target" or len(known) == len(rows)):
            ranked = [row for _, row in sorted(known, key=lambda pair: pair[0])]
            ranked[0].is_best = True
            found.finding = _say(found, kind, ranked)
            return


def _name(row: Row | Trial) -> str:
    return row.method if row.workers == 1 else f"{row.method} on {row.workers} workers"


def _name_best(row: Row) -> str:
    if row.workers == 1 or row.speed_up is None:
        return _name(row)
    return f"{_name(row)} ({row.speed_up:.2g} times as fast as one)"


def _say(found: Comparison, kind: str, ranked: Sequence[Row]) -> str:
    best = ranked[0]
    second = ranked[1] if len(ranked) > 1 else None
    if kind == "target":
        text = f"{_name_best(best)} is the first to reach loss {found.target:g}, after {best.time_to_target_s:.3g} s"
        if second is not None and second.time_to_target_s and best.time_to_target_s:
            text += _then(second, second.time_to_target_s / best.time_to_target_s, "takes", "times as long")
    elif kind == "loss":
        text = f"{_name_best(best)} has the lowest loss after {found.equal_time_s:.3g} s, {best.loss_at_time:.4g}"
        if second is not None and second.loss_at_time is not None and best.loss_at_time is not None:
            close = second.loss_at_time - best.loss_at_time < _ALIKE * abs(best.loss_at_time)
            text += f"; {_name(second)} has {second.loss_at_time:.4g}" + (", hardly more" if close else "")
    elif kind == "samples":
        text = f"{_name_best(best)} trains on the most samples per second, {best.samples_a_second:,.0f}"
        if second is not None and second.samples_a_second and best.samples_a_second:
            text += _then(second, best.samples_a_second / second.samples_a_second, "takes", "times as long for as many")
    else:
        text = f"{_name_best(best)} has the shortest steps, {1e3 * (best.step_s or 0):.3g} ms"
    missed = [row for row in found.rows if found.target is not None and row.time_to_target_s is None]
    if kind != "target" and missed:
        text = f"No method reached loss {found.target:g}; {text}"
    return f"{text[0].upper()}{text[1:]}." if text.startswith(ONE_WORKER) else f"{text}."


def _then(second: Row, ratio: float, verb: str, unit: str) -> str:
    if not math.isfinite(ratio) or ratio < 1 + _ALIKE:
        return f"; {_name(second)} {verb} as long"
    return f"; {_name(second)} {verb} {ratio:.3g} {unit}"
