"""A report on the terminal: short, in the order in which one asks."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from unisono.observe.reports.pipelines import HEADS, PipelineSummary, describe_pipeline, list_pipeline_rows
from unisono.observe.reports.summary import PARTS, Summary
from unisono.observe.reports.wording import (
    conclude,
    describe_balance,
    describe_speed_up,
    list_facts,
    list_parts,
    list_rank_cells,
)
from unisono.units import show_bytes, show_duration, show_ms, show_number

__all__ = ["list_run", "print_report", "print_runs", "print_side_by_side"]

_MOST_RANKS = 16
_MOST_LINES = 12


def print_report(found: Summary, console: Console) -> None:
    """Print the whole report of a run."""
    console.print(_facts(found))
    if found.failure and found.outcome == "failed":
        console.print(Padding(Text(found.failure.strip()[:1500], style="red"), (1, 2)))
    if found.cost:
        console.print(_title("time per step"), _costs(found))
        console.print(*_explain_costs(found), sep="\n")
    if found.pipeline is not None:
        console.print(_title("pipeline"), _pipeline(found.pipeline))
        console.print(*_lines(describe_pipeline(found.pipeline)), sep="\n")
    if found.bytes_by_kind:
        console.print(_title("bytes by kind"), _kinds(found))
    if balance := describe_balance(found):
        console.print(_title("balance"), *_lines(balance), sep="\n")
    if found.metrics:
        console.print(_title("losses and metrics"), _metrics(found))
    listed = {
        "verdicts": [f"step {e.get('step', '-')}: {e['text']}" for e in found.verdicts],
        "changes": [e["text"] for e in found.changes],
        "what is missing from the record": found.missing,
        "in short": [verdict] if (verdict := conclude(found)) else [],
    }
    for title, texts in listed.items():
        if texts:
            console.print(_title(title), *_lines(texts), sep="\n")


def _title(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def _lines(texts: Sequence[str]) -> list[Padding]:
    shown = [*texts[:_MOST_LINES], *([f"and {len(texts) - _MOST_LINES} more"] if len(texts) > _MOST_LINES else [])]
    return [Padding(Text(text), (0, 0, 0, 2), expand=False) for text in shown]


def _facts(found: Summary) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    colours = {"ok": "green", "failed": "red", "killed": "red"}
    for name, text in list_facts(found):
        style = colours.get(found.outcome, "yellow") if name == "outcome" else "bold" if name == "run" else ""
        table.add_row(name, Text(text, style=style))
    return table


def _costs(found: Summary) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    meshed = any(rank.mesh_place for rank in found.ranks)
    heads = ("rank", *(["mesh"] if meshed else []), "step ms", *list_parts(found), "hidden", "sent", "steps", "samples")
    for head in heads:
        table.add_column(head, justify="right")
    ranks = [rank for rank in found.ranks if rank.steps]
    for rank in ranks if len(ranks) <= _MOST_RANKS else sorted(ranks, key=lambda r: -r.own_s)[: _MOST_RANKS // 2]:
        slow = found.slowest is not None and found.slowest.cause and rank.place == found.slowest.place
        table.add_row(*list_rank_cells(found, rank), style="yellow" if slow else "")
    if len(ranks) > _MOST_RANKS:
        table.add_row(f"of {len(ranks)}", *[""] * (len(heads) - 1), style="dim")
    shares = ["100 %", *(f"{100 * found.cost[name] / (found.cost['wall'] or 1):.0f} %" for name in PARTS)]
    mean = [show_ms(found.cost[name]) for name in ("wall", *PARTS, "hidden")]
    table.add_section()
    gap = [""] if meshed else []
    table.add_row("mean", *gap, *mean, show_bytes(found.cost["bytes_sent"]), "", "", style="bold")
    table.add_row("", *gap, *shares, "", "", "", "", style="dim")
    return table


def _pipeline(found: PipelineSummary) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    for head in HEADS:
        table.add_column(head, justify="left" if head == "mesh" else "right")
    rows = list_pipeline_rows(found)
    for row in rows[:_MOST_RANKS]:
        table.add_row(*row)
    if len(rows) > _MOST_RANKS:
        table.add_row(f"of {len(rows)}", *[""] * (len(HEADS) - 1), style="dim")
    return table


def _explain_costs(found: Summary) -> list[Padding]:
    lines = [found.slowest.text] if found.slowest is not None else []
    lines.append(describe_speed_up(found))
    if found.samples_a_second is not None:
        lines.append(f"{found.samples_a_second:,.0f} samples per second")
    return _lines([*lines, *found.notes])


def _kinds(found: Summary) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2))
    total = sum(found.bytes_by_kind.values())
    note = " (by a formula)" if found.bytes_by_formula else ""
    kinds = list(found.bytes_by_kind.items())
    for kind, sent in kinds[:_MOST_LINES]:
        table.add_row(kind, Text(show_bytes(sent), justify="right"), f"{100 * sent / total:.1f} %")
    if rest := sum(sent for _, sent in kinds[_MOST_LINES:]):
        table.add_row(f"{len(kinds) - _MOST_LINES} others", Text(show_bytes(rest), justify="right"), "")
    table.add_row("all ranks", Text(show_bytes(total), justify="right"), note, style="bold")
    return table


def _metrics(found: Summary) -> Table:
    table = Table(box=None, padding=(0, 2))
    for head in ("", "first", "last", "lowest", "highest", "over ranks"):
        table.add_column(head, justify="left" if head in ("", "over ranks") else "right", style="" if head else "bold")
    for metric in found.metrics[:_MOST_LINES]:
        values = [v for v in metric.values if v == v] or [float("nan")]
        if metric.how == "rank":
            shown = ", ".join(f"{r}: {show_number(v)}" for r, v in list(metric.ranks.items())[:8])
            table.add_row(metric.name, "", "", "", "", f"by rank: {shown}")
            continue
        first = metric.values[0] if metric.values else None
        numbers = [show_number(v) for v in (first, metric.last, min(values), max(values))]
        table.add_row(metric.name, *numbers, metric.how)
    return table


# Several -------------------------------------------------------------------------------------------------------------


def print_side_by_side(rows: Sequence[tuple[str, Sequence[str]]], names: Sequence[str], console: Console) -> None:
    """Facts of several runs, a column each."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("", style="dim")
    for name in names:
        table.add_column(name, overflow="fold")
    for name, cells in rows:
        table.add_row(name, *cells)
    console.print(table)


def print_runs(rows: Sequence[Sequence[str]], console: Console) -> None:
    """Print the list of runs."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    for head in ("name", "started", "lasted", "workers", "method", "steps", "loss", "outcome"):
        table.add_column(head, justify="right" if head in ("workers", "steps", "loss") else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def list_run(found: Summary, started: str) -> list[str]:
    """The cells of one run in the list of runs."""
    return [
        found.name,
        started,
        show_duration(found.seconds),
        str(found.workers),
        found.strategy or "-",
        f"{found.steps:,}",
        show_number(found.loss),
        found.outcome,
    ]
