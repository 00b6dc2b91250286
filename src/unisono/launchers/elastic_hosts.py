"""A run whose workers come and go, on an engine: every place has an agent, which starts one worker after the other.

What is decided is decided in coordinator.py, as for workers on this host (elastic.py). Here are the agents
(worker/elastic_agent.py) and what is told to them:

1. A worker that ended is replaced by its own agent, or by another that has none. The engine decides which there are.
2. An agent that says nothing for the heartbeat's time is lost with its worker: its host is gone or cut off. The others
   go on, and it may come back: then it has no worker, and is asked to start one.
3. When a worker is lost, or leaves its generation of the world, the launcher tells all others of that generation.
   Connections between hosts would tell only some of them, or nobody.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import time
from dataclasses import dataclass
from typing import Any

from unisono.launchers.coordinator import Action, Coordinator, Dismiss, End, Form, GiveUp, Start, Summon, TooFew
from unisono.launchers.engine_run import EngineRun
from unisono.launchers.engines.engine import Engine
from unisono.launchers.failures import SETTLE_S, Failure, Outcome, fail_run
from unisono.launchers.job import Job, TimedOut
from unisono.launchers.member import Member
from unisono.launchers.scaling import Scaling
from unisono.runtime.channel import Channel, Frame
from unisono.runtime.stack_text import judge

__all__ = ["ElasticHostsRun"]

_LOOK_S = 0.25  # between two looks at heartbeats and steps
_BEAT_S = 0.5  # between two words to an agent
_REVIVE_S = 2.0  # between two requests to the engine
_TO_START_S = 60.0  # that an agent may take for it, without a word
_TAKEN = 75  # exit status of an agent whose place has another


@dataclass
class _Line:
    """A worker that runs."""

    worker: int  # its number in this run: no two have the same
    member: Member
    came: float | None = None  # since when it waits
    is_hung: bool = False  # and is being killed for it
    log: bytearray | None = None  # the results that later workers are given, as it has written them
    log_bytes: int = 0  # of it, before it is whole


class ElasticHostsRun(EngineRun):
    """One run of one job. Ranks in reports and files are places: a replacement has its agent's."""

    def __init__(self, job: Job, engine: Engine, payload: bytes | None = None) -> None:
        assert job.elastic is not None
        super().__init__(job, engine, payload)
        self.elastic = job.elastic
        self.coordinator = Coordinator(job.workers, job.elastic.least, patience_s=job.elastic.patience_s)
        self._scaling = Scaling(self.coordinator, self.elastic, " ".join(job.program)[:200], self.output.say)
        self._heartbeat_s = float(os.environ.get("UNISONO_HEARTBEAT_S", job.elastic.heartbeat_s))
        self._lines: dict[int, _Line] = {}
        self._number = 0  # of workers that were started
        self._heard: dict[Channel, float] = {}  # when each agent last said something
        self._agents: dict[Channel, tuple[str, int]] = {}  # its host and process
        self._started_with: dict[str, Any] = {}  # the same for all workers
        self._log = b""  # results that later workers are given, as rank 0 has written them
        self._has_log = False  # all results up to the first step: rank 0 has told its step, and these before
        self._summoned = 0
        self._over = -1  # the last generation whose workers know that it is over
        self._lost_at: float | None = None
        self._looked = self._fresh_since = self._beaten = self._revived = time.monotonic()
        self._step = -1
        self._steps: dict[int, int] = {}  # by place
        self._returned: dict[int, bytes] = {}
        self._losses: list[Failure] = []
        self._unwanted: set[int] = set()  # told to end
        self._have_saved = self._is_under_way = False
        self._given_up: GiveUp | None = None
        self._words = ""  # of the engine, where that has ended too

    # -- start ---------------------------------------------------------------------------------------------------------

    def _agent_variables(self) -> dict[str, str]:
        return {"UNISONO_ELASTIC": str(self._heartbeat_s)}

    def _add_waiting(self, member: Member, agent: int) -> None:
        """An agent without a worker. Its place may have another: itself, by a connection that is lost, or one that an
        engine started before, and then the new one is not needed."""
        now, mine = time.monotonic(), (member.identity, agent)
        for channel, other in list(self._channels.items()):
            if other is None or other.rank != member.rank or channel is member.channel:
                continue
            if self._agents.get(channel) != mine and now - self._heard[channel] < self._heartbeat_s:
                self._say(member.channel, kind="exit", status=_TAKEN)
                return
            self._lose_agent(channel)
        self._heard[member.channel], self._agents[member.channel] = now, mine
        super()._add_waiting(member, agent)

    def _begin_first(self) -> None:
        """All agents are there."""
        self._is_under_way = True
        self._started_with = {
            "store_port": self._fresh_store().address[1],
            "attempt": 0,
            "attempt_id": secrets.token_hex(8),
            "page": False,
        }
        for _ in range(self.job.workers):
            self._start_in(min(self._waiting))
        self.coordinator.begin(list(self._lines))

    def _start_in(self, place: int) -> int:
        """Start a worker in a place whose agent has none; its number."""
        member = self._waiting.pop(place)
        joining, size = bool(self.coordinator.members), max(1, len(self.coordinator.members))
        everyone = [other for other in self._channels.values() if other is not None]
        hosts = list(dict.fromkeys(other.identity for other in sorted(everyone, key=lambda one: one.rank)))
        near = sorted(other.rank for other in everyone if other.identity == member.identity)
        if joining and self._log:
            self._send(member.channel, "G", self._log)
        self._members.append(member)
        self._start_member(
            member,
            rank=size if joining else place,
            size=size + 1 if joining else self.job.workers,
            joining=joining,
            summons=self._summoned,
            local_rank=near.index(place),
            local_size=len(near),
            host_number=hosts.index(member.identity),
            hosts=len(hosts),
            **self._started_with,
        )
        number = self._number
        self._number += 1
        self._lines[number] = _Line(number, member)
        return number

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """See EngineRun."""
        return super().answer(request) if request.get("do") == "stacks" else self._scaling.answer(request)

    # -- watch ---------------------------------------------------------------------------------------------------------

    @property
    def _has_begun(self) -> bool:
        return self._is_under_way

    @property
    def _has_failed(self) -> bool:
        return self._given_up is not None or super()._has_failed

    def _watch(self) -> None:
        while not self._is_under_way or self._running():
            now = time.monotonic()
            if self._step < 0 and (failures := self._failures()):  # the program is wrong: the run ends as any other
                first = min(failure.time for failure in failures)
                may_wait = all(failure.consequence or failure.kind == "lost" for failure in failures)
                if now >= first + SETTLE_S or not may_wait:
                    return
            if not self._is_under_way and len(self._waiting) == self._places:
                self._begin_first()
            if self._is_under_way and self._step >= 0:
                for action in self.coordinator.decide(now):
                    self._act(action)
            if self._given_up is not None:
                break
            if self.job.timeout_s is not None and now >= self._begin + self.job.timeout_s:
                raise TimedOut(self._activities())
            self._pass_word_on()
            self._check_start(now)
            if not self._is_under_way:  # afterwards agents are asked, not the engine
                self._check_engine(now)
            self._look(now)
            self._pump(_LOOK_S)
        for action in self.coordinator.decide(time.monotonic()):  # all may have been lost at once
            self._given_up = action if isinstance(action, GiveUp) else self._given_up
        if self._given_up is not None and self._started is not None and self._started.poll():
            self._words = self._started.words()

    def _act(self, action: Action) -> None:
        match action:
            case Start(count):
                room = len(self._waiting) if self._has_log else 0  # the coordinator asks again for the others
                for _ in range(min(count, room)):
                    self.coordinator.started(self._start_in(min(self._waiting)))
            case Summon(generation):
                self._summoned = generation
                for line in self._lines.values():
                    self._say(line.member.channel, kind="summon", generation=generation)
            case Form(generation, workers):
                self._form(generation, workers)
            case End(worker):
                self._unwanted.add(worker)
                self._kill(self._lines[worker])
            case Dismiss(worker):
                self._unwanted.add(worker)
                self._tell(self._lines[worker], kind="leave")
            case TooFew(left):
                why = self.elastic.describe_shortage(left)
                self.output.say(f"unisono: {why}: they save and leave")
                if not self.preempt():
                    self._given_up = GiveUp(f"{why}; the program does not save by itself (un.preempted, un.Trainer)")
            case GiveUp():
                self._given_up = action

    def _form(self, generation: int, workers: tuple[int, ...]) -> None:
        pids = [self._lines[worker].member.pid for worker in workers]
        for rank, worker in enumerate(workers):
            self._tell(self._lines[worker], kind="go", generation=generation, rank=rank, size=len(workers), pids=pids)
        self._over = max(self._over, generation - 1)
        after = "" if self._lost_at is None else f", {time.monotonic() - self._lost_at:.2f} s after the loss"
        self._lost_at = None
        who = "1 worker goes" if len(workers) == 1 else f"{len(workers)} workers go"
        self.output.say(f"unisono: {who} on{after}")
        self.job.note("world", generation=generation, size=len(workers))

    def _tell(self, line: _Line, **message: Any) -> None:
        """Say something to a worker."""
        if message["kind"] in ("go", "leave"):
            line.came = None
        self._send(line.member.channel, "C", json.dumps(message).encode())

    def _send(self, channel: Channel, kind: str, body: bytes) -> None:
        if channel in self._channels:
            with contextlib.suppress(OSError):  # its end is noticed when it is read
                channel.send(kind, body)
            self._flush(channel)

    def _end_generation(self, why: str) -> None:
        """One has left it or is lost: the others need not wait for that one."""
        if self._over >= self.coordinator.generation:
            return
        self._over = self.coordinator.generation
        for worker in self.coordinator.members:
            self._tell(self._lines[worker], kind="over", generation=self._over, why=why)

    # -- what agents and workers say -----------------------------------------------------------------------------------

    def _on_channel(self, channel: Channel) -> None:
        self._heard[channel] = time.monotonic()
        super()._on_channel(channel)

    def _on_frame(self, member: Member, frame: Frame) -> None:
        line = self._find_line(member)
        message = frame.json() if frame.kind == "J" else {}
        if frame.kind == "C" and line is not None:
            self._on_message(line, json.loads(frame.body))
        elif frame.kind == "L" and line is not None:
            self._take_log(line, frame.body)
        elif message.get("kind") == "log" and line is not None:
            line.log, line.log_bytes = bytearray(), int(message["bytes"])
            self._take_log(line, b"")
        elif message.get("kind") == "beat":
            if line is not None:
                self._on_beat(line, message)
        elif message.get("kind") == "ended":
            member.take_status(message, time.monotonic())
            member.take_end(int(message["status"]), time.monotonic(), stopping=self._stop_time is not None)
            self._note_end(member)
            self.output.flush(member.rank)
            self._note_step(member)
            self._on_end(member)
        elif frame.kind not in "CL":
            super()._on_frame(member, frame)

    def _find_line(self, member: Member) -> _Line | None:
        return next((line for line in self._lines.values() if line.member is member), None)

    def _on_message(self, line: _Line, message: dict[str, Any]) -> None:
        if message["kind"] == "come":
            line.came = time.monotonic()
            self.coordinator.came(line.worker, is_open=message["open"])
            if line.worker in self.coordinator.members:
                self._end_generation(f"worker {line.member.rank} (process {line.member.pid}) has left this world")
        elif message["kind"] == "settled":
            self.coordinator.settled(line.worker)

    def _take_log(self, line: _Line, data: bytes) -> None:
        """A piece of what rank 0 has written; what a former one wrote stays until this is whole."""
        if line.log is None:
            return
        line.log += data
        if len(line.log) >= line.log_bytes:
            self._log = bytes(line.log)

    def _on_beat(self, line: _Line, message: dict[str, Any]) -> None:
        line.member.take_status(message, time.monotonic())
        self._note_step(line.member)
        if line.worker in self.coordinator.members[:1]:
            self._scaling.look(line.member.step, time.monotonic() - float(message.get("step_age_s", 0.0)))
        silent_s = float(message.get("silent_s", 0.0))
        is_training = line.worker in self.coordinator.members and not line.member.is_leaving
        if silent_s > self._heartbeat_s and is_training:
            self._end_hung(line, f"has stood still for {silent_s:.0f} s (SIGSTOP, or no time to run)")

    def _note_step(self, member: Member) -> None:
        if member.step is None:
            return
        line = self._find_line(member)
        self._has_log |= line is not None and line.worker in self.coordinator.members[:1]
        self._steps[member.rank] = max(member.step, self._steps.get(member.rank, -1))
        if member.step > self._step:
            self._step = member.step
            self.coordinator.advanced(member.step)
            for other in [other for other in self._members if other.ended is not None and other is not member]:
                self._on_end(other)  # lost when no step was known yet

    def _look(self, now: float) -> None:
        """Agents that say nothing, and workers that do not come: lost, and replaced as any other."""
        if now - self._looked > 4 * _LOOK_S + 1.0:  # this process was stopped, perhaps with all of them
            self._fresh_since = now
        self._looked = now
        if now - self._beaten >= _BEAT_S:
            self._beaten = now
            for channel, member in list(self._channels.items()):
                if member is not None:
                    self._say(channel, kind="beat")
        for channel, heard in list(self._heard.items()):
            silent_s = now - max(heard, self._fresh_since)
            if channel not in self._channels:
                del self._heard[channel]
                self._agents.pop(channel, None)
            elif self._channels[channel] is None:
                continue
            elif silent_s > self._find_patience(channel) and self._is_under_way:
                self._lose_agent(channel, f" It has said nothing for {silent_s:.0f} s.")
        waits = [line.came for line in self._lines.values() if line.came is not None]
        for line in list(self._lines.values()):
            if self.debugger.is_paused:
                self._fresh_since = now
            waited_s = now - max(min(waits), self._fresh_since) if waits and line.came is None else 0.0
            is_training = line.worker in self.coordinator.members and not line.member.is_leaving
            if waited_s > self.elastic.stuck_s and is_training:
                self._end_hung(line, f"did not come for {waited_s:.0f} s while others waited")
        if self._is_under_way and now - self._revived > _REVIVE_S and self._started is not None:
            self._revived = now
            present = {member.rank for member in self._channels.values() if member is not None}
            self._started.revive(set(range(self._places)) - present)

    def _find_patience(self, channel: Channel) -> float:
        """How long an agent may say nothing: longer while it starts a worker, from a fork server perhaps."""
        member = self._channels[channel]
        is_starting = member is not None and member.pid == 0 and self._find_line(member) is not None
        return max(_TO_START_S, self._heartbeat_s) if is_starting else self._heartbeat_s

    def _end_hung(self, line: _Line, why: str) -> None:
        if not line.is_hung:
            line.is_hung = True
            member = line.member
            stack = next((found for found in self._gather_stacks()[0] if found.rank == member.rank), None)
            doing = f"{judge([stack])[0]}; " if stack is not None else ""
            self.output.say(f"unisono: worker {member.rank} (process {member.pid}) {why}: {doing}it is replaced")
            self._kill(line)

    def _kill(self, line: _Line) -> None:
        self._say(line.member.channel, kind="signal", number=int(signal.SIGKILL))

    def _lose_agent(self, channel: Channel, why: str = "") -> None:
        member = self._channels[channel]
        self._forget(channel)
        if member is not None:
            self._on_loss(member, why)

    # -- a worker has ended --------------------------------------------------------------------------------------------

    def _on_loss(self, member: Member, more: str = "") -> None:
        """Its agent is lost; with its worker, if it had one."""
        had_worker = self._find_line(member) is not None and member.ended is None
        super()._on_loss(member, more)
        if had_worker:
            self._on_end(member)

    def _on_end(self, member: Member) -> None:
        line = self._find_line(member)
        if line is None or self._stop_time is not None:
            return
        if line.worker in self._unwanted:
            self._unwanted.discard(line.worker)
            member.result.clear()
            self._retire(line)
            return
        if self._step < 0 and member.failure is not None:
            return  # before the first step: the program is wrong, and the run ends as any other
        was_member = line.worker in self.coordinator.members
        self.coordinator.ended(line.worker, well=member.failure is None)
        if member.failure is not None:
            self._note_loss(member, was_member)
        self._retire(line)
        if member.failure is not None and was_member:
            self._end_generation(f"worker {member.rank} (process {member.pid} on {member.host}) is lost")

    def _note_loss(self, member: Member, was_member: bool) -> None:
        assert member.failure is not None
        self._losses.append(member.failure)
        del self._losses[:-100]
        if was_member and self._lost_at is None:
            self._lost_at = member.failure.time
        what = "worker" if was_member else "a worker that was to join as"
        who = f"{member.rank} (process {member.pid} on {member.host})"
        text = f"unisono: {what} {who} was lost: {member.failure.headline}"
        if member.activity():
            text += f" ({member.activity()})"
        if member.failure.kind == "lost":
            text += f". {member.failure.message}"
        if member.failure.traceback:
            text += "\n" + member.failure.traceback.rstrip("\n")
        self.output.say(text)

    def _retire(self, line: _Line) -> None:
        """Forget a worker that has ended. Its agent, if it is there, waits for another, or leaves where all is done."""
        member = line.member
        del self._lines[line.worker]
        self._members.remove(member)
        self._have_saved = self._have_saved or member.preempted
        if member.result:
            self._returned[member.rank] = b"".join(member.result)
        if member.channel not in self._channels:
            return
        if member.failure is None and self.coordinator.ending:
            self._say(member.channel, kind="exit", status=0)
        fresh = Member(member.rank, member.channel, member.host, member.identity)
        self._channels[member.channel] = fresh
        self._waiting[member.rank] = fresh

    # -- the end -------------------------------------------------------------------------------------------------------

    def _clean_up(self) -> None:
        if self._is_under_way and not self._running():
            for member in self._waiting.values():  # agents without a worker
                self._say(member.channel, kind="exit", status=0)
        super()._clean_up()

    def _take_results(self) -> list[bytes]:
        return [self._returned.get(place, b"") for place in range(self._places)]

    def _outcome(self) -> Outcome:
        if self._given_up is not None:
            words = [f"  {self.engine.name}: {line}" for line in self._words.splitlines()[-3:]]
            return fail_run(self._given_up.why, self._losses, self._step, more=words)
        if self._have_saved:
            return Outcome(step=self._step, preempted=True)
        if self._failures():
            return super()._outcome()
        return self._faults.judge(Outcome(), self._steps.get)
