"""A report as a page that opens without a network: charts, tables, and what is missing; and as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unisono.observe.pages import Bars, Block, Lines, Pairs, Section, Series, Table, write_page
from unisono.observe.reports.pipelines import HEADS, describe_pipeline, list_pipeline_rows
from unisono.observe.reports.summary import PARTS, Summary
from unisono.observe.reports.wording import (
    conclude,
    count_classes,
    describe_balance,
    describe_outcome,
    describe_speed_up,
    list_differences,
    list_facts,
    list_parts,
    list_rank_cells,
)
from unisono.units import show_bytes, show_ms, show_number

__all__ = ["draw", "make_page"]

_MOST_RANKS = 32
_MOST_METRICS = 24
_MOST_CLASSES = 5  # in colours of their own
_SUFFIXES = (".png", ".svg", ".pdf")  # of a picture
_COLOURS = ("#3f7fbf", "#d9822b", "#b0b0b0", "#5a9e6f")  # of the parts of a step
_MOST_DRAWN = 24


def make_page(runs: Sequence[Summary]) -> str:
    """The page of one run, or of several side by side."""
    if len(runs) > 1:
        return _make_comparison(runs)
    (found,) = runs
    sections = [
        Section("Where the time went", _show_costs(found)),
        Section("The pipeline", _show_pipeline(found)),
        Section("Losses and metrics", _show_metrics(found)),
        Section("Bytes", _show_bytes(found)),
        Section("How evenly data and work were split", _show_balance(found)),
        Section("Verdicts and changes", _show_events(found)),
        Section("What is missing from the record", [*found.missing]),
        Section("What was run", [Pairs(list_facts(found)), *_show_failure(found)]),
    ]
    return write_page(found.name, _make_lead(found), [section for section in sections if section.blocks])


def _make_lead(found: Summary) -> str:
    workers = f"{found.workers} worker{'s' if found.workers != 1 else ''}"
    text = f"{found.strategy or 'a run'}, {workers}, {found.steps:,} steps: {describe_outcome(found)}."
    if found.cost:
        shares = ", ".join(f"{part} {100 * found.cost[part] / (found.cost['wall'] or 1):.0f} %" for part in PARTS)
        text += f" A step takes {show_ms(found.cost['wall'])} ms: {shares}."
    if found.speed_up.times is not None and found.speed_up.efficiency is not None:
        text += f" Speed-up {found.speed_up.times:.2f}, efficiency {100 * found.speed_up.efficiency:.0f} %."
    return f"{text} {conclude(found)}".rstrip()


def _show_costs(found: Summary) -> list[Block]:
    trained = [rank for rank in found.ranks if rank.steps]
    if not trained:
        return ["No step was recorded."]
    slowest_first = sorted(trained, key=lambda rank: -rank.own_s)
    shown = trained if len(trained) <= _MOST_RANKS else sorted(slowest_first[:_MOST_RANKS], key=lambda rank: rank.rank)
    rows = [(rank.name, [1e3 * rank.cost[part] for part in PARTS]) for rank in shown]
    rows.append(("mean of all", [1e3 * found.cost[part] for part in PARTS]))
    note = "Hidden communication runs behind compute and costs no time."
    if len(shown) < len(trained):
        note = f"The {len(shown)} slowest of {len(trained)} ranks. {note}"
    bars = Bars("Mean time per step, by rank", "ms", list_parts(found), rows, note)
    slowest = [] if found.slowest is None else [found.slowest.text]
    said = _make_sentences([*slowest, describe_speed_up(found), *found.notes])
    mesh = [("mesh", "")] if any(rank.mesh_place for rank in found.ranks) else []
    times = [(part, "ms") for part in ("step", *PARTS, "hidden", "longest")]
    heads = [("rank", ""), *mesh, ("host", ""), *times, ("sent", "per step"), ("steps", ""), ("samples", "")]
    return [*said, bars, Table(heads, [list_rank_cells(found, rank, details=True) for rank in shown])]


def _make_sentences(texts: Sequence[str]) -> list[str]:
    return [text[0].upper() + text[1:] + "." for text in texts]


def _show_pipeline(found: Summary) -> list[Block]:
    if found.pipeline is None:
        return []
    said = _make_sentences(describe_pipeline(found.pipeline))
    shown = found.pipeline.members[:_MOST_RANKS]
    rows = [(f"rank {one.rank}", [100 * one.busy, 100 * (1 - one.busy)]) for one in shown]
    note = f"Of equal stages each would wait {100 * found.pipeline.ideal:.1f} % of it, by {found.pipeline.formula}."
    bars = Bars("The schedule's time on each rank", "%", ["computes", "waits"], rows, note)
    return [*said, bars, Table([(head, "") for head in HEADS], list_pipeline_rows(found.pipeline))]


def _show_metrics(found: Summary) -> list[Block]:
    blocks: list[Block] = []
    over = {"mean": "mean over ranks", "sum": "sum over ranks", "min": "lowest of the ranks", "max": "highest"}
    for i, metric in enumerate(found.metrics[:_MOST_METRICS]):
        if metric.values:
            series = Series(metric.name, metric.steps, metric.values, i)
            title = f"{metric.name} ({over.get(metric.how, metric.how)})"
            blocks.append(Lines(title, "step", metric.name, [series], whole_x=True))
    for metric in found.metrics:
        if metric.how == "rank":
            shown = ", ".join(f"rank {r}: {show_number(v)}" for r, v in list(metric.ranks.items())[:_MOST_RANKS])
            blocks.append(f"{metric.name}, last value of each rank: {shown}")
    return blocks


def _show_bytes(found: Summary) -> list[Block]:
    total = sum(found.bytes_by_kind.values())
    if not total:
        return []
    rows = [[kind, show_bytes(sent), f"{100 * sent / total:.1f} %"] for kind, sent in found.bytes_by_kind.items()]
    rows.append(["all", show_bytes(total), "100 %"])
    note = ["Computed by a formula, not counted."] if found.bytes_by_formula else []
    return [Table([("kind", ""), ("sent by all ranks", ""), ("share", "")], rows), *note]


def _show_balance(found: Summary) -> list[Block]:
    blocks: list[Block] = [*_make_sentences(describe_balance(found))]
    known = [rank for rank in found.ranks if rank.classes][:_MOST_RANKS]
    if known:
        total = count_classes(known)
        names = sorted(total, key=lambda name: -total[name])[:_MOST_CLASSES]
        rows: list[tuple[str, list[float | None]]] = []
        for rank in known:
            rest = sum(count for name, count in rank.classes.items() if name not in names)
            rows.append((rank.name, [*(float(rank.classes.get(name, 0)) for name in names), float(rest)]))
        parts = [*(f"class {name}" for name in names), "others"]
        if not any(values[-1] for _, values in rows):
            parts, rows = parts[:-1], [(name, values[:-1]) for name, values in rows]
        blocks.append(Bars("Samples per worker, by class", "", parts, rows))
    return blocks


def _show_events(found: Summary) -> list[Block]:
    every = sorted([*found.verdicts, *found.changes], key=lambda event: float(event["time"]))
    if not every:
        return []
    rows = []
    for event in every:
        after = math.nan if found.started is None else event["time"] - found.started
        at = f"{after:.1f} s" if math.isfinite(after) else "-"
        rows.append([str(event["text"]), str(event["kind"]), str(event.get("step", "-")), at])
    return [Table([("what happened", ""), ("kind", ""), ("step", ""), ("after", "")], rows)]


def _show_failure(found: Summary) -> list[Block]:
    lines = [line for line in found.failure.splitlines() if line.strip()]
    return [Table([("how it failed", "")], [[line] for line in lines[:60]])] if lines else []


# Several -------------------------------------------------------------------------------------------------------------


def _make_comparison(runs: Sequence[Summary]) -> str:
    rows = [[name.strip(), *cells] for name, cells in list_differences(runs)]
    table = Table([("", ""), *((run.name, "") for run in runs)], rows)
    bars = Bars(
        "Mean time per step, by run",
        "ms",
        PARTS,
        [(run.name, [1e3 * run.cost.get(p, 0.0) for p in PARTS]) for run in runs],
    )
    charts: list[Block] = []
    names = dict.fromkeys(metric.name for run in runs for metric in run.metrics if metric.values)
    for name in list(names)[:_MOST_METRICS]:
        for label, whole in (("step", True), ("seconds since the first step", False)):
            series = []
            for i, run in enumerate(runs):
                metric = next((metric for metric in run.metrics if metric.name == name and metric.values), None)
                if metric is not None:
                    series.append(Series(run.name, metric.steps if whole else metric.times, metric.values, i))
            charts.append(Lines(f"{name} against {'steps' if whole else 'time'}", label, name, series, whole_x=whole))
    sections = [Section("Side by side", [table, bars])]
    if charts:
        sections.append(Section("Losses and metrics", charts))
    lead = f"{len(runs)} runs; in brackets, the ratio to the first run."
    return write_page(" and ".join(run.name for run in runs), lead, sections)


# The picture ----------------------------------------------------------------------------------------------------------


def draw(found: Summary, path: Path) -> None:
    """Draw a run's costs, metrics and bytes as a picture file."""
    if path.suffix.lower() not in _SUFFIXES:
        raise ValueError(f"a picture file ends in {', '.join(_SUFFIXES)}; got {str(path)!r}")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('a picture needs matplotlib: pip install "unisono[plots]"') from error
    figure = Figure(figsize=(11, 8), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots(2, 2)
    _draw_metric(axes[0][0], found)
    _draw_steps(axes[0][1], found)
    _draw_others(axes[1][0], found)
    _draw_bytes(axes[1][1], found)
    workers = f"{found.workers} worker{'s' if found.workers != 1 else ''}"
    gained = found.speed_up
    speed = f", speed-up {gained.times:.2f} ({gained.how.partition(':')[0]})" if gained.times is not None else ""
    step = f", {show_ms(found.cost['wall'])} ms per step" if found.cost else ""
    second = f"{found.strategy or 'a run'}, {workers}, {found.steps:,} steps{step}{speed}; {describe_outcome(found)}"
    figure.suptitle(f"{found.name}\n{second}", fontsize=10)
    figure.savefig(path, dpi=130)


def _draw_metric(axes: Any, found: Summary) -> None:
    metric = next((metric for metric in found.metrics if metric.values), None)
    if metric is None:
        _say_nothing(axes, "no loss or metric was recorded")
        return
    axes.plot(metric.steps, metric.values, linewidth=1, color=_COLOURS[0])
    axes.set_xlabel("step")
    axes.set_title(f"{metric.name} ({metric.how} over ranks)", fontsize=10)
    axes.grid(alpha=0.3)


def _draw_steps(axes: Any, found: Summary) -> None:
    ranks = sorted((rank for rank in found.ranks if rank.steps), key=lambda rank: -rank.own_s)[:_MOST_DRAWN]
    if not ranks:
        _say_nothing(axes, "no step was recorded")
        return
    ranks = sorted(ranks, key=lambda rank: -rank.rank)
    names = [rank.name for rank in ranks]
    left = [0.0] * len(ranks)
    for part, label, colour in zip(PARTS, list_parts(found), _COLOURS, strict=True):
        widths = [1e3 * rank.cost[part] for rank in ranks]
        axes.barh(names, widths, left=left, color=colour, label=label)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_xlabel("ms")
    axes.tick_params(axis="y", labelsize=10 if len(ranks) <= 12 else 6)
    more = f" (the {len(ranks)} slowest of {found.workers})" if len(ranks) < found.workers else ""
    axes.set_title(f"mean time per step, by rank{more}", fontsize=10)
    axes.set_xlim(0, 1.02 * max(left))
    axes.legend(fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.12), frameon=False)


