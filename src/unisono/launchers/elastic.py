"""Workers that come and go: those that are lost are replaced, others are taken in and let go.

coordinator.py decides; this file keeps track of the workers and carries the decisions out. How a worker is started,
reached and ended is up to the run: LocalElastic on this host, over a channel to each worker whose other end is
runtime/membership.py; elastic_hosts.py on an engine.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic

from unisono.launchers.coordinator import Action, Coordinator, Dismiss, End, Form, GiveUp, Start, Summon, TooFew
from unisono.launchers.failures import Failure, Outcome, fail_run
from unisono.launchers.job import ElasticSettings
from unisono.launchers.runtime import membership
from unisono.launchers.runtime.files import anonymous_file
from unisono.launchers.runtime.local_channel import LocalChannel
from unisono.launchers.runtime.stacks import judge
from unisono.launchers.scaling import Scaling
from unisono.launchers.supervisor import Supervisor, W
from unisono.launchers.workers import LocalWorker

if TYPE_CHECKING:
    from unisono.launchers.local import LocalRun

__all__ = ["LOOK_S", "ElasticSupervisor", "LocalElastic", "WorkerConnection"]

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
        self.scaling = Scaling(self.coordinator, settings, run.output.say)
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
        who = "1 worker continues" if len(numbers) == 1 else f"{len(numbers)} workers continue"
        self._run.output.say(f"unisono: {who}{after}")
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
                self._end_hung(connection, f"did not arrive for {waited_s:.0f} s while others waited")

    def check_heartbeat(self, connection: WorkerConnection[W], silent_s: float) -> None:
        """Replace a worker that has given no heartbeat for too long."""
        if silent_s > self.heartbeat_s:
            self._end_hung(connection, f"sent no heartbeat for {silent_s:.0f} s (SIGSTOP, or no time to run)")

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

    def _describe_stack(self, worker: W) -> str:
        """What a worker is doing, by its stacks; "" if it does not answer."""
        stacks = [found for found in self._run.gather_stacks()[0] if found.rank == worker.rank]
        return judge(stacks)[0] if stacks else ""

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


# Workers of this host ------------------------------------------------------------------------------------------------


LEAVE_S = 300.0  # that a process may take to end, when its program has ended well


class LocalElastic(ElasticSupervisor[LocalWorker]):
    """The elastic part of a run on this host."""

    def __init__(self, settings: ElasticSettings, run: LocalRun) -> None:
        super().__init__(settings, run)
        self._local = run
        self.look_s = LOOK_S if settings.adapt is None else min(LOOK_S, max(0.02, settings.adapt.window_s))
        self._results = anonymous_file("unisono-results")
        self._ends: tuple[LocalChannel, LocalChannel] | None = None  # to the worker that is being started

    # -- start ---------------------------------------------------------------------------------------------------------

    @property
    def is_under_way(self) -> bool:
        """Whether a worker that is started now comes later than the first."""
        return bool(self.coordinator.members)

    def open_connection(self) -> dict[str, int]:
        """The descriptors that the next worker is to inherit, beside those that all do."""
        self._ends = LocalChannel.pair()
        return {membership.VARIABLE: self._ends[1].fileno(), membership.LOG_VARIABLE: self._results}

    def add_started(self, worker: LocalWorker | None) -> None:
        """The worker that inherits the open connection has been started (None: could not be)."""
        assert self._ends is not None
        (ours, theirs), self._ends = self._ends, None
        theirs.close()
        if worker is None:
            ours.close()
            return
        ours.set_timeout(0)
        connection = self.add(worker, ours)
        self._run.loop.watch(ours, partial(self._read, connection, ours))
        if self.is_under_way:
            self.coordinator.started(connection.number)

    def environment(self, place: int) -> dict[str, str]:
        """The variables of the next worker, beside those that all have."""
        env = {"UNISONO_PLACE": str(place)}
        if self.is_under_way:
            size = len(self.coordinator.members)
            env.update(RANK=str(size), WORLD_SIZE=str(size + 1), LOCAL_RANK=str(size), LOCAL_WORLD_SIZE=str(size + 1))
            env[membership.JOINING] = "1"
        return env

    def _start(self, count: int) -> None:
        """See ElasticSupervisor. One that leaves has its place until it has ended. Before the first step nobody is
        started: a newcomer would not find what the others have done."""
        taken = {connection.worker.rank for connection in self.connections.values()}
        free = [place for place in range(self.settings.most) if place not in taken] if self.step >= 0 else []
        for place in free[:count]:
            self._local.page.clear(place)
            self._local.start_worker(place)

    # -- what a worker is told -----------------------------------------------------------------------------------------

    def _request_regroup(self, generation: int) -> None:
        self._local.page.request_regroup(generation)

    def _open_meeting_page(self) -> tuple[int, ...]:
        return (anonymous_file("unisono-meeting-page"),)

    def _send(
        self, connection: WorkerConnection[LocalWorker], message: dict[str, Any], fds: tuple[int, ...] = ()
    ) -> None:
        assert connection.channel is not None
        with contextlib.suppress(OSError):  # it has died, and its end will be noticed
            connection.channel.send(message, fds)

    def _kill(self, connection: WorkerConnection[LocalWorker]) -> None:
        connection.worker.send(signal.SIGKILL)

    # -- what happens --------------------------------------------------------------------------------------------------

    def _read(self, connection: WorkerConnection[LocalWorker], channel: LocalChannel) -> None:
        message, _ = channel.receive()
        if message is None:
            self._run.loop.forget(channel)
        else:
            self.on_message(connection, message)

    def look(self, now: float) -> None:
        """Note steps, and replace workers that stand still."""
        self._note_step()
        super().look(now)
        if self.coordinator.members:
            first = self.connections[self.coordinator.members[0]].worker.read_status()
            self.scaling.look(first.step, first.step_at)
        for connection in list(self.connections.values()):
            left_at = connection.left_program_at
            if left_at is not None and now - max(left_at, self.fresh_since) > LEAVE_S:
                self._end_leaving(connection)
            beat = connection.worker.read_status().heartbeat
            self.check_heartbeat(connection, now - max(beat, self.fresh_since) if beat else 0.0)

    def _end_leaving(self, connection: WorkerConnection[LocalWorker]) -> None:
        """Its program has ended well: that its process does not end is no failure."""
        worker = connection.worker
        if not worker.is_overdue:
            worker.is_overdue = True
            self._run.output.say(
                f"unisono: worker {worker.rank} (process {worker.pid}) has ended its program, but its process has not "
                f"ended for {LEAVE_S:.0f} s since: {self._describe_stack(worker)}; it is killed, and counts as ended"
            )
            self._kill(connection)

    def on_done(self, worker: LocalWorker) -> None:
        """The program of a worker has ended well. Nobody waits for it any more, nor for its heartbeat: its process may
        take long to end."""
        connection = self.find(worker)
        self._note_step()
        if connection is not None and self.step >= 0:
            connection.left_program_at = time.monotonic()
            self.coordinator.ended(connection.number, well=True)

    def _note_step(self) -> None:
        for connection in self.connections.values():
            self.advance(connection.worker.read_status().step)

    def on_end(self, worker: LocalWorker) -> bool:
        self._note_step()  # a step may have been made since the last look
        return super().on_end(worker)

    def _retire(self, connection: WorkerConnection[LocalWorker]) -> None:
        assert connection.channel is not None
        self._run.loop.forget(connection.channel)
        connection.channel.close()
        self._local.let_go(connection.worker)

    def close(self) -> None:
        """The run is over."""
        for connection in self.connections.values():
            if connection.channel is not None:
                connection.channel.close()
        os.close(self._results)
