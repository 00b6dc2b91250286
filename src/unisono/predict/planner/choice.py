"""From what was measured to a ranking: which method is first, why, what would change the answer; and a plan as text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from unisono.predict.costs import Anatomy, Network, Prediction, predict, replay
from unisono.predict.planner.candidates import GRADES
from unisono.predict.planner.measured import Measured, MeasuredMethod
from unisono.predict.planner.meshes import advise_mesh
from unisono.text_table import format_rows
from unisono.units import show_rate, show_size
from unisono.units import show_s as show_time

show_s = partial(show_time, fixed=True)  # as all stand in columns
show_bits = partial(show_rate, digits=2)
_NEAR = 0.05  # within so much of the best, the method with the least effect on training is first
_EXPOSED = 0.1  # of a step: communication that is worth nothing more to be done about
_SLOWEST, _FASTEST = 1e5, 1e13  # bits a second: where a crossing is looked for


@dataclass(frozen=True)
class Ranked:
    """A method with its predicted step."""

    method: MeasuredMethod
    prediction: Prediction

    @property
    def spec(self) -> str:
        """The method's spec."""
        return self.method.spec

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.prediction.timing.total

    @property
    def to_a_loss(self) -> float:
        """Seconds for as much as an exact step learns; inf: not measured, or it diverged."""
        return self.seconds / self.method.learning.share if self.method.learning.share else math.inf


@dataclass(frozen=True)
class Choice:
    """ranked: allowed, the first choice first. others: they change training. left_out: not predicted, and why."""

    ranked: list[Ranked]
    others: list[Ranked]
    left_out: list[MeasuredMethod]
    reasons: list[str]
    advice: list[str]


def choose(measured: Measured, allow: Sequence[str]) -> Choice:
    """Rank by the predicted time to a loss; among those that are about as fast, the least effect on training first."""
    left_out = [m for m in measured.methods if m.anatomy is None and m.verified_s is None]
    if measured.network is None:
        return Choice([], [], left_out, [], [])
    rows = [Ranked(m, predict(m.anatomy, measured.network)) for m in measured.methods if m.anatomy is not None]
    allowed = rank([row for row in rows if row.method.convergence.grade in allow])
    others = sorted((row for row in rows if row.method.convergence.grade not in allow), key=_by_time)
    if not allowed:
        return Choice([], others, left_out, [], [])
    advice = _advise_batch(measured, allowed[0])
    if measured.settings:
        advice.append(f"Memory is short: {measured.settings[0]} fits (see `unisono memory`).")
    timing = allowed[0].prediction.timing
    advice += advise_mesh(measured, timing.total, timing.exposed + timing.compression)
    return Choice(allowed, others, left_out, _explain(measured, measured.network, allowed), advice)


def rank(rows: Sequence[Ranked]) -> list[Ranked]:
    """Order methods: the first choice, then the others by time; last those of which nobody knows what they learn."""
    ordered = sorted(rows, key=_by_time)
    if not ordered:
        return []
    near = [row for row in ordered if _is_near(row, ordered[0])]
    first = min(near, key=lambda row: (GRADES.index(row.method.convergence.grade), *_by_time(row)))
    return [first, *(row for row in ordered if row is not first)]


def _by_time(row: Ranked) -> tuple[float, bool, float]:
    return row.to_a_loss, row.method.learning.share == 0.0, row.seconds


def _is_near(row: Ranked, best: Ranked) -> bool:
    """About as fast to a loss; where that is not known of both, in a step."""
    if math.isinf(best.to_a_loss):
        return row.seconds <= best.seconds * (1 + _NEAR)
    return row.to_a_loss <= best.to_a_loss * (1 + _NEAR)


# Why, and what would change it ------------------------------------------------------------------------------------


def _explain(measured: Measured, network: Network, ranked: Sequence[Ranked]) -> list[str]:
    first = ranked[0]
    timing = first.prediction.timing
    dense = next((row for row in ranked if row.spec == "allreduce"), None)
    operations = dense.method.anatomy.operations if dense is not None and dense.method.anatomy is not None else []
    plain = sum(network.seconds(operation) for operation in operations)
    said = [f"{first.spec}: " + (f"gradients in full take {show_s(plain)} on this network, " if plain else "")]
    said[0] += f"compute {show_s(measured.compute_s)}."
    if dense is not None and first is not dense:
        said.append(
            f"It takes {show_s(timing.total)} per step, {dense.seconds / timing.total:.1f} times as fast as allreduce "
            f"({show_s(dense.seconds)}): {show_s(timing.exposed)} of it waits for messages, "
            f"{show_s(timing.compression)} for compression."
        )
        said += _explain_learning(first, dense)
    elif timing.exposed < _EXPOSED * timing.total:
        said.append(f"Messages are hidden behind compute but for {show_s(timing.exposed)}: sending less gains nothing.")
    elif len(ranked) > 1:
        said.append(f"Nothing that sends less is faster by more than {_NEAR:.0%}: compression costs what it saves.")
    near = [row.spec for row in ranked[1:] if _is_near(row, first)]
    if near:
        said.append(f"About as fast, with more effect on training or slightly slower: {', '.join(near[:4])}.")
    said += _explain_unknown(ranked)
    if (change := _describe_crossing(network, ranked)) is not None:
        said.append(change)
    return said


