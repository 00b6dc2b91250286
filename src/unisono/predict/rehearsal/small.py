"""`unisono run --small`: the script with one worker and with several, a few steps each, and whether they agree."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unisono.launchers.runtime.variables import name_observer
from unisono.predict.compare.runs import start_launcher
from unisono.predict.compare.steps import STEP_FIELDS
from unisono.predict.planner.candidates import describe_candidate
from unisono.predict.rehearsal.differences import Observed, judge

__all__ = ["SmallRequest", "SmallVerdict", "compare_worlds"]

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
            _remove(folder)
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
    _remove(folder)
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


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
