"""Workers that come and go: those that are lost are replaced, others are taken in and let go.

coordinator.py decides; this file keeps track of the workers and carries the decisions out. How a worker is started,
reached and ended is up to the run: elastic_local.py on this host, elastic_hosts.py on an engine.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Generic

from unisono.launchers.coordinator import Action, Coordinator, Dismiss, End, Form, GiveUp, Start, Summon, TooFew
from unisono.launchers.failures import Failure, Outcome, fail_run
from unisono.launchers.job import ElasticSettings
from unisono.launchers.runtime.local_channel import LocalChannel
from unisono.launchers.scaling import Scaling
from unisono.launchers.supervisor import Supervisor, W

__all__ = ["LOOK_S", "ElasticSupervisor", "WorkerConnection"]

LOOK_S = 0.25  # between two looks at heartbeats and steps


@dataclass
class WorkerConnection(Generic[W]):
    """A worker that runs, and what it waits for."""

    number: int  # of the worker in this run: no two have the same
    worker: W
    channel: LocalChannel | None = None  # to a worker of this host
    waits_since: float | None = None  # it waits for the next generation
    left_program_at: float | None = None  # its program has ended well; its process is still to end
    is_hung: bool = False  # and is being killed for it
    is_unwanted: bool = False  # it was told to end, as there are to be fewer
    log: bytearray | None = None  # the results that later workers are given, as this one has written them elsewhere
    log_bytes: int = 0  # that the log will have when it is whole


class ElasticSupervisor(ABC, Generic[W]):
    """The elastic part of one run."""

    def __init__(self, settings: ElasticSettings, run: Supervisor[W]) -> None:
        self.settings, self._run = settings, run
        self.coordinator = Coordinator(run.job.workers, settings.least, patience_s=settings.patience_s)
        self.scaling = Scaling(self.coordinator, settings, run.job.describe_program(), run.output.say)
        self.heartbeat_s = float(os.environ.get("UNISONO_HEARTBEAT_S", settings.heartbeat_s))
        self.connections: dict[int, WorkerConnection[W]] = {}
        self.step = -1  # the furthest that any worker has come
        self.given_up: GiveUp | None = None
        self.fresh_since = time.monotonic()  # neither this process nor its workers were stopped on purpose since
        self._looked = self.fresh_since
        self._started = 0
        self._lost_at: float | None = None  # when the first of the workers was lost that this generation is without
        self._losses: list[Failure] = []
        self._have_saved = False
        self._failed_late = False  # a process failed after its program had ended well

    # -- what the run does ---------------------------------------------------------------------------------------------

    @abstractmethod
    def _start(self, count: int) -> None:
        """Start so many workers, or as many as there is room for: the coordinator asks again for the others."""

    @abstractmethod
    def _request_regroup(self, generation: int) -> None:
        """Call all workers to that generation, at their next step."""

    @abstractmethod
    def _send(self, connection: WorkerConnection[W], message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        """Send a message to a worker (runtime/membership.py); one that has died is noticed elsewhere."""

    @abstractmethod
    def _open_meeting_page(self) -> tuple[int, ...]:
        """New memory in which the workers of a generation meet; empty if they meet in the run's store."""

    @abstractmethod
    def _kill(self, connection: WorkerConnection[W]) -> None:
        """SIGKILL to a worker."""

    @abstractmethod
    def _retire(self, connection: WorkerConnection[W]) -> None:
        """Let go of a worker that has ended."""

    @abstractmethod
    def _describe_stack(self, worker: W) -> str:
        """What a worker is doing, by its stacks; "" if it does not answer."""

    # -- what is decided -----------------------------------------------------------------------------------------------

    def add(self, worker: W, channel: LocalChannel | None = None) -> WorkerConnection[W]:
        """Keep track of a worker that has been started."""
        connection = WorkerConnection(self._started, worker, channel)
        self._started += 1
        self.connections[connection.number] = connection
        return connection

    def find(self, worker: W) -> WorkerConnection[W] | None:
        """The connection of a worker, until it is let go."""
        return next((found for found in self.connections.values() if found.worker is worker), None)

    def act(self, now: float) -> None:
        """Carry out what is to be done now."""
        for action in self.coordinator.decide(now):
            self._do(action)

    def _do(self, action: Action) -> None:
        match action:
            case Start(count):
                self._start(count)
            case Summon(generation):
                self._request_regroup(generation)
            case Form(generation, numbers):
                self._form(generation, numbers)
            case End(number):
                self.connections[number].is_unwanted = True
                self._kill(self.connections[number])
            case Dismiss(number):
                self.connections[number].is_unwanted = True
                self._answer(self.connections[number], {"kind": "leave"})
            case TooFew(left):
                why = self.settings.describe_shortage(left)
                self._run.output.say(f"unisono: {why}: they save and leave")
                if not self._run.preempt():
                    self.given_up = GiveUp(f"{why}; the program does not save by itself (un.preempted, un.Trainer)")
            case GiveUp():
                self.given_up = action

    def _form(self, generation: int, numbers: tuple[int, ...]) -> None:
        """Tell each worker its rank in the next generation."""
        pids = [self.connections[number].worker.pid for number in numbers]
        page = self._open_meeting_page()
        try:
            for rank, number in enumerate(numbers):
                message = {"kind": "go", "generation": generation, "rank": rank, "size": len(numbers), "pids": pids}
                self._answer(self.connections[number], message, page)
        finally:
            for fd in page:
                os.close(fd)
        after = "" if self._lost_at is None else f", {time.monotonic() - self._lost_at:.2f} s after the loss"
        self._lost_at = None
        who = "1 worker goes" if len(numbers) == 1 else f"{len(numbers)} workers go"
        self._run.output.say(f"unisono: {who} on{after}")
        self._run.job.note("world", generation=generation, size=len(numbers))

    def _answer(self, connection: WorkerConnection[W], message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        connection.waits_since = None
        self._send(connection, message, fds)

    # -- what happens --------------------------------------------------------------------------------------------------

    def on_message(self, connection: WorkerConnection[W], message: dict[str, Any]) -> None:
        """Handle a message of a worker."""
        if message["kind"] == "come":
            connection.waits_since = time.monotonic()
            self.coordinator.came(connection.number, is_open=message["open"])
        elif message["kind"] == "settled":
            self.coordinator.settled(connection.number)

    def advance(self, step: int | None) -> bool:
        """Some worker has made `step`; whether that is the furthest."""
        if step is None or step <= self.step:
            return False
        self.step = step
        self.coordinator.advanced(step)
        return True

    def look(self, now: float) -> None:
        """Replace workers that others have waited for too long."""
        if now - self._looked > 4 * LOOK_S + 1.0:  # this process was stopped, perhaps with all of them
            self.fresh_since = now
        self._looked = now
        if self._run.debugger.is_paused:
            self.fresh_since = now
        waits = [found.waits_since for found in self.connections.values() if found.waits_since is not None]
        for connection in list(self.connections.values()):
            waited_s = now - max(min(waits), self.fresh_since) if waits and connection.waits_since is None else 0.0
            if waited_s > self.settings.stuck_s:
                self._end_hung(connection, f"did not come for {waited_s:.0f} s while others waited")

    def check_heartbeat(self, connection: WorkerConnection[W], silent_s: float) -> None:
        """Replace a worker that has given no heartbeat for too long."""
        if silent_s > self.heartbeat_s:
            self._end_hung(connection, f"has stood still for {silent_s:.0f} s (SIGSTOP, or no time to run)")

    def _end_hung(self, connection: WorkerConnection[W], why: str) -> None:
        worker = connection.worker
        is_training = worker.ended is None and not worker.done and not worker.preempted
        if not is_training or connection.is_hung or connection.number not in self.coordinator.members:
            return
        connection.is_hung = True
        doing = self._describe_stack(worker)
        self._run.output.say(
            f"unisono: worker {worker.rank} (process {worker.pid}) {why}: {doing}{'; ' if doing else ''}it is replaced"
        )
        self._kill(connection)

    def on_end(self, worker: W) -> bool:
        """A worker has ended. Before the first step the program is wrong, and the run ends as any other.

        True if a worker of this generation was lost.
        """
        connection = self.find(worker)
        if connection is None:
            return False
        if self.step < 0 and worker.failure is not None and not connection.is_unwanted:
            return False
        is_lost = False
        if not connection.is_unwanted:
            had_left = connection.left_program_at is not None
            was_member = connection.number in self.coordinator.members or had_left
            self.coordinator.ended(connection.number, well=worker.failure is None)
            if worker.failure is not None:
                is_lost = was_member
                self._failed_late |= had_left
                self._note_loss(worker, worker.failure, was_member)
        self._have_saved |= worker.preempted
        del self.connections[connection.number]
        self._retire(connection)
        return is_lost

    def _note_loss(self, worker: W, failure: Failure, was_member: bool) -> None:
        self._losses.append(failure)
        del self._losses[:-100]
        if was_member:
            self._lost_at = min(failure.time, failure.time if self._lost_at is None else self._lost_at)
        what = "worker" if was_member else "a worker that was to join as"
        text = f"unisono: {what} {worker.rank} ({worker.describe_process()}) was lost: {failure.headline}"
        if activity := worker.describe_activity(failure.time):
            text += f" ({activity})"
        if failure.kind == "lost":
            text += f". {failure.message}"
        if failure.traceback:
            text += "\n" + failure.traceback.rstrip("\n")
        self._run.output.say(text)

    def find_outcome(self, more: tuple[str, ...] = ()) -> Outcome | None:
        """How the run ended, if not as any other; `more`: further lines of the report."""
        why = "a worker failed as its process ended, after its program" if self._failed_late else ""
        why = why if self.given_up is None else self.given_up.why
        if why:
            return fail_run(why, self._losses, self.step, more=more)
        return Outcome(step=self.step, preempted=True) if self._have_saved else None
