"""Runs the user's script under each method, one after the other in rounds, and watches what its workers write.

Each run is `unisono run` as a process of its own, with its output in files. Nothing is asked of the workers while they
train: when to stop at a loss is decided here, from what they write, so that no message between ranks is needed for it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unisono.launchers.runtime.machine import usable_cores
from unisono.launchers.runtime.variables import name_observer
from unisono.predict.compare.results import ONE_WORKER, SMOOTHED, RankSteps, Trial, merge_ranks

_POLL_S = 0.25
_STOPPING_S = 15.0
_OBSERVER = "unisono.predict.compare.recorder"


class NothingToCompare(RuntimeError):
    """The script gave nothing that could be compared; the message says why and what to do."""


@dataclass(frozen=True)
class Request:
    """What is to be compared, and how far each run goes."""

    program: Sequence[str]  # the script, or -m and a module, and its arguments
    strategies: Sequence[str]
    workers: Sequence[int] = (2,)
    rounds: int = 1
    steps: int | None = None
    target: float | None = None  # a loss
    time_s: float | None = None
    hosts: int | None = None
    net: str | None = None
    shaper: str | None = None
    threads: int | None = None
    warm: bool = False
    base: bool = True  # one worker is run too
    folder: Path = Path("unisono-compare")


@dataclass(frozen=True)
class Planned:
    """One run that is still to be made."""

    method: str
    workers: int
    round: int

    @property
    def spec(self) -> str:
        """The spec that the workers get."""
        return "allreduce" if self.method == ONE_WORKER else self.method

    def describe(self) -> str:
        """Method and number of workers."""
        return self.method if self.method == ONE_WORKER else f"{self.method}, {self.workers} workers"


def list_runs(request: Request) -> list[Planned]:
    """All runs in their order: round by round, so that what else the machine does meets all methods alike.

    One worker is run once a round, whatever the methods.
    """
    alone = request.base or 1 in request.workers
    row = [Planned(ONE_WORKER, 1, 0)] if alone else []
    row += [Planned(s, n, 0) for n in request.workers if n > 1 for s in request.strategies]
    return [Planned(run.method, run.workers, number) for number in range(request.rounds) for run in row]


@dataclass
class Progress:
    """Where the run that is under way stands."""

    run: Planned
    number: int  # from 1
    count: int
    step: int = 0
    loss: float | None = None
    seconds: float = 0.0
    start_s: float = 0.0  # of these, until the first step was seen
    left_s: float | None = None  # about, for all runs that are still to come


class Runs:
    """Makes the runs; `trials` are those that are complete."""

    def __init__(self, request: Request, show: Callable[[Progress], None] = lambda progress: None) -> None:
        self.request, self.show = request, show
        self.planned = list_runs(request)
        self.trials: list[Trial] = []
        self.links: list[list[str]] = []  # by run: what was measured of emulated hosts
        self.commands: list[str] = []
        self._took: list[float] = []
        most = max(run.workers for run in self.planned)
        self.threads = request.threads or max(1, usable_cores() // most)

    def make_all(self) -> None:
        """Make all runs, one after the other. KeyboardInterrupt ends the one under way, which then does not count."""
        for former in (self.request.folder / "runs").glob("[0-9][0-9]*-*/run.log"):
            shutil.rmtree(former.parent)  # of a comparison before this one
        for number, run in enumerate(self.planned, 1):
            began = time.monotonic()
            self.trials.append(self._make(run, Progress(run, number, len(self.planned))))
            self._took.append(time.monotonic() - began)

    def _make(self, run: Planned, progress: Progress) -> Trial:
        folder = self.request.folder / "runs" / f"{len(self.trials) + 1:02}-{_write_name(run)}"
        folder.mkdir(parents=True, exist_ok=True)
        command = self._write_command(run, folder)
        self.commands.append(shlex.join(["unisono", *command[3:]]))
        watched = _Watched([_RankFile(folder / f"rank-{rank}.jsonl") for rank in range(run.workers)])
        began = time.monotonic()
        observer = name_observer(_OBSERVER, folder=str(folder.resolve()), steps=self.request.steps)
        env = {**os.environ, **observer, "UNISONO_STRATEGY": run.spec}
        with start_launcher(command, env, folder / "run.log") as process:
            while process.poll() is None and not self._is_enough(watched, time.monotonic() - began):
                progress.step, progress.loss = len(watched.losses), watched.smoothed
                progress.seconds = time.monotonic() - began
                progress.start_s = progress.start_s if progress.step else progress.seconds
                progress.left_s = self._estimate(progress)
                self.show(progress)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_S)
            ended_by_us = process.poll() is None
        watched.read()
        log = (folder / "run.log").read_text(encoding="utf-8", errors="replace")
        if said := [line.removeprefix("unisono: ") for line in log.splitlines() if "emulated host" in line]:
            self.links.append(said)
        trial = Trial(run.method, run.workers, run.round, merge_ranks(watched.ranks), output=str(folder))
        if process.returncode and not ended_by_us:
            trial.failure = _find_reason(log, process.returncode)
            if run.method == ONE_WORKER and not self.trials and not watched.ranks:
                raise NothingToCompare(
                    f"{self._script} failed with one worker, before any method came in: {trial.failure}\nAll of its "
                    f"output is in {folder}. If it needs several workers, --no-base leaves this run out"
                )
        elif not len(trial.curve):
            trial.failure = self._explain_nothing(watched, ended_by_us)
        return trial

    @property
    def _script(self) -> str:
        return " ".join(self.request.program[: 2 if self.request.program[0] == "-m" else 1])

    def _explain_nothing(self, watched: _Watched, ended_by_us: bool) -> str:
        """Why there is no step to show; where the script is the reason, nothing can be compared."""
        if ended_by_us:
            return f"made no step in {self.request.time_s:g} s"
        if not watched.ranks:
            raise NothingToCompare(
                f"{self._script} ended without calling un.parallel(model, optimizer, ...), which is where a method "
                "comes in. Add the call (un.Trainer makes it too)"
            )
        raise NothingToCompare(
            f"{self._script} called un.parallel and ended without a training step (backward and optimizer.step())"
        )

    def _is_enough(self, watched: _Watched, seconds: float) -> bool:
        watched.read()
        if watched.broke or (self.request.time_s is not None and seconds > self.request.time_s):
            return True
        return self.request.target is not None and watched.reached(self.request.target)

    def _estimate(self, progress: Progress) -> float | None:
        """How long the rest will take, as the runs so far took."""
        if self._took:
            each = sum(self._took) / len(self._took)
        elif self.request.steps and progress.step and self.request.target is None:
            each = progress.start_s + (progress.seconds - progress.start_s) * self.request.steps / progress.step
        else:
            return None
        return max(0.0, each - progress.seconds) + each * (progress.count - progress.number)

    def _write_command(self, run: Planned, folder: Path) -> list[str]:
        request = self.request
        command = [sys.executable, "-m", "unisono", "run", "-n", str(run.workers), "--threads", str(self.threads)]
        command += ["--output", "files", "--output-dir", str(folder), "--grace", "0"]
        command += ["--warm"] if request.warm else []
        if run.workers > 1 and (request.hosts or request.net):
            command += ["--hosts", str(min(request.hosts or run.workers, run.workers))]
            command += ["--net", request.net] if request.net else []
            command += ["--shaper", request.shaper] if request.shaper else []
        return [*command, *request.program]


def _write_name(run: Planned) -> str:
    """The name of a run's folder.

    >>> _write_name(Planned("powersgd(rank=2)", 4, 1))
    'powersgd-rank-2-4-workers-round-2'
    """
    word = re.sub(r"[^a-z0-9]+", "-", run.method.lower()).strip("-")[:40]
    return f"{word}-{run.workers}-workers-round-{run.round + 1}" if run.workers > 1 else f"{word}-round-{run.round + 1}"


@contextlib.contextmanager
def start_launcher(command: Sequence[str], env: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The launcher, in a session of its own: Ctrl-C comes here first. It is ended with the block, however that ends."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )
        try:
            yield process
        finally:
            if process.poll() is None:  # as Ctrl-C does: the launcher ends its workers, and cleans up
                process.send_signal(signal.SIGINT)
                try:
                    process.wait(_STOPPING_S)
                except subprocess.TimeoutExpired:  # it is killed, and they with it
                    process.kill()
                    process.wait()


# What the workers write ----------------------------------------------------------------------------------------------


class _RankFile:
    """The file of a rank, read as it grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.steps: RankSteps | None = None
        self._offset = 0
        self._rest = b""

    def read(self) -> None:
        """Read what is new."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                fresh = file.read()
        except FileNotFoundError:
            return
        self._offset += len(fresh)
        *lines, self._rest = (self._rest + fresh).split(b"\n")
        for line in lines:
            values: Any = json.loads(line)
            if self.steps is None:
                self.steps = RankSteps(values, {name: [] for name in values["fields"]})
            else:
                for column, value in zip(self.steps.columns.values(), values, strict=True):
                    column.append(value)


@dataclass
class _Watched:
    """All ranks' files, and the mean of their losses as far as all have got."""

    files: Sequence[_RankFile]
    losses: list[float | None] = field(default_factory=list)
    broke: bool = False  # a loss is nan or inf
    _checked: int = 0

    @property
    def ranks(self) -> list[RankSteps]:
        """The steps of the ranks that have written something."""
        return [file.steps for file in self.files if file.steps is not None]

    @property
    def smoothed(self) -> float | None:
        """The mean of the last losses."""
        last = [loss for loss in self.losses[-SMOOTHED:] if loss is not None]
        return sum(last) / len(last) if last else None

    def read(self) -> None:
        """Read what is new."""
        for file in self.files:
            file.read()
        trained = [rank for rank in self.ranks if len(rank)]
        for i in range(len(self.losses), min(map(len, trained), default=0)):
            losses = [rank.columns["loss"][i] for rank in trained]
            self.broke |= not all(rank.columns["finite"][i] for rank in trained)
            self.losses.append(None if None in losses else math.fsum(losses) / len(losses))

    def reached(self, target: float) -> bool:
        """Whether the loss, smoothed, has been at or below the target."""
        for end in range(max(self._checked, SMOOTHED), len(self.losses) + 1):
            last = [loss for loss in self.losses[end - SMOOTHED : end] if loss is not None]
            if len(last) == SMOOTHED and sum(last) / SMOOTHED <= target:
                return True
        self._checked = len(self.losses) + 1
        return False


def _find_reason(log: str, status: int) -> str:
    """The first line of why a run failed, from what the launcher said."""
    head = re.search(r"^unisono: (worker \d+ of \d+ failed: (.*))$", log, re.MULTILINE)
    if head is not None:
        said = re.search(rf"^(?:[\w.]*\.)?({re.escape(head[2])}: .+)$", log[head.end() :], re.MULTILINE)
        return said[1] if said is not None else head[1]
    lines = [line for line in log.splitlines() if line.strip() and "emulated host" not in line]
    return lines[-1].removeprefix("unisono: ") if lines else f"ended with status {status}"
