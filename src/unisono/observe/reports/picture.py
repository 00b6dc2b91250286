"""A report as a picture: the loss, a step of each rank taken apart, throughput over time, and bytes by kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unisono.observe.reports.summary import PARTS, Summary
from unisono.observe.reports.wording import describe_outcome, list_parts
from unisono.units import show_bytes, show_ms

__all__ = ["draw"]

_SUFFIXES = (".png", ".svg", ".pdf")
_COLOURS = ("#3f7fbf", "#d9822b", "#b0b0b0", "#5a9e6f")  # of the parts of a step
_MOST_RANKS = 24


def draw(found: Summary, path: Path) -> None:
    """Draw a run's costs, metrics and bytes as a picture file."""
    if path.suffix.lower() not in _SUFFIXES:
        raise ValueError(f"a picture is a file that ends in {', '.join(_SUFFIXES)}; got {str(path)!r}")
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
    step = f", {show_ms(found.cost['wall'])} ms a step" if found.cost else ""
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
    ranks = sorted((rank for rank in found.ranks if rank.steps), key=lambda rank: -rank.own_s)[:_MOST_RANKS]
    if not ranks:
        _say_nothing(axes, "no step was recorded")
        return
    ranks = sorted(ranks, key=lambda rank: -rank.rank)
    names = [f"rank {rank.label}" for rank in ranks]
    left = [0.0] * len(ranks)
    for part, label, colour in zip(PARTS, list_parts(found), _COLOURS, strict=True):
        widths = [1e3 * rank.cost[part] for rank in ranks]
        axes.barh(names, widths, left=left, color=colour, label=label)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_xlabel("ms")
    axes.tick_params(axis="y", labelsize=10 if len(ranks) <= 12 else 6)
    more = f" (the {len(ranks)} slowest of {found.workers})" if len(ranks) < found.workers else ""
    axes.set_title(f"a mean step of each rank{more}", fontsize=10)
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
    known = [rank for rank in found.ranks if rank.samples is not None][:_MOST_RANKS]
    if not known:
        _say_nothing(axes, "no other metrics, and samples were not counted")
        return
    axes.bar([rank.label for rank in known], [rank.samples for rank in known], color=_COLOURS[0])
    axes.set_xlabel("rank")
    axes.set_title("samples of each worker", fontsize=10)


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