def _explain_learning(first: Ranked, dense: Ranked) -> list[str]:
    """What the gain in a step is to a loss."""
    found = first.method.learning
    if not found.share or found.low == 1.0:
        return []
    faster = [dense.seconds * share / first.seconds for share in (found.share, found.low, found.high)]
    return [
        f"A sample teaches {found.words} of what it does under allreduce (small models, see docs/evidence.md): to a "
        f"loss it is {faster[0]:.1f} times as fast ({faster[1]:.1f} - {faster[2]:.1f})."
    ]


def _explain_unknown(ranked: Sequence[Ranked]) -> list[str]:
    """Methods that may be better than their place says."""
    unknown = [row.spec for row in ranked if row.method.learning.share is None]
    if not unknown:
        return []
    place = "ranked last" if len(unknown) < len(ranked) else "ranked by their steps alone"
    return [
        f"How much a sample teaches was not measured with these settings, so they are {place}: {', '.join(unknown)}. "
        "`unisono compare` measures it on your program."
    ]


def _describe_crossing(network: Network, ranked: Sequence[Ranked]) -> str | None:
    """At which bandwidth another method becomes the first."""
    here, first = network.link.bits_per_s, ranked[0].method
    found: list[tuple[float, str]] = []
    for row in ranked[1:]:
        other, share = row.method, (row.method.learning.share or 0.0) / (first.learning.share or 1.0)
        if first.anatomy is not None and other.anatomy is not None and share:
            at = find_crossing(first.anatomy, other.anatomy, network, share)
            found += [(at, other.spec)] if at is not None else []
    above, below = [f for f in found if f[0] > here], [f for f in found if f[0] <= here]
    nearest = [("above", min(above, default=None)), ("below", max(below, default=None))]
    words = [f"{side} {show_bits(edge[0])} {edge[1]} wins" for side, edge in nearest if edge is not None]
    where = "Links" if network.hosts > 1 else "Memory"
    return f"{where} of {show_bits(here)} now; {'; '.join(words)}." if words else None


def find_crossing(first: Anatomy, other: Anatomy, network: Network, share: float = 1.0) -> float | None:
    """The bandwidth nearest to the present one at which `other` takes less time than `first`; None: at none.

    share: what it learns from a sample, of what `first` does.
    """

    def gap(bits_per_s: float) -> float:
        there = network.with_bandwidth(bits_per_s)
        return replay(first, there).total - replay(other, there).total / share  # above 0: the other wins

    here = network.link.bits_per_s
    if gap(here) > 0:
        return None
    for direction in (1, -1):  # go away from here by factors of two until the gap is above 0, then halve the interval
        far = here
        while _SLOWEST < far < _FASTEST:
            near, far = far, far * 2.0**direction
            if gap(far) > 1e-6:
                for _ in range(30):
                    middle = math.sqrt(near * far)
                    near, far = (near, middle) if gap(middle) > 1e-6 else (middle, far)
                return far
    return None


# Advice -----------------------------------------------------------------------------------------------------------


def _advise_batch(measured: Measured, first: Ranked) -> list[str]:
    """How large a batch saves time, and how large a one saves steps."""
    return [*_advise_batch_by_time(measured, first), *_advise_batch_by_noise(measured)]


def _advise_batch_by_noise(measured: Measured) -> list[str]:
    """By the gradient noise scale, roughly: few steps were measured, near the start of the training."""
    if measured.noise_batches is None:
        return []
    samples = ""
    if measured.batch is not None:
        samples = f" ({measured.noise_batches * measured.batch * measured.ranks:,.2g} samples)"
    return [
        f"The gradient noise scale is about {measured.noise_batches:.2g} times the global batch{samples}: up to there "
        "a larger batch saves steps nearly in proportion, beyond it few. Measured in a few first steps; it grows as "
        "the loss falls, and `unisono report` has it of a whole run."
    ]


