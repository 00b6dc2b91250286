"""Runs side by side: what each was, and by how much they differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from unisono.observe.reports.summary import PARTS, Summary, show_time
from unisono.observe.reports.wording import describe_outcome
from unisono.units import show_bytes, show_duration, show_ms, show_number

__all__ = ["list_differences"]


def list_differences(runs: Sequence[Summary]) -> list[tuple[str, list[str]]]:
    """Rows of a table: a name, and a cell for each run; of numbers, how many times the first run's."""
    rows: list[tuple[str, list[str]]] = [
        ("outcome", [describe_outcome(run) for run in runs]),
        ("started", [show_time(run.started) or "-" for run in runs]),
        ("lasted", [show_duration(run.seconds) for run in runs]),
        ("command", [run.command or "-" for run in runs]),
        ("method", [run.strategy or "-" for run in runs]),
        ("workers", [str(run.workers) for run in runs]),
        ("mesh", [run.mesh or "-" for run in runs]),
        ("parameters", ["-" if run.parameters is None else f"{run.parameters:,}" for run in runs]),
        ("versions", [", ".join(f"{k} {v}" for k, v in run.versions.items()) or "-" for run in runs]),
        ("steps", [f"{run.steps:,}" for run in runs]),
        _compare("step, ms", runs, lambda run: run.cost.get("wall"), show_ms),
        *(_compare(f"  {part}", runs, _finder(part), show_ms) for part in PARTS),
        _compare("  bubble, % of the schedule", runs, _find_bubble, lambda v: f"{v:.1f}"),
        _compare("sent a step by a worker", runs, lambda run: run.cost.get("bytes_sent"), show_bytes),
        _compare("samples a second", runs, lambda run: run.samples_a_second, lambda v: f"{v:,.0f}"),
        _compare("speed-up", runs, lambda run: run.speed_up.times, lambda v: f"{v:.2f}"),
        ("slowest rank", [_describe_slowest(run) for run in runs]),
    ]
    names = dict.fromkeys(metric.name for run in runs for metric in run.metrics if metric.how != "rank")
    rows += [_compare(f"{name}, last", runs, partial(_find_last, name), show_number) for name in names]
    rows.append(("missing", ["; ".join(run.missing) or "nothing" for run in runs]))
    same = ("versions", "command", "parameters", "missing")
    of_meshes = ("mesh", "  bubble, % of the schedule")
    rows = [(name, cells) for name, cells in rows if name not in of_meshes or set(cells) != {"-"}]
    return [(name, cells) for name, cells in rows if name not in same or len(set(cells)) > 1 or name == "parameters"]


def _compare(
    name: str, runs: Sequence[Summary], find: Callable[[Summary], float | None], show: Callable[[float], str]
) -> tuple[str, list[str]]:
    numbers = [find(run) for run in runs]
    first = numbers[0]
    cells = []
    for i, number in enumerate(numbers):
        text = "-" if number is None else show(number)
        if i and number and first:
            text += f"  ({number / first:.2f}x)"
        cells.append(text)
    return name, cells


def _describe_slowest(run: Summary) -> str:
    if run.slowest is None:
        return "-"
    return f"{run.slowest.rank}: {run.slowest.cause}, {run.slowest.factor:.2f}x" if run.slowest.cause else "none"


def _find_bubble(run: Summary) -> float | None:
    return None if run.pipeline is None else 100 * run.pipeline.bubble


def _finder(part: str) -> Callable[[Summary], float | None]:
    return lambda run: run.cost.get(part)


def _find_last(name: str, run: Summary) -> float | None:
    return next((metric.last for metric in run.metrics if metric.name == name and metric.values), None)
