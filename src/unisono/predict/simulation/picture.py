"""Speed-up curves as a picture: every method against the ideal line, and which is best where."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from unisono.predict.simulation.report import describe_cluster
from unisono.predict.simulation.study import LIKE_ALLREDUCE, Study

__all__ = ["check_path", "draw"]

_STYLES = {"exact": "-", "rounded": "-.", "compressed": "--", "other": ":"}
_SUFFIXES = (".png", ".svg", ".pdf")


def check_path(path: str) -> None:
    """Refuse a file that cannot be written as a picture."""
    if Path(path).suffix.lower() not in _SUFFIXES:
        raise ValueError(f"a picture is a file that ends in {', '.join(_SUFFIXES)}; got {path!r}")
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
