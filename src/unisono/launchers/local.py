"""Starts N workers on this host, watches them, and leaves nothing behind.

1. Start all workers at once, each in a session of its own, then the guard (guard.py).
2. Watch: pass their output on, take their error reports, start the store when a first worker asks for it.
3. Stop: at the first failure or an interruption the rest is told to go, and made to after a grace time.
4. Clean up: whatever the workers left running is ended; only then are they reaped, so no process id is used again.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from unisono.launchers import guard
from unisono.launchers.failures import Outcome
from unisono.launchers.job import Job, TimedOut, check_elastic_on_one_host
from unisono.launchers.meeting import RunDebugger, store_variables
from unisono.launchers.output import OutputClosed
from unisono.launchers.processes import Command, open_starter, worker_environment
from unisono.launchers.runtime.channel import derive_secret
from unisono.launchers.runtime.files import anonymous_file
from unisono.launchers.runtime.stacks import VARIABLE as STACKS
from unisono.launchers.runtime.stacks import StackFiles, WorkerStack
from unisono.launchers.runtime.status import StatusPage
from unisono.launchers.runtime.store_server import StoreServer
from unisono.launchers.supervisor import Schedule, Supervisor
from unisono.launchers.workers import LocalWorker, Worker

if TYPE_CHECKING:
    from unisono.launchers.elastic import LocalElastic

__all__ = ["LocalRun"]

_TICK_S = 0.02


class LocalRun(Supervisor[LocalWorker]):
    """One run of one job on this host."""

    elastic: LocalElastic | None

    def __init__(self, job: Job) -> None:
        if job.elastic is not None:
            check_elastic_on_one_host()
        super().__init__(job, inherit=job.inherit)
        self._starter = open_starter(job.start)
        self.page = StatusPage.create(job.places)
        self._meeting_page = anonymous_file("unisono-meeting-page")
        self._secret = secrets.token_hex(32)  # what the workers are given
        listener = socket.create_server(("127.0.0.1", 0), backlog=max(128, 2 * job.places))
        self._store = StoreServer(listener, derive_secret(self._secret.encode(), "store"))
        self.debugger = RunDebugger(job, self._secret, self.output.say)
        if job.elastic is not None:
            from unisono.launchers.elastic import LocalElastic

            self.elastic = LocalElastic(job.elastic, self)
        self._stacks = StackFiles()
        self._guard: guard.Guard | None = None
        self._interrupted_processes: dict[int, str] | None = None  # the run's processes when it was interrupted
        self._is_over = False  # all that is left is ended

    def supervise(self) -> Outcome:
        try:
            return super().supervise()
        finally:
            self.page.close()

    def preempt(self) -> bool:
        asked = [worker for worker in self.workers if worker.read_status().preemptible]
        for worker in asked:
            worker.send(signal.SIGTERM)
        self._preempting = bool(asked)
        return self._preempting

    def kill(self) -> None:
        for worker in self.workers:
            worker.send(signal.SIGKILL)

    def signal_groups(self, signum: signal.Signals) -> None:
        for worker in self.workers:
            worker.send_group(signum)

    # -- 1. start ------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        for server in (self._store, self.debugger):
            self.loop.watch(server.listener, partial(self._start_once, server))
        for rank in range(self.job.workers):
            self.start_worker(rank)
        self._guard = guard.Guard(self.run_id, self._sessions())
        if self.elastic is not None:
            self.elastic.coordinator.begin(list(self.elastic.connections))
        self._open_control()

    def start_worker(self, rank: int) -> None:
        """Start the worker of a rank; where workers come and go, of a place."""
        begin = time.monotonic()
        left_s = None if self.job.timeout_s is None else self._begin + self.job.timeout_s - begin
        connection = {} if self.elastic is None else self.elastic.open_connection()
        descriptors = {**self._descriptors(rank), **connection}
        streams = self.output.open(rank)
        command = Command(self.job.program, self._environment(rank), descriptors, **streams)
        try:
            process = self._starter.start(command, timeout_s=left_s)
        except BaseException as error:
            if self.elastic is not None:
                self.elastic.add_started(None)
            if isinstance(error, TimeoutError):
                raise TimedOut("  the workers were being started") from None
            raise
        finally:
            if self.job.output == "files":
                streams["stdout"].close()  # type: ignore[union-attr]
        host = socket.gethostname()
        worker = LocalWorker(rank=rank, host=host, pid=process.pid, started=begin, process=process, page=self.page)
        process.watch(self.loop, partial(self._take, worker), partial(self._on_exit, worker))
        self.workers.append(worker)
        self.job.note("worker started", rank=rank, pid=process.pid)
        if self.elastic is not None:
            self.elastic.add_started(worker)
        if self._guard is not None:
            self._guard.add(process.pid)

    def _descriptors(self, rank: int) -> dict[str, int]:
        """The open files that `rank` inherits, by the variable that names them."""
        found = {"UNISONO_STATUS_FD": self.page.fd, STACKS: self._stacks.open(rank)}
        if self.elastic is None or not self.elastic.is_under_way:
            found["UNISONO_SHM_FD"] = self._meeting_page
        if self.job.payload_fd is not None:
            found.update(UNISONO_PAYLOAD_FD=self.job.payload_fd, UNISONO_RESULT_FD=self.job.result_fds[rank])
        return found

    def _environment(self, rank: int) -> dict[str, str]:
        env = store_variables(self._store.address, self._secret) | worker_environment(
            rank,
            self.job.workers,
            address=self._store.address,
            run_id=self.run_id,
            threads=self.job.threads,
            most=self.job.places,
            faults=self.faults.write_for(rank),
            record=self.job.record,
        )
        env |= self.debugger.variables()
        return env if self.elastic is None else {**env, **self.elastic.environment(rank)}

    def _start_once(self, server: StoreServer | RunDebugger) -> None:
        """A first worker asks for it."""
        self.loop.forget(server.listener)
        server.start()

    # -- 2. watch ------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Return when all workers have ended, or one has failed and its failure is not waiting for its cause."""
        while self.running:
            now = time.monotonic()
            times = []  # when there is something to be done, if nothing happens before
            failures = self.failures
            if self.elastic is not None:
                self.elastic.act(now)
                if self.elastic.given_up is not None:
                    return
                self.elastic.look(now)
                times.append(now + self.elastic.look_s)
                failures = self.failures if self.elastic.step < 0 else []  # workers that fail are replaced
            if failures:
                times.append(self.find_settling(failures))
                if now >= times[-1]:
                    return
            elif self.deadline is not None:
                times.append(self.deadline)
                if now >= times[-1]:
                    raise TimedOut(self.describe_activities())
            self._pump(min(times) - now if times else None)

    def _pump(self, wait_s: float | None) -> None:
        """Handle what has happened, waiting at most `wait_s` (None: for as long as it takes) for something to."""
        polled = [worker for worker in self.running if worker.process.pid_fd is None]
        if polled:
            wait_s = _TICK_S if wait_s is None else min(wait_s, _TICK_S)
        self.loop.pump(wait_s)
        for worker in polled:
            self._on_exit(worker)

    def _take(self, worker: LocalWorker, name: str, data: bytes) -> None:
        """Handle a piece of what a worker wrote to one of its pipes."""
        if name == "report":
            self.take_report(worker, data)
        else:
            self.output.feed(worker.rank, name, data)

    def _on_report(self, worker: LocalWorker, message: dict[str, Any]) -> None:
        kind = message.get("kind")
        if kind == "done" and self.elastic is not None:
            self.elastic.on_done(worker)
        if kind == "preemptible" and self._preempting and worker.read_status().preemptible:
            worker.send(signal.SIGTERM)  # it asked after the others were told

    def _on_exit(self, worker: LocalWorker) -> None:
        status = worker.process.exit_status()
        if status is None:
            return
        if worker.process.pid_fd is not None:
            self.loop.forget(worker.process.pid_fd)
        worker.ended = time.monotonic()
        worker.process.drain()
        self.output.flush(worker.rank)
        worker.take_end(status, worker.ended, stopping=self.stop_time is not None)
        self.note_end(worker, status=status)
        if self.elastic is not None and self.stop_time is None and not self._is_over:
            self.elastic.on_end(worker)

    def let_go(self, worker: LocalWorker) -> None:
        """Let go of a worker that has ended, before the run has; others of its group end too."""
        worker.process.send_group(signal.SIGKILL)
        worker.process.forget()
        self.workers.remove(worker)
        worker.process.close()

    # -- 3. stop -------------------------------------------------------------------------------------------------------

    def _interrupt(self, error: BaseException) -> None:
        self._interrupted_processes = guard.members(self.run_id, self._sessions())
        self.stop_time = time.monotonic()
        with contextlib.suppress(OutputClosed):
            self._pump(0.0)  # reports that are waiting: a worker that has begun its program may tidy up
        super()._interrupt(error)

    def _stop(self, schedule: Callable[[Worker], Schedule]) -> None:
        start = self.stop_time = time.monotonic()
        self.output.hurry(start + 1.5)
        for worker in self.workers:
            worker.schedule = [(start + delay, signum) for delay, signum in schedule(worker)]
        while True:
            alive = self.running
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

    def _clean_up(self) -> None:
        self._is_over = True
        self.kill()
        self._store.close()
        self.debugger.close()
        interrupted = self._interrupted_processes
        guard.sweep(
            self.run_id,
            self._sessions(),
            patience_s=0.15 if interrupted is not None else 1.0 if self.stop_time is None else 0.3,
            manager_patience_s=3.0 if interrupted is None else 0.0,
            ended=interrupted or (),
        )
        for worker in self.workers:
            self._forget(worker)
        self._starter.close()
        if self._guard is not None:
            self._guard.done()
        self.loop.close()
        os.close(self._meeting_page)
        self._control.close()
        self._stacks.close()
        if self.elastic is not None:
            self.elastic.close()

    def _sessions(self) -> list[int]:
        return [worker.pid for worker in self.workers]

    def _forget(self, worker: LocalWorker) -> None:
        with contextlib.suppress(OutputClosed):
            if worker.ended is None:
                worker.process.exit_status(wait=True)
                self._on_exit(worker)
            worker.process.drain()  # what its children wrote after it
            self.output.flush(worker.rank)
        worker.process.close()

    # -- the report ----------------------------------------------------------------------------------------------------

    def find_step(self, rank: int) -> int | None:
        return self.page.read(rank).step

    def gather_stacks(self) -> tuple[list[WorkerStack], list[int]]:
        gone = [worker.rank for worker in self.workers if worker.ended is not None]
        return self._stacks.gather({worker.rank: worker.pid for worker in self.running}, self.page), gone
