"""A plan as text: the network, a table of methods, and words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unisono.predict.planner.choice import Choice, Ranked, show_bits, show_s
from unisono.predict.planner.measured import Measured, MeasuredMethod
from unisono.text_table import format_rows
from unisono.units import show_size

__all__ = ["plan_to_dict", "write_report"]

_HEAD = ("method", "step", "interval", "compute", "exposed", "hidden", "compress", "sent", "memory", "training")


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
    if first.seconds > measured.ranks * measured.compute_s > 0:
        return (
            f"In short: one worker is faster for this model: what {measured.ranks} do in {show_s(first.seconds)}, it "
            f"does in {show_s(measured.ranks * measured.compute_s)}; use -n 1, or give a worker more samples a step."
        )
    own = next((row for row in choice.ranked if row.spec == measured.own and row is not first), None)
    gains = [f"{own.seconds / first.seconds:.2f} times as fast as the program's {own.spec}"] if own is not None else []
    gains += [f"{m.spec} took {show_s(m.verified_s or 0.0)}" for m in _find_compared(measured)]
    what = f"keep {first.spec}" if first.spec == measured.own else f"use {first.spec} (--strategy '{first.spec}')"
    return f"In short: {what}, {show_s(first.seconds)} a step{''.join(f'; {gain}' for gain in gains)}."


def _describe_run(measured: Measured) -> str:
    hosts = len(set(measured.hosts))
    batch = f", {measured.batch} samples a worker and step" if measured.batch is not None else ""
    return (
        f"{measured.ranks} workers on {hosts} host{'s' if hosts > 1 else ''}; {measured.parameters / 1e6:.1f} M "
        f"parameters, {show_size(measured.gradient_bytes)} of gradients{batch}; compute {show_s(measured.compute_s)} a "
        f"step. Measured in {measured.seconds:.0f} s, {measured.steps} steps."
    )


def _describe_network(measured: Measured) -> str:
    if measured.network is None:
        return ""
    lines = [
        f"{link['first']} - {link['second']}: {show_s(link['latency_s'])}, {show_bits(link['bits_per_s'])}"
        for link in measured.links
    ]
    for op, (latency_s, s_per_byte) in sorted(measured.network.fitted.items()):
        rate = f"{show_bits(8 / s_per_byte)}" if s_per_byte else "any rate"
        lines.append(f"{op}: {show_s(latency_s)} + bytes at {rate}")
    return "\n".join(["Network, as time = latency + bytes / bandwidth:", *(f"  {line}" for line in lines)])


def _table(rows: Sequence[Ranked], verified: bool, compared: Sequence[MeasuredMethod] = ()) -> list[str]:
    head = [*_HEAD, *(["measured"] if verified or compared else [])]
    cells = [head, *(_cells(row, verified or bool(compared)) for row in rows)]
    cells += [
        [m.spec, *[""] * 7, show_size(m.memory_bytes), m.convergence.grade, show_s(m.verified_s or 0.0)]
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
    timing = row.prediction.timing
    return {
        "spec": row.spec,
        "allowed": allowed,
        "seconds": timing.total,
        "low": row.prediction.low,
        "high": row.prediction.high,
        "compute": timing.compute,
        "exposed": timing.exposed,
        "hidden": timing.hidden,
        "compression": timing.compression,
        "bytes_sent": row.method.bytes_sent,
        "memory_bytes": row.method.memory_bytes,
        "grade": row.method.convergence.grade,
        "note": row.method.convergence.note,
        "verified_s": row.method.verified_s,
    }