def _advise_batch_by_time(measured: Measured, first: Ranked) -> list[str]:
    """A larger batch, or accumulation, where communication takes much of a step."""
    timing = first.prediction.timing
    waits = timing.exposed + timing.compression
    if waits <= _EXPOSED * timing.total or not timing.compute:
        return [
            f"Batch: keep it; only {waits / timing.total:.0%} of a step is not compute, so a larger one gains little."
        ]
    times = math.ceil(waits * (1 - _EXPOSED) / _EXPOSED / timing.compute)
    said = [
        f"Batch: {waits / timing.total:.0%} of a step is not compute. {times} times the batch a worker would make it "
        f"{_EXPOSED:.0%}, if compute grows with the batch (it was measured at yours only)."
    ]
    if measured.batch is not None:
        fits = _largest_batch(measured)
        room = f"; memory holds about {fits}" if fits is not None else ""
        said[0] += f" That is {measured.batch * times} samples per worker{room}."
    said.append(
        f"Where memory is short, accumulate={times} has the same effect: {_with_accumulation(first.spec, times)}."
    )
    adam = "adam" in measured.optimizer.lower()
    rule, factor = ("the square root of the batch", math.sqrt(times)) if adam else ("the batch", times)
    if measured.learning_rate is not None:
        said.append(
            f"The learning rate usually grows with {rule}: {measured.learning_rate:g} would become "
            f"{measured.learning_rate * factor:.3g}, after a warm-up. A rule of thumb: try it with `unisono compare`."
        )
    return said


def _with_accumulation(spec: str, times: int) -> str:
    if "(" not in spec and spec in ("allreduce", "zero"):
        return f"{spec}(accumulate={times})"
    if spec.startswith(("zero(", "allreduce(")):
        return spec[:-1] + f", accumulate={times})"
    return f"allreduce(reducer={spec}, accumulate={times})"


def _largest_batch(measured: Measured) -> int | None:
    """By memory: what grows with the batch is taken to be what a step held beside parameters and gradients."""
    room = measured.device_bytes or measured.host_bytes // measured.per_host
    if measured.batch is None or not room or not measured.memory_bytes:
        return None
    fixed = min(measured.memory_bytes, 4 * measured.gradient_bytes)
    growing = max(1, measured.memory_bytes - fixed)
    return max(measured.batch, int(measured.batch * max(0, room - fixed) / growing))


# In words ---------------------------------------------------------------------------------------------------------


_HEAD = (
    *("method", "step", "interval", "compute", "exposed", "hidden", "compress", "sent", "memory", "training"),
    *("learns", "to a loss"),
)


def write_report(measured: Measured, choice: Choice) -> str:
    """The whole plan as text."""
    incomplete = f"Incomplete: {measured.unfinished}." if measured.unfinished else ""
    parts = [incomplete, _describe_run(measured), _describe_network(measured)]
    verified = any(row.method.verified_s is not None for row in choice.ranked)
    if choice.ranked:
        parts.append("\n".join(_table(choice.ranked, verified, _find_compared(measured))))
        parts.append("\n".join([*choice.reasons, *choice.advice]))
    elif measured.unfinished:
        parts.append("Nothing could be predicted.")
    if choice.others:
        words = "These change training: try them with `unisono compare`, or rank them too with --allow all."
        parts.append("\n".join([words, *_table(choice.others, verified)]))
    reasons: dict[str, list[str]] = {}
    for method in choice.left_out:
        reasons.setdefault(method.why, []).append(method.spec)
    parts.append("\n".join(f"{', '.join(specs)}: {why}" for why, specs in reasons.items()))
    parts.append(_conclude(measured, choice))
    return "\n\n".join(part for part in parts if part)


def _find_compared(measured: Measured) -> list[MeasuredMethod]:
    """Methods of torch's own: measured for real, and not predicted."""
    return [m for m in measured.methods if m.anatomy is None and m.verified_s is not None]


def _conclude(measured: Measured, choice: Choice) -> str:
    """The last sentence of a plan: what to do."""
    if not choice.ranked:
        return ""
    first = choice.ranked[0]
    late = [method for method in choice.left_out if "--budget" in method.why]
    if len(late) > len(choice.ranked):
        return (
            f"In short: of the methods that were measured {first.spec} is the fastest, {show_s(first.seconds)} per "
            f"step. {len(late)} others were not: run this again with a longer --budget, in seconds, before you choose."
        )
    if first.seconds > measured.ranks * measured.compute_s > 0:
        return (
            f"In short: one worker is faster for this model: what {measured.ranks} do in {show_s(first.seconds)}, it "
            f"does in {show_s(measured.ranks * measured.compute_s)}; use -n 1, or more samples per worker."
        )
    own = next((row for row in choice.ranked if row.spec == measured.own and row is not first), None)
    gains = [_tell_gain(first, own)] if own is not None else []
    gains += [f"{m.spec} took {show_s(m.verified_s or 0.0)}" for m in _find_compared(measured)]
    what = f"keep {first.spec}" if first.spec == measured.own else f"use {first.spec} (--strategy '{first.spec}')"
    return f"In short: {what}, {show_s(first.seconds)} per step{''.join(f'; {gain}' for gain in gains)}."


