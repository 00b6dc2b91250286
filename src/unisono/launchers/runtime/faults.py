"""Faults on purpose: "kill 2@40; stop 1@60 for 5s; slow 3 x4@80-120; full-disk@200", read, checked, and how each fires.

The launcher gives a worker its own faults, and is told as each fires. When one is due is for `strategy/watches.py`
to say, and for the two places that write to a disk, which call `before_write`.
"""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NoReturn, get_args

from unisono.launchers.runtime import status
from unisono.launchers.runtime.variables import read_worker_number
from unisono.units import write_number

__all__ = [
    "PHASES",
    "Armed",
    "Fault",
    "FaultError",
    "Kind",
    "Phase",
    "before_write",
    "check_script",
    "find_armed",
    "fire_in_healing",
    "listen",
    "parse_script",
]

Kind = Literal["kill", "stop", "slow", "full-disk"]
Phase = Literal["forward", "backward", "exchange", "step", "update", "save", "healing"]

PHASES: tuple[Phase, ...] = get_args(Phase)  # in the order in which they come in a step
_FORMS: dict[str, str] = {
    "kill": "kill RANK@STEP [in PHASE]",
    "stop": "stop RANK@STEP [in PHASE] for SECONDSs",
    "slow": "slow RANK xFACTOR@FIRST-LAST",
    "full-disk": "full-disk [RANK]@STEP",
}
_MAX_CHARACTERS = 4096
_EXAMPLE = "kill 2@40; stop 1@60 for 5s; slow 3 x4@80-120; full-disk@200"


class FaultError(ValueError):
    """A fault script that cannot be read, or cannot happen; the message shows it and points at the character."""

    def __init__(self, problem: str, text: str, position: int) -> None:
        self.problem, self.text, self.position = problem, text, position
        super().__init__(f"faults: {problem}\n  {text}\n  {' ' * position}^")


@dataclass(frozen=True)
class Fault:
    """One fault. `str(fault)` is text that reads back to an equal one."""

    kind: Kind
    rank: int | None  # None: every rank, of full-disk
    step: int  # from 1 up; of slow, the first
    phase: Phase = "step"  # of kill and stop
    seconds: float = 0.0  # of stop
    factor: float = 1.0  # of slow
    last: int = 0  # of slow: its last step
    position: int = field(default=0, compare=False, repr=False)  # in the text that it was read from

    def __str__(self) -> str:
        inside = "" if self.phase == "step" else f" in {self.phase}"
        if self.kind == "kill":
            return f"kill {self.rank}@{self.step}{inside}"
        if self.kind == "stop":
            return f"stop {self.rank}@{self.step}{inside} for {write_number(self.seconds)}s"
        if self.kind == "slow":
            return f"slow {self.rank} x{write_number(self.factor)}@{self.step}-{self.last}"
        return f"full-disk{'' if self.rank is None else f' {self.rank}'}@{self.step}"


# Reading -----------------------------------------------------------------------------------------------------------


def parse_script(text: str) -> list[Fault]:
    """The faults of a script, in its order; none where it is empty.

    >>> parse_script("kill 2@40")
    [Fault(kind='kill', rank=2, step=40, phase='step', seconds=0.0, factor=1.0, last=0)]
    >>> [str(fault) for fault in parse_script("stop 1@60 in save for 5s; slow 0 x1.5@3 ; full-disk@7")]
    ['stop 1@60 in save for 5s', 'slow 0 x1.5@3-3', 'full-disk@7']

    Raises:
        FaultError: anything else; the message says what was expected, and where.
    """
    if not isinstance(text, str):
        raise TypeError(f"faults are text such as {_EXAMPLE!r}; got {type(text).__name__}")
    text = re.sub(r"\s", " ", text).strip()
    if len(text) > _MAX_CHARACTERS:
        raise ValueError(f"faults: the script has {len(text)} characters; at most {_MAX_CHARACTERS} are read")
    reader, faults = _Reader(text), []
    while not reader.at_end():
        if not reader.skip(";"):
            faults.append(reader.fault())
    return faults


