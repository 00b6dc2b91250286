"""Starts N workers on this host, watches them, and leaves nothing behind.

1. Start all workers at once, each in a session of its own, then the guard (guard.py).
2. Watch: pass their output on, take their error reports, start the store when a first worker asks for it.
3. Stop: at the first failure or an interruption the rest is told to go, and made to after a grace time.
4. Clean up: whatever the workers left running is ended; only then are they reaped, so no process id is used again.

One thread, one selector, no torch; the store has a thread of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from unisono.launchers import guard
from unisono.launchers.child import Child
from unisono.launchers.control import Control, describe_fixed
from unisono.launchers.debugging import RunDebugger
from unisono.launchers.elastic import Members
from unisono.launchers.environment import worker_environment
from unisono.launchers.failures import (
    SETTLE_S,
    Failure,
    Outcome,
    WorkerDescription,
    failure_of_exit,
    find_outcome,
    read_failure,
)
from unisono.launchers.fault_report import FaultReport, read_faults
from unisono.launchers.forks import open_starter
from unisono.launchers.job import Job, TimedOut
from unisono.launchers.output import Output, OutputClosed
from unisono.launchers.private_folder import NotPrivate
from unisono.launchers.processes import Command
from unisono.launchers.stacks import HangReports, StackFiles, answer_stacks
from unisono.launchers.store import HostedStore
from unisono.runtime.memfd import anonymous_file
from unisono.runtime.secret import SECRET
from unisono.runtime.stack_dump import VARIABLE as STACKS
from unisono.runtime.stack_text import WorkerStack, judge
from unisono.runtime.status import StatusPage

__all__ = ["LocalRun"]

_TICK_S = 0.02
# Signals sent to the workers' main processes, and when (seconds after the decision to stop).
_AFTER_FAILURE = ((0.0, signal.SIGTERM), (1.0, signal.SIGKILL))
_LEAVING = ((3.0, signal.SIGKILL),)  # it has reported its error, or its program is over
_AT_ONCE = ((0.0, signal.SIGKILL),)
_AFTER_INTERRUPT = ((0.0, signal.SIGINT), (0.9, signal.SIGTERM), (1.2, signal.SIGKILL))


class LocalRun:
    """One run of one job. `supervise()` does it all; a BaseException raised into it (Ctrl-C) stops the run."""

    def __init__(self, job: Job) -> None:
        self.job = job
        places = job.places
        self._faults = FaultReport(read_faults(job.faults, places, restarts=job.restarts))
        self.run_id = secrets.token_hex(12)
        self.output = Output(job.output, places, job.output_dir, inherit=job.inherit)
        self._starter = open_starter(job.start)
        self._begin = time.monotonic()
        self._workers: list[Child] = []
        self.selector: selectors.BaseSelector = selectors.DefaultSelector()
        self.page = StatusPage.create(places)
        self._meeting_page = anonymous_file("unisono-meeting-page")
        self._store = HostedStore(backlog=max(128, 2 * places))
        self.debugger = RunDebugger(job, self._store.variables[SECRET], self.output.say)
        self.members = (
            None if job.elastic is None else Members(job.elastic, job.workers, self, " ".join(job.program)[:200])
        )
        self._control = Control(self.selector, self._answer)
        self._stacks = StackFiles()
        self._hangs = HangReports(job, self._gather_stacks, self.output.say)
        self._guard: guard.Guard | None = None
        self._stop_time: float | None = None
        self._interrupted_members: dict[int, str] | None = None  # the run's processes when it was interrupted
        self.interruptible = True  # whether a signal handler may raise into `supervise` now, or before it
        self._is_over = False  # all that is left is ended
        self._preempting = False  # whether workers that asked for it have been told to leave

    def supervise(self) -> Outcome:
        """Run the job to its end and clean up. Raises TimedOut, or what interrupted it, after the clean-up."""
        try:
            self._run()
            return self._outcome()
        finally:
            self.page.close()

    def _run(self) -> None:
        patience_s = 1.0
        try:
            self.interruptible = True
            self._start()
            self._watch()
            self.interruptible = False
            if any(worker.failure for worker in self._workers):
                patience_s = 0.3
                self._stop(self._after_failure)
        except BaseException:
            self.interruptible = False
            patience_s = 0.15
            self._interrupted_members = guard.members(self.run_id, self._sessions())
            self._stop(self._interruption)
            raise
        finally:
            self._clean_up(patience_s)

    def note(self, kind: str, **values: object) -> None:
        """Something happened: an event of the run's record, where there is one."""
        self.job.note(kind, **values)

    def preempt(self) -> bool:
        """Tell the workers that asked for it to save and leave (SIGTERM); False where none did."""
        asked = [worker for worker in self._workers if self._is_preemptible(worker)]
        for worker in asked:
            worker.send(signal.SIGTERM)
        self._preempting = bool(asked)
        return self._preempting

    def _is_preemptible(self, worker: Child) -> bool:
        return self.page.read(worker.rank).preemptible

    def kill(self) -> None:
        """SIGKILL to every worker now (the second Ctrl-C); `supervise` then ends by itself."""
        for worker in self._workers:
            worker.send(signal.SIGKILL)

    def signal_groups(self, signum: signal.Signals) -> None:
        """Send a signal to every worker and the children in its process group (Ctrl-Z, and going on after it)."""
        for worker in self._workers:
            worker.send_group(signum)

    # -- 1. start ------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self.selector.register(self._store.listener, selectors.EVENT_READ, self._start_store)
        self.selector.register(self.debugger.listener, selectors.EVENT_READ, self._start_debugger)
        for rank in range(self.job.workers):
            self.start_worker(rank)
        self._start_guard()
        if self.members is not None:
            self.members.begin()
        else:
            with contextlib.suppress(OSError, NotPrivate):  # the run does not depend on being asked
                self._control.open()

    def _start_guard(self) -> None:
        self._guard = guard.Guard(self.run_id, self._sessions())

    def start_worker(self, rank: int) -> None:
        """Start the worker of a rank; where workers come and go, of a place."""
        begin = time.monotonic()
        left_s = None if self.job.timeout_s is None else self._begin + self.job.timeout_s - begin
        report_fd, report_end = os.pipe()
        line = {} if self.members is None else self.members.open_line()
        descriptors = {**self._descriptors(rank), **line, "UNISONO_REPORT_FD": report_end}
        streams = self.output.open(rank)
        command = Command(self.job.program, self._environment(rank), descriptors, **streams)
        try:
            process = self._starter.start(command, timeout_s=left_s)
        except BaseException as error:
            os.close(report_fd)
            if self.members is not None:
                self.members.opened(None)
            if isinstance(error, TimeoutError):
                raise TimedOut("  the workers were being started") from None
            raise
        finally:
            os.close(report_end)
            if self.job.output == "files":
                streams["stdout"].close()  # type: ignore[union-attr]
        worker = Child(rank, process, report_fd, begin)
        self._workers.append(worker)
        self.note("worker started", rank=rank, pid=process.pid)
        if self.members is not None:
            self.members.opened(worker)
        if self._guard is not None:
            self._guard.add(process.pid)
        self._listen(report_fd, partial(self._on_report, worker))
        for name in ("stdout", "stderr"):
            fd = getattr(process, name)
            if fd is not None:
                self._listen(fd, partial(self.output.feed, rank, name))
        if process.pid_fd is not None:
            self.selector.register(process.pid_fd, selectors.EVENT_READ, partial(self._on_exit, worker))

    def _descriptors(self, rank: int) -> dict[str, int]:
        """The open files that `rank` inherits, by the variable that names them."""
        found = {"UNISONO_STATUS_FD": self.page.fd, STACKS: self._stacks.open(rank)}
        if self.members is None or not self.members.is_under_way:
            found["UNISONO_SHM_FD"] = self._meeting_page
        if self.job.payload_fd is not None:
            found.update(UNISONO_PAYLOAD_FD=self.job.payload_fd, UNISONO_RESULT_FD=self.job.result_fds[rank])
        return found

    def _environment(self, rank: int) -> dict[str, str]:
        env = self._store.variables | worker_environment(
            rank,
            self.job.workers,
            address=self._store.address,
            run_id=self.run_id,
            threads=self.job.threads,
            most=self.job.places,
            faults=self._faults.write_for(rank),
            record=self.job.record,
        )
        env |= self.debugger.variables()
        return env if self.members is None else {**env, **self.members.environment(rank)}

    def _start_store(self) -> None:
        self.selector.unregister(self._store.listener)
        self._store.start()

    def _start_debugger(self) -> None:
        self.selector.unregister(self.debugger.listener)
        self.debugger.start()

    # -- 2. watch ------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Until all workers have ended, or one has failed and its failure is not waiting for its cause."""
        while any(worker.exited is None for worker in self._workers):
            if self.members is not None and not self.members.act():
                return
            failures = [worker.failure for worker in self._workers if worker.failure]
            if self.members is not None and self.members.step >= 0:
                failures = []  # workers that fail are replaced
            now = time.monotonic()
            until = None if self.members is None else now + self.members.look_s
            if failures:
                until = min(failure.time for failure in failures) + SETTLE_S
                if now >= until or not all(failure.consequence for failure in failures):
                    return
            elif self.job.timeout_s is not None:
                end = self._begin + self.job.timeout_s + self.debugger.paused_s
                if now >= end:
                    raise TimedOut(self._activities(now))
                until = end if until is None else min(until, end)
            self._pump(None if until is None else until - now)

    def _pump(self, wait_s: float | None) -> None:
        """Handle what has happened, waiting at most `wait_s` (None: for as long as it takes) for something to."""
        polled = [worker for worker in self._workers if worker.process.pid_fd is None and worker.exited is None]
        if polled:
            wait_s = _TICK_S if wait_s is None else min(wait_s, _TICK_S)
        for key, _ in self.selector.select(wait_s):
            if key.fileobj in self.selector.get_map():
                key.data()
        for worker in polled:
            self._on_exit(worker)

    def _listen(self, fd: int, take: Callable[[bytes], None]) -> None:
        os.set_blocking(fd, False)
        self.selector.register(fd, selectors.EVENT_READ, partial(self._read, fd, take))

    def _read(self, fd: int, take: Callable[[bytes], None]) -> bool:
        """Pass on one piece of what can be read; False when there is nothing now."""
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self.selector.unregister(fd)
            return False
        take(data)
        return True

    def _on_report(self, worker: Child, data: bytes) -> None:
        *lines, worker.text = (worker.text + data).split(b"\n")
        unknown = b""
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError:
                unknown += line + b"\n"  # faulthandler's
                continue
            if not isinstance(message, dict):
                continue
            worker.ready = True
            self._faults.take(message)
            if self._stop_time is None and worker.failure is None:
                self._hangs.take(message)
            if message.get("kind") == "done" and not worker.done:
                worker.done = True
                if self.members is not None:
                    self.members.on_done(worker)
            worker.preempted = worker.preempted or message.get("kind") == "preempted"
            if message.get("kind") == "preemptible" and self._preempting and self._is_preemptible(worker):
                worker.send(signal.SIGTERM)  # it asked after the others were told
            worker.failure = worker.failure or read_failure(worker.rank, message, time.monotonic())
        worker.text = unknown + worker.text

    def _on_exit(self, worker: Child) -> None:
        status = worker.process.exit_status()
        if status is None:
            return
        worker.exited = time.monotonic()
        if worker.process.pid_fd is not None:
            self.selector.unregister(worker.process.pid_fd)
        self._drain(worker)
        self.output.flush(worker.rank)
        stopped = worker.done and (self._stop_time is not None or worker.is_overdue)  # it took its time: no failure
        if status != 0 and worker.failure is None and not worker.preempted and not stopped:
            text = worker.text.decode("utf-8", "replace")
            worker.failure = failure_of_exit(worker.rank, status, worker.exited, text)
        self._note_exit(worker, status)
        if self.members is not None and self._stop_time is None and not self._is_over:
            self.members.on_exit(worker)

    def _note_exit(self, worker: Child, status: int) -> None:
        failed = worker.failure is not None
        kind = "worker ended" if not failed else "worker lost" if self._stop_time is None else "worker stopped"
        text = "" if worker.failure is None else worker.failure.headline
        self.note(kind, rank=worker.rank, pid=worker.process.pid, status=status, text=text)

    def let_go(self, worker: Child) -> None:
        """Let go of a worker that has ended, before the run has; others of its group end too."""
        worker.process.send_group(signal.SIGKILL)
        for fd in (worker.report_fd, *worker.stream_fds()):
            if fd in self.selector.get_map():
                self.selector.unregister(fd)
        self._workers.remove(worker)
        worker.close()

    def _drain(self, worker: Child) -> None:
        """Take what the pipes hold now: a child of the worker may keep them open, so their end is not waited for."""
        for fd in (worker.report_fd, *worker.stream_fds()):
            for _ in range(64):  # a pipe holds 64 KiB, at most 1 MiB
                if fd not in self.selector.get_map() or self.selector.get_key(fd).data() is False:
                    break

    # -- 3. stop -------------------------------------------------------------------------------------------------------

    def _interruption(self, worker: Child) -> Sequence[tuple[float, signal.Signals]]:
        # A worker that has not begun its program has nothing to tidy up.
        return _AFTER_INTERRUPT if worker.ready else _AT_ONCE

    def _after_failure(self, worker: Child) -> Sequence[tuple[float, signal.Signals]]:
        if worker.is_leaving:
            return _LEAVING
        return _AT_ONCE if self._is_preemptible(worker) else _AFTER_FAILURE  # it would only note SIGTERM

    def _stop(self, schedule: Callable[[Child], Sequence[tuple[float, signal.Signals]]]) -> None:
        """Send every live worker the signals of its schedule until it has ended."""
        start = self._stop_time = time.monotonic()
        self.output.hurry(start + 1.5)
        for worker in self._workers:
            worker.schedule = [(start + delay, signum) for delay, signum in schedule(worker)]
        while True:
            alive = [worker for worker in self._workers if worker.exited is None]
            now = time.monotonic()
            if not alive or now > start + 5:  # SIGKILL does not fail, but a disk may hold a process for long
                return
            for worker in alive:
                while worker.schedule and worker.schedule[0][0] <= now:
                    worker.send(worker.schedule.pop(0)[1])
            due = [worker.schedule[0][0] for worker in alive if worker.schedule]
            try:
                self._pump(max(0.0, min([*due, now + 0.1]) - now))
            except OutputClosed:
                continue

    # -- 4. clean up ---------------------------------------------------------------------------------------------------

    def _clean_up(self, patience_s: float) -> None:
        self._is_over = True
        self.kill()
        self._store.close()
        self.debugger.close()
        guard.sweep(
            self.run_id,
            self._sessions(),
            patience_s=patience_s,
            manager_patience_s=3.0 if self._interrupted_members is None else 0.0,
            ended=self._interrupted_members or (),
        )
        for worker in self._workers:
            self._forget(worker)
        self._starter.close()
        if self._guard is not None:
            self._guard.done()
        self.selector.close()
        os.close(self._meeting_page)
        self._control.close()
        self._stacks.close()
        if self.members is not None:
            self.members.close()

    def _sessions(self) -> list[int]:
        return [worker.process.pid for worker in self._workers]

    def _forget(self, worker: Child) -> None:
        with contextlib.suppress(OutputClosed):
            if worker.exited is None:
                worker.process.exit_status(wait=True)
                self._on_exit(worker)
            self._drain(worker)  # what its children wrote after it
            self.output.flush(worker.rank)
        worker.close()

    # -- the report ----------------------------------------------------------------------------------------------------

    def _outcome(self) -> Outcome:
        outcome = None if self.members is None else self.members.find_outcome()
        if outcome is not None:
            return outcome
        failures = [worker.failure for worker in self._workers if worker.failure]
        workers, colour = self.job.workers, self.output.colour
        if not failures and any(worker.preempted for worker in self._workers):
            steps = [self.page.read(worker.rank).step for worker in self._workers if worker.preempted]
            return Outcome(step=max((step for step in steps if step is not None), default=None), preempted=True)
        outcome = find_outcome(failures, self._stop_time, workers=workers, describe=self._describe, colour=colour)
        outcome = self._hangs.add_to(outcome)
        return self._faults.judge(outcome, lambda rank: self.page.read(rank).step)

    def _describe(self, failure: Failure) -> WorkerDescription:
        rank = failure.rank
        worker = next(worker for worker in self._workers if worker.failure is failure)
        ran_s = failure.time - worker.started
        return WorkerDescription(
            f"rank {rank}, host {socket.gethostname()}, pid {worker.process.pid}, after {ran_s:.1f} s",
            self.describe_activity(rank, failure.time),
            self.page.read(rank).step,
            self.output.unseen(rank),
            self._faults.find_kill(rank),
        )

    def _activities(self, now: float) -> str:
        running = [worker.rank for worker in self._workers if worker.exited is None]
        lines = [f"  rank {rank}: {self.describe_activity(rank, now) or 'running'}" for rank in running]
        return "\n".join([*lines, f"  {judge(*self._gather_stacks())[0]}"])

    # -- stacks --------------------------------------------------------------------------------------------------------

    def _gather_stacks(self) -> tuple[list[WorkerStack], list[int]]:
        pids = {worker.rank: worker.process.pid for worker in self._workers if worker.exited is None}
        gone = [worker.rank for worker in self._workers if worker.exited is not None]
        return self._stacks.gather(pids, self.page), gone

    def tell_stacks(self) -> dict[str, Any]:
        """What all workers are doing, for who asks."""
        return answer_stacks(*self._gather_stacks())

    def describe_stack(self, worker: Child) -> str:
        """What a worker is doing, by its stacks."""
        return judge(self._stacks.gather({worker.rank: worker.process.pid}, self.page))[0]

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Of a run whose workers stay."""
        match request:
            case {"do": "stacks"}:
                return self.tell_stacks()
            case {"do": "status"}:
                steps = [self.page.read(worker.rank).step for worker in self._workers]
                step = max((step for step in steps if step is not None), default=None)
                return describe_fixed(self.job.program, self.job.workers, step)
            case _:
                raise ValueError("this run has as many workers as it was started with: use `unisono run -n MIN:MAX`")

    def describe_activity(self, rank: int, now: float) -> str:
        """What `rank` last noted, in words; "" when it noted nothing."""
        status = self.page.read(rank)
        parts = [] if status.step is None else [f"last step {status.step}"]
        if status.doing:
            parts.append(f"doing: {status.doing} (since {max(0.0, now - status.doing_since):.1f} s)")
        return ", ".join(parts)
