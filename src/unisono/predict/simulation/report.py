"""A study in words and as curves: what was assumed, tables by scale and by method, what is best where, and what to buy
next."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

from unisono.predict.costs import Link
from unisono.predict.simulation.cluster import Cluster
from unisono.predict.simulation.steps import Outcome
from unisono.predict.simulation.study import GROUPS, LIKE_ALLREDUCE, Study
from unisono.text_table import format_rows
from unisono.units import show_duration, show_rate, show_s

_SHOWN = 3  # of the best at each scale


def write_report(study: Study, title: str) -> str:
    """The whole study as text."""
    hosts = study.cluster.count_hosts(study.workers[-1])
    head = [title, describe_cluster(study.cluster), study.cluster.failures.describe(hosts)]
    parts = [
        "\n".join(head),
        f"the best at each scale (mean time per step; {study.steps} steps each, seed {study.seed})\n"
        + _write_scales(study),
        "speed-up over one worker, by method\n" + _write_methods(study),
        "\n".join(_explain_best(study)),
        "\n".join(_explain_purchases(study)),
        'not in these numbers: how many steps each method needs to the same loss. Those of grade "other" train in '
        "another\nway and may need more; more workers take a larger batch together. `unisono compare` measures that.",
    ]
    return "\n\n".join(part for part in parts if part)


def describe_cluster(cluster: Cluster) -> str:
    """A cluster in one line."""
    each = f"{cluster.per_host} workers per host" if cluster.per_host > 1 else "1 worker per host"
    if cluster.cores is not None:
        each += f" of {cluster.cores} cores"
    parts = [each, f"{_describe_link(cluster.between)} between hosts"]
    if cluster.measured is not None:
        parts[-1] += f" (as measured with {cluster.measured.ranks} workers)"
    if cluster.per_host > 1:
        parts.append(f"{_describe_link(cluster.inside)} inside")
    if cluster.rack_hosts:
        parts.append(f"{cluster.rack_hosts} hosts a rack, oversubscribed {cluster.oversubscription:g}:1")
    return ", ".join([*parts, cluster.stragglers.describe()])


def _describe_link(link: Link) -> str:
    rate = show_rate(link.bits_per_s) if math.isfinite(link.bits_per_s) else "no limit"
    return f"{rate} and {show_s(link.latency_s)}"


def _write_scales(study: Study) -> str:
    columns = ("step", "compute", "network", "compress", "waiting", "speed-up", "efficiency")
    failing = any(o.kept < 1 for rows in study.outcomes.values() for o in rows.values())
    lines = [["workers", "method", "training", *columns, *(["kept"] if failing else [])]]
    for workers in study.workers:
        ranked = [o for o in study.rank(workers) if not o.problem]
        shown = ranked[:_SHOWN]
        best = (study.best(workers, grades) for _, grades in reversed(GROUPS))
        shown += [found for found in best if found is not None and found not in shown]
        for i, o in enumerate(shown):
            parts = (o.step_s, o.compute_s, o.communication_s, o.compression_s, o.waiting_s)
            row = [f"{workers:,}" if not i else "", o.spec, o.grade, *map(show_duration, parts)]
            row += [_write_times(o.speed_up), f"{o.efficiency:.0%}"]
            lines.append([*row, *([f"{o.kept:.1%}"] if failing else [])])
    return "\n".join(format_rows(lines, left=(1, 2)))


def _write_methods(study: Study) -> str:
    lines = [["method", "training", *(f"{n:,}" for n in study.workers), "stops scaling at"]]
    order = sorted(study.methods, key=lambda m: -study.outcomes[m.spec][study.workers[-1]].throughput)
    notes = [f"  {method.spec}: {method.note}" for method in order if method.note]
    for method in order:
        rows = study.outcomes[method.spec]
        stops = study.stops_at(method.spec)
        numbers = [_write_times(rows[n].speed_up) if not rows[n].problem else "-" for n in study.workers]
        said = {n: rows[n].problem or rows[n].note for n in study.workers}
        notes += [f"  {method.spec}, {n:,} workers: {words}" for n, words in said.items() if words]
        last = f"{stops:,}" if stops is not None else f"beyond {study.workers[-1]:,}"
        if rows[study.workers[-1]].problem and stops is None:
            last = "-"
        lines.append([method.spec, method.grade, *numbers, last])
    note = "(stops scaling: from there on, twice as many workers give less than 10 % more)"
    return "\n".join([*format_rows(lines, left=(0, 1)), note, *notes])


def _explain_best(study: Study) -> list[str]:
    """Which method is best at which numbers of workers."""
    lines = []
    words = {
        "exact": "the best that trains exactly as one process",
        "like all-reduce": "the best that trains like all-reduce (exact, rounded or compressed)",
        "any": "the best of all",
    }
    for name, grades in GROUPS:
        stretches: list[tuple[str, list[int]]] = []
        for n in study.workers:
            found = study.best(n, grades)
            spec = found.spec if found is not None else "none"
            if stretches and stretches[-1][0] == spec:
                stretches[-1][1].append(n)
            else:
                stretches.append((spec, [n]))
        ends = [(spec, f"{n[0]:,} to {n[-1]:,}" if len(n) > 1 else f"{n[0]:,}") for spec, n in stretches]
        said = "; ".join(f"{spec} ({scales})" for spec, scales in ends)
        lines.append(f"{words[name]}: {said}")
    return lines


def _explain_purchases(study: Study) -> list[str]:
    lines = ["what to buy next, for the best that trains like all-reduce:"]
    for workers, (chosen, bought) in study.purchases.items():
        gains = ", ".join(f"{p.what} {p.gain - 1:+.0%}" for p in bought[:3]) or "failures leave no time to train"
        lines.append(f"  {workers:,} workers, {chosen.spec}: {gains}; {_explain_limit(chosen)}")
    failures = study.cluster.failures
    if failures.way == "restart" and math.isfinite(failures.mtbf_s):
        interval = failures.best_interval(study.cluster.count_hosts(study.workers[-1]))
        lines.append(
            f"  with {study.workers[-1]:,} workers a checkpoint every {show_duration(interval)} loses the least "
            f"(asked: {show_duration(failures.checkpoint_every_s)})"
        )
    return lines


def _explain_limit(o: Outcome) -> str:
    """What takes most of a step beside compute."""
    parts = {
        "the network": o.communication_s,
        "compression": o.compression_s,
        "waiting for the slowest": o.waiting_s,
    }
    name, most = max(parts.items(), key=lambda part: part[1])
    if most < 0.05 * o.step_s:
        return "compute is what a step takes"
    return f"{name} is {most / o.step_s:.0%} of a step"


def _write_times(x: float) -> str:
    return f"{x:,.0f}" if x >= 100 else f"{x:.1f}" if x >= 1 else f"{x:.2g}"


_STYLES = {"exact": "-", "rounded": "-.", "compressed": "--", "other": ":"}
_SUFFIXES = (".png", ".svg", ".pdf")


def check_path(path: str) -> None:
    """Refuse a file that cannot be written as a picture."""
    if Path(path).suffix.lower() not in _SUFFIXES:
        raise ValueError(f"a picture file ends in {', '.join(_SUFFIXES)}; got {path!r}")
    if not Path(path).absolute().parent.is_dir():
        raise ValueError(f"the folder of {path!r} does not exist: make it first")


def draw(study: Study, path: str, title: str) -> None:
    """Write the picture to `path` (.png, .svg or .pdf)."""
    check_path(path)
    try:
        from matplotlib import colormaps
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('a picture needs matplotlib: pip install "unisono[plots]"') from error
    figure = Figure(figsize=(9, 7), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.add_subplot()
    sizes = sorted({n for rows in study.outcomes.values() for n in rows})
    axes.plot(sizes, sizes, color="black", linewidth=1, label="ideal")
    last = study.workers[-1]
    order = sorted(study.methods, key=lambda m: -study.outcomes[m.spec][last].throughput)
    shades = colormaps["tab20" if len(order) > 10 else "tab10"]
    colours = [shades(i % shades.N) for i in range(len(order))]
    for method, colour in zip(order, colours, strict=True):
        rows = study.outcomes[method.spec]
        able = [n for n in sizes if not rows[n].problem]
        style = _STYLES[method.grade]
        axes.plot(
            able, [rows[n].speed_up for n in able], style, color=colour, label=method.spec, marker="o", markersize=3
        )
    _mark_best(axes, study, sizes, {m.spec: c for m, c in zip(order, colours, strict=True)})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(list(study.workers), [f"{n:,}" for n in study.workers])
    axes.minorticks_off()
    axes.set_xlim(1, sizes[-1])
    axes.set_ylim(bottom=0.5)
    axes.set_xlabel("workers")
    axes.set_ylabel("speed-up over one worker")
    axes.set_title(f"{title}\n{describe_cluster(study.cluster)}", fontsize=8)
    axes.grid(alpha=0.3)
    key = "lines: exact solid, rounded dash-dotted, compressed dashed, other dotted; band: the best but for other"
    columns = 2 if max(len(m.spec) for m in order) > 30 else 4
    figure.legend(loc="outside lower center", ncols=columns, fontsize=8, title=key, title_fontsize=8)
    figure.savefig(path, dpi=110)


def _mark_best(axes: Any, study: Study, sizes: list[int], colours: dict[str, Any]) -> None:
    """A band at the bottom: the colour of the best that trains like all-reduce, to half-way to the next scale."""
    ends = [(a * b) ** 0.5 for a, b in pairwise(sizes)]
    for n, begin, end in zip(sizes, [sizes[0], *ends], [*ends, sizes[-1]], strict=True):
        best = study.best(n, LIKE_ALLREDUCE)
        if best is not None and n > 1:
            axes.axvspan(begin, end, 0, 0.035, color=colours[best.spec], linewidth=0)