class _Reader:
    """Reads a script from left to right."""

    def __init__(self, text: str) -> None:
        self.text, self.place = text, 0

    def at_end(self) -> bool:
        self.skip(" *")
        return self.place == len(self.text)

    def skip(self, pattern: str) -> str:
        """What is here, if it is of this form; else ""."""
        found = re.compile(rf" *({pattern})").match(self.text, self.place)
        if found is None:
            return ""
        self.place = found.end()
        return found[1]

    def take(self, pattern: str, expected: str, form: str) -> str:
        found = self.skip(pattern)
        if not found:
            self.fail(f"expected {expected}, as in `{form}`")
        return found

    def fail(self, problem: str) -> NoReturn:
        self.skip(" *")
        got = re.match(r"[^\s;@]+|.|$", self.text[self.place :])
        what = repr(got[0]) if got is not None and got[0] else "the end"
        raise FaultError(f"{problem}; got {what}", self.text, self.place)

    def fault(self) -> Fault:
        self.skip(" *")
        start = self.place
        kind = self.skip(r"[a-zA-Z_-]+")
        if kind == "partition":
            problem = (
                "partition is not offered: no world can continue in parts yet; `stop` cuts one rank off for a time"
            )
            raise FaultError(problem, self.text, start)
        if kind not in _FORMS:
            self.place = start
            self.fail(f"expected {', '.join(list(_FORMS)[:-1])} or {list(_FORMS)[-1]}")
        read = {"kill": self.kill, "stop": self.stop, "slow": self.slow, "full-disk": self.full_disk}
        fault = read[kind](start)
        if not self.at_end() and self.text[self.place] != ";":
            self.fail(f"expected `;` or the end after `{fault}`")
        return fault

    def kill(self, start: int) -> Fault:
        rank, step, phase = self.moment(_FORMS["kill"])
        return Fault("kill", rank, step, phase, position=start)

    def stop(self, start: int) -> Fault:
        rank, step, phase = self.moment(_FORMS["stop"])
        self.take(r"for\b", "`for` and a time", _FORMS["stop"])
        before = self.place
        seconds = float(self.take(r"\d{1,9}(?:\.\d{1,9})?(?= *s\b)", "seconds with an s behind", _FORMS["stop"]))
        self.skip("s")
        if seconds <= 0:
            self.fail_at(before, "expected a time above 0")
        return Fault("stop", rank, step, phase, seconds=seconds, position=start)

    def slow(self, start: int) -> Fault:
        form = _FORMS["slow"]
        rank = int(self.take(r"\d{1,9}\b", "a rank", form))
        self.take("x", "x and how many times as long each step takes", form)
        before = self.place
        factor = float(self.take(r"\d{1,9}(?:\.\d{1,9})?", "how many times as long each step takes", form))
        if factor <= 1:
            self.fail_at(before, f"expected a factor above 1, got {factor:g}")
        first = self.step(form)
        ranged, before = self.skip("-"), self.place
        last = int(self.take(r"\d{1,15}\b", "the last step", form)) if ranged else first
        if last < first:
            self.fail_at(before, f"expected a last step from {first} up, got {last}")
        return Fault("slow", rank, first, factor=factor, last=last, position=start)

    def full_disk(self, start: int) -> Fault:
        rank = self.skip(r"\d{1,9}\b")
        return Fault("full-disk", int(rank) if rank else None, self.step(_FORMS["full-disk"]), position=start)

    def moment(self, form: str) -> tuple[int, int, Phase]:
        """RANK@STEP, and where in it."""
        rank = int(self.take(r"\d{1,9}\b", "a rank", form))
        step = self.step(form)
        if not self.skip(r"in\b"):
            return rank, step, "step"
        phase = self.take("|".join(rf"{name}\b" for name in PHASES), f"a phase of a step ({', '.join(PHASES)})", form)
        return rank, step, next(name for name in PHASES if name == phase)

    def step(self, form: str) -> int:
        self.take("@", "@ and a step", form)
        before = self.place
        step = int(self.take(r"\d{1,15}\b", "a step", form))
        if step < 1:
            self.fail_at(before, "steps count from 1 up")
        return step

    def fail_at(self, position: int, problem: str) -> NoReturn:
        while self.text[position] == " ":
            position += 1
        raise FaultError(problem, self.text, position)


# Checking ----------------------------------------------------------------------------------------------------------


def check_script(text: str, workers: int, *, restarts: int = 0) -> list[Fault]:
    """The faults of a script, all of which can happen in a world of `workers` that is started again `restarts` times.

    >>> check_script("kill 2@40", 2)
    Traceback (most recent call last):
        ...
    unisono.launchers.runtime.faults.FaultError: faults: there is no rank 2 among 2 workers: they are 0 to 1
      kill 2@40
      ^
    """
    faults = parse_script(text)
    text = re.sub(r"\s", " ", text).strip()
    for number, fault in enumerate(faults):
        if fault.rank is not None and fault.rank >= workers:
            ranks = f"they are 0 to {workers - 1}" if workers > 1 else "there is rank 0 only"
            raise FaultError(
                f"there is no rank {fault.rank} among {workers} worker{'s' if workers > 1 else ''}: {ranks}",
                text,
                fault.position,
            )
        problems = [_find_contradiction(other, fault) for other in faults[:number]]
        problems += [] if restarts else [_find_end(faults, fault)]
        if fault.phase == "healing" and not restarts:
            why = "the world is formed again only in elastic runs: unisono run -n MIN:MAX"
            problems.append(f"`{fault}`: {why}")
        for problem in filter(None, problems):
            raise FaultError(problem, text, fault.position)
    return faults


def _find_contradiction(one: Fault, other: Fault) -> str:
    """Why two faults cannot both happen; "" where they can."""
    if one.rank != other.rank:
        return ""
    if "slow" in (one.kind, other.kind):
        both = one.kind == other.kind and one.step <= other.last and other.step <= one.last
        return f"`{one}` and `{other}` slow the same steps of rank {one.rank}: give each its own" if both else ""
    if "full-disk" in (one.kind, other.kind):
        return f"`{other}` appears twice" if one == other else ""
    if (one.step, one.phase) == (other.step, other.phase):
        return f"`{one}` and `{other}` happen to rank {one.rank} at one moment: give each its own step or phase"
    return ""


