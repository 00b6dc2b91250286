"""A run on an engine: the engine starts an agent for each worker, and the agents report here.

1. Start: the store and the channel listen on this host; the engine is given the agents' command.
2. Meet: agents prove that they belong to this run and say their ranks, and are told to start their workers.
3. Watch: output, error reports, results.
4. Clean up: the agents end their workers, the engine's job is ended, and what is left on this host as well.

What happens when a worker is lost is not here: see remote.py, and elastic_hosts.py for workers that come and go.

One thread, one selector, no torch; the store has a thread of its own.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import signal
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from unisono.launchers import guard
from unisono.launchers.control import Control, describe_fixed
from unisono.launchers.debugging import RunDebugger
from unisono.launchers.engines.engine import Engine, EngineError, Started, Work, agent_command
from unisono.launchers.environment import worker_environment
from unisono.launchers.failures import Failure, Outcome, WorkerDescription, find_outcome
from unisono.launchers.fault_report import FaultReport, read_faults
from unisono.launchers.job import Job
from unisono.launchers.meeting_page import OfferedPage
from unisono.launchers.member import Member
from unisono.launchers.output import Output, OutputClosed
from unisono.launchers.private_folder import NotPrivate
from unisono.launchers.stacks import HangReports, answer_stacks
from unisono.launchers.store import HostedStore
from unisono.runtime.channel import GREETING_S, Channel, Frame, accept, flush
from unisono.runtime.machine import address_towards
from unisono.runtime.run_folder import name_rank_file
from unisono.runtime.secret import derive_secret
from unisono.runtime.stack_text import WorkerStack, judge

__all__ = ["EngineRun", "stop_after_failure"]

_STACKS_S = 1.5  # that agents have to read their workers' stacks
_ENDED_S = 1.5  # after the engine has ended, what its workers said may still be on its way
Schedule = Sequence[tuple[float, signal.Signals]]
_AFTER_FAILURE: Schedule = ((0.0, signal.SIGTERM), (1.0, signal.SIGKILL))
_LEAVING: Schedule = ((3.0, signal.SIGKILL),)
_AFTER_INTERRUPT: Schedule = ((0.0, signal.SIGINT), (0.9, signal.SIGTERM), (1.2, signal.SIGKILL))
_AT_ONCE: Schedule = ((0.0, signal.SIGKILL),)
# Variables of this process that workers on other hosts get too, where they are set.
_FORWARDED = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "UNISONO_TIMEOUT_S",
    "UNISONO_CHECKS",
    "UNISONO_CHECK_EVERY",
    "UNISONO_SHARED_MEMORY",
    "UNISONO_BALANCE",
    "UNISONO_METHODS",
    "UNISONO_OBSERVER",
    "UNISONO_STRATEGY",
    "NCCL_DEBUG",
)


def stop_after_failure(member: Member) -> Schedule:
    """How a worker is ended after another has failed: signals, and when they are sent."""
    if member.is_leaving:
        return _LEAVING
    return _AT_ONCE if member.preemptible else _AFTER_FAILURE  # it would only note SIGTERM


class EngineRun(ABC):
    """One run of one job on one engine. `supervise()` does it all; a BaseException raised into it stops the run."""

    def __init__(self, job: Job, engine: Engine, payload: bytes | None = None) -> None:
        self.job, self._payload = job, payload
        self._places = job.places
        self.engine = engine = engine.open(self._places)
        restarts = max(engine.restarts, job.restarts)
        self._faults = FaultReport(read_faults(job.faults, self._places, restarts=restarts))
        self.run_id, self._token = secrets.token_hex(12), secrets.token_bytes(32)
        self.output = Output(job.output, self._places, job.output_dir, inherit=False)
        self.interruptible = True  # whether a signal handler may raise into `supervise` now, or before it
        self.results: list[bytes] = []
        self._preempting = False  # whether workers that asked for it are to leave
        self._backlog = max(128, 2 * self._places)
        self._store = self._open_store()  # of the first attempt
        self._later_store: HostedStore | None = None
        self._meeting_page = OfferedPage()
        secret = derive_secret(self._token, "run").hex()
        self.debugger = RunDebugger(job, secret, self.output.say, engine.listen(self._backlog))
        self._listener = engine.listen(self._backlog)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._control = Control(self._selector, self.answer)
        self._hangs = HangReports(job, self._gather_stacks, self.output.say)
        self._told_stacks: dict[int, WorkerStack] | None = None  # while they are being gathered
        self._channels: dict[Channel, Member | None] = {}
        self._hosts: list[Channel] = []  # of hosts whose agents are started by host.py
        self._waiting: dict[int, Member] = {}  # agents of the attempt that is to begin
        self._members: list[Member] = []  # workers of the attempt that runs, by rank
        self._attempt = 0
        self._started: Started | None = None
        self._guard: guard.Guard | None = None
        self._since = self._begin = time.monotonic()
        self._stop_time: float | None = None
        self._engine_ended: float | None = None
        self._wrong = ""  # why the run cannot begin

    def supervise(self) -> Outcome:
        """Run the job to its end and clean up. Raises EngineError, TimedOut, or what interrupted it."""
        try:
            self.interruptible = True
            self._start()
            self._watch()
            self.interruptible = False
            if self._has_failed:
                self._stop(stop_after_failure)
        except BaseException as error:
            self.interruptible = False
            if not isinstance(error, EngineError):
                self._stop(lambda member: _AFTER_INTERRUPT if member.ready else _AT_ONCE)
            raise
        finally:
            self._clean_up()
        self.results = self._take_results()
        return self._outcome()

    @abstractmethod
    def _watch(self) -> None:
        """Start the workers when their agents are there, until all have ended, or the run has failed."""

    @abstractmethod
    def _take_results(self) -> list[bytes]:
        """What a function returned in each worker."""

    def preempt(self) -> bool:
        """Tell the workers that asked for it to save and leave, soon; False where none did."""
        self._preempting = any(member.preemptible for member in self._members)
        return self._preempting

    def kill(self) -> None:
        """SIGKILL to every worker now (the second Ctrl-C); `supervise` then ends by itself."""
        self._send_stop(lambda _: _AT_ONCE)

    def signal_groups(self, signum: signal.Signals) -> None:
        """Send a signal to every worker and the children in its process group (Ctrl-Z, and going on after it)."""
        for member in self._running():
            self._say(member.channel, kind="signal", number=int(signum))

    # -- 1. start ------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self.debugger.start()
        env = self._environment()
        port = self._listener.getsockname()[1]
        addresses = [(address, port) for address in self._addresses()]
        self._started = self.engine.start(
            Work(
                workers=self._places,
                agent=agent_command(self.engine.python_there()),
                env={
                    "UNISONO_LAUNCHER": ",".join(f"{host}:{port}" for host, port in addresses),
                    "UNISONO_TOKEN": self._token.hex(),
                    "UNISONO_ENGINE": self.engine.environment(),
                    "UNISONO_RUN": env["UNISONO_RUN"],
                    "UNISONO_MEETING_PAGE": self._meeting_page.offer(),
                    **self._agent_variables(),
                },
                addresses=addresses,
                token=self._token.hex(),
                elastic=self.job.elastic is not None,
            )
        )
        self._guard = guard.Guard(self.run_id, self._started.sessions())
        try:
            self._control.open()
        except (OSError, NotPrivate) as error:  # the run does not depend on being asked
            if self.job.elastic is not None:
                self.output.say(f"unisono: `unisono scale` and `unisono stacks` cannot reach this run: {error}")

    def _agent_variables(self) -> dict[str, str]:
        """Further variables of the agents."""
        return {}

    def _environment(self) -> dict[str, str]:
        """Of processes on this host that serve the run."""
        address = self._store.address
        return worker_environment(0, self.job.workers, address=address, run_id=self.run_id, threads=1)

    def _open_store(self) -> HostedStore:
        """Its secret follows from the run's token, which agents have: it does not travel once more."""
        return HostedStore(self.engine.listen(self._backlog), secret=derive_secret(self._token, "run").hex())

    def _fresh_store(self) -> HostedStore:
        """The store of an attempt: torch's own groups take addresses of an earlier attempt for this one's."""
        store = self._store
        if self._attempt > 0:
            self._close_later_store()
            store = self._later_store = self._open_store()
        if not store.serving:
            store.start()
        return store

    def _close_later_store(self) -> None:
        if self._later_store is not None:
            self._later_store.close()

    def _addresses(self) -> list[str]:
        """Where other hosts may reach this one: the addresses from which it would speak to them."""
        if own := self.engine.own_addresses():
            return list(own)
        hosts = [*self.engine.hosts_to_reach(), "192.0.2.1"]  # the last stands for anywhere
        found = [address for host in hosts if (address := address_towards(host))]
        return list(dict.fromkeys([*found, socket.gethostname()]))

    # -- 2. meet -------------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        channel = accept(self._listener, self._token, self._channels, self._forget)
        if channel is None:
            return
        self._channels[channel] = None
        self._selector.register(channel, selectors.EVENT_READ, partial(self._on_channel, channel))
        self._flush(channel)

    def _on_channel(self, channel: Channel) -> None:
        member = self._channels[channel]
        try:
            channel.flush()
            frames = channel.receive()
        except OSError:  # not one of ours, or a host that is gone
            frames = None
        if frames is None:
            self._forget(channel)
            if member is not None:
                self._on_loss(member)
            return
        for frame in frames:
            if (current := self._channels.get(channel)) is None:
                self._on_hello(channel, frame)
            else:
                self._on_frame(current, frame)
        self._flush(channel)

    def _on_hello(self, channel: Channel, frame: Frame) -> None:
        hello = frame.json()
        if hello.get("kind") == "host":  # of ssh.py: one a host, which starts the agents there
            self._hosts.append(channel)
            return
        rank, size = int(hello["rank"]), int(hello["size"])
        if size != self._places:
            self._wrong = f"{self.engine.name} started {size} workers, not the {self._places} that were asked for"
            return
        member = Member(rank, channel, str(hello["host"]), str(hello["identity"]), hello.get("page"))
        self._channels[channel] = member
        self._add_waiting(member, int(hello["pid"]))

    def _add_waiting(self, member: Member, agent: int) -> None:
        """An agent is there; `agent`: its process."""
        self._waiting[member.rank] = member

    def _start_member(self, member: Member, **fields: Any) -> None:
        """Have a worker started."""
        member.started = time.monotonic()
        self.job.note("worker started", rank=member.rank, host=member.host)
        if self._payload is not None:
            member.channel.send("P", self._payload)
        self._say(
            member.channel,
            kind="start",
            program=list(self.job.program),
            function=self._payload is not None,
            folder=os.getcwd(),
            env=self._forwarded_variables(),
            threads=self.job.threads or self.engine.threads(self._places),
            faults=self._faults.write_for(member.rank),
            grace_s=self.job.grace_s,
            **fields,
        )

    def _forwarded_variables(self) -> dict[str, str | None]:
        """Variables for the workers; None for one that is to be unset."""
        env: dict[str, str | None] = {name: os.environ[name] for name in _FORWARDED if name in os.environ}
        env |= self.debugger.variables(self._addresses())
        if self.engine.environment() == "torchrun":
            env.setdefault("OMP_NUM_THREADS", None)  # torchrun sets it to 1
        if self.engine.python_there() is None and "PYTHONPATH" in os.environ:
            env["PYTHONPATH"] = os.environ["PYTHONPATH"]
        return env | (self.job.record.variables if self.job.record is not None else {})

    # -- 3. watch ------------------------------------------------------------------------------------------------------

    def _pass_word_on(self) -> None:
        """To every worker that asked for it, once."""
        for member in self._running() if self._preempting else ():
            if member.preemptible and not member.told:
                member.told = True
                self._say(member.channel, kind="preempt")

    def _check_start(self, now: float) -> None:
        if not self._wrong and not self._has_begun and now > self._since + self.engine.start_s:
            self._wrong = (
                f"{self.engine.name}: {len(self._waiting)} of {self._places} workers had reported to this host "
                f"after {self.engine.start_s:.0f} s (at {', '.join(self._addresses())}, port "
                f"{self._listener.getsockname()[1]}): there are too few free slots, or hosts cannot connect back"
            )
        if self._wrong:
            raise EngineError(self._with_words(self._wrong))
        for channel, member in list(self._channels.items()):
            if member is None and not channel.proven and now > channel.since + GREETING_S:
                self._forget(channel)

    def _check_engine(self, now: float) -> None:
        """When the engine's job has ended and workers have not said how they did, they never will."""
        assert self._started is not None
        status = self._started.poll()
        if status is None:
            return
        self._engine_ended = self._engine_ended or now
        if now < self._engine_ended + _ENDED_S:
            return
        if not self._has_begun:
            text = f"{self.engine.name} ended (exit status {status}) before {self.job.workers} workers were running"
            raise EngineError(self._with_words(text))
        words = " | ".join(self._started.words().splitlines()[-3:])
        for member in self._running():
            self._on_loss(member, f" It ended with exit status {status}. {words}".rstrip())

    def _with_words(self, text: str) -> str:
        words = self._started.words() if self._started is not None else ""
        advice = self.engine.explain(words, self.job.workers)
        lines = [line for line in words.splitlines() if line.strip("- ")]
        quoted = "\n".join(f"  {line}" for line in (lines[:6] if advice else lines[-40:]))
        return "".join([text, f". {advice}" if advice else "", f"\nIts own words:\n{quoted}" if quoted else ""])

    def _on_frame(self, member: Member, frame: Frame) -> None:
        now = time.monotonic()
        if frame.kind in "oe":
            self.output.feed(member.rank, "stdout" if frame.kind == "o" else "stderr", frame.body)
        elif frame.kind == "r":
            for message in member.take_report(frame.body, now):
                self._faults.take(message)
                if self._stop_time is None and member.failure is None:
                    self._hangs.take(message)
                self._take_lines(member, message)
        elif frame.kind == "S":
            self._take_stacks(member, frame.json())
        elif frame.kind == "R":
            member.result.append(frame.body)
        else:
            message = frame.json()
            member.take_status(message, now)
            if message.get("kind") == "ended":
                member.take_end(int(message["status"]), now, stopping=self._stop_time is not None)
                self._note_end(member)
                self.output.flush(member.rank)
                if member.failure is None:
                    self._say(member.channel, kind="exit", status=0)

    def _on_loss(self, member: Member, more: str = "") -> None:
        if member is self._waiting.get(member.rank):
            del self._waiting[member.rank]
        elif member.ended is None:
            member.ended = time.monotonic()
            self.output.flush(member.rank)
            member.failure = member.failure or Failure(
                member.rank,
                member.ended,
                "lost",
                1,
                message=f"Nothing more is heard of it: host {member.host} is gone or cut off, or {self.engine.name} "
                f"ended the worker.{more}",
            )
            self._note_end(member)

    def _take_lines(self, member: Member, message: dict[str, Any]) -> None:
        """A worker on a host that does not have the run's folder sends what it would write there."""
        if message.get("kind") == "lines" and isinstance(message.get("text"), str) and self.job.record is not None:
            self.job.record.append(name_rank_file(member.rank), message["text"])

    def _note_end(self, member: Member) -> None:
        failed = member.failure is not None
        kind = "worker ended" if not failed else "worker lost" if self._stop_time is None else "worker stopped"
        text = "" if member.failure is None else member.failure.headline
        self.job.note(kind, rank=member.rank, pid=member.pid, host=member.host, text=text)

    def _pump(self, wait_s: float) -> None:
        for key, _ in self._selector.select(max(0.0, wait_s)):
            if key.fileobj in self._selector.get_map():
                key.data()

    def _say(self, channel: Channel, **fields: Any) -> None:
        if channel in self._channels:
            with contextlib.suppress(OSError):  # its end is noticed when it is read
                channel.send_json(**fields)
            self._flush(channel)

    def _flush(self, channel: Channel) -> None:
        """Send what can be sent now, and ask to be told when more can."""
        if channel in self._channels:
            flush(channel, self._selector)

    def _forget(self, channel: Channel) -> None:
        self._selector.unregister(channel)
        del self._channels[channel]
        channel.close()

    @property
    def _has_begun(self) -> bool:
        """Whether workers of this attempt were started."""
        return bool(self._members)

    @property
    def _has_failed(self) -> bool:
        return bool(self._failures())

    def _failures(self) -> list[Failure]:
        return [member.failure for member in self._members if member.failure]

    def _running(self) -> list[Member]:
        return [member for member in self._members if member.ended is None]

    # -- 4. stop and clean up ------------------------------------------------------------------------------------------

    def _send_stop(self, schedule: Callable[[Member], Schedule]) -> None:
        for member in [*self._members, *self._waiting.values()]:
            code = member.failure.code if member.failure else 1
            if member.ended is None:
                signals = [[delay, int(signum)] for delay, signum in schedule(member)]
                self._say(member.channel, kind="stop", schedule=signals)
            self._say(member.channel, kind="exit", status=code or 1)

    def _stop(self, schedule: Callable[[Member], Schedule]) -> None:
        """Tell every agent to end its worker, and wait until all have."""
        start = self._stop_time = time.monotonic()
        self.output.hurry(start + 1.5)
        self._send_stop(schedule)
        while self._running() and time.monotonic() < start + 5:
            with contextlib.suppress(OutputClosed):
                self._pump(0.05)

    def _clean_up(self) -> None:
        self._control.close()
        self._listener.close()
        self.debugger.close()
        if self._started is not None:
            self._end_engine(self._started)
        for channel in list(self._channels):
            self._forget(channel)
        self._close_later_store()
        self._store.close()
        self._meeting_page.close()
        guard.sweep(self.run_id, self._started.sessions() if self._started else (), patience_s=0.3)
        if self._started is not None:
            self._started.close()
        if self._guard is not None:
            self._guard.done()
        self._selector.close()

    def _end_engine(self, started: Started) -> None:
        """It ends by itself once its workers have; otherwise it is told to."""
        well = self._has_begun and not self._running()
        for channel in self._hosts if well else ():
            self._say(channel, kind="end")
        for signum, wait_s in ((None, 3.0 if well else 0.0), (signal.SIGTERM, 2.0), (signal.SIGKILL, 1.0)):
            if signum is not None and started.poll() is None:
                started.stop(signum)
            deadline = time.monotonic() + wait_s
            while started.poll() is None and time.monotonic() < deadline:
                with contextlib.suppress(OutputClosed):
                    self._pump(0.02)  # agents may still be sending

    # -- the report ----------------------------------------------------------------------------------------------------

    def _outcome(self) -> Outcome:
        workers, colour = self.job.workers, self.output.colour
        if not self._failures() and any(member.preempted for member in self._members):
            steps = [member.step for member in self._members if member.preempted and member.step is not None]
            return Outcome(step=max(steps, default=None), preempted=True)
        failures, stopped = self._failures(), self._stop_time
        outcome = find_outcome(failures, stopped, workers=workers, describe=self._describe, colour=colour)
        outcome = self._hangs.add_to(outcome)
        return self._faults.judge(outcome, lambda rank: self._members[rank].step)

    def _describe(self, failure: Failure) -> WorkerDescription:
        rank = failure.rank
        member = next(member for member in self._members if member.rank == rank)
        ran_s = failure.time - member.started
        return WorkerDescription(
            f"rank {rank}, host {member.host}, pid {member.pid}, after {ran_s:.1f} s",
            member.activity(),
            member.step,
            self.output.unseen(rank),
            self._faults.find_kill(rank),
        )

    # -- stacks --------------------------------------------------------------------------------------------------------

    def _gather_stacks(self) -> tuple[list[WorkerStack], list[int]]:
        """Asked of the agents; one that does not answer within a moment is said not to."""
        running = self._running()
        gone = [member.rank for member in self._members if member.ended is not None]
        if self._told_stacks is not None:  # asked for while they are being gathered
            return [], gone
        told: dict[int, WorkerStack] = {}
        self._told_stacks = told
        for member in running:
            self._say(member.channel, kind="stacks")
        deadline = time.monotonic() + _STACKS_S
        try:
            while len(told) < len(running) and time.monotonic() < deadline:
                self._pump(0.02)
        finally:
            self._told_stacks = None
        return [told.get(m.rank, WorkerStack(m.rank, m.pid, m.host)) for m in running], gone

    def _take_stacks(self, member: Member, found: dict[str, Any]) -> None:
        if self._told_stacks is not None:
            self._told_stacks[member.rank] = WorkerStack(**{**found, "rank": member.rank, "host": member.host})

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """What is answered who asks this run something; ValueError refuses it."""
        match request:
            case {"do": "stacks"}:
                return answer_stacks(*self._gather_stacks())
            case {"do": "status"}:
                step = max((member.step for member in self._members if member.step is not None), default=None)
                return describe_fixed(self.job.program, self.job.workers, step)
            case _:
                raise ValueError("this run has as many workers as it was started with: use `unisono run -n MIN:MAX`")

    def _activities(self) -> str:
        """What every worker is doing, asked now."""
        running = self._running()
        for member in running:
            self._say(member.channel, kind="status")
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline:
            self._pump(0.05)
        if not running:
            return f"  {len(self._waiting)} of {self.job.workers} workers had reported to the launcher"
        lines = [f"  rank {member.rank}: {member.activity() or 'running'}" for member in running]
        return "\n".join([*lines, f"  {judge(*self._gather_stacks())[0]}"])
