"""Writes docs/results.md from benchmarks/results/*.jsonl: `make results`. A test compares the page with that.

A figure says which keys of the lines it is made of, in which words, and from where on it counts as lost. Lines are by
date, the newest last: a table shows the newest, and the range of all runs in the same conditions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from results_figures import ACCURACY, HOST_BOUND, METHOD_NAMES, SECTIONS, Figure, Matrix

ROOT = Path(__file__).parents[1]
MACHINES = {
    "cpu": ("2 cores", "virtual machine, 2 cores of an AMD EPYC, 24 GiB"),
    "gpu": ("H200", "one NVIDIA H200, 16 cores of a Xeon, 128 GiB"),
}
CORES = {2: "cpu", 16: "gpu"}  # of a line that says how many there were: it may be in the other's file
ABOUT = {"date", "benchmark", "torch", "python", "machine"}

INTRO = """\
# Results

Made by `make results` from `benchmarks/results/cpu.jsonl` and `gpu.jsonl`, which have a line for each run of a
benchmark; no number on this page is written by hand. Ratios are of medians of interleaved repeats in one run, both
sides in the same processes, in turn; *2.0×* is twice as fast as the other. Each table has the newest run, and the range
of all runs in the same conditions where there were several. Between runs, ratios vary by about a tenth, and by more on
a machine that others use. `benchmarks/results/README.md` says what was special about single runs. What methods do to
the accuracy is on [Methods](methods/README.md#break-even); the papers' claims stand beside ours on
[Evidence](evidence.md).
"""
LOST = """\
## Where we lose

Everything measured that is slower or worse than what it is compared with, and then what falls short of a target that
the project set itself, in the newest run of its kind.
"""
SHORT = """\
### Short of a target

Faster than what it is compared with, or compared with nothing, but not by as much as was wanted:
"""


@dataclass
class Series:
    """One figure on one machine in one condition: its values by date, and what each was compared with."""

    figure: Figure
    machine: str
    condition: str
    groups: tuple[str, ...]
    values: list[Any] = field(default_factory=list)
    others: list[Any] = field(default_factory=list)
    date: str = ""

    @property
    def bare_words(self) -> str:
        return self.figure.words.format(*map(name_method, self.groups))

    @property
    def words(self) -> str:
        return f"{self.bare_words} ({self.condition})" if self.condition else self.bare_words

    @property
    def place(self) -> str:
        """The machine, and the condition."""
        return ", ".join([MACHINES[self.machine][0], *([self.condition] if self.condition else [])])

    def is_lost(self, i: int = -1) -> bool:
        """Whether the i-th value is on the wrong side of the bound, or of what it was compared with."""
        value, figure = self.values[i], self.figure
        bound = self.others[i] if figure.bound is None else figure.bound
        if bound is None or isinstance(value, bool):
            return False
        if value is None:
            return True
        slack = figure.slack + figure.within * bound
        return value < bound - slack if figure.more else value > bound + slack

    @property
    def newest(self) -> str:
        other = self.others[-1] if self.figure.against else None
        beside = "" if other is None else f" ({self.figure.other} {show(other, self.figure.unit)})"
        return show(self.values[-1], self.figure.unit) + beside

    @property
    def runs(self) -> str:
        known = [v for v in self.values if isinstance(v, int | float)]
        if len(self.values) < 2 or not known:
            return ""
        least, most = (
            show(v, self.figure.unit).rstrip(f"×{self.figure.unit}").strip() for v in (min(known), max(known))
        )
        return f"{least} – {most} in {len(self.values)} runs"

    @property
    def target(self) -> str:
        figure = self.figure
        if figure.bound is None or not figure.is_target:
            return ""
        return ("at least " if figure.more else "at most ") + show(figure.bound, figure.unit)


def show(value: Any, unit: str) -> str:
    """A number, with the digits that count.

    >>> show(5.6023, "x"), show(0.9739, "x"), show(0.0346, "s"), show(0.9461, "%"), show(13304602624, "")
    ('5.6×', '0.97×', '0.035 s', '94.6 %', '13.3 billion')
    """
    if value is None:
        return "not reached" if unit == "s" else "diverged"
    if isinstance(value, bool | str):
        return {True: "yes", False: "no"}.get(value, str(value))
    if unit == "%":
        digits = f"{100 * value:.3g}"
    elif unit == "x" and value >= 0.1:
        digits = f"{value:.2f}" if value < 2 else f"{value:.1f}"
    elif abs(value) >= 1e9:
        digits = f"{value / 1e9:.3g} billion"
    else:
        digits = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2g}" if abs(value) < 1 else f"{value:.3g}"
    return f"{digits}×" if unit == "x" else f"{digits} {unit}".strip()


def name_method(key: str) -> str:
    """The part of a key that names a method, in words.

    >>> name_method("powersgd_r4"), name_method("topk_01"), name_method("local_sgd")
    ('powersgd(4)', 'topk(0.001)', 'local_sgd')
    """
    for pattern, words in METHOD_NAMES.items():
        key = re.sub(pattern, words, key)
    return key


def read_lines(folder: Path) -> list[dict[str, Any]]:
    """The lines of all files, with the machine that each is from."""
    return [
        {**line, "file": CORES.get(line.get("cores"), machine)}
        for machine in MACHINES
        for line in map(json.loads, (folder / f"{machine}.jsonl").read_text(encoding="utf-8").splitlines())
    ]


def name_benchmark(line: Mapping[str, Any]) -> str:
    return re.split(r"\W", str(line["benchmark"]))[0]


def find_condition(line: Mapping[str, Any]) -> str:
    """What was special about a run: only runs in the same conditions are compared."""
    found = []
    name, command = name_benchmark(line), str(line["benchmark"])
    if megabytes := re.search(r"--megabytes (\d+)", command):
        found.append(f"{megabytes[1]} MB")
    if line.get("busy"):
        found.append(f"beside {line['busy']} busy processes")
    if name == "network":
        found.append(f"{line['hosts']} hosts")
    if name == "small_steps" and line.get("mbit"):
        found.append(f"{line['hosts']} hosts at {line['mbit'] / 1000:g} Gbit/s")
    if name == "gpu_reducers":
        found.append(f"{5 * round(line['busy_ms'] / 5)} ms of work for the GPU")
        if line["compute_ms"] > 1.15 * line["busy_ms"]:
            found.append(HOST_BOUND)
    if name == "faults" and "workers" in line:
        found.append(f"{line['workers']} workers, {line['least']} at least")
    return ", ".join(found)


def collect(figures: Sequence[Figure], names: Sequence[str], lines: list[dict[str, Any]]) -> list[Series]:
    """The series of some figures, in the figures' order."""
    made: dict[tuple[int, str, str, tuple[str, ...]], Series] = {}
    for i, figure in enumerate(figures):
        for line in lines:
            if name_benchmark(line) not in names:
                continue
            condition = find_condition(line)
            if not re.fullmatch(figure.condition or ".*", condition):
                continue
            for key, value in line.items():
                match = re.fullmatch(figure.keys, key)
                if match is None or key in ABOUT:
                    continue
                where = (i, line["file"], condition, match.groups())
                series = made.setdefault(where, Series(figure, line["file"], condition, match.groups()))
                values = value if isinstance(value, list) else [value]  # several runs may share a line
                series.values += values
                series.others += [line.get(match.expand(figure.against)) if figure.against else None] * len(values)
                series.date = line["date"]
    return [made[where] for where in sorted(made, key=lambda where: where[0])]


def make_table(titles: Sequence[str], rows: Sequence[Sequence[str]], *, words: int = 1) -> Iterator[str]:
    """A table whose first columns are words, and the others numbers."""
    yield "| " + " | ".join(titles) + " |"
    yield "|" + "|".join(["---"] * words + ["---:"] * (len(titles) - words)) + "|"
    yield from ("| " + " | ".join(row) + " |" for row in rows)
    yield ""


def make_rows(found: Sequence[Series]) -> Iterator[str]:
    """A row for each; or, where several conditions were measured, a column for each of these."""
    if len({series.place for series in found}) > 2:
        yield from make_columns(found)
        return
    columns = {"runs": any(s.runs for s in found), "target": any(s.target for s in found)}
    more = [name for name, used in columns.items() if used]
    rows = [[s.words, s.newest, *(getattr(s, m) for m in more), MACHINES[s.machine][0], s.date] for s in found]
    yield from make_table(["", "newest", *more, "machine", "date"], rows)


def make_columns(found: Sequence[Series]) -> Iterator[str]:
    """What was measured down, and under which conditions across: the newest of each."""
    places = sorted({series.place for series in found}, key=[series.place for series in found].index)
    cells: dict[str, dict[str, str]] = {}
    for series in found:
        runs = f" ({series.runs})" if series.runs else ""
        cells.setdefault(series.bare_words, {})[series.place] = series.newest + runs
    dates = {place: _join_dates([series for series in found if series.place == place]) for place in places}
    titles = ["", *(f"{place}, {dates[place]}" for place in places)]
    rows = [[words, *(row.get(place, "") for place in places)] for words, row in cells.items()]
    if targets := {series.bare_words: series.target for series in found if series.target}:
        titles.append("target")
        rows = [[*row, targets.get(row[0], "")] for row in rows]
    yield from make_table(titles, rows)


def _join_dates(found: Sequence[Series]) -> str:
    dates = sorted(series.date for series in found)
    return " to ".join(dict.fromkeys([dates[0], dates[-1]]))


def make_matrix(matrix: Matrix, names: Sequence[str], lines: list[dict[str, Any]]) -> Iterator[str]:
    """Methods down, one column for each figure (and its second group: a speed of the link)."""
    cells: dict[str, dict[str, str]] = {}
    columns: list[str] = []
    shown: list[Series] = []
    for series in collect(matrix.figures, names, lines):
        if matrix.condition and series.condition != matrix.condition:
            continue
        column = series.figure.words.format(*series.groups)
        if column not in columns:
            columns.append(column)
        cells.setdefault(series.groups[0], {})[column] = series.newest
        shown.append(series)
    if cells:
        places = "; ".join(sorted({series.place for series in shown}))
        yield f"{matrix.words} ({places}, {_join_dates(shown)}):"
        yield ""
        rows = [[name_method(row), *(cells[row].get(column, "") for column in columns)] for row in cells]
        yield from make_table(["", *columns], rows)


def make_lost(lines: list[dict[str, Any]]) -> Iterator[str]:
    """What is lost in the newest run, a row for each figure; then what was lost in an earlier one."""
    lost, short, before = [], [], []
    for section in (*SECTIONS, ACCURACY):
        figures = [*section.figures, *(figure for matrix in section.matrices for figure in matrix.figures)]
        series = collect(figures, section.names, lines)
        for figure in figures:
            mine = [s for s in series if s.figure is figure]
            groups: dict[str, list[Series]] = {}
            for s in mine:
                if s.is_lost():
                    groups.setdefault(s.machine, []).append(s)
                elif any(s.is_lost(i) for i in range(len(s.values))):
                    before.append(f"{s.words}: {s.newest}; {s.runs}")
            for found in groups.values():
                slower = figure.unit == "x" and figure.more and any((s.values[-1] or 0) < 1 for s in found)
                rows = short if figure.is_target and not slower else lost
                rows.append(_make_lost_row(section.title, figure, found))
    yield from make_table(["", "newest", "expected", "why", "where, when"], lost, words=5)
    if short:
        yield SHORT
        yield from make_table(["", "newest", "target", "why", "where, when"], short, words=5)
    if before:
        yield "Lost, or short of a target, in an earlier run and not in the newest:"
        yield ""
        yield from (f"- {line}" for line in before)
        yield ""


def _make_lost_row(title: str, figure: Figure, found: Sequence[Series]) -> list[str]:
    """One row: the section that it is of, what, how much, and how much it should be."""
    conditions = {s.condition for s in found}
    common = next(iter(conditions)) if len(conditions) == 1 else ""
    if len(found) == 1 and not figure.all_words:
        words, value = found[0].words, _show_lost(found[0])
    else:
        words = figure.all_words or figure.words.format(*_common_groups(found))
        words += f" ({common})" if common else ""
        value = "; ".join(_name_part(s, found, common) + _show_lost(s) for s in found)
    others = dict.fromkeys(f"{figure.other} {show(s.others[-1], figure.unit)}" for s in found)
    expected = "; ".join(others) if figure.bound is None else found[0].target or show(figure.bound, figure.unit)
    if figure.within:
        expected += f", at most {show(figure.within, '%')} more"
    where = f"[{title}](#{re.sub('[^a-z0-9-]', '', title.lower().replace(' ', '-'))}): " if title else ""
    return [where + words, value, expected, figure.why, f"{MACHINES[found[0].machine][0]}, {_join_dates(found)}"]


def _common_groups(found: Sequence[Series]) -> list[str]:
    """Of each group the name that all have, or an ellipsis."""
    groups = [s.groups for s in found]
    return [name_method(names[0]) if len(set(names)) == 1 else "…" for names in zip(*groups, strict=True)]


def _show_lost(series: Series) -> str:
    """With more digits where it would look like its target."""
    value, figure = series.values[-1], series.figure
    shown = show(value, figure.unit)
    if figure.unit == "x" and figure.bound is not None and value is not None and shown == show(figure.bound, "x"):
        return f"{value:.4f}".rstrip("0") + "×"
    return shown


def _name_part(series: Series, found: Sequence[Series], common: str) -> str:
    """Which of the keys of a figure: its groups in words, and the condition, where others have another."""
    label = series.figure.label or ", ".join(["{}"] * len(series.groups))
    several = series.figure.all_words or len({s.groups for s in found}) > 1
    names = [label.format(*map(name_method, series.groups))] if several else []
    conditions = [series.condition] if series.condition != common else []
    said = f"{names[0]} ({conditions[0]})" if names and conditions and conditions[0] else "".join(names + conditions)
    return f"{said}: " if said else ""


def make_page(lines: list[dict[str, Any]]) -> str:
    """The whole page."""
    text = [INTRO, *_describe_machines(lines), "", LOST, *make_lost(lines)]
    measured = {name_benchmark(line) for line in lines}
    for section in SECTIONS:
        if not measured.intersection(section.names):
            continue
        text += [f"## {section.title}", "", section.words, ""]
        if found := collect(section.figures, section.names, lines):
            text += make_rows(found)
        for matrix in section.matrices:
            text += make_matrix(matrix, section.names, lines)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(text)).rstrip() + "\n"


def _describe_machines(lines: list[dict[str, Any]]) -> Iterator[str]:
    rows = []
    for machine, (short, words) in MACHINES.items():
        mine = [line for line in lines if line["file"] == machine]
        versions = sorted({f"torch {line['torch']}, Python {line['python']}" for line in mine if "torch" in line})
        dates = sorted({line["date"] for line in mine})
        if mine:
            rows.append([short, words, "; ".join(versions), " to ".join(dict.fromkeys([dates[0], dates[-1]]))])
    yield from make_table(["machine", "", "versions", "dates"], rows, words=4)


def list_unknown(lines: list[dict[str, Any]]) -> list[str]:
    """Benchmarks whose lines no section shows."""
    known = {name for section in (*SECTIONS, ACCURACY) for name in section.names}
    return sorted({name_benchmark(line) for line in lines} - known)


def main() -> None:
    lines = read_lines(ROOT / "benchmarks" / "results")
    (ROOT / "docs" / "results.md").write_text(make_page(lines), encoding="utf-8")
    if unknown := list_unknown(lines):
        raise SystemExit(f"no section of docs/results_figures.py shows the benchmarks {', '.join(unknown)}")


if __name__ == "__main__":
    main()