def _find_end(faults: Sequence[Fault], fault: Fault) -> str:
    """Whether the rank is killed before: "" where it is not."""
    for kill in faults:
        if kill.kind == "kill" and kill.rank == fault.rank and _moment(kill) < _moment(fault):
            return f"rank {kill.rank} does not come to `{fault}`: `{kill}` ends it, and nothing starts it again"
    return ""


def _moment(fault: Fault) -> tuple[int, int]:
    return fault.step, PHASES.index(fault.phase)


# Those of this worker ------------------------------------------------------------------------------------------------


_FOR_USERS, _FOR_WORKERS = "UNISONO_FAULTS", "UNISONO_WORKER_FAULTS"
# Stops its parent, and lets it go on. The parent waits for the end of this: it does nothing before it is stopped.
_STOPPER = """
import os, signal, sys, time
parent, until = int(sys.argv[1]), time.monotonic() + float(sys.argv[2])
if os.getppid() == parent:
    os.kill(parent, signal.SIGSTOP)
while os.getppid() == parent and time.monotonic() < until:
    time.sleep(min(0.1, max(0.0, until - time.monotonic())))
if os.getppid() == parent:
    os.kill(parent, signal.SIGCONT)
"""

_armed: list[Armed] | None = None  # None: not looked for yet
_writes: list[Armed] = []  # those of them that wait for a write
_listener: Callable[[Fault, int], None] | None = None


class Armed:
    """A fault of this worker that fires once. `number`: its place in the launcher's script."""

    def __init__(self, number: int, fault: Fault, rank: int) -> None:
        self.number, self.fault, self.rank = number, fault, rank
        self.fired = False
        self._lock = threading.Lock()  # writes and collectives have threads of their own

    def is_due(self, step: int) -> bool:
        """Whether it happens at this step; where workers are replaced, at the first from then on that this one sees."""
        return step == self.fault.step or (step > self.fault.step and "UNISONO_PLACE" in os.environ)

    def fire(self, step: int) -> bool:
        """Say so, and let it happen; False where it has before. A full disk is for the caller to raise."""
        with self._lock:
            if self.fired:
                return False
            self.fired = True
        print(f"unisono: fault: rank {self.rank} {self._describe()} at step {step}", file=sys.stderr, flush=True)
        if _listener is not None:
            _listener(self.fault, step)
        status.report("fault", number=self.number, time=time.monotonic())
        if self.fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.fault.kind == "stop":
            command = [sys.executable, "-I", "-S", "-c", _STOPPER, str(os.getpid()), str(self.fault.seconds)]
            subprocess.run(command, stdin=subprocess.DEVNULL, check=True)
        return True

    def _describe(self) -> str:
        fault = self.fault
        inside = "" if fault.phase == "step" else f" in {fault.phase}"
        if fault.kind == "kill":
            return f"kills itself{inside}"
        if fault.kind == "stop":
            return f"stops for {fault.seconds:g} s{inside}"
        if fault.kind == "slow":
            return f"is {fault.factor:g} times as slow until step {fault.last}, beginning"
        return "finds the disk full"


def find_armed() -> list[Armed]:
    """The faults of this worker, looked for once; RuntimeError where they are asked for and no launcher looks on."""
    global _armed
    if _armed is None:
        if os.environ.get(_FOR_USERS, "").strip() and not status.is_attached():
            raise RuntimeError(
                f"{_FOR_USERS} is set, but this program was started without Unisono's launcher, which makes sure that "
                f"every fault fires: start it with `unisono run` (on an engine: with --on) or un.launch, or unset "
                f"{_FOR_USERS}"
            )
        found = json.loads(os.environ.get(_FOR_WORKERS, "{}")) if status.is_attached() else {}
        rank = read_worker_number() or 0
        _armed = [Armed(int(number), fault, rank) for number, text in found.items() for fault in parse_script(text)]
        _writes[:] = [one for one in _armed if one.fault.kind == "full-disk" or one.fault.phase == "save"]
    return _armed


def fire_in_healing(step: int) -> None:
    """Called while the world is formed anew, after so many steps."""
    for armed in find_armed():
        if armed.fault.phase == "healing" and not armed.fired and step >= armed.fault.step:
            armed.fire(step)


def listen(listener: Callable[[Fault, int], None]) -> None:
    """Have `listener(fault, step)` called as a fault fires, instead of the one before."""
    global _listener
    _listener = listener


def before_write(what: Literal["checkpoint", "scratch"]) -> None:
    """Called before each write to a file: the disk may be full, or a save interrupted."""
    for armed in _writes:
        step = status.read_step() or 0
        if armed.fired or step < armed.fault.step or (armed.fault.phase == "save" and what != "checkpoint"):
            continue
        if armed.fire(step) and armed.fault.kind == "full-disk":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
