"""A run whose workers come and go, on an engine: every place has an agent, which starts one worker after the other.

elastic.py carries out what coordinator.py decides, as for workers on this host. Here are the agents
(worker/elastic_agent.py) and what they are told:

1. A worker that ended is replaced by its own agent, or by another that has none. The engine decides which there are.
2. An agent that says nothing for the heartbeat's time is lost with its worker: its host is gone or cut off. The others
   go on, and it may come back: then it has no worker, and is asked to start one.
3. When a worker is lost, or leaves its generation of the world, the launcher tells all others of that generation.
   Connections between hosts would tell only some of them, or nobody.
"""

from __future__ import annotations

import json
import secrets
import signal
import time
from typing import Any

from unisono.launchers.coordinator import GiveUp
from unisono.launchers.elastic import LOOK_S, ElasticSupervisor, WorkerConnection
from unisono.launchers.engine_run import EngineRun
from unisono.launchers.engines.engine import TAKEN, Engine
from unisono.launchers.failures import SETTLE_S, Outcome
from unisono.launchers.job import ElasticSettings, Job, TimedOut
from unisono.launchers.joining import OpenPlaces
from unisono.launchers.runtime.channel import Channel, Frame
from unisono.launchers.workers import RemoteWorker

__all__ = ["ElasticHostsRun"]

_BEAT_S = 0.5  # between two words to an agent
_REVIVE_S = 2.0  # between two requests to the engine
_TO_START_S = 60.0  # that an agent may take for it, without a word


