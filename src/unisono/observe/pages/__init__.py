"""A page of sections: text, tables, line charts (uPlot) and stacked bars, as one HTML file with all that it needs.

Nothing is fetched: style, script and data are in the file, and the page's own policy forbids the rest. Light and dark
follow the reader's system.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import resources
from typing import Any

__all__ = ["Bars", "Block", "Lines", "Pairs", "Section", "Series", "Table", "write_page"]

COLOURS = 8  # page.css has so many
_POINTS = 600  # of a line, at most


@dataclass
class Series:
    """One line of a chart. Lines of one `colour` belong together."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float | None]
    colour: int = 0
    dashed: bool = False
    dots: bool = False


@dataclass
class Lines:
    """A line chart."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    whole_x: bool = False  # x counts something
    from_zero: bool = False


@dataclass
class Bars:
    """Bars side by side, each made of parts; a part that is not known (None) is left out."""

    title: str
    unit: str
    parts: Sequence[str]
    rows: Sequence[tuple[str, Sequence[float | None]]]
    note: str = ""


@dataclass
class Table:
    """Text in columns; `marked` rows stand out, a row's note goes below it."""

    headings: Sequence[tuple[str, str]]  # name and unit
    rows: Sequence[Sequence[str]]
    marked: Sequence[bool] = ()
    notes: Sequence[str] = ()


@dataclass
class Pairs:
    """A list of names and their texts."""

    pairs: Sequence[tuple[str, str]]


Block = str | Lines | Bars | Table | Pairs


@dataclass
class Section:
    """A heading, and what is below it; blocks that are charts stand side by side where there is room."""

    heading: str
    blocks: Sequence[Block] = field(default_factory=list)


def write_page(title: str, lead: str, sections: Sequence[Section]) -> str:
    """The whole page as HTML text, which needs no other file."""
    charts: list[dict[str, Any]] = []
    body = "\n".join(_write_section(section, charts) for section in sections)
    script = "\n".join([_read("vendor/uPlot.iife.min.js"), _read("charts.js")]) if charts else ""
    data = json.dumps(charts, allow_nan=False).replace("<", "\\u003c")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; \
script-src 'unsafe-inline'; img-src data:">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>
{_read("vendor/uPlot.min.css")}
{_read("page.css")}
</style>
</head>
<body>
<main>
<h1>{escape(title)}</h1>
<p class="lead">{escape(lead)}</p>
{body}
</main>
<script type="application/json" id="charts">{data}</script>
<script>
{script}
</script>
</body>
</html>
"""


def _read(name: str) -> str:
    return (resources.files(__name__) / name).read_text(encoding="utf-8")


def _write_section(section: Section, charts: list[dict[str, Any]]) -> str:
    parts: list[str] = []
    row: list[str] = []  # charts that stand side by side
    for block in section.blocks:
        if isinstance(block, Lines):
            row.append(_write_lines(block, charts))
            continue
        if row:
            parts.append(f'<div class="charts">{"".join(row)}</div>')
            row = []
        parts.append(_write_block(block))
    if row:
        parts.append(f'<div class="charts">{"".join(row)}</div>')
    return f"<section>\n<h2>{escape(section.heading)}</h2>\n" + "\n".join(parts) + "\n</section>"


def _write_block(block: str | Bars | Table | Pairs) -> str:
    if isinstance(block, str):
        return f"<p>{escape(block)}</p>"
    if isinstance(block, Table):
        return _write_table(block)
    if isinstance(block, Pairs):
        items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in block.pairs)
        return f"<dl>{items}</dl>"
    return _write_bars(block)


def _write_table(table: Table) -> str:
    head = "".join(
        f"<th>{escape(name)}{f'<span>{escape(unit)}</span>' if unit else ''}</th>" for name, unit in table.headings
    )
    rows = []
    for i, cells in enumerate(table.rows):
        marked = ' class="marked"' if i < len(table.marked) and table.marked[i] else ""
        rows.append(f"<tr{marked}>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
        if i < len(table.notes) and table.notes[i]:
            rows.append(f'<tr class="note"><td colspan="{len(table.headings)}">{escape(table.notes[i])}</td></tr>')
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _write_bars(bars: Bars) -> str:
    """Plain HTML: each part's width is its share of the longest bar."""
    longest = max((sum(v or 0.0 for v in values) for _, values in bars.rows), default=0.0) or 1.0
    keys = "".join(f'<span class="key"><i class="p{i}"></i>{escape(p)}</span>' for i, p in enumerate(bars.parts))
    lines = []
    for name, values in bars.rows:
        pieces = "".join(
            f'<i class="p{i}" style="width:{100 * value / longest:.3f}%" '
            f'title="{escape(f"{bars.parts[i]}: {value:.4g} {bars.unit}")}"></i>'
            for i, value in enumerate(values)
            if value
        )
        total = f"{sum(v or 0.0 for v in values):.4g} {bars.unit}"
        lines.append(f'<div class="bar-name">{escape(name)}</div><div class="bar">{pieces}<b>{escape(total)}</b></div>')
    note = f'<p class="small">{escape(bars.note)}</p>' if bars.note else ""
    return (
        f'<figure><figcaption>{escape(bars.title)}</figcaption><div class="keys">{keys}</div>'
        f'<div class="bars">{"".join(lines)}</div>{note}</figure>'
    )


def _write_lines(lines: Lines, charts: list[dict[str, Any]]) -> str:
    charts.append(
        {
            "x": lines.x_label,
            "y": lines.y_label,
            "whole": lines.whole_x,
            "zero": lines.from_zero,
            "series": [_write_series(series) for series in lines.series],
        }
    )
    name = escape(lines.title)
    return f'<figure><figcaption>{name}</figcaption><div class="chart" data-chart="{len(charts) - 1}"></div></figure>'


def _write_series(series: Series) -> dict[str, Any]:
    """Points with a number each, thinned out where there are more than a screen can show."""
    points = [(x, y) for x, y in zip(series.xs, series.ys, strict=True) if y is not None and math.isfinite(x + y)]
    step = max(1, math.ceil(len(points) / _POINTS))
    kept = points[::step] + (points[-1:] if len(points) % step != 1 and step > 1 else [])
    return {
        "name": series.name,
        "xs": [float(f"{x:.6g}") for x, _ in kept],
        "ys": [float(f"{y:.6g}") for _, y in kept],
        "colour": series.colour % COLOURS,
        "dashed": series.dashed or series.colour >= COLOURS,
        "dots": series.dots,
    }
