"""Workers that come and go on this host: a channel to each, whose other end is runtime/membership.py."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from unisono.launchers.elastic import LOOK_S, ElasticSupervisor, WorkerConnection
from unisono.launchers.job import ElasticSettings
from unisono.launchers.local_worker import LocalWorker
from unisono.launchers.runtime import membership
from unisono.launchers.runtime.files import anonymous_file
from unisono.launchers.runtime.local_channel import LocalChannel

if TYPE_CHECKING:
    from unisono.launchers.local import LocalRun

__all__ = ["LocalElastic"]

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

    def begin(self) -> None:
        """The first workers have been started."""
        self.coordinator.begin(list(self.connections))

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

    def _describe_stack(self, worker: LocalWorker) -> str:
        return self._local.describe_stack(worker)

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
        """See ElasticSupervisor."""
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
