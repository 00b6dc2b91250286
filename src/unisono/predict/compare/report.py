"""A comparison as a table on standard output, as a page that opens without a network, and as JSON. No torch."""

from __future__ import annotations

import json
import platform
import shlex
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from unisono import units
from unisono.launchers.runtime.machine import usable_cores
from unisono.observe.pages import Bars, Lines, Pairs, Section, Series, Table, write_page
from unisono.predict.compare.results import ONE_WORKER, PARTS, SMOOTHED, WARM_UP, Comparison, Row, Trial, smooth
from unisono.predict.compare.runs import Request, Runs
from unisono.text_table import format_rows
from unisono.units import show_bytes, show_ms, show_number, show_s

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
    columns += [("sent", "per step"), ("samples", "/s"), ("speed-up", ""), ("effic.", "")]
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
        texts.append(show_number(row.loss_at_time))
    if found.equal_samples is not None:
        texts.append(show_number(row.loss_at_samples))
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


_EXPLANATION = (
    f"Times are means over the steps after the first {WARM_UP}; of several rounds, those of the middle one. "
    f"Losses are means over the workers and over the last {SMOOTHED} steps. Sent is what one worker sends in a "
    "step, ≈ by a formula. Speed-up is the time that one worker takes for the same samples, over this one. "
    "A - stands for what is not known; that part of a step is then counted with the others of its row."
)


def write_report(found: Comparison, runs: Runs, *, html: Path | None = None, json_file: Path | None = None) -> Path:
    """Write both into the folder, and to where they are asked for too; gives the path of the page."""
    folder = runs.request.folder
    folder.mkdir(parents=True, exist_ok=True)
    about = _describe_setting(runs)
    page = make_page(found, runs.request, about)
    numbers = json.dumps(as_json(found, runs.request, about), indent=1) + "\n"
    for path in (folder / "report.html", html):
        if path is not None:
            path.write_text(page, encoding="utf-8")
    for path in (folder / "results.json", json_file):
        if path is not None:
            path.write_text(numbers, encoding="utf-8")
    return folder / "report.html"


def _describe_setting(runs: Runs) -> dict[str, str]:
    """What was run, where, and with what."""
    request = runs.request
    how_far = [f"{request.steps} steps"] if request.steps else []
    how_far += [f"until loss {request.target:g}"] if request.target is not None else []
    how_far += [f"at most {request.time_s:g} s"] if request.time_s else []
    links = "none: all workers are on this machine, and share its memory"
    if runs.links:  # as the first run measured them; those of later runs are in their run.log
        links = "; ".join(runs.links[0]) + (f" (the first of {len(runs.links)} runs)" if len(runs.links) > 1 else "")
    about = {
        "script": shlex.join(request.program),
        "methods": ", ".join(request.strategies),
        "last run": f"UNISONO_STRATEGY={shlex.quote(runs.planned[len(runs.commands) - 1].spec)} {runs.commands[-1]}",
        "each run": ", ".join(how_far) or "to the script's own end",
        "rounds": str(request.rounds),
        "links": links,
        "threads per worker": str(runs.threads),
        "machine": f"{platform.machine()}, {usable_cores()} cores, {platform.system()} {platform.release()}",
        "versions": ", ".join([f"Python {platform.python_version()}", *map(_find_version, ("unisono", "torch"))]),
        "time": time.strftime("%Y-%m-%d %H:%M"),
    }
    curve = next((trial.curve for trial in runs.trials if len(trial.curve)), None)
    if curve is not None:
        about["model"] = f"{curve.about['parameters']:,} parameters, on {curve.about['device']}"
    return about


def _find_version(name: str) -> str:
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:  # used from a folder
        return f"{name} (not installed)"


# The page ------------------------------------------------------------------------------------------------------------


def make_page(found: Comparison, request: Request, about: dict[str, str]) -> str:
    """The report as an HTML page."""
    colours = {name: i for i, name in enumerate(dict.fromkeys(row.method for row in found.rows))}
    rows = found.rows
    table = Table(
        headings(found),
        [cells(row, found) for row in rows],
        [row.is_best for row in rows],
        [row.note for row in rows],
    )
    sections = [
        Section("Results", [table, _EXPLANATION]),
        Section("Loss", [*_draw_losses(found, colours)]),
        Section("Time per step", [_draw_steps(found)]),
    ]
    if (chart := _draw_speed_up(found, colours)) is not None:
        sections.append(Section("Speed-up", [chart]))
    sections.append(Section("What was run", [Pairs(list(about.items()))]))
    script = request.program[1] if request.program[0] == "-m" else request.program[0]
    return write_page(f"{Path(script).name}: methods compared", found.finding, sections)


