"""The table on standard output. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.predict.compare.results import Comparison, Row
from unisono.predict.compare.steps import PARTS
from unisono.text_table import format_rows
from unisono.units import show_bytes, show_ms, show_s

__all__ = ["cells", "format_table", "headings"]

_SHORT = {
    "compute": "compute",
    "communication": "commun.",
    "waiting": "waiting",
    "compression": "compr.",
    "data": "data",
}


def headings(found: Comparison) -> list[tuple[str, str]]:
    """Each column's name and unit."""
    columns = [("method", ""), ("workers", ""), ("step", "ms")]
    columns += [(_SHORT[name], "ms") for name in PARTS]
    columns += [("sent", "a step"), ("samples", "/s"), ("speed-up", ""), ("effic.", "")]
    if found.equal_time_s is not None:
        columns.append(("loss", f"at {show_s(found.equal_time_s)}"))
    if found.equal_samples is not None:
        columns.append(("loss", f"at {_count(found.equal_samples)}"))
    if found.target is not None:
        columns.append(("time to", f"{found.target:g}"))
    return columns


def cells(row: Row, found: Comparison) -> list[str]:
    """A row's text for each column; "-" where something is not known."""
    texts = [row.method, str(row.workers), show_ms(row.step_s)]
    texts += [show_ms(row.parts_s.get(name)) for name in PARTS]
    sent = "-" if row.bytes_a_step is None else show_bytes(row.bytes_a_step)
    texts.append(f"≈{sent}" if row.bytes_by_formula and row.bytes_a_step else sent)
    texts.append("-" if row.samples_a_second is None else _rate(row.samples_a_second))
    texts.append("-" if row.speed_up is None else f"{row.speed_up:.2f}")
    texts.append("-" if row.efficiency is None else f"{row.efficiency:.0%}")
    if found.equal_time_s is not None:
        texts.append("-" if row.loss_at_time is None else f"{row.loss_at_time:.4g}")
    if found.equal_samples is not None:
        texts.append("-" if row.loss_at_samples is None else f"{row.loss_at_samples:.4g}")
    if found.target is not None:
        texts.append(_target(row))
    return texts


def format_table(found: Comparison) -> str:
    """The whole table, with what was found and what its signs mean."""
    columns = headings(found)
    lines = [[name for name, _ in columns], [unit for _, unit in columns]]
    lines += [cells(row, found) for row in found.rows]
    for line, row in zip(lines[2:], found.rows, strict=True):
        line[0] = ("* " if row.is_best else "  ") + line[0]
    lines[0][0] = "  " + lines[0][0]
    head, units, *body = format_rows(lines)
    text = [head, units]
    for formatted, row in zip(body, found.rows, strict=True):
        text += [formatted, f"    {row.note}"] if row.note else [formatted]
    return "\n".join([*text, "", found.finding, *_explain(found.rows)])


def _explain(rows: Sequence[Row]) -> list[str]:
    lines = []
    if any(row.is_best for row in rows):
        lines.append("* the best")
    if any(row.bytes_by_formula and row.bytes_a_step for row in rows):
        lines.append("≈ bytes by a formula, not counted")
    if any(value is None for row in rows if row.step_s is not None for value in row.parts_s.values()):
        lines.append("- not known: that part of a step is counted with the others of its row")
    return ["", "; ".join(lines)] if lines else []


def _target(row: Row) -> str:
    if row.failed:
        return "-"
    if row.time_to_target_s is not None:
        return show_s(row.time_to_target_s)
    return "not reached" if not row.reached else f"{row.reached} of {row.rounds}"


def _rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _count(count: float) -> str:
    """A number of samples, short.

    >>> _count(6400), _count(2_560_000)
    ('6,400', '2.56M')
    """
    return f"{count / 1e6:.3g}M" if count >= 1e6 else f"{count:,.0f}"
