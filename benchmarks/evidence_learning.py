"""How much a method learns from a sample, beside exact training, for `unisono plan`: from the runs of evidence.py.

python benchmarks/evidence_learning.py                        # write the planner's file from what is in results/
python benchmarks/evidence_learning.py --measure more.jsonl   # the reference's curve; go on where the file ends

A method's final losses are compared with how the reference's loss falls with the number of its samples. If the
reference ends with the same loss after 0.8 of the samples, a sample under the method teaches 0.8 of what it does under
exact training: the method needs 1 / 0.8 of the samples to that loss. A point of the reference's curve is a whole run
with so many samples, in which the learning rate falls as in a long one: in the middle of a long run it is higher, and
so is the loss. Curves are of losses over the loss at the end, as they may be of another machine than the method's runs.

A method and its reference have the same seeds, so that what counts is the mean over the seeds of loss / reference's
loss, on the mean curve. How far the share differs with the seed of the method, and with that of the curve, gives its
standard error, and by Student's t the interval in which four of five such measurements are expected. Of several tasks
the one counts whose interval ends lowest: where the method is worst, as far as can be told. What would be above 1
counts as 1: better than the reference at the reference's learning rate says more of that rate. A run that diverged
makes it 0 (from 0 to 0). With fewer than two seeds, or no curve, nothing is said.

Where a spec was run at the larger size too (evidence_large.py: the GPT of 25 M parameters, each method at its own best
learning rate, beside exact AdamW at its own), that one counts alone.

Keys of the JSON line: specs that are in the planner's file.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from evidence import RESULTS, Bundle, begin_session, run_bundle
from evidence_claims import BOTH, VARIANTS
from evidence_large_results import RESULTS as LARGE
from evidence_large_results import sizes
from evidence_large_tasks import CURVED, curve
from evidence_large_tasks import SHARES as LARGE_SHARES
from evidence_rules import DIVERGED, Results, read
from evidence_tasks import ALONE, STEPS, Run, Variant
from measure import finish

CURVES = RESULTS.with_name("learning.jsonl")
SHARES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)  # of the samples, of which a curve has points
SEEDS = 3
REFERENCES = {False: "allreduce", True: "adam"}  # by whether the optimizer is AdamW
PROPOSED = {  # what `unisono plan` proposes, and no row of the evidence has
    "qsgd": Variant("qsgd"),
    "nuqsgd": Variant("nuqsgd"),
    "randomk_1": Variant("randomk(k=0.01)"),
}
EVERY = VARIANTS | PROPOSED
T80 = {
    1: 3.078,
    2: 1.886,
    3: 1.638,
    4: 1.533,
    5: 1.476,
}  # Student's t: four of five, by degrees of freedom; beyond: normal


Curve = Sequence[float]  # losses of the reference over its loss at the end, by shares of the samples


def share_at(curve: Curve, loss: float, shares: Sequence[float] = SHARES) -> float:
    """The share after which the reference has this loss: of several the largest; 0 if all losses are below."""
    points = list(zip(shares, falling(curve), strict=True))
    if loss <= points[-1][1]:
        return 1.0
    for (a, above), (b, below) in pairwise(points):
        if below < loss <= above:
            return a + (b - a) * (above - loss) / (above - below)
    return 0.0


class Found(NamedTuple):
    """On one task."""

    share: float
    low: float
    high: float
    task: str
    seeds: int


# Curves ------------------------------------------------------------------------------------------------------


def curve_runs(task: str, reference: str, seed: int) -> list[Run]:
    return [Run(task, EVERY[reference], seed, round(share * STEPS[task])) for share in SHARES]


def make_curves(results: Results, task: str, reference: str) -> list[Curve]:
    """Of the seeds of which all points are there."""
    curves: list[Curve] = []
    for seed in range(20):
        found = [results.runs.get(run.key, {}).get("loss") for run in curve_runs(task, reference, seed)]
        if all(found):
            curves.append([loss / found[-1] for loss in found])
    return curves


def falling(values: Sequence[float]) -> list[float]:
    """The nearest values (least squares) that never rise: neighbours that do are replaced by their mean."""
    blocks: list[list[float]] = []
    for value in values:
        blocks.append([value])
        while len(blocks) > 1 and statistics.mean(blocks[-2]) < statistics.mean(blocks[-1]):
            last = blocks.pop()
            blocks[-1] += last
    return [statistics.mean(block) for block in blocks for _ in block]


# What a method learns ----------------------------------------------------------------------------------------


def compare(
    losses: Mapping[int, float | None],
    others: Mapping[int, float | None],
    curves: Sequence[Curve],
    shares: Sequence[float] = SHARES,
) -> Found | None:
    """By the seeds that a method and its reference have in common."""
    seeds = [seed for seed in sorted(set(losses) & set(others)) if not diverged(others[seed])]
    if min(len(seeds), len(curves)) < 2:
        return None
    if any(diverged(losses[seed]) for seed in seeds):
        return Found(0.0, 0.0, 0.0, "", len(seeds))
    ratios = [losses[seed] / others[seed] for seed in seeds]  # type: ignore[operator]
    ratio, curve = statistics.mean(ratios), [statistics.mean(points) for points in zip(*curves, strict=True)]
    share = share_at(curve, ratio, shares)
    by_seed = [share_at(curve, each, shares) for each in ratios]
    by_curve = [share_at(each, ratio, shares) for each in curves]
    error = math.hypot(*(statistics.stdev(each) / math.sqrt(len(each)) for each in (by_seed, by_curve)))
    half = T80.get(min(len(ratios), len(curves)) - 1, 1.282) * error
    least = shares[0] if share == 0.0 else 0.0  # below the curve's first point: somewhere
    return Found(share, max(share - half, 0.0), min(max(share + half, least), 1.0), "", len(seeds))


def diverged(loss: float | None) -> bool:
    return loss is None or loss > DIVERGED


def judge(name: str, results: Results, curves: Mapping[tuple[str, str], Sequence[Curve]]) -> Iterator[Found]:
    """What was found of a variant, task by task."""
    variant = EVERY[name]
    reference = REFERENCES[variant.adam]
    for task in BOTH:
        here = results.of_one_place([(name, task), (reference, task)])
        losses, others = ({run["seed"]: run["loss"] for run in here.of(each, task)} for each in (name, reference))
        if (found := compare(losses, others, curves[task, reference])) is not None:
            yield found._replace(task=task)


def judge_large(lines: Sequence[dict[str, Any]]) -> Iterator[tuple[Variant, Found]]:
    """The same at the larger size, where a method is compared with exact AdamW."""
    made = {line["key"]: line for line in lines if line["kind"] == "run"}
    for task, workers, steps, found in sizes(lines):
        if task not in CURVED or "adam" not in found:
            continue
        exact = {line["seed"]: line["loss"] for line in found["adam"].lines}
        points = [run for run in curve(task, found["adam"].lines[0]["variant"], steps, workers) if run.key in made]
        by_seed = {seed: [made[run.key]["loss"] for run in points if run.seed == seed] for seed in exact}
        curves = [
            [*(loss / exact[seed] for loss in losses), 1.0]
            for seed, losses in by_seed.items()
            if len(losses) == len(LARGE_SHARES) - 1
        ]
        for ours in found.values():
            losses = {line["seed"]: line["loss"] for line in ours.lines}
            if (one := compare(losses, exact, curves, LARGE_SHARES)) is not None:
                yield ours.lines[0]["variant"], one._replace(task=task)


def is_judged(variant: Variant) -> bool:
    """Whether a variant is a method beside exact training: not the references, nor those at another's learning rate."""
    return variant.spec not in (ALONE, "allreduce") and not variant.muon


