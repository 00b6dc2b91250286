"""Draws network.png and time_to_loss.png from the lines in benchmarks/results: `python docs/pictures.py`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from results import name_benchmark, name_method, read_lines

FOLDER = Path(__file__).parent
STYLE = {
    "figure.constrained_layout.use": True,
    "figure.facecolor": "white",  # not transparent: readable on a dark page too
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 11,
    "savefig.dpi": 130,
}
STEPS = ("fp16", "bytegrad", "nuqsgd", "topk_1pct", "powersgd_r4", "randomk_1pct")
LINKS = {100: "100 Mbit/s", 1000: "1 Gbit/s", 10000: "10 Gbit/s"}
RACERS = {
    "ddp": ("DDP", "#9aa3af"),
    "torch_powersgd_r4": ("DDP, PyTorch's PowerSGD hook", "#9aa3af"),
    "local_sgd_8_topk": ("local_sgd(8) with topk", "#3b82c4"),
    "local_sgd_8_powersgd_r8": ("local_sgd(8) with powersgd(8)", "#3b82c4"),
    "sparseloco_8": ("sparseloco(8)", "#3b82c4"),
    "sparseloco_8_outer": ("sparseloco(8, outer_lr=1.5)", "#3b82c4"),
}


def find_line(lines: list[dict[str, Any]], *keys: str) -> dict[str, Any]:
    """The newest line of network.py that has all these keys."""
    return [line for line in lines if name_benchmark(line) == "network" and set(keys) <= set(line)][-1]


def draw_steps(line: Mapping[str, Any]) -> Figure:
    """The time per step of several methods on three links."""
    figure = Figure(figsize=(8.5, 2.6))
    for axes, (mbit, title) in zip(figure.subplots(1, len(LINKS), sharey=True), LINKS.items(), strict=True):
        exact = line[f"dense_s_{mbit}"]
        times = [exact, *(exact / line[f"dense_over_{name}_{mbit}"] for name in STEPS)]
        colours = ["#9aa3af", *["#3b82c4"] * len(STEPS)]
        bars = axes.barh(["exact gradients", *map(name_method, STEPS)], times, color=colours)
        axes.bar_label(bars, [f"{time:.2f} s" for time in times], padding=3, fontsize=9)
        axes.set(title=title, xticks=[], xlim=(0, 1.25 * max(times)))
        axes.spines["bottom"].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.title.set_fontsize(11)
    axes.invert_yaxis()
    figure.suptitle(f"Seconds per training step: 25 M parameters, {line['hosts']} hosts, three links", fontsize=11)
    return figure


def draw_races(line: Mapping[str, Any]) -> Figure:
    """The time in which several methods reach DDP's loss over a slow link."""
    figure = Figure(figsize=(7, 2.7))
    axes = figure.subplots()
    times = [line[f"{name}_seconds"] for name in RACERS]
    labels, colours = zip(*RACERS.values(), strict=True)
    bars = axes.barh(labels, times, color=colours, height=0.7)
    axes.bar_label(bars, [f"{time:.1f} s" for time in times], padding=4)
    axes.set(xlim=(0, 1.12 * max(times)), xticks=[])
    axes.invert_yaxis()
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.suptitle(f"Seconds to the same loss: {line['hosts']} hosts, links of 100 Mbit/s", fontsize=11)
    return figure


def main() -> None:
    matplotlib.use("Agg")
    matplotlib.rcParams.update(STYLE)
    lines = read_lines(FOLDER.parent / "benchmarks" / "results")
    draw_steps(find_line(lines, "dense_s_10000")).savefig(FOLDER / "network.png")
    draw_races(find_line(lines, *(f"{name}_seconds" for name in RACERS))).savefig(FOLDER / "time_to_loss.png")


if __name__ == "__main__":
    main()