class ElasticHostsRun(EngineRun):
    """One run of one job. Ranks in reports and files are places: a replacement has its agent's."""

    elastic: _HostsElastic

    def __init__(self, job: Job, engine: Engine, payload: bytes | None = None) -> None:
        assert job.elastic is not None
        super().__init__(job, engine, payload)
        self.elastic = _HostsElastic(job.elastic, self)
        self._heard: dict[Channel, float] = {}  # when each agent last said something
        self._processes: dict[Channel, tuple[str, int]] = {}  # the host and process of each agent
        self._beaten = self._revived = time.monotonic()
        self._steps: dict[int, int] = {}  # by place
        self.returned: dict[int, bytes] = {}
        self._is_under_way = False
        self.words = ""  # of the engine, if that has ended too
        self._first_heard: float | None = None  # when the first agent came
        self._places = OpenPlaces(self, self._token)

    # -- start ---------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        super()._start()
        self._places.announce((self._addresses()[0], self._listener.getsockname()[1]))

    def _on_join(self, channel: Channel, message: dict[str, Any]) -> None:
        self._places.take(channel, message)

    def _may_begin(self, now: float) -> bool:
        """Whether all agents of the engine are there; or enough, if others have not come for so long."""
        if len(self.waiting) >= self.job.engine_places:
            return True
        is_late = self._first_heard is not None and now > self._first_heard + self.elastic.settings.patience_s
        return is_late and len(self.waiting) >= self.elastic.settings.least

    def _add_waiting(self, worker: RemoteWorker, hello: dict[str, Any]) -> None:
        """An agent without a worker. Its place may have another: itself, by a connection that is lost, or one that an
        engine started before, and then the new one is not needed."""
        now, mine = time.monotonic(), (worker.identity, int(hello["pid"]))
        self._places.versions = self._places.versions or dict(hello["versions"])
        self._first_heard = self._first_heard or now
        for channel, other in list(self.agents.items()):
            if other.rank != worker.rank or channel is worker.channel:
                continue
            if self._processes.get(channel) != mine and now - self._heard[channel] < self.elastic.heartbeat_s:
                self.server.send(worker.channel, kind="exit", status=TAKEN)
                return
            self._lose_agent(channel)
        self._heard[worker.channel], self._processes[worker.channel] = now, mine
        super()._add_waiting(worker, hello)

    @property
    def has_begun(self) -> bool:
        return self._is_under_way

    # -- watch ---------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._is_under_way or self.running:
            now = time.monotonic()
            if self.elastic.step < 0 and (failures := self.failures):  # the program is wrong: it ends as any other
                first = min(failure.time for failure in failures)
                may_wait = all(failure.consequence or failure.kind == "lost" for failure in failures)
                if now >= first + SETTLE_S or not may_wait:
                    return
            if not self._is_under_way and self._may_begin(now):
                self._is_under_way = True
                self.elastic.begin(self._fresh_store().address[1])
            if self._is_under_way and self.elastic.step >= 0:
                self.elastic.act(now)
            if self.elastic.given_up is not None:
                break
            if self.deadline is not None and now >= self.deadline:
                raise TimedOut(self.describe_activities())
            self._pass_word_on()
            self._check_start(now)
            if not self._is_under_way:  # afterwards agents are asked, not the engine
                self._check_engine(now)
            self._look(now)
            self._pump(LOOK_S)
        for action in self.elastic.coordinator.decide(time.monotonic()):  # all may have been lost at once
            if isinstance(action, GiveUp):
                self.elastic.given_up = action
        if self.elastic.given_up is not None and self._started is not None and self._started.poll():
            self.words = self._started.words()

    def _look(self, now: float) -> None:
        """Give agents a word now and then, and replace workers whose agents say nothing."""
        self.elastic.look(now)
        if now - self._beaten >= _BEAT_S:
            self._beaten = now
            for channel in list(self.agents):
                self.server.send(channel, kind="beat")
        for channel, heard in list(self._heard.items()):
            silent_s = now - max(heard, self.elastic.fresh_since)
            if channel not in self.server.channels:
                del self._heard[channel]
                self._processes.pop(channel, None)
            elif channel in self.agents and silent_s > self._find_patience(channel) and self._is_under_way:
                self._lose_agent(channel, f" It has sent nothing for {silent_s:.0f} s.")
        if self._is_under_way and now - self._revived > _REVIVE_S and self._started is not None:
            self._revived = now
            present = {worker.rank for worker in self.agents.values()}
            self._started.revive(set(range(self.job.engine_places)) - present)

    def _find_patience(self, channel: Channel) -> float:
        """How long an agent may say nothing: longer while it starts a worker, from a fork server perhaps."""
        worker, heartbeat_s = self.agents[channel], self.elastic.heartbeat_s
        is_starting = worker.pid == 0 and self.elastic.find(worker) is not None
        return max(_TO_START_S, heartbeat_s) if is_starting else heartbeat_s

    # -- what agents and workers say -----------------------------------------------------------------------------------

    def _on_frames(self, channel: Channel, frames: list[Frame]) -> None:
        self._heard[channel] = time.monotonic()
        super()._on_frames(channel, frames)

    def _on_frame(self, worker: RemoteWorker, frame: Frame) -> None:
        connection = self.elastic.find(worker)
        message = frame.json() if frame.kind == "J" else {}
        is_beat = message.get("kind") == "beat"
        if frame.kind in "CL" or message.get("kind") == "log":
            if connection is not None:
                self.elastic.take_frame(connection, frame, message)
        elif connection is not None or not is_beat:
            super()._on_frame(worker, frame)
            if connection is not None and is_beat:
                self.note_step(worker)
                if connection.number in self.elastic.coordinator.members[:1]:
                    step_at = time.monotonic() - float(message.get("step_age_s", 0.0))
                    self.elastic.scaling.look(worker.read_status().step, step_at)
                self.elastic.check_heartbeat(connection, float(message.get("silent_s", 0.0)))

    def note_step(self, worker: RemoteWorker) -> None:
        """Note the last step of a worker."""
        step = worker.read_status().step
        if step is None:
            return
        self._steps[worker.rank] = max(step, self._steps.get(worker.rank, -1))
        if self.elastic.note_step(worker, step):
            for other in [other for other in self.workers if other.ended is not None and other is not worker]:
                self._on_end(other)  # lost when no step was known yet

    # -- a worker has ended --------------------------------------------------------------------------------------------

    def _lose_agent(self, channel: Channel, why: str = "") -> None:
        self.server.forget(channel)
        self._on_lost(channel, why)

    def _on_loss(self, worker: RemoteWorker, more: str = "") -> None:
        """Its agent is lost; with its worker, if it had one."""
        had_worker = self.elastic.find(worker) is not None and worker.ended is None
        super()._on_loss(worker, more)
        if had_worker:
            self._on_end(worker)

    def _on_end(self, worker: RemoteWorker) -> None:
        self.note_step(worker)
        if self.stop_time is None:
            self.elastic.on_end(worker)

    def _on_lost(self, channel: Channel, why: str = "") -> None:
        self._places.release(channel)
        super()._on_lost(channel, why)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        found = super().answer(request)
        return found if request.get("do") == "stacks" else {**found, "join": self._places.how}

    # -- the end -------------------------------------------------------------------------------------------------------

    def _clean_up(self) -> None:
        is_over = self._is_under_way and not self.running and not self.failures
        self._places.dismiss(well=is_over and self.elastic.given_up is None)
        self._places.close()
        if self._is_under_way and not self.running:
            for worker in self.waiting.values():  # agents without a worker
                self.server.send(worker.channel, kind="exit", status=0)
        super()._clean_up()

    def _take_results(self) -> list[bytes]:
        return [self.returned.get(place, b"") for place in range(self.job.places)]

    def find_step(self, rank: int) -> int | None:
        return self._steps.get(rank)