def _name(row: Row | Trial) -> str:
    return row.method if row.method == ONE_WORKER else f"{row.method}, {row.workers} workers"


def _draw_losses(found: Comparison, colours: dict[str, int]) -> list[Lines]:
    """Loss curves of each row's first round, against time and against bytes."""
    times, sent = [], []
    several = len({row.workers for row in found.rows if row.method != ONE_WORKER}) > 1
    sizes = sorted({row.workers for row in found.rows if row.method != ONE_WORKER})
    for trial in found.trials:
        curve = trial.curve
        if trial.round or not len(curve):
            continue
        name = _name(trial) if several else trial.method
        dashed = several and trial.workers in sizes[1::2]
        losses = smooth(curve.losses)
        times.append(Series(name, curve.times, losses, colours[trial.method], dashed))
        if curve.sent[-1]:
            sent.append(Series(name, [x / 1e6 for x in curve.sent], losses, colours[trial.method], dashed))
    for series in (times, sent):
        if found.target is not None and series:
            ends = [min(s.xs[0] for s in series), max(s.xs[-1] for s in series)]
            series.append(Series(f"target {found.target:g}", ends, [found.target] * 2, 7, dashed=True))
    drawn = [Lines("Loss against time", "seconds", "loss", times)] if times else []
    return [*drawn, *([Lines("Loss against bytes", "MB sent by a worker", "loss", sent)] if sent else [])]


def _draw_steps(found: Comparison) -> Bars:
    rows: list[tuple[str, list[float | None]]] = []
    for row in found.rows:
        if row.step_s is not None:
            known = [row.parts_s.get(name) for name in PARTS]
            rest = max(0.0, row.step_s - sum(value or 0.0 for value in known))
            rows.append((_name(row), [None if v is None else 1e3 * v for v in (*known, rest)]))
    return Bars(
        "Where a step's time goes", "ms", [*PARTS, "not told apart"], rows, "Compression is a reducer's own work."
    )


def _draw_speed_up(found: Comparison, colours: dict[str, int]) -> Lines | None:
    """Over the number of workers, with one worker in common and the ideal beside."""
    known = [row for row in found.rows if row.speed_up is not None]
    base = [row for row in known if row.workers == 1]
    sizes = sorted({row.workers for row in known})
    if not base or len(sizes) < 2:
        return None
    series = [Series("ideal", sizes, sizes, 7, dashed=True)]
    for method in dict.fromkeys(row.method for row in known if row.workers > 1):
        points = sorted([(1, 1.0), *((r.workers, r.speed_up) for r in known if r.method == method and r.workers > 1)])
        xs, ys = zip(*points, strict=True)
        series.append(Series(method, xs, ys, colours[method], dots=True))
    return Lines("Speed-up over one worker", "workers", "times as fast", series, whole_x=True, from_zero=True)


# JSON ----------------------------------------------------------------------------------------------------------------


def as_json(found: Comparison, request: Request, about: dict[str, str]) -> dict[str, Any]:
    """All numbers: the rows of the table, and each run's steps."""
    numbers: dict[str, Any] = units.as_json(
        {
            "finding": found.finding,
            "best": None if found.best is None else {"method": found.best.method, "workers": found.best.workers},
            "target": found.target,
            "equal_time_s": found.equal_time_s,
            "equal_samples": found.equal_samples,
            "strategies": list(request.strategies),
            "about": about,
            "rows": [asdict(row) for row in found.rows],
            "runs": [
                {
                    "method": trial.method,
                    "workers": trial.workers,
                    "round": trial.round,
                    "failure": trial.failure,
                    "output": trial.output,
                    "times_s": trial.curve.times,
                    "losses": trial.curve.losses,
                    "samples": trial.curve.samples,
                    "bytes_sent": trial.curve.sent,
                    "parts_s": trial.curve.parts,
                }
                for trial in found.trials
            ],
        }
    )
    return numbers
