"""One clear report for a failed run: who failed first, how, and what it did; and whether faults on purpose fired."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from unisono.launchers.runtime.faults import Fault, check_script
from unisono.launchers.runtime.sigterm import PREEMPTED

__all__ = [
    "VARIABLE",
    "EngineError",
    "Failure",
    "FaultReport",
    "Outcome",
    "WorkerError",
    "fail_run",
    "failure_of_exit",
    "first_failure",
    "format_preemption",
    "format_report",
    "read_failure",
    "read_faults",
]

SETTLE_S = 1.0  # a failure that looks like a consequence waits this long for its cause

_HINTS = {
    "SIGKILL": "SIGKILL comes from `kill -9` or, more often, from the kernel's out-of-memory killer: look at the "
    "memory limit of the machine or container, and at `dmesg`.",
    "SIGSEGV": "SIGSEGV is a crash in native code, not a Python error.",
    "SIGBUS": "SIGBUS often means that shared memory is full (/dev/shm) or that a memory-mapped file was cut short.",
    "SIGABRT": "SIGABRT is native code giving up; its last words are in the worker's output.",
    "SIGILL": "SIGILL: native code was built for another processor.",
}
_CONSEQUENCES = {"PeerLost", "BrokenPipeError", "ConnectionResetError", "ConnectionAbortedError"}
_CONSEQUENCE_TEXT = re.compile(
    r"connection (was )?(closed|reset) by (remote )?peer|broken pipe|remote process exited|peer .*(died|closed|lost)"
    r"|\bGroupPeerLost: ",  # through torch's C++, which makes a RuntimeError of it
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Failure:
    """How one worker failed. `code` is the exit status that the run takes over."""

    rank: int
    time: float  # time.monotonic(), when it failed
    # lost: by the engine that started it. fault: one of a fault script did not fire.
    kind: Literal["exception", "exit", "signal", "interrupt", "lost", "fault"]
    code: int
    types: Sequence[str] = field(default=())  # of the exception: its class and the base classes, by name
    message: str = ""
    traceback: str = ""

    @property
    def consequence(self) -> bool:
        """Whether this looks like the loss of a peer, so that another worker's failure is the cause."""
        if self.kind == "signal":
            return self.message == "SIGABRT"  # what some native transports do when a peer is lost
        return bool(_CONSEQUENCES & set(self.types)) or (
            self.kind == "exception" and _CONSEQUENCE_TEXT.search(self.message) is not None
        )

    @property
    def headline(self) -> str:
        """A few words, without the message."""
        if self.kind == "exception":
            return self.types[0]
        if self.kind == "signal":
            return f"killed by {self.message}"
        if self.kind == "interrupt":
            return "interrupted by SIGINT"
        if self.kind == "lost":
            return "connection lost"
        if self.kind == "fault":
            return "a fault did not fire"
        return f"exit status {self.code}"


class EngineError(RuntimeError):
    """The engine is not installed, not reachable, or too small: nothing was run."""


class WorkerError(RuntimeError):
    """Raised by `launch` when a worker fails; its text is the report.

    `rank`, `exit_status`, `step` (None before the first) and `traceback` (text, "" without a Python error) are those of
    the worker that failed first.
    """

    def __init__(self, report: str, *, rank: int, exit_status: int, step: int | None, traceback: str) -> None:
        super().__init__(report)
        self.rank = rank
        self.exit_status = exit_status
        self.step = step
        self.traceback = traceback


def read_failure(rank: int, message: dict[str, object], now: float) -> Failure | None:
    """The failure that a worker's JSON line reports; None if it reports something else."""
    kind, code, time = message.get("kind"), message.get("code"), message.get("time")
    if kind not in ("exception", "exit", "interrupt") or not isinstance(code, int):
        return None
    types = message.get("types")
    return Failure(
        rank=rank,
        time=time if isinstance(time, float) else now,
        kind=kind,
        code=code,
        types=tuple(map(str, types)) if isinstance(types, list) else (),
        message=str(message.get("message", "")),
        traceback=str(message.get("traceback", "")),
    )


def failure_of_exit(rank: int, status: int, now: float, native_traceback: str) -> Failure:
    """The failure of a worker that reported none. `status` is negative for a signal, as in subprocess."""
    if status < 0:
        known = [signum.name for signum in signal.Signals if signum == -status]
        name = known[0] if known else f"signal {-status}"
        return Failure(rank, now, "signal", 128 - status, (), name, _trim_native(native_traceback))
    return Failure(rank, now, "exit", status)


def first_failure(failures: Iterable[Failure]) -> Failure:
    """The earliest failure, causes before consequences when they lie within a second."""
    by_time = sorted(failures, key=lambda failure: failure.time)
    first = by_time[0]
    for failure in by_time if first.consequence else ():
        if not failure.consequence and failure.time <= first.time + SETTLE_S:
            return failure
    return first


@dataclass(frozen=True)
class Outcome:
    """How the run ended: `failure` is None when every worker ended well, or saved and left (`preempted`)."""

    failure: Failure | None = None
    report: str = ""
    step: int | None = None
    preempted: bool = False

    @property
    def exit_status(self) -> int:
        """The status of the worker that failed first; 0 without a failure, 143 if the workers saved and left."""
        return self.failure.code if self.failure else PREEMPTED if self.preempted else 0


def fail_run(why: str, losses: Sequence[Failure], step: int | None, *, more: Sequence[str] = ()) -> Outcome:
    """The outcome of an elastic run that could not go on."""
    lines = [f"unisono: the run has failed: {why}"]
    lines += [f"  worker {loss.rank}: {loss.headline}" for loss in losses[-10:]]
    last = losses[-1] if losses else Failure(0, time.monotonic(), "lost", 1)
    return Outcome(last, "\n".join([*lines, *more]), step)


