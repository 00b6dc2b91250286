"""Part of evidence_large.py: what came of the runs, as numbers, as a picture and as a part of docs/evidence.md.

A method holds what its paper claims of learning if its held-out loss is not worse than that of exact AdamW at equal
samples by more than 1 %, or by more than that one's standard deviation; in part, if by not more than 3 %. Accuracies
are compared by points: 0.5, and in part 1.5.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from evidence_large_tasks import LOWER, OUTERS, RATES, ROUND, TASKS, VARIANTS, best, search
from evidence_rules import DIVERGED, HOLDS, NOT, PART
from evidence_tasks import TUNED, Run

RESULTS = Path(__file__).parent / "results" / "evidence_large.jsonl"
LINKS = (100.0, 1000.0, 10_000.0)  # Mbit/s
MARGINS = {"text": (0.01, 0.03), "digits": (0.005, 0.015)}  # holds, in part: of the loss; points of accuracy
PICTURE = "evidence_large.png"  # beside the page
TITLES = {
    "text25_128": "A GPT of 25.6 million parameters, 128 sequences per step",
    "text25": "A GPT of 25.6 million parameters, 32 sequences per step",
    "text125": "A GPT of 126 million parameters",
    "images": "A ResNet on Fashion-MNIST",
    "text3": "A GPT of 2.8 million parameters",
}


class Reached(NamedTuple):
    """What a variant came to, over the seeds."""

    name: str
    lines: list[dict[str, Any]]

    @property
    def losses(self) -> list[float]:
        found = (line["loss"] for line in self.lines)
        return [math.inf if loss is None or loss > DIVERGED else loss for loss in found]

    def mean(self, field: str = "loss") -> float:
        return statistics.mean(self.losses if field == "loss" else [line[field] for line in self.lines])

    def spread(self, field: str = "loss") -> float:
        values = self.losses if field == "loss" else [line[field] for line in self.lines]
        return statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else 0.0


def chosen(task: str, names: Iterable[str], steps: int, workers: int, lines: dict[str, Any]) -> dict[str, list[Any]]:
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
        if loss is not None and loss <= target:
            return step * compute_s + nbytes * 8 / (mbit * 1e6)
    return None


def compare(ours: Reached, exact: Reached, task: str) -> tuple[float, str]:
    """How much worse than exact training (a share of its loss; points of accuracy), and the verdict."""
    like = TASKS[task].like
    if like == "digits":
        worse, spread = exact.mean("accuracy") - ours.mean("accuracy"), exact.spread("accuracy")
    else:
        worse, spread = ours.mean() / exact.mean() - 1, exact.spread() / exact.mean()
    holds, part = MARGINS[like]
    return worse, HOLDS if worse <= max(holds, spread) else PART if worse <= part else NOT


def tell(found: dict[str, list[Any]], compute_s: float) -> dict[str, Any]:
    """Print a line for each variant, and give the numbers: loss, spread, effect size against AdamW's exact mean, bytes,
    and how many times as fast it comes to within 1 % of that one's loss on each link."""
    reference, told = found.get("adam"), {}
    for name, lines in found.items():
        ours = Reached(name, lines)
        said: dict[str, Any] = {"loss": ours.mean(), "spread": ours.spread(), "seeds": len(lines)}
        said |= {"bytes": lines[0]["bytes"], "lr": lines[0]["variant"].lr[1], "outer": lines[0]["variant"].outer}
        if reference is not None:
            exact = Reached("adam", reference)
            said["effect"] = ours.mean() / exact.mean() - 1
            for mbit in LINKS:
                each = [
                    seconds_to(run["course"], 1.01 * exact.mean(), compute_s, mbit) for run in (lines[0], reference[0])
                ]
                said[f"faster_{mbit:g}"] = each[1] / each[0] if each[0] and each[1] else None
        told[name] = said
        print(f"{name:<18}" + ", ".join(f"{k} {v:.4g}" if v is not None else f"{k} never" for k, v in said.items()))
    return told


# The page ----------------------------------------------------------------------------------------------------

NO_MORE = """**These are runs of the search alone**: {steps} steps, a quarter of {whole}, and one seed for all but exact
training. The longer runs have not been made, so no claim is judged. The search is not complete either: outer rates were
tried for {outer}, and 0.1 times the learning rate for {lower}. After {steps} steps
a method that exchanges every 30 has done so {times} times.{muon}
"""
NO_MUON = """ Muon and AdamW learn differently from a sample,
and exact Muon was not run: what `muloco` has lost by its exchange cannot be seen here."""


def sizes(lines: Sequence[dict[str, Any]]) -> list[tuple[str, int, int, dict[str, Reached]]]:
    """Tasks, workers and steps that there are runs of, with what each variant came to."""
    made = {line["key"]: line for line in lines if line["kind"] == "run"}
    kinds = {(line["task"], line["workers"]) for line in made.values()}
    found = []
    for task, workers in sorted(kinds, key=lambda one: (list(TITLES).index(one[0]), -one[1])):
        steps = max(line["steps"] for line in made.values() if (line["task"], line["workers"]) == (task, workers))
        each = chosen(task, VARIANTS, steps, workers, made)
        found.append((task, workers, steps, {name: Reached(name, runs) for name, runs in each.items()}))
    return found


