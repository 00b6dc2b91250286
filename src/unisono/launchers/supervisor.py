"""What a run on this host (local.py) and a run on an engine (engine_run.py) have in common.

A supervisor starts the workers of one job, watches them, stops them at the first failure or an interruption, cleans up
and says how the run ended. Workers may be replaced while it goes on: see elastic.py. One thread, one event loop, no
torch; the store and the debugger's hub have threads of their own.
"""

from __future__ import annotations

import os
import secrets
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from unisono.launchers.control import Control, HangReports, answer_stacks
from unisono.launchers.failures import (
    SETTLE_S,
    Failure,
    FaultReport,
    Outcome,
    first_failure,
    format_report,
    read_faults,
)
from unisono.launchers.job import Job
from unisono.launchers.meeting import RunDebugger
from unisono.launchers.output import Output
from unisono.launchers.runtime.files import NotPrivate
from unisono.launchers.runtime.local_channel import EventLoop
from unisono.launchers.runtime.stacks import WorkerStack, judge
from unisono.launchers.workers import Worker

if TYPE_CHECKING:
    from unisono.launchers.elastic import ElasticSupervisor

__all__ = ["AT_ONCE", "Schedule", "Supervisor", "after_failure", "after_interrupt"]

W = TypeVar("W", bound=Worker)

# Signals sent to a worker's main process, and when: seconds after the decision to stop.
Schedule = Sequence[tuple[float, signal.Signals]]
AT_ONCE: Schedule = ((0.0, signal.SIGKILL),)
_AFTER_FAILURE: Schedule = ((0.0, signal.SIGTERM), (1.0, signal.SIGKILL))
_LEAVING: Schedule = ((3.0, signal.SIGKILL),)  # it has reported its error, or its program is over
_AFTER_INTERRUPT: Schedule = ((0.0, signal.SIGINT), (0.9, signal.SIGTERM), (1.2, signal.SIGKILL))


def after_failure(worker: Worker) -> Schedule:
    """How a worker is stopped after another has failed."""
    if worker.done or worker.preempted or worker.failure is not None:
        return _LEAVING
    return AT_ONCE if worker.read_status().preemptible else _AFTER_FAILURE  # it would only note SIGTERM


def after_interrupt(worker: Worker) -> Schedule:
    """How a worker is stopped after Ctrl-C; one that has not begun its program has nothing to tidy up."""
    return _AFTER_INTERRUPT if worker.ready else AT_ONCE