def format_preemption(workers: int, step: int | None) -> str:
    """One line for a run whose workers saved and left."""
    who = "1 worker" if workers == 1 else f"all {workers} workers"
    where = "" if step is None else f" after step {step}"
    return f"unisono: preempted (SIGTERM): {who} left{where} with exit status {PREEMPTED}"


def format_report(
    first: Failure,
    others: Sequence[Failure],
    *,
    workers: int,
    identity: str,
    status: str,
    stopped: Sequence[int],
    unseen: Sequence[str],
    fault: str = "",
    colour: bool = False,
) -> str:
    """The text of the report; `identity` and `status` are one line each ("" to leave out)."""
    bold, red, plain = ("\x1b[1m", "\x1b[31m", "\x1b[0m") if colour else ("", "", "")
    lines = [f"{bold}{red}unisono: worker {first.rank} of {workers} failed: {first.headline}{plain}", f"  {identity}"]
    if status:
        lines.append(f"  {status}")
    if first.message == "SIGKILL" and fault:
        lines.append(f"  The fault script asked for it: {fault}")
    elif first.kind == "signal" and first.message in _HINTS:
        lines.append(f"  {_HINTS[first.message]}")
    if first.kind == "exit" and not first.message:
        lines.append("  The program ended itself (sys.exit, os._exit or native code), without a Python error.")
    if first.kind in ("exit", "lost") and first.message:
        lines.append(f"  {first.message}")
    if first.traceback:
        lines += ["", first.traceback.rstrip("\n")]
    if unseen:
        lines += ["", f"Last output of rank {first.rank}:", *(f"  {line}" for line in unseen)]
    aftermath = [f"rank {other.rank} failed as well ({_one_line(other)})" for other in others]
    if stopped:
        aftermath.append(f"{_ranks(stopped)} stopped")
    if aftermath:
        text = "; ".join(aftermath)
        lines += ["", text[0].upper() + text[1:] + "."]
    return "\n".join(lines)


def _one_line(failure: Failure) -> str:
    message = " ".join(failure.message.split()) if failure.kind != "signal" else ""
    if len(message) > 80:
        message = message[:77] + "..."
    return f"{failure.headline}: {message}" if message else failure.headline


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} was"
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"ranks {shown} were"


def _trim_native(text: str) -> str:
    """faulthandler's dump without the frames of Python's and our own start, and without its list of modules."""
    kept = [
        line
        for line in text.splitlines()
        if not re.search(r'File "(<frozen |.*launchers/worker/(program|fork_server)\.py")', line)
        and not line.startswith("Extension modules:")
    ]
    return "\n".join(kept).strip()


# Faults on purpose ---------------------------------------------------------------------------------------------------


VARIABLE = "UNISONO_FAULTS"


def read_faults(given: str | None, workers: int, *, restarts: int = 0) -> list[Fault]:
    """The faults of a run: those given, or those that the environment asks for (None). Raises FaultError."""
    return check_script(os.environ.get(VARIABLE, "") if given is None else given, workers, restarts=restarts)


class FaultReport:
    """The faults of one run. Each fires once, even if an engine starts the workers again."""

    def __init__(self, faults: list[Fault]) -> None:
        self.faults = faults
        self.fired: list[int] = []  # by their places in the script, in the order in which the launcher heard of them

    def write_for(self, rank: int) -> str:
        """The faults of a worker that have not fired, as JSON by number; "" if there are none."""
        mine = {
            n: str(fault) for n, fault in enumerate(self.faults) if fault.rank in (None, rank) and n not in self.fired
        }
        return json.dumps(mine) if mine else ""

    def take(self, message: dict[str, Any]) -> None:
        """Note a fault that has fired, if a worker's message says so."""
        number = message.get("number")
        if message.get("kind") == "fault" and isinstance(number, int) and 0 <= number < len(self.faults):
            self.fired.append(number)

    def find_kill(self, rank: int) -> str:
        """The last fault that killed this rank; "" if none did."""
        kills = [self.faults[number] for number in self.fired if self.faults[number].kind == "kill"]
        return next((str(fault) for fault in reversed(kills) if fault.rank == rank), "")

    def judge(self, outcome: Outcome, last_step: Callable[[int], int | None]) -> Outcome:
        """The outcome of the run: a failure if a fault did not fire. `last_step(rank)` is how far a rank came."""
        left = [fault for number, fault in enumerate(self.faults) if number not in self.fired]
        if outcome.failure is not None or not left:
            return outcome
        many = f"{len(left)} of {len(self.faults)} faults" if len(self.faults) > 1 else "the fault"
        lines = [f"unisono: the program ended well, but {many} did not fire"]
        lines += [f"  {fault}: {_explain(fault, last_step(fault.rank or 0))}" for fault in left]
        failure = Failure(left[0].rank or 0, time.monotonic(), "fault", 1, message=lines[0])
        return Outcome(failure, "\n".join(lines), last_step(failure.rank))


def _explain(fault: Fault, last: int | None) -> str:
    rank = fault.rank or 0
    if last is None:
        return f"rank {rank} counted no step; steps are those of un.parallel"
    if last < fault.step:
        return f"rank {rank} came to step {last} only"
    if fault.kind == "full-disk":
        return f"nothing was written to a disk by un.save or an offload after step {fault.step}"
    if fault.phase == "save":
        return f"un.save wrote nothing after step {fault.step}"
    if fault.phase == "healing":
        return f"the world was not formed again after step {fault.step}, with rank {rank} in it"
    if fault.phase == "exchange":
        return f"rank {rank} exchanged nothing from step {fault.step} on"
    return f"rank {rank} came to step {last}, but not through this moment"
