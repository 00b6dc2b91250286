"""A run started from the command line: signals, job control, and the report on standard error."""

from __future__ import annotations

import os
import select
import signal
import stat
import threading
import time
from types import FrameType
from typing import Any

from unisono.launchers.failures import format_preemption
from unisono.launchers.job import Job
from unisono.launchers.local import LocalRun
from unisono.launchers.output import OutputClosed
from unisono.launchers.supervisor import Supervisor

__all__ = ["run_in_terminal"]

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Interrupted(BaseException):
    """A signal asked the launcher to end."""

    def __init__(self, text: str) -> None:
        self.text, self.time = text, time.monotonic()


def run_in_terminal(job: Job, run: Supervisor[Any] | None = None) -> int:
    """Run the job (by default on this host) and return the exit status: of the worker that failed first, 128 + signal
    when interrupted, or 0.

    The first SIGTERM is passed on to workers that save and leave by themselves; they have the grace time for it. Where
    standard output and error were both read by processes that are gone, the run ends as when a terminal is closed.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    run = run if run is not None else LocalRun(job)
    received: list[int] = []

    def end(signum: int, _: FrameType | None) -> None:
        received.append(signum)
        if received == [signal.SIGTERM] and job.grace_s and run.interruptible and run.preempt():
            signal.setitimer(signal.ITIMER_REAL, job.grace_s)
            return
        if run.interruptible:
            run.interruptible = False
            late = f", and not all had left {job.grace_s:g} s later (--grace)" if signum == signal.SIGALRM else ""
            raise _Interrupted(f"interrupted ({signal.Signals(received[0]).name}{late})")
        run.kill()

    try:
        signal.signal(signal.SIGALRM, end)
        for signum in _ENDING:
            if signal.getsignal(signum) is not signal.SIG_IGN:  # as nohup and background jobs want it
                signal.signal(signum, end)
        _follow_job_control(run)
        _hang_up_without_readers()
        outcome = run.supervise()
    except _Interrupted as interrupted:
        took_s = time.monotonic() - interrupted.time
        count = f"{job.workers} worker{'s' if job.workers > 1 else ''}"
        text = f"unisono: {interrupted.text}; {count} stopped in {took_s:.1f} s"
        run.output.say(text)
        return _finish(job, "interrupted", 128 + received[0], text)
    except OutputClosed:
        return _finish(job, "interrupted", 128 + signal.SIGPIPE, "whoever read the output has gone")
    except BaseException as error:  # the workers could not be started
        _finish(job, "failed", 1, str(error))
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if outcome.preempted:
        run.output.say(format_preemption(job.workers, outcome.step))
    if outcome.failure is not None:
        run.output.say(outcome.report)
    how = "preempted" if outcome.preempted else "failed" if outcome.failure is not None else "ok"
    return _finish(job, how, outcome.exit_status, outcome.report)


def _finish(job: Job, outcome: str, status: int, report: str) -> int:
    """Note the end in the run's record, if it has one, and return the exit status."""
    if job.record is not None:
        job.record.finish(outcome, exit_status=status, report=report)
    return status


def _follow_job_control(run: Supervisor[Any]) -> None:
    """Ctrl-Z stops the workers too, and `fg` or `bg` lets them go on: they are in sessions of their own."""

    def pause(signum: int, _: FrameType | None) -> None:
        run.signal_groups(signal.SIGSTOP)
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)  # stops here until SIGCONT
        signal.signal(signum, pause)
        run.signal_groups(signal.SIGCONT)

    if signal.getsignal(signal.SIGTSTP) is not signal.SIG_IGN:
        signal.signal(signal.SIGTSTP, pause)


def _hang_up_without_readers() -> None:
    """Send this process SIGHUP when nobody can read its output and errors any more: a quiet run would not notice."""
    watched = select.poll()
    for fd in (1, 2):
        try:
            if not stat.S_ISFIFO(os.fstat(fd).st_mode):
                return
        except OSError:  # it was started without
            return
        watched.register(fd, 0)  # errors alone

    def watch() -> None:
        left = {1, 2}
        while left:
            for fd, _ in watched.poll():
                watched.unregister(fd)
                left.discard(fd)
        os.kill(os.getpid(), signal.SIGHUP)

    threading.Thread(target=watch, name="unisono readers", daemon=True).start()