HEAD = """## At a larger size

The same methods on larger tasks, each at its own best learning rate: `benchmarks/evidence_large.py`, on one GPU.

- **Tasks**: a GPT (blocks of GPT-2 with heads of 64, without biases) on the bytes of 52 MB of Python source and
  documentation, from four wheels of fixed versions, in sequences of 256 bytes; the held-out loss in nats per byte.
  Each step's sequences are of all workers together.{images}
- **Rates**: the optimizer is AdamW unless the table says otherwise. Every method has the best of three learning rates
  (0.3, 1 and 3 times a common one; also 0.1 times where 0.3 is the best), and then of three outer rates where it has
  one (also 1.5 and 2.2 where the highest is the best), by the same search over a quarter of the steps with a seed of
  its own. The rate rises over 5 % of the steps and falls to a tenth as a cosine.
- **Workers** are threads that share the GPU, with all of unisono between them: what is learned does not depend on where
  they run. Parameters and exchanges are float32, activations bfloat16.
- **Worse than exact**: the mean loss over that of exact AdamW at equal samples, minus 1 (images: points of accuracy).
  The claim that a method learns as exact training does **holds** up to 1 % (0.5 points), or up to the standard
  deviation of exact training; it **holds in part** up to 3 % (1.5 points).
- **To the loss**: the predicted time until the held-out loss is within 1 % of what exact AdamW ends with: the measured
  compute of a worker that has the GPU to itself ({compute}, with AdamW; Muon's step takes
  longer), then the bytes that it had sent by then on the link, one after the other. Methods that send while the program
  computes are faster than that.
"""
IMAGES = """ A ResNet of 0.7 million parameters on Fashion-MNIST, images moved and mirrored, {batch}
  per step; accuracy on its test set."""