def write_specs(variant: Variant) -> tuple[str, list[str]]:
    """The canonical spec of a variant, and the arguments that it is without: those that are a share of the run."""
    from unisono.methods.spec import build, describe, parse
    from unisono.predict.planner.learning import strip

    free = re.findall(r"(\w+)=\{", variant.spec)
    whole = parse(describe(build(variant.told(STEPS["text"]), kind="strategy")))
    return str(strip(whole, free)), free


def make_file(
    evidence: Iterable[dict[str, Any]], curves: Iterable[dict[str, Any]], large: Sequence[dict[str, Any]] = ()
) -> str:
    """The planner's file."""
    more = Results(curves, EVERY)
    measured = {(t, r): make_curves(more, t, r) for t in BOTH for r in REFERENCES.values()}
    lines = [*evidence, *curves]
    results = Results(lines, EVERY)
    found: dict[tuple[str, tuple[str, ...]], list[Found]] = {}
    for name, variant in EVERY.items():
        if is_judged(variant):
            spec, free = write_specs(variant)
            found.setdefault((spec, tuple(free)), []).extend(judge(name, results, measured))
    for variant, one in judge_large(large):
        if is_judged(variant):
            spec, free = write_specs(variant)
            found[spec, tuple(free)] = [one]
    rows = []
    for (spec, free), each in sorted(found.items()):
        if each:
            worst = min(each, key=lambda f: (f.high, -f.low))
            numbers = {key: round(getattr(worst, key), 3) for key in ("share", "low", "high")}
            rows.append({"spec": spec, "free": list(free), **numbers, "task": worst.task, "seeds": worst.seeds})
    made = '{"made by": "make results, of the runs that docs/evidence.md is of", "methods": [\n'
    return made + ",\n".join(map(json.dumps, rows)) + "\n]}\n"


# The command -------------------------------------------------------------------------------------------------


def measure(path: Path) -> None:
    """What is missing in the file, seed by seed; a seed's runs in one set of workers."""
    done = set(Results(read([path]) if path.exists() else [], EVERY).runs)
    session = begin_session(path, "learning")
    for seed in range(SEEDS):
        runs = [run for task in BOTH for name in REFERENCES.values() for run in curve_runs(task, name, seed)]
        runs += [Run(task, variant, seed, STEPS[task]) for task in BOTH for variant in PROPOSED.values()]
        left = [run for run in runs if run.key not in done]
        if left and (why := run_bundle(Bundle(left), str(path), session)):
            raise SystemExit(why)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", type=Path, metavar="FILE", help="the file that runs are appended to")
    asked = parser.parse_args()
    if asked.measure is not None:
        measure(asked.measure.absolute())
        return
    from unisono.predict.planner.learning import FILE

    text = make_file(read([RESULTS]), read([CURVES]), read([LARGE]) if LARGE.exists() else [])
    FILE.write_text(text, encoding="utf-8")
    finish({"methods": len(json.loads(text)["methods"])})


if __name__ == "__main__":
    main()