def _tell_gain(first: Ranked, own: Ranked) -> str:
    """Beside the program's own method; where nobody knows what one of them learns, by a step."""
    times, to = own.to_a_loss / first.to_a_loss, "to a loss"
    if not 0 < times < math.inf:
        times, to = own.seconds / first.seconds, "in a step"
    return f"{times:.2f} times as fast {to} as the program's {own.spec}"


def _describe_run(measured: Measured) -> str:
    hosts = len(set(measured.hosts))
    batch = f", {measured.batch} samples per worker and step" if measured.batch is not None else ""
    return (
        f"{measured.ranks} workers on {hosts} host{'s' if hosts > 1 else ''}; {measured.parameters / 1e6:.1f} M "
        f"parameters, {show_size(measured.gradient_bytes)} of gradients{batch}; compute {show_s(measured.compute_s)} "
        f"per step. Measured in {measured.seconds:.0f} s, {measured.steps} steps."
    )


def _describe_network(measured: Measured) -> str:
    if measured.network is None:
        return ""
    lines = [
        f"{link['first']} - {link['second']}: {show_s(link['latency_s'])}, {show_bits(link['bits_per_s'])}"
        for link in measured.links
    ]
    if found := measured.encryption:
        plain, sealed = show_bits(found["plain_bits_per_s"]), show_bits(found["encrypted_bits_per_s"])
        how = f"encrypted, {sealed}; {plain} without (--no-encrypt)"
        how = how if found["is_on"] else f"not encrypted, {plain}; {sealed} with --encrypt"
        lines.append(f"between hosts: {how}")
    for op, (latency_s, s_per_byte) in sorted(measured.network.fitted.items()):
        rate = f"{show_bits(8 / s_per_byte)}" if s_per_byte else "any rate"
        lines.append(f"{op}: {show_s(latency_s)} + bytes at {rate}")
    return "\n".join(["Network, as time = latency + bytes / bandwidth:", *(f"  {line}" for line in lines)])


def _table(rows: Sequence[Ranked], verified: bool, compared: Sequence[MeasuredMethod] = ()) -> list[str]:
    head = [*_HEAD, *(["measured"] if verified or compared else [])]
    cells = [head, *(_cells(row, verified or bool(compared)) for row in rows)]
    cells += [
        [m.spec, *[""] * 7, show_size(m.memory_bytes), m.convergence.grade, "", "", show_s(m.verified_s or 0.0)]
        for m in compared
    ]
    return format_rows(cells)


def _cells(row: Ranked, verified: bool) -> list[str]:
    timing, low, high = row.prediction
    cells = [
        row.spec,
        show_s(timing.total),
        f"{show_s(low)} - {show_s(high)}",
        *(show_s(x) for x in (timing.compute, timing.exposed, timing.hidden, timing.compression)),
        show_size(round(row.method.bytes_sent)),
        show_size(row.method.memory_bytes),
        row.method.convergence.grade,
        row.method.learning.words,
        show_s(row.to_a_loss) if math.isfinite(row.to_a_loss) else "",
    ]
    if verified:
        cells.append(show_s(row.method.verified_s) if row.method.verified_s is not None else "")
    return cells


def plan_to_dict(measured: Measured, choice: Choice) -> dict[str, Any]:
    """For `--json`: the ranking with its numbers, and everything that was measured."""
    return {
        "first": choice.ranked[0].spec if choice.ranked else None,
        "methods": [_row_to_dict(row, True) for row in choice.ranked]
        + [_row_to_dict(row, False) for row in choice.others],
        "left_out": {m.spec: m.why for m in choice.left_out},
        "reasons": choice.reasons,
        "advice": choice.advice,
        "measured": measured.to_dict(),
    }


def _row_to_dict(row: Ranked, allowed: bool) -> dict[str, Any]:
    timing, low, high = row.prediction
    parts = asdict(timing)
    return {
        "spec": row.spec,
        "allowed": allowed,
        "seconds": parts.pop("total"),
        "low": low,
        "high": high,
        **parts,
        "bytes_sent": row.method.bytes_sent,
        "memory_bytes": row.method.memory_bytes,
        "grade": row.method.convergence.grade,
        "note": row.method.convergence.note,
        "learns": {"grade": row.method.learning.grade, **asdict(row.method.learning)},
        "to_a_loss": row.to_a_loss if math.isfinite(row.to_a_loss) else None,
        "verified_s": row.method.verified_s,
    }