class Supervisor(ABC, Generic[W]):
    """One run of one job. `supervise()` does it all; a BaseException raised into it (Ctrl-C) stops the run."""

    debugger: RunDebugger

    def __init__(self, job: Job, *, restarts: int = 0, inherit: bool) -> None:
        self.job = job
        self.faults = FaultReport(read_faults(job.faults, job.places, restarts=max(restarts, job.restarts)))
        self.run_id = secrets.token_hex(12)
        self.output = Output(job.output, job.places, job.output_dir, inherit=inherit)
        self.interruptible = True  # whether a signal handler may raise into `supervise` now, or before it
        self.workers: list[W] = []  # those that run or have ended; replaced ones are not among them
        self.elastic: ElasticSupervisor[W] | None = None
        self.loop = EventLoop()
        self.stop_time: float | None = None  # when the launcher began to stop the workers
        self._begin = time.monotonic()
        self._control = Control(self.loop, self.answer)
        self._hangs = HangReports(job, self.gather_stacks, self.output.say)
        self._preempting = False  # whether workers that asked for it are told to save and leave

    def supervise(self) -> Outcome:
        """Run the job to its end and clean up. Raises TimedOut, EngineError, or what interrupted it."""
        try:
            self.interruptible = True
            self._start()
            self._watch()
            self.interruptible = False
            if self.failures or (self.elastic is not None and self.elastic.given_up is not None):
                self._stop(after_failure)
        except BaseException as error:
            self.interruptible = False
            self._interrupt(error)
            raise
        finally:
            self._clean_up()
        return self._outcome()

    @abstractmethod
    def preempt(self) -> bool:
        """Tell the workers that asked for it to save and leave; False if none did."""

    @abstractmethod
    def kill(self) -> None:
        """SIGKILL to every worker now (the second Ctrl-C); `supervise` then ends by itself."""

    @abstractmethod
    def signal_groups(self, signum: signal.Signals) -> None:
        """Send a signal to every worker and the children in its process group (Ctrl-Z, and going on after it)."""

    @abstractmethod
    def gather_stacks(self) -> tuple[list[WorkerStack], list[int]]:
        """The stacks of all workers that run, and the ranks of those that have ended."""

    @abstractmethod
    def _start(self) -> None:
        """Start the workers, or the engine that does."""

    @abstractmethod
    def _watch(self) -> None:
        """Return when all workers have ended, or the run has failed."""

    @abstractmethod
    def _stop(self, schedule: Callable[[Worker], Schedule]) -> None:
        """Stop every worker by the signals of its schedule, and wait until all have ended."""

    def _interrupt(self, error: BaseException) -> None:
        """Stop the workers, as `error` was raised while they ran."""
        self._stop(after_interrupt)

    @abstractmethod
    def _clean_up(self) -> None:
        """Leave no process and no open file behind."""

    def _open_control(self) -> None:
        """Listen for `unisono scale` and `unisono stacks`; the run does not depend on them."""
        try:
            self._control.open()
        except (OSError, NotPrivate) as error:
            if self.elastic is not None:
                self.output.say(f"unisono: `unisono scale` and `unisono stacks` cannot reach this run: {error}")

    # -- what happens --------------------------------------------------------------------------------------------------

    @property
    def failures(self) -> list[Failure]:
        """Of the workers that are not replaced."""
        return [worker.failure for worker in self.workers if worker.failure]

    @property
    def running(self) -> list[W]:
        """The workers that have not ended."""
        return [worker for worker in self.workers if worker.ended is None]

    @property
    def deadline(self) -> float | None:
        """When the run has to be over; time that people spend in the debugger does not count."""
        return None if self.job.timeout_s is None else self._begin + self.job.timeout_s + self.debugger.paused_s

    def find_settling(self, failures: Sequence[Failure]) -> float:
        """When failures are final: at once, or when those that look like consequences have waited for their cause."""
        if all(failure.consequence for failure in failures):
            return min(failure.time for failure in failures) + SETTLE_S
        return 0.0

    def take_report(self, worker: W, data: bytes) -> None:
        """Handle a piece of what a worker wrote to its report pipe."""
        for message in worker.take_report(data, time.monotonic()):
            self.faults.take(message)
            if self.stop_time is None and worker.failure is None:
                self._hangs.take(message)
            self._on_report(worker, message)

    @abstractmethod
    def _on_report(self, worker: W, message: dict[str, Any]) -> None:
        """Handle a message of a worker's report pipe, beyond what is common to all runs."""

    def note_end(self, worker: W, **values: Any) -> None:
        """Enter the end of a worker into the run's record."""
        text, kind = "", "worker ended"
        if worker.failure is not None:
            text, kind = worker.failure.headline, "worker lost" if self.stop_time is None else "worker stopped"
        self.job.note(kind, rank=worker.rank, pid=worker.pid, text=text, **values)

    # -- the report ----------------------------------------------------------------------------------------------------

    def _outcome(self) -> Outcome:
        outcome = None if self.elastic is None else self.elastic.find_outcome()
        if outcome is not None:
            return outcome
        left = [worker for worker in self.workers if worker.preempted]
        if left and not self.failures:
            return Outcome(step=_find_last_step(left), preempted=True)
        return self.faults.judge(self._report_failure(), self.find_step)

    @abstractmethod
    def find_step(self, rank: int) -> int | None:
        """The last step of a rank, also of one that was replaced."""

    def _report_failure(self) -> Outcome:
        """Tell failures from workers that the launcher stopped, and put the first failure into words."""
        failures = self.failures
        own = [failure for failure in failures if self.stop_time is None or failure.time <= self.stop_time]
        if not own:
            return Outcome()
        first = first_failure(own)
        worker = next(worker for worker in self.workers if worker.failure is first)
        rank, ran_s = worker.rank, first.time - worker.started
        report = format_report(
            first,
            sorted((failure for failure in own if failure is not first), key=lambda failure: failure.time),
            workers=self.job.workers,
            identity=f"rank {rank}, host {worker.host}, pid {worker.pid}, after {ran_s:.1f} s",
            status=worker.describe_activity(first.time),
            stopped=[failure.rank for failure in failures if failure not in own],
            unseen=self.output.unseen(rank),
            fault=self.faults.find_kill(rank),
            colour=self.output.colour,
        )
        if self._hangs.last:
            report += f"\n\n{self._hangs.last}"
        return Outcome(first, report, worker.read_status().step)

    def describe_activities(self) -> str:
        """What every worker is doing, a line each, and who keeps the others waiting."""
        now = time.monotonic()
        lines = [f"  rank {worker.rank}: {worker.describe_activity(now) or 'running'}" for worker in self.running]
        return "\n".join([*lines, f"  {judge(*self.gather_stacks())[0]}"])

    # -- requests of other processes -----------------------------------------------------------------------------------

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a request that came over the run's socket (control.py); ValueError refuses it."""
        if request.get("do") == "stacks":
            return answer_stacks(*self.gather_stacks())
        fixed = {**dict.fromkeys(("workers", "wanted", "least", "most"), self.job.workers), "adapts": False}
        match request:
            case {"do": "status"}:
                pass
            case _ if self.elastic is None:
                raise ValueError("this run has as many workers as it was started with: use `unisono run -n MIN:MAX`")
            case {"do": "scale", "workers": int(count)} if not isinstance(count, bool):
                self.elastic.scaling.scale(count)
            case _:
                raise ValueError("got a request that is not known; expected status, or scale with a number of workers")
        return {
            "pid": os.getpid(),
            "program": self.job.describe_program(),
            "step": _find_last_step(self.workers),
            "elastic": self.elastic is not None,
            **(fixed if self.elastic is None else self.elastic.scaling.describe()),
        }


def _find_last_step(workers: Sequence[Worker]) -> int | None:
    steps = [worker.read_status().step for worker in workers]
    return max((step for step in steps if step is not None), default=None)
