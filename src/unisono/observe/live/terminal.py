"""`unisono top`: what a run does, as a table in the terminal."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from unisono.observe.live.bins import PARTS
from unisono.observe.live.live_run import LiveRun, LiveWorker, Speed
from unisono.observe.runs.reading import say_mesh_place
from unisono.units import show_s

__all__ = ["draw_frame", "draw_sparkline", "show_top"]

_BLOCKS = "▁▂▃▄▅▆▇█"
_TONES = {
    "training": "green",
    "slow": "yellow",
    "silent": "yellow",
    "lost": "red",
    "failed": "red",
    "gone": "red",
    "running": "green",
    "ok": "green",
    "launcher gone": "red",
    "interrupted": "yellow",
}
_ROWS = 20  # of ranks where there are more, and nobody says how high the terminal is
_READ_S = 0.5


def show_top(folder: Path, *, once: bool, console: Console | None = None) -> None:
    """Show the run until it is over or the user leaves; one frame where `once`, or where this is no terminal."""
    console = console or Console()
    live = LiveRun(folder)
    live.read()
    if once or not console.is_terminal:
        console.print(draw_frame(live, time.time(), rows=None))
        return
    with Live(console=console, auto_refresh=False, screen=True, vertical_overflow="crop") as screen:
        try:
            while True:
                live.read()
                screen.update(draw_frame(live, time.time(), rows=max(3, console.height - 12)), refresh=True)
                if live.is_over():
                    break
                time.sleep(_READ_S)
        except KeyboardInterrupt:
            pass
    console.print(draw_frame(live, time.time(), rows=None))


def draw_frame(live: LiveRun, now: float, *, rows: int | None) -> RenderableType:
    """One picture of the run. `rows`: how many ranks there is room for."""
    speeds = live.measure_speeds()
    states = live.describe_places(now)
    order = live.order_places(speeds, states)
    room = rows if rows is not None else (len(order) if len(order) <= 64 else _ROWS)
    shown = order[:room] if len(order) > room else sorted(order)
    parts: list[RenderableType] = [*_draw_head(live, now), _draw_counts(states)]
    if shown:
        parts.append(_draw_ranks(live, shown, speeds, states, now))
    if len(order) > len(shown):
        parts.append(_draw_rest(speeds, len(order) - len(shown)))
    parts += _draw_said(live)
    return Group(*parts)


def _draw_head(live: LiveRun, now: float) -> list[RenderableType]:
    run, state = live.run, live.describe_state()
    title = Text(overflow="ellipsis", no_wrap=True)
    title.append(str(run.get("name") or live.folder.name), style="bold")
    title.append("  ")
    title.append(state, style=_TONES.get(state, "bold"))
    started, ended = run.get("started"), run.get("ended")
    if isinstance(started, int | float):
        last = max((place.last for place in live.places.values()), default=now)
        end = ended if isinstance(ended, int | float) else now if not live.is_over() else last
        title.append(f"  {_clock(end - started)}")
    if live.step >= 0:
        title.append(f"  step {live.step:,}")
    found: list[RenderableType] = [title]
    command = " ".join(str(word) for word in run.get("command") or [])
    if command:
        found.append(Text(command, style="dim", overflow="ellipsis", no_wrap=True))
    for name, series in list(live.metrics.items())[:3]:
        values = [point[2] for point in series.since(0)]
        if values:
            line = Text(f"{name[:16]:<16} ", overflow="ellipsis", no_wrap=True)
            line.append(draw_sparkline(values, 40), style="cyan")
            line.append(f" {values[-1]:.5g}")
            found.append(line)
    return found


def _draw_counts(states: dict[int, str]) -> Text:
    text = Text(f"{len(states)} rank{'s' if len(states) != 1 else ''}" + (": " if states else ""))
    for i, (state, count) in enumerate(Counter(states.values()).most_common()):
        text.append(", " if i else "")
        text.append(f"{count} {state}", style=_TONES.get(state, ""))
    return text


def _draw_ranks(
    live: LiveRun, shown: Sequence[int], speeds: dict[int, Speed], states: dict[int, str], now: float
) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    meshed = any(live.places[number].header.get("mesh") for number in shown)
    where = ["mesh"] if meshed else []
    for name in ("rank", *where, "step", "step/s", "compute", "comm.", "wait", "data", "MB/s", "slow"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for number in shown:
        rank, *rest = _describe_row(live.places[number], speeds.get(number), states[number], now)
        table.add_row(rank, *([say_mesh_place(live.places[number].header, short=True)] if meshed else []), *rest)
    return table


def _name(place: LiveWorker) -> str:
    """Its rank; where ranks were dealt anew, the number that the launcher's messages call the worker by."""
    return str(place.rank) if place.rank == place.place else f"worker {place.place}"


def _describe_row(place: LiveWorker, speed: Speed | None, state: str, now: float) -> list[RenderableType]:
    text = f"{state} {_clock(now - place.last)}" if state == "silent" else state
    shown = Text(text, style=_TONES.get(state, ""))
    step = f"{place.step:,}" if place.step >= 0 else ""
    if speed is None:
        return [_name(place), step, *[""] * 7, shown]
    compute, compression, communication, waiting, data = speed.parts
    times = [show_s(s).replace(" ", "") for s in (compute, compression + communication, waiting, data)]
    factor = Text(f"x{speed.factor:.1f}", style="yellow" if speed.factor >= 1.3 else "dim")
    return [_name(place), step, f"{speed.steps_s:.4g}", *times, f"{speed.bytes_s / 1e6:.4g}", factor, shown]


def _draw_rest(speeds: dict[int, Speed], count: int) -> Text:
    own = np.array([s.parts[0] + s.parts[PARTS.index("data")] for s in speeds.values()])
    if not len(own):
        return Text(f"and {count:,} more", style="dim")
    low, middle, high = np.percentile(own, [5, 50, 95])
    return Text(
        f"and {count:,} more; own time per step, all ranks: median {show_s(middle)}, 5 % below {show_s(low)}, "
        f"5 % above {show_s(high)}",
        style="dim",
    )


def _draw_said(live: LiveRun) -> list[RenderableType]:
    said = [mark for mark in live.marks.kept if mark.tone != "quiet"]
    verdicts = [mark for mark in said if mark.kind == "verdict"][-5:]
    others = [mark for mark in said if mark.kind != "verdict"][-3:]
    begin = live.run.get("started")
    found: list[RenderableType] = []
    for mark in sorted([*verdicts, *others], key=lambda mark: mark.time):
        when = _clock(mark.time - begin) if isinstance(begin, int | float) else ""
        line = Text(f"{when} ", style="dim")
        line.append(mark.cause or mark.kind, style="red" if mark.tone == "bad" else "yellow")
        line.append(f"  {mark.text}", style="default")
        found.append(line)
    found += [Text(f"not there: {text}", style="dim") for text in live.missing]
    return found


def draw_sparkline(values: Sequence[float], width: int) -> str:
    """Values as a line of blocks, the mean of some for each.

    >>> draw_sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8)
    '▁▂▃▄▅▆▇█'
    """
    if not values:
        return ""
    groups = [group.mean() for group in np.array_split(np.asarray(values, dtype=float), min(width, len(values)))]
    low, high = min(groups), max(groups)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((value - low) * scale)] for value in groups)


def _clock(seconds: float) -> str:
    """Hours, minutes and seconds.

    >>> _clock(75), _clock(3700)
    ('1:15', '1:01:40')
    """
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
