"""`unisono run --small`: the script with one worker and with several, a few steps each; whether they agree, and what
differs."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unisono.launchers.runtime.variables import name_observer
from unisono.methods.facts import Grade
from unisono.predict.compare.results import STEP_FIELDS
from unisono.predict.compare.runs import start_launcher
from unisono.predict.planner.candidates import describe_candidate

_CLOSE = {"exact": 1e-3, "rounded": 3e-2}  # of a gradient's norm
_HALF = 3e-2  # of numbers of 16 bits
_MOVED = 5e-2  # of how far a parameter has moved: optimizers enlarge what rounding leaves
_SHOWN = 8


@dataclass
class Observed:
    """What was seen in one world: its ranks' notes, mean losses by step, rank 0's gradients and parameters."""

    notes: Sequence[Mapping[str, Any]]
    losses: Sequence[float | None]
    gradients: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]


@dataclass
class Verdict:
    """Whether worlds agree, and what was found. `agrees` None: that cannot be told, and `lines` say why."""

    agrees: bool | None
    lines: list[str] = field(default_factory=list)


def judge(one: Observed, several: Observed, start: Mapping[str, Tensor], grade: Grade) -> Verdict:
    """Compare a world of one worker with one of several."""
    workers, lines = len(several.notes), _describe_course(one, several)
    data = _compare_inputs(one, several)
    if data.agrees is False:
        return Verdict(False, [*data.lines, *lines])
    if grade not in _CLOSE:
        method = several.notes[0]["strategy"]
        return Verdict(
            None,
            [
                f"{method} is not exact: its worlds train on other courses, so that parameters are not compared. Try "
                "--strategy allreduce, which tells whether the program itself is right",
                *data.lines,
                *lines,
            ],
        )
    if data.agrees is None:
        return Verdict(None, [*data.lines, *lines])
    found = _compare_gradients(one, several, workers, grade)
    if found.agrees:
        found = _compare_parameters(one, several, start, found)
    return Verdict(found.agrees, [*found.lines, *lines])


def _describe_course(one: Observed, several: Observed) -> list[str]:
    """Losses, and what was done so that they can be compared."""
    lines = []
    pairs = [(a, b) for a, b in zip(one.losses, several.losses, strict=False) if a is not None and b is not None]
    if pairs:
        rows = [" ".join(f"{x:.6g}" for x in column) for column in zip(*pairs, strict=True)]
        lines.append(f"losses of one worker: {rows[0]}; of {len(several.notes)}: {rows[1]}")
    dropped = sorted({name for note in (*one.notes, *several.notes) for name in note["dropout"]})
    if dropped:
        lines.append(f"dropout was switched off for this comparison: {', '.join(dropped[:_SHOWN])}")
    if not all(note["seeded"] for note in several.notes):
        lines.append(
            "the script begins with other parameters each time (no torch.manual_seed before the model is made, or "
            "seeds that differ by rank); here all worlds began with the same"
        )
    return lines


def _compare_inputs(one: Observed, several: Observed) -> Verdict:
    """Whether the workers' batches are the parts of the one worker's batch."""
    whole, parts = one.notes[0], list(several.notes)
    if whole["samples"] is None or any(part["samples"] is None for part in parts):
        return Verdict(True)
    count, total = sum(part["samples"] for part in parts), sum(part["total"] for part in parts)
    each = ", ".join(str(part["samples"]) for part in parts)
    if len({part["digest"] for part in parts}) < len(parts) and count != whole["samples"]:
        return Verdict(
            False,
            [
                f"workers train on the same samples ({each}; one worker alone: {whole['samples']}): divide the data by "
                "un.shard(dataset, batch_size=...), whose batch_size counts the samples of all workers"
            ],
        )
    if count != whole["samples"]:
        return Verdict(
            False,
            [
                f"the global batch is not the same: {whole['samples']} samples with one worker, {count} with "
                f"{len(parts)} ({each}). batch_size is a worker's own here; un.shard divides one that all share"
            ],
        )
    if abs(total - whole["total"]) > 1e-5 * max(1e-12, abs(whole["total"])):
        if whole["shards"]:
            return Verdict(
                None,
                [
                    "the samples are dealt by un.shard, but their numbers differ: random augmentation, or other random "
                    "numbers on the way. Whether the worlds agree cannot be told; switch them off to find out"
                ],
            )
        return Verdict(
            False,
            [
                "the workers' batches are not the parts of the batch that one worker has: seeds of each rank's own, or "
                "an order that depends on the number of workers. un.shard gives every world the same batches"
            ],
        )
    return Verdict(True)


def _compare_gradients(one: Observed, several: Observed, workers: int, grade: Grade) -> Verdict:
    names = [name for name in one.gradients if name in several.gradients]
    if not names:
        return Verdict(
            None, ["gradients and parameters are split over the workers by this method: only losses are compared"]
        )
    whole = torch.cat([one.gradients[name].double().flatten() for name in names])
    other = torch.cat([several.gradients[name].double().flatten() for name in names])
    norm = float(whole.norm())
    scale = float(whole @ other) / norm**2 if norm else 1.0
    close = max(_CLOSE[grade], *(_HALF if x.element_size() < 4 else 0.0 for x in one.gradients.values()))
    off = {name: _distance(one.gradients[name], several.gradients[name], norm) for name in names}
    if max(off.values()) <= close:
        largest = max(off, key=lambda name: off[name])
        return Verdict(True, [f"gradients agree: {largest} differs most, by {off[largest]:.1e} of its norm"])
    if float((other - scale * whole).norm()) <= close * float(other.norm()):
        return Verdict(False, [_explain_scale(scale, workers)])
    differing = [name for name in names if off[name] > close]
    lines = [f"gradients differ in {len(differing)} of {len(names)} parameters (of the norm of each):"]
    lines += [f"  {name}: {off[name]:.1%}" for name in _list_worst({name: off[name] for name in differing})]
    if len(differing) > _SHOWN:
        lines.append(f"  and {len(differing) - _SHOWN} more")
    norms = several.notes[0]["batch_norms"]
    if norms:
        lines.append(
            f"batch normalisation ({', '.join(norms[:3])}{', ...' if len(norms) > 3 else ''}) takes its statistics "
            "from each worker's own samples: un.sync_batch_norm(model) takes them over all"
        )
    elif float(several.notes[0]["samples"] or 0) and len({n["samples"] for n in several.notes}) > 1:
        lines.append("the workers have parts of different sizes: a loss that is a mean weighs them alike")
    else:
        lines.append(
            "the loss may depend on more than each sample by itself (contrastive losses, statistics of a batch), or on "
            "the rank or random numbers"
        )
    return Verdict(False, lines)


def _distance(a: Tensor, b: Tensor, norm: float) -> float:
    """The distance over the norm of `a`; if that is tiny beside `norm` of all, over a part of that."""
    a, b = a.double(), b.double()
    return float((a - b).norm()) / max(float(a.norm()), 1e-4 * norm, 1e-30)


def _explain_scale(scale: float, workers: int) -> str:
    text = f"gradients of {workers} workers are {scale:.3g} times those of one"
    if abs(scale * workers - 1) < 0.01:
        return (
            f"{text}: the loss is a sum over samples, and gradients are means over workers. Take the mean "
            '(reduction="mean"), or divide by the samples of the global batch and multiply by the number of workers'
        )
    if abs(scale / workers - 1) < 0.01:
        return f"{text}: the loss is multiplied by the number of workers, or divided by its share of the samples twice"
    return f"{text}: the loss is multiplied by something that depends on the number of workers"


def _compare_parameters(one: Observed, several: Observed, start: Mapping[str, Tensor], gradients: Verdict) -> Verdict:
    names = [name for name in one.parameters if name in several.parameters and name in start]
    steps = one.notes[0]["steps"], several.notes[0]["steps"]
    if not names or steps[0] != steps[1]:
        return gradients
    moved, theirs = (
        {name: world.parameters[name].double() - start[name].double() for name in names} for world in (one, several)
    )
    whole = float(torch.cat([x.flatten() for x in moved.values()]).norm())
    off = {name: _distance(moved[name], theirs[name], whole) for name in names}
    worst = max(off, key=lambda name: off[name])
    text = f"after {steps[0]} steps, {worst} differs most: by {off[worst]:.1e} of how far it has moved"
    if off[worst] <= _MOVED:
        return Verdict(True, [*gradients.lines, text])
    return Verdict(
        False,
        [
            *gradients.lines,
            f"{text}. The first gradients agree, so something after them does not: an optimizer, schedule or clipping "
            "that depends on the rank or on the number of workers",
            *(f"  {name}: {off[name]:.1%}" for name in _list_worst(off) if off[name] > _MOVED),
        ],
    )


def _list_worst(off: Mapping[str, float]) -> list[str]:
    return sorted(off, key=lambda name: -off[name])[:_SHOWN]


_OBSERVER = "unisono.predict.rehearsal.recorder"


@dataclass(frozen=True)
class SmallRequest:
    """What `unisono run --small` is to compare."""

    program: Sequence[str]  # the script, or -m and a module, and its arguments
    workers: int
    steps: int = 5
    threads: int | None = None
    is_warm: bool = False


@dataclass(frozen=True)
class SmallVerdict:
    """What was found. `log`: the output of a run that failed."""

    text: str
    exit_status: int
    log: Path | None = None


def compare_worlds(request: SmallRequest, show: Callable[[str], None] = lambda text: None) -> SmallVerdict:
    """Make both runs, and compare. The folder of their output stays where one has failed."""
    folder = Path(tempfile.mkdtemp(prefix="unisono-small-"))
    observed: list[Observed] = []
    for number, workers in enumerate((1, request.workers), 1):
        many = "one worker" if workers == 1 else f"{workers} workers"
        show(f"[{number}/2] {request.steps} steps with {many}")
        try:
            status = _run(request, workers, folder)
        except BaseException:  # interrupted: nobody is told of the folder
            shutil.rmtree(folder, ignore_errors=True)
            raise
        found = _read(folder / f"with-{workers}", workers)
        if status != 0 or found is None:
            why = f"failed (exit status {status})" if status else "made no optimizer step under un.parallel"
            text = f"with {many} the script {why}; its output is in {folder / f'with-{workers}.log'}"
            return SmallVerdict(text, 1, folder / f"with-{workers}.log")
        observed.append(found)
    start = torch.load(folder / "start.pt", weights_only=True)
    one, several = observed
    spec = str(several.notes[0]["strategy"])
    grade = "exact" if spec.startswith("torch:ddp") else describe_candidate(spec).convergence.grade
    verdict = judge(one, several, start, grade)
    heads = {True: "they agree", False: "they differ", None: "it cannot be told whether they agree"}
    steps = min(int(one.notes[0]["steps"]), int(several.notes[0]["steps"]))
    head = f"one worker and {request.workers}, {spec}, {steps} steps each: {heads[verdict.agrees]}"
    shutil.rmtree(folder, ignore_errors=True)
    return SmallVerdict("\n".join([head, *(f"  {line}" for line in verdict.lines)]), int(verdict.agrees is False))


def _run(request: SmallRequest, workers: int, folder: Path) -> int:
    inside = folder / f"with-{workers}"
    inside.mkdir()
    settings = {"folder": str(inside), "start": str(folder / "start.pt"), "steps": request.steps}
    env = {**os.environ, **name_observer(_OBSERVER, **settings)}
    options = ["-n", str(workers), "--output", "prefix"]
    options += ["--threads", str(request.threads)] if request.threads else []
    options += ["--warm"] if request.is_warm else []
    command = [sys.executable, "-m", "unisono", "run", *options, *request.program]
    log = folder / f"with-{workers}.log"
    with start_launcher(command, env, log) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            print(f"unisono: interrupted in {shlex.join(command)}", file=sys.stderr)
            raise SystemExit(130) from None


def _read(folder: Path, workers: int) -> Observed | None:
    """What the ranks wrote; None where they have made no step."""
    notes: list[dict[str, Any]] = []
    losses: list[list[float | None]] = []
    for rank in range(workers):
        file = folder / f"notes-{rank}.json"
        if not file.exists():
            return None
        notes.append(json.loads(file.read_text()))
        rows = [json.loads(line) for line in (folder / f"rank-{rank}.jsonl").read_text().splitlines()[1:]]
        losses.append([row[STEP_FIELDS.index("loss")] for row in rows])
    if not all(note["steps"] for note in notes):
        return None
    means = [
        None if None in column else sum(x for x in column if x is not None) / workers
        for column in zip(*losses, strict=False)
    ]
    tensors = {
        name: torch.load(folder / f"{name}.pt", weights_only=True) if (folder / f"{name}.pt").exists() else {}
        for name in ("gradients", "parameters")
    }
    return Observed(notes, means, tensors["gradients"], tensors["parameters"])