def section(lines: Sequence[dict[str, Any]]) -> str:
    """The part of the page: a table for each task and number of workers."""
    alone = {(x["task"], x["workers"]): x["step_s"] for x in lines if x["kind"] == "compute"}
    compute = ", ".join(f"{1e3 * seconds:.1f} ms per step on {task}" for (task, _), seconds in sorted(alone.items()))
    pictured = IMAGES.format(batch=TASKS["images"].batch) if any(x.get("task") == "images" for x in lines) else ""
    parts = [HEAD.format(images=pictured, compute=compute)]
    every = [one if "adam" in one[3] else searched(one[0], one[1], lines) for one in sizes(lines)]
    for task, workers, steps, found in every:
        if "adam" in found:
            parts.append(f"### {TITLES[task]}, {workers} workers\n")
            is_whole = steps >= TASKS[task].steps
            if not is_whole:
                tried = [
                    " and ".join(f"`{name}`" for name, one in found.items() if tried_more(one, field, lines)) or "none"
                    for field in ("outer", "lr")
                ]
                said = {"steps": steps, "whole": f"{TASKS[task].steps:,}", "times": steps // ROUND}
                muon = NO_MUON if "muloco" in found and "muon" not in found else ""
                parts.append(NO_MORE.format(outer=tried[0], lower=tried[1], muon=muon, **said))
            if (task, workers) == every[0][:2]:
                parts.append(f"![Loss over the megabytes that a worker has sent, by method]({PICTURE})\n")
            if TASKS[task].like == "text":
                parts += [*tell_claims(found, is_whole), ""]
            samples = f"{steps:,} steps of {TASKS[task].batch} samples"
            parts += [f"{samples}, {found['adam'].lines[0]['parameters'] / 1e6:.1f} million parameters.\n"]
            parts += table(task, found, alone.get((task, workers)), is_whole)
    sessions = {x["session"]: x for x in lines if x["kind"] == "session"}
    dates = sorted({f"{x['date']}, torch {x['torch']}, Python {x['python']}" for x in sessions.values()})
    parts.append(f"Measured on one NVIDIA H200 with 16 cores: {'; '.join(dates)}.\n")
    return "\n".join(parts)


def searched(task: str, workers: int, lines: Sequence[dict[str, Any]]) -> tuple[str, int, int, dict[str, Reached]]:
    """The same of the search alone, where the runs after it have not been made: of each variant that was tried at all
    its learning rates, the best."""
    made = {line["key"]: line for line in lines if line["kind"] == "run"}
    steps, found = max(1, TASKS[task].steps // 4), {}
    for name in VARIANTS:
        runs = [run for run in search(task, name, 4 * steps, workers, made)[0] if run.key in made]
        if len(runs) >= len(RATES) and (variant := best(runs, made)) is not None:
            keys = [Run(task, variant, seed, steps, workers).key for seed in (*range(20), TUNED)]
            found[name] = Reached(name, [made[key] | {"variant": variant} for key in keys if key in made])
    return task, workers, steps, found


def tried_more(ours: Reached, field: str, lines: Sequence[dict[str, Any]]) -> bool:
    """Whether more than one outer rate was tried (`outer`), or the lowest learning rate (`lr`)."""
    variant, last = ours.lines[0]["variant"], ours.lines[-1]
    others = [VARIANTS[ours.name].at(LOWER)]
    if field == "outer":
        others = [variant._replace(outer=outer) for outer in OUTERS if variant.outer not in (0.0, outer)]
    keys = {Run(last["task"], other, TUNED, last["steps"], last["workers"]).key for other in others}
    return any(line.get("key") in keys for line in lines)


def tell_claims(found: dict[str, Reached], is_whole: bool) -> list[str]:
    """Sentences on the claims of the newest methods."""
    told = []
    if {"sparseloco", "adam"} <= found.keys():
        worse, verdict = compare(found["sparseloco"], found["adam"], "text25")
        fewer = found["adam"].mean("bytes") / found["sparseloco"].mean("bytes")
        so_far = "so far within it" if verdict == HOLDS else "not so far"
        told.append(
            f"- `sparseloco` ends within 1 % of exact AdamW's loss at equal samples: "
            f"{f'**{verdict}**' if is_whole else so_far} ({100 * worse:+.2f} %, with {fewer:,.0f} times fewer bytes)."
        )
    if {"muloco", "diloco"} <= found.keys():
        ours, theirs = found["muloco"], found["diloco"]
        worse = ours.mean() / theirs.mean() - 1
        holds = worse <= max(0.0, theirs.spread() / theirs.mean())
        verdict = f"**{HOLDS if holds else NOT}**" if is_whole else "so it is so far" if holds else "not so far"
        told.append(f"- `muloco` is not worse than `diloco`: {verdict} ({100 * worse:+.2f} %).")
    if {"muloco", "muon"} <= found.keys():
        lost = found["muloco"].mean() / found["muon"].mean() - 1
        told.append(f"- What `muloco` loses by its exchange, beside exact Muon (`muon`): {100 * lost:+.2f} %.")
    return told


def table(task: str, found: dict[str, Reached], compute_s: float | None, is_whole: bool) -> list[str]:
    exact, like = found["adam"], TASKS[task].like
    what = "accuracy" if like == "digits" else "held-out loss"
    heads = ["method", what, "seeds", "worse than exact", *(["claim"] if is_whole else []), "MB sent", "times fewer"]
    timed = compute_s is not None and like == "text"
    heads += [f"to the loss at {mbit / 1000:g} Gbit/s" for mbit in LINKS] if timed else []
    rows = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(heads) - 1)]
    for ours in sorted(found.values(), key=lambda one: compare(one, exact, task)[0]):
        worse, verdict = compare(ours, exact, task)
        value = "accuracy" if like == "digits" else "loss"
        mean, spread, nbytes = ours.mean(value), ours.spread(value), ours.lines[0]["bytes"]
        scale, digits = (100, 2) if like == "digits" else (1, 4)
        told = f"{scale * mean:.{digits}f}" + (f" ± {scale * spread:.{digits}f}" if len(ours.lines) > 1 else "")
        cells = [tell_name(ours), told + (" %" if like == "digits" else "") if math.isfinite(mean) else "diverged"]
        cells += [str(len(ours.lines)), f"{100 * worse:+.2f} %" if like == "text" else f"{100 * worse:+.2f} points"]
        if is_whole:
            cells.append("reference" if ours is exact else f"**{verdict}**")
        fewer = exact.lines[0]["bytes"] / nbytes if nbytes else 0.0
        cells += [f"{nbytes / 1e6:,.0f}", f"{fewer:,.0f}" if fewer >= 100 else f"{fewer:.3g}" if nbytes else ""]
        for mbit in LINKS if timed else ():
            seconds = seconds_to(ours.lines[0]["course"], 1.01 * exact.mean(), compute_s or 0.0, mbit)
            cells.append("not reached" if seconds is None else tell_time(seconds))
        rows.append(f"| {' | '.join(cells)} |")
    return [*rows, ""]


def tell_name(ours: Reached) -> str:
    """With the rates that were best, times the common ones."""
    variant = ours.lines[0]["variant"]
    optimizer = "" if variant.adam else ", Muon" if variant.muon else f", SGD {variant.momentum:g}"
    outer = f", outer {variant.outer:g}" if variant.outer else ""
    rate = ours.lines[0]["variant"].lr[1 if TASKS[ours.lines[0]["task"]].like == "text" else 0]
    return f"`{ours.name}`{optimizer}, x {rate:g}{outer}"


def tell_time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


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
            colour = "black" if exact else plt.get_cmap("tab10" if len(found) <= 10 else "tab20")(i % 20)
            style = {"lw": 2.2 if exact else 1.4, "ls": "--" if i >= 20 else "-"}
            axes.plot(x, y, color=colour, marker="o" if len(x) == 1 else None, **style)
            axes.annotate(
                name, (x[-1], y[-1]), (4, 0), textcoords="offset points", fontsize=8, color=colour, va="center"
            )
    axes.set(xscale="log", xlabel="MB that a worker has sent so far", ylabel="held-out loss", title=title)
    axes.grid(alpha=0.25, which="both", lw=0.5)
    axes.margins(x=0.15)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