def _draw_others(axes: Any, found: Summary) -> None:
    """Metrics beside the first one, or the samples of each worker."""
    others = [metric for metric in found.metrics if metric.values][1:4]
    for metric, colour in zip(others, (_COLOURS[1], _COLOURS[3], _COLOURS[2]), strict=False):
        axes.plot(metric.steps, metric.values, linewidth=1, label=metric.name, color=colour)
    if others:
        axes.legend(fontsize=8)
        axes.set_xlabel("step")
        axes.set_title("other metrics", fontsize=10)
        axes.grid(alpha=0.3)
        return
    known = [rank for rank in found.ranks if rank.samples is not None][:_MOST_DRAWN]
    if not known:
        _say_nothing(axes, "no other metrics, and samples were not counted")
        return
    axes.bar([rank.label for rank in known], [rank.samples for rank in known], color=_COLOURS[0])
    axes.set_xlabel("rank")
    axes.set_title("samples per worker", fontsize=10)


def _draw_bytes(axes: Any, found: Summary) -> None:
    kinds = list(found.bytes_by_kind.items())[:8]
    if not kinds:
        _say_nothing(axes, "no bytes were sent")
        return
    names = [kind for kind, _ in kinds][::-1]
    values = [sent for _, sent in kinds][::-1]
    bars = axes.barh(names, values, color=_COLOURS[1])
    axes.bar_label(bars, labels=[show_bytes(value) for value in values], fontsize=8, padding=3)
    axes.set_xscale("log")
    axes.set_xlim(min(values) / 2, max(values) * 20)
    axes.set_xlabel("bytes sent by all ranks")
    axes.set_title("bytes by kind", fontsize=10)


def _say_nothing(axes: Any, text: str) -> None:
    axes.axis("off")
    axes.text(0.5, 0.5, text, ha="center", va="center", color="grey")