class _HostsElastic(ElasticSupervisor[RemoteWorker]):
    """The elastic part of it: an agent passes on what the launcher and its worker tell each other."""

    def __init__(self, settings: ElasticSettings, run: ElasticHostsRun) -> None:
        super().__init__(settings, run)
        self._hosts = run
        self._started_with: dict[str, Any] = {}  # the same for all workers
        self._log = b""  # results that later workers are given, as rank 0 has written them
        self._has_log = False  # all results up to the first step: rank 0 has told its step, and these before
        self._regroup_generation = 0
        self._over = -1  # the last generation whose workers know that it is over

    def begin(self, store_port: int) -> None:
        """Start the first workers: all agents are there, or enough of them."""
        attempt = {"attempt": 0, "attempt_id": secrets.token_hex(8)}
        self._started_with = {"store_port": store_port, "page": False, **attempt}
        places = sorted(self._hosts.waiting)[: self._run.job.workers]
        for rank, place in enumerate(places):
            self._start_in(place, rank, len(places))
        self.coordinator.begin(list(self.connections))

    def _start(self, count: int) -> None:
        room = len(self._hosts.waiting) if self._has_log else 0
        for _ in range(min(count, room)):
            size = len(self.coordinator.members)
            self.coordinator.started(self._start_in(min(self._hosts.waiting), size, size + 1).number)

    def _start_in(self, place: int, rank: int, size: int) -> WorkerConnection[RemoteWorker]:
        """Start a worker in a place whose agent has none; the rank and size are what it is told at first."""
        worker = self._hosts.waiting.pop(place)
        joining = bool(self.coordinator.members)
        everyone = list(self._hosts.agents.values())
        hosts = list(dict.fromkeys(other.identity for other in sorted(everyone, key=lambda one: one.rank)))
        near = sorted(other.rank for other in everyone if other.identity == worker.identity)
        if joining and self._log:
            self._hosts.server.send_frame(worker.channel, "G", self._log)
        self._run.workers.append(worker)
        self._hosts.start_worker(
            worker,
            rank=rank,
            size=size,
            joining=joining,
            summons=self._regroup_generation,
            local_rank=near.index(place),
            local_size=len(near),
            host_number=hosts.index(worker.identity),
            hosts=len(hosts),
            **self._started_with,
        )
        return self.add(worker)

    def _request_regroup(self, generation: int) -> None:
        self._regroup_generation = generation
        for connection in self.connections.values():
            self._hosts.server.send(connection.worker.channel, kind="summon", generation=generation)

    def _open_meeting_page(self) -> tuple[int, ...]:
        return ()

    def _send(
        self, connection: WorkerConnection[RemoteWorker], message: dict[str, Any], fds: tuple[int, ...] = ()
    ) -> None:
        self._hosts.server.send_frame(connection.worker.channel, "C", json.dumps(message).encode())

    def _kill(self, connection: WorkerConnection[RemoteWorker]) -> None:
        self._hosts.server.send(connection.worker.channel, kind="signal", number=int(signal.SIGKILL))

    # -- what happens --------------------------------------------------------------------------------------------------

    def on_message(self, connection: WorkerConnection[RemoteWorker], message: dict[str, Any]) -> None:
        super().on_message(connection, message)
        if message["kind"] == "come" and connection.number in self.coordinator.members:
            worker = connection.worker
            self._end_generation(f"worker {worker.rank} (process {worker.pid}) has left this world")

    def _end_generation(self, why: str) -> None:
        """A worker has left its generation or is lost: tell the others, who need not wait for it."""
        if self._over >= self.coordinator.generation:
            return
        self._over = self.coordinator.generation
        for number in self.coordinator.members:
            self._send(self.connections[number], {"kind": "over", "generation": self._over, "why": why})

    def take_frame(self, connection: WorkerConnection[RemoteWorker], frame: Frame, message: dict[str, Any]) -> None:
        """Handle what an agent passes on of its worker: a message ("C"), or a piece of the results that rank 0 has
        written ("L"). What a former rank 0 wrote stays until the log, announced by `message`, is whole."""
        if frame.kind == "C":
            self.on_message(connection, frame.json())
            return
        if message:
            connection.log, connection.log_bytes = bytearray(), int(message["bytes"])
        if connection.log is not None:
            connection.log += b"" if message else frame.body
            if len(connection.log) >= connection.log_bytes:
                self._log = bytes(connection.log)

    def note_step(self, worker: RemoteWorker, step: int) -> bool:
        """A worker has made `step`; whether that is the furthest."""
        connection = self.find(worker)
        self._has_log |= connection is not None and connection.number in self.coordinator.members[:1]
        return self.advance(step)

    def on_end(self, worker: RemoteWorker) -> bool:
        is_lost = super().on_end(worker)
        if is_lost:
            self._end_generation(f"worker {worker.rank} ({worker.describe_process()}) is lost")
        return is_lost

    def _retire(self, connection: WorkerConnection[RemoteWorker]) -> None:
        """See ElasticSupervisor. Its agent, if it is there, waits for another, or leaves if all is done."""
        worker = connection.worker
        self._run.workers.remove(worker)
        if worker.result and not connection.is_unwanted:
            self._hosts.returned[worker.rank] = b"".join(worker.result)
        if worker.channel not in self._hosts.agents:
            return
        if worker.failure is None and self.coordinator.ending:
            self._hosts.server.send(worker.channel, kind="exit", status=0)
        fresh = RemoteWorker(rank=worker.rank, host=worker.host, channel=worker.channel, identity=worker.identity)
        self._hosts.agents[worker.channel] = self._hosts.waiting[worker.rank] = fresh

    def find_outcome(self, more: tuple[str, ...] = ()) -> Outcome | None:
        words = self._hosts.words.splitlines()[-3:]  # of an engine that has ended too
        return super().find_outcome(tuple(f"  {self._hosts.engine.name}: {line}" for line in words))
