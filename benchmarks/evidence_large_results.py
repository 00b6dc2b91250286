"""Part of evidence_large.py: what came of the runs, as numbers, as a picture and as a part of docs/evidence.md."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evidence_large_tasks import best, search
from evidence_tasks import Run

LINKS = (100.0, 1000.0, 10_000.0)  # Mbit/s


def chosen(task: str, names: Sequence[str], steps: int, workers: int, lines: dict[str, Any]) -> dict[str, list[Any]]:
    """By variant: the lines of its runs over the seeds, at its best rates."""
    found: dict[str, list[Any]] = {}
    for name in names:
        variant = best(search(task, name, steps, workers, lines)[0], lines)
        if variant is not None:
            keys = [Run(task, variant, seed, steps, workers).key for seed in range(20)]
            found[name] = [lines[key] | {"variant": variant} for key in keys if key in lines]
    return {name: each for name, each in found.items() if each}


def seconds_to(course: Sequence[Sequence[float]], target: float, compute_s: float, mbit: float) -> float | None:
    """Until the held-out loss is at most `target`, on a link of this speed: compute, then bytes."""
    for step, loss, _, nbytes, *_ in course:
        if loss <= target:
            return step * compute_s + nbytes * 8 / (mbit * 1e6)
    return None


def tell(found: dict[str, list[Any]], compute_s: float) -> dict[str, Any]:
    """Print a line for each variant, and give the numbers: loss, spread, effect size against AdamW's exact mean, bytes,
    and how many times as fast it comes to within 1 % of that one's loss on each link."""
    reference, told = found.get("adam"), {}
    for name, lines in found.items():
        losses = [math.inf if line["loss"] is None else line["loss"] for line in lines]
        mean, spread = statistics.mean(losses), statistics.stdev(losses) if len(losses) > 1 else 0.0
        said: dict[str, Any] = {"loss": mean, "spread": spread, "seeds": len(losses), "bytes": lines[0]["bytes"]}
        said |= {"lr": lines[0]["variant"].lr[1], "outer": lines[0]["variant"].outer}
        if reference is not None:
            theirs = [line["loss"] for line in reference]
            said["effect"] = (mean - statistics.mean(theirs)) / statistics.mean(theirs)
            target = 1.01 * statistics.mean(theirs)
            for mbit in LINKS:
                each = [seconds_to(run["course"], target, compute_s, mbit) for run in (lines[0], reference[0])]
                said[f"faster_{mbit:g}"] = each[1] / each[0] if each[0] and each[1] else None
        told[name] = said
        print(f"{name:<18}" + ", ".join(f"{k} {v:.4g}" if v is not None else f"{k} never" for k, v in said.items()))
    return told


def draw(found: dict[str, list[Any]], title: str, path: Path) -> None:
    """Held-out loss over the bytes that a worker has sent, a line a method: left is cheap, low is good."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 6))
    for i, (name, lines) in enumerate(found.items()):
        course = [row for row in lines[0]["course"] if row[3] > 0]
        exact = name in ("adam", "allreduce")
        if course:
            x, y = [row[3] / 1e6 for row in course], [row[1] for row in course]
            colour = "black" if exact else plt.get_cmap("tab20")(i % 20)
            axes.plot(x, y, color=colour, lw=2.2 if exact else 1.4, ls="--" if i >= 20 else "-")
            axes.annotate(
                name, (x[-1], y[-1]), (4, 0), textcoords="offset points", fontsize=8, color=colour, va="center"
            )
    axes.set(xscale="log", xlabel="MB that a worker has sent so far", ylabel="held-out loss", title=title)
    axes.grid(alpha=0.25, which="both", lw=0.5)
    axes.margins(x=0.15)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
