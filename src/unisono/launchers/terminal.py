"""A run started from the command line: signals, job control, and the report on standard error."""

from __future__ import annotations

import os
import signal
import time
from types import FrameType
from typing import Protocol

from unisono.launchers.failures import Outcome
from unisono.launchers.job import Job
from unisono.launchers.local import LocalRun
from unisono.launchers.output import Output, OutputClosed

__all__ = ["Run", "run_in_terminal"]

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Run(Protocol):
    """A run that is about to begin, here or on an engine."""

    output: Output
    interruptible: bool

    def supervise(self) -> Outcome: ...

    def kill(self) -> None: ...

    def signal_groups(self, signum: signal.Signals) -> None: ...


class _Interrupted(BaseException):
    """A signal asked the launcher to end."""


def run_in_terminal(job: Job, run: Run | None = None) -> int:
    """Run the job (by default on this host) and return the exit status: of the worker that failed first, 128 + signal
    when interrupted, or 0."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    run = run if run is not None else LocalRun(job)
    received: list[tuple[int, float]] = []

    def end(signum: int, _: FrameType | None) -> None:
        received.append((signum, time.monotonic()))
        if run.interruptible:
            run.interruptible = False
            raise _Interrupted
        run.kill()

    for signum in _ENDING:
        if signal.getsignal(signum) is not signal.SIG_IGN:  # as nohup and background jobs want it
            signal.signal(signum, end)
    _follow_job_control(run)
    try:
        outcome = run.supervise()
    except _Interrupted:
        cause, start = received[0]
        took_s = time.monotonic() - start
        name, count = signal.Signals(cause).name, f"{job.workers} worker{'s' if job.workers > 1 else ''}"
        run.output.say(f"unisono: interrupted ({name}); {count} stopped in {took_s:.1f} s")
        return 128 + cause
    except OutputClosed:
        return 128 + signal.SIGPIPE
    if outcome.failure is not None:
        run.output.say(outcome.report)
    return outcome.exit_status


def _follow_job_control(run: Run) -> None:
    """Ctrl-Z stops the workers too, and `fg` or `bg` lets them go on: they are in sessions of their own."""

    def pause(signum: int, _: FrameType | None) -> None:
        run.signal_groups(signal.SIGSTOP)
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)  # stops here until SIGCONT
        signal.signal(signum, pause)
        run.signal_groups(signal.SIGCONT)

    if signal.getsignal(signal.SIGTSTP) is not signal.SIG_IGN:
        signal.signal(signal.SIGTSTP, pause)
