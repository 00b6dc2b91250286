"""Part of evidence.py: docs/evidence.md, made from results/evidence.jsonl and the claims alone."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evidence_claims import ONLY, ROWS, TWO_HOSTS, VARIANTS, Row, links_of, of_row, variants_of
from evidence_large_results import RESULTS as LARGE
from evidence_large_results import section as large_section
from evidence_links import SPEEDS
from evidence_rules import HOLDS, NOT, PART, UNKNOWN, Results, read, speed, told, verdict
from evidence_tasks import BATCH, STEPS, WORKERS

PAGE = Path(__file__).parent.parent / "docs" / "evidence.md"
SEEDS = 3  # of a whole run
MARKS = {True: "yes", False: "**no**", None: "not measured"}
KINDS = {"run": "accuracy", "link": "links"}
HEAD = """# Evidence

After this page you can judge for each method whether its paper's claim holds in our measurements. The summary comes
first, then every check that failed, the setup, and each method in detail. You can repeat each row with one command,
`python benchmarks/evidence.py METHOD`, which needs no download. Rules in code (`benchmarks/evidence_rules.py`) decide
whether a claim holds, and claims that do not hold are shown like the others. The tasks are small, the runs are short,
and {workers} workers take part: a claim that does not hold here may hold at the size of its paper, and vice versa.
{larger}
"""
LARGER = """[At a larger size](#at-a-larger-size), on a GPT of 25.6 million parameters, methods are compared at learning
rates of their own."""
NOT_LARGER = """`benchmarks/evidence_large.py` trains a GPT of 25.6 million parameters and a ResNet under most methods;
it needs a GPU, and there are no results of it yet."""
HOW = """## How it is measured

- **digits**: a CNN of 0.12 M parameters on {digits}, {digits_steps} steps of {digits_batch}; accuracy on 300
  held-out samples. **text**: a character transformer of 0.11 M parameters on the sources of Python's standard library,
  {text_steps} steps of {text_batch} sequences of 32; the loss on held-out sequences. **sparse**: logistic regression on
  8 of 4000 features per sample (synthetic). All with {workers} workers. **long**: a transformer of 0.22 M parameters on
  the text, {long_steps:,} steps of {long_batch} sequences of 64, by one worker.
- A method and its reference begin with the same weights and see the same samples in the same order, and all accuracies
  and losses of a row were measured with one machine, torch and Python. The learning rate falls to a fifth at 60 and
  at 85 % of the steps. Learning rates are the reference's (SGD with momentum 0.9, or AdamW), not tuned by method;
  exceptions are in the tables, with their reasons in `benchmarks/evidence_claims.py`. `..._searched` and the methods
  compared with it have the best of four rates, from 0.1 to 3 times these, by one run each with another seed (`--tune`).
  On **long** every variant has the best of five rates from 0.35 to 1.4 times 0.003, by runs of 500 steps.
- Numbers are the mean over {seeds} ± their standard deviation.
- **as good as**: not worse than the reference by more than 0.5 points of accuracy (digits) or 1 % of its loss (text,
  sparse), or by its standard deviation if that is more. **better than**: better by more than that, and by more than the
  standard deviations of both. A run whose loss is not finite or above 20 has diverged, and is worse than all.
- **bytes**: the bytes that a rank sent in the run according to the ledger (mean over the ranks), divided by the
  reference's; on two hosts, those sent from host to host. **step**: a training step of an MLP of 1.05 M parameters
  (4.2 MB) between emulated hosts ([the lab](lab.md)), and its speed relative to the reference's step: 4 hosts with
  one worker each, or 2 with two for `hierarchical` and `shared`. **faster than**: the other takes at least 5 % longer.
- **one worker 4 times as slow**: compute is emulated by sleeping for 20 ms and for 80 ms; shown are windows a
  second of all workers together.
- A row **holds** if every measured check does, **does not hold here** if none of its main checks does (the result of
  training, or another subject of the paper; not bytes or time), and otherwise **holds in part**.
"""


def write_page(results: Path, files: list[Path]) -> None:
    """Remake the page; `files` first take the place of what the results file has of their kinds."""
    if files:
        lines = read(files)
        if not any(line["kind"] in KINDS for line in lines):
            raise SystemExit(f"no results in {', '.join(map(str, files))}")
        kinds = {line["kind"] for line in lines if line["kind"] in KINDS}
        kept = [line for line in read([results] if results.exists() else []) if line["kind"] in set(KINDS) - kinds]
        merge(results, lines, kept)
    large = read([LARGE]) if LARGE.exists() else []
    PAGE.write_text(page(Results(read([results]), VARIANTS), large), encoding="utf-8")


def merge(results: Path, lines: list[dict[str, Any]], kept: list[dict[str, Any]]) -> None:
    """New lines, and what is kept of the old ones, with the sessions that they are of."""
    sessions = {line["session"]: line for line in read([results]) if line["kind"] == "session"} if kept else {}
    used = {line["session"] for line in kept}
    both = [*(sessions[name] for name in sorted(used) if name in sessions), *kept, *lines]
    results.write_text("".join(json.dumps(line) + "\n" for line in both), encoding="utf-8")


def page(results: Results, large: Sequence[dict[str, Any]] = ()) -> str:
    digits = sorted({run["data"] for run in results.runs.values() if run["task"] == "digits"})
    small = why_small(results)
    parts = [
        HEAD.format(workers=WORKERS, larger=LARGER if large else NOT_LARGER),
        *([f"> **This page is from a small run**: {small}. Treat its verdicts as preliminary.\n"] if small else []),
        summary(results),
        *([large_section(large)] if large else []),
        HOW.format(
            workers=WORKERS,
            seeds=count(max((len(results.of(name, "text")) for name in VARIANTS), default=0), "seed"),
            digits=" or ".join(digits) or "scikit-learn's digits",
            digits_steps=results.steps["digits"],
            text_steps=results.steps["text"],
            digits_batch=BATCH["digits"],
            text_batch=BATCH["text"],
            long_steps=results.steps["long"],
            long_batch=BATCH["long"],
        ),
        measured_when(results),
        "## Methods in detail\n",
        *(section(method, row, results) for method, row in sorted(ROWS.items())),
    ]
    return "\n".join(parts)


def count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def measured_when(results: Results) -> str:
    """The sessions that lines on the page are of, and the rows that have some of them."""
    used: dict[tuple[str, str], dict[str, None]] = {}  # session and part to methods
    for method in sorted(ROWS):
        mine = of_row(method, results)
        for task in ROWS[method].tasks:
            for run in (run for name in variants_of(method, task) for run in mine.of(name, task)):
                used.setdefault((run["session"], "accuracy"), {})[method] = None
    for line in results.links.values():
        used[line["session"], "links"] = {}
    rows = ["## Dates and machines\n"]
    rows.append("| date | machine | torch | Python | part | rows | command |\n|---|---|---|---|---|---|---|")
    for (name, part), methods in sorted(used.items()):
        s = results.sessions[name]
        told = f"{s['date']} | {s['machine']} | {s['torch']} | {s['python']} | {part}"
        whose = ", ".join(methods) if 0 < len(methods) < len(ROWS) / 2 else "all" if not methods else "most"
        rows.append(f"| {told} | {whose} | `{s['command']}` |")
    rows.append(
        "\nThe page is made from `benchmarks/results/evidence.jsonl` by `python benchmarks/evidence.py --page`."
    )
    if results.errors:
        rows.append("\nRuns that failed:\n")
        rows += [f"- {key}: {why}" for key, why in sorted(results.errors.items())]
    return "\n".join(rows) + "\n"


def why_small(results: Results) -> str:
    """What a whole run has and this has not."""
    short = [task for task in ("digits", "text") if results.steps[task] < STEPS[task]]
    found = [f"{results.steps[task]} steps of {task} instead of {STEPS[task]}" for task in short]
    rows = {method: of_row(method, results) for method in ROWS}
    counts = [len(rows[m].of(name, task)) for m in ROWS for task in ROWS[m].tasks for name in variants_of(m, task)]
    if min(counts, default=0) < SEEDS:
        few = sum(count < SEEDS for count in counts)
        found.append(f"{few} of {len(counts)} variants with fewer than {SEEDS} seeds")
    return ", ".join(found)


def summary(results: Results) -> str:
    verdicts = {method: verdict(row.checks, of_row(method, results)) for method, row in sorted(ROWS.items())}
    counts = Counter(verdicts.values())
    plural = {HOLDS: "hold", PART: "hold in part", NOT: "do not hold here", UNKNOWN: "were not measured"}
    words = {v: text if counts[v] != 1 else f"was {v}" if v == UNKNOWN else v for v, text in plural.items()}
    told = ", ".join(f"{counts[v]} {text}" for v, text in words.items() if counts[v] or v == NOT)
    lines = [
        f"## Summary\n\nOf {len(ROWS)} claims: {told}.\n",
        "| method | the claim | here | checks |",
        "|---|---|---|---:|",
    ]
    for method, row in sorted(ROWS.items()):
        outcomes = [check.judge(of_row(method, results)).holds for check in row.checks]
        share = f"{sum(o is True for o in outcomes)} of {sum(o is not None for o in outcomes)}"
        lines.append(f"| [{method}](#{method}) | {row.claim} | **{verdicts[method]}** | {share} |")
    lines += ["\n## Checks that failed\n", *failures(results)]
    return "\n".join(lines) + "\n"


def failures(results: Results) -> list[str]:
    lines = []
    for method, row in sorted(ROWS.items()):
        found = [(check, check.judge(of_row(method, results))) for check in row.checks]
        failed = [(check.text, outcome.told) for check, outcome in found if outcome.holds is False]
        lines += [f"| [{method}](#{method}) | {text} | {told} |" for text, told in failed]
    return ["| method | expected | measured |", "|---|---|---|", *lines] if lines else ["None."]


def section(method: str, row: Row, all_results: Results) -> str:
    results = of_row(method, all_results)
    lines = [
        f"### {method}\n",
        f"**Claim**: {row.claim} *{row.source}*\n",
        f"**Here**: {verdict(row.checks, results)}. `python benchmarks/evidence.py {method}`\n",
        *([f"{row.note}\n"] if row.note else []),
        *table(method, row, results),
        *([] if row.links else ["\nThe method works within one host, so no step on links was timed."]),
        "",
        "| check | passed | measured |",
        "|---|---|---|",
    ]
    for check in row.checks:
        outcome = check.judge(results)
        lines.append(f"| {check.text} | {MARKS[outcome.holds]} | {outcome.told if outcome.holds is not None else ''} |")
    return "\n".join(lines) + "\n"


def table(method: str, row: Row, results: Results) -> list[str]:
    """A line for each variant: what it reached, sent and took."""
    tasks = [task for task in ("digits", "text", "sparse", "long") if task in row.tasks]
    heads = [{"digits": "digits, accuracy"}.get(task, f"{task}, loss") for task in tasks]
    names = list(dict.fromkeys([name for task in tasks for name in variants_of(method, task)] + links_of(method)))
    speeds = [f"step at {speed(mbit)}" for mbit in SPEEDS] if row.links else []
    lines = ["| variant | spec | " + " | ".join([*heads, "bytes", *speeds]) + " |"]
    lines.append("|---|---|" + "---:|" * (len(heads) + 1 + len(speeds)))
    for name in names:
        cells = [told(results, name, task) if name in variants_of(method, task) else "" for task in tasks]
        cells.append(share_of_bytes(name, row.variants[0], tasks, results))
        cells += [step_cell(name, links_of(method)[0], mbit, results) for mbit in SPEEDS if row.links]
        lines.append(f"| {name} | {spec_cell(name, results)} | " + " | ".join(cells) + " |")
    return lines


def spec_cell(name: str, results: Results) -> str:
    """The spec as run on the text (`long`), and what else differs."""
    variant = VARIANTS[name]
    other = [] if variant.momentum else ["momentum 0"]
    if variant.muon or variant.adam:
        other = ["Muon and AdamW" if variant.muon else "AdamW"]
    other += ["fused optimizer"] if variant.fused else []
    if name in ONLY["long"]:
        other += [f"learning rate x {variant.lr[1]:g}"]
    elif variant.lr[:2] != (1.0, 1.0):
        other.append(f"learning rate x {variant.lr[0]:g} (digits), x {variant.lr[1]:g} (text)")
    if variant.hosts > 1:
        other.append(f"{variant.hosts} hosts")
    spec = variant.told(results.steps["long" if name in ONLY["long"] else "text"])
    return ", ".join([f"`{spec}`", *other])


def share_of_bytes(name: str, reference: str, tasks: list[str], results: Results) -> str:
    """Of the reference's, on the first task that both were run on; on its own where that sends nothing."""
    for task in [task for task in ("text", *tasks) if task in tasks and task not in ONLY]:
        ours, theirs = results.value(name, task, "bytes"), results.value(reference, task, "bytes")
        if ours is not None and theirs is not None and theirs.mean:
            return f"{ours.mean / theirs.mean:.3g}"
        if ours is not None and theirs is not None:
            return f"{ours.mean / 1e6:.3g} MB"
    return ""


def step_cell(name: str, reference: str, mbit: float, results: Results) -> str:
    ours, theirs = results.step_s(name, mbit), results.step_s(reference, mbit)
    if ours is None or theirs is None or not math.isfinite(ours) or (name in TWO_HOSTS) != (reference in TWO_HOSTS):
        return ""  # not timed, or on other hosts
    return f"{ours * 1e3:.0f} ms" + (f", {theirs / ours:.2g} x" if name != reference else "")
