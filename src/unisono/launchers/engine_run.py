"""A run on an engine: the engine starts an agent for each worker, and the agents report here.

1. Start: the store and the channel listen on this host; the engine is given the agents' command.
2. Meet: agents prove that they belong to this run and say their ranks, and are told to start their workers.
3. Watch: output, error reports, results.
4. Clean up: the agents end their workers, the engine's job is ended, and what is left on this host as well.

RemoteRun's workers stay: at the first failure all are stopped, or all are started again. Those of elastic_hosts.py come
and go.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from unisono.launchers import guard
from unisono.launchers.engines.engine import AGENT, Engine, EngineError, Started, Work, agent_command
from unisono.launchers.failures import Failure, Outcome, first_failure
from unisono.launchers.job import Job, TimedOut
from unisono.launchers.meeting import OfferedPage, RunDebugger
from unisono.launchers.output import OutputClosed
from unisono.launchers.processes import worker_environment
from unisono.launchers.runtime.addresses import ANYWHERE, INTERFACE, address_towards, find_own_addresses
from unisono.launchers.runtime.channel import Channel, ChannelServer, Frame, derive_secret
from unisono.launchers.runtime.encryption import is_control_encrypted
from unisono.launchers.runtime.run_folder import name_rank_file
from unisono.launchers.runtime.stacks import WorkerStack
from unisono.launchers.runtime.store_server import StoreServer
from unisono.launchers.supervisor import AT_ONCE, Schedule, Supervisor, after_failure
from unisono.launchers.workers import RemoteWorker, Worker

__all__ = ["EngineRun", "RemoteRun", "open_remote_run"]

_STACKS_S = 1.5  # that agents have to read their workers' stacks
_ENDED_S = 1.5  # after the engine has ended, what its workers said may still be on its way
# Variables of this process that workers on other hosts get too, where they are set.
_FORWARDED = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "UNISONO_TIMEOUT_S",
    "UNISONO_CHECKS",
    "UNISONO_ENCRYPT",
    "UNISONO_INTERFACE",
    "UNISONO_PORTS",
    "UNISONO_CHECK_EVERY",
    "UNISONO_SHARED_MEMORY",
    "UNISONO_BALANCE",
    "UNISONO_METHODS",
    "UNISONO_OBSERVER",
    "UNISONO_STRATEGY",
    "NCCL_DEBUG",
)


class EngineRun(Supervisor[RemoteWorker]):
    """One run of one job on one engine."""

    def __init__(self, job: Job, engine: Engine, payload: bytes | None = None) -> None:
        self.engine = engine.open(job.engine_places)
        super().__init__(job, restarts=self.engine.restarts, inherit=False)
        self._payload, self._token = payload, secrets.token_bytes(32)
        self._secret = derive_secret(self._token, "run").hex()  # agents have the token, so it need not travel
        self.results: list[bytes] = []
        self.is_encrypted = is_control_encrypted(is_one_host=self.engine.local)
        self._backlog = max(128, 2 * job.places)
        self._store = self._open_store()  # of this attempt
        self._meeting_page = OfferedPage()
        self.offered_page = self._meeting_page.offer()
        listener = self.engine.listen(self._backlog)
        self.debugger = RunDebugger(job, self._secret, self.output.say, listener, is_encrypted=self.is_encrypted)
        self._listener = self.engine.listen(self._backlog)
        self.server = ChannelServer(
            self.loop,
            self._listener,
            self._token,
            self._on_frames,
            self._on_lost,
            is_encrypted=self.is_encrypted,
            name="the launcher",
        )
        self._told_stacks: dict[int, WorkerStack] | None = None  # while they are being gathered
        self.agents: dict[Channel, RemoteWorker] = {}  # agents that have said who they are, with their workers
        self._hosts: list[Channel] = []  # of hosts whose agents a helper starts (ssh.py)
        self.waiting: dict[int, RemoteWorker] = {}  # agents of the attempt that is to begin
        self._attempt = 0
        self._started: Started | None = None
        self._guard: guard.Guard | None = None
        self._since = self._begin
        self._engine_ended: float | None = None
        self._wrong = ""  # why the run cannot begin

    def supervise(self) -> Outcome:
        outcome = super().supervise()
        self.results = self._take_results()
        return outcome

    @abstractmethod
    def _take_results(self) -> list[bytes]:
        """The pickled results of a function, one of each worker."""

    def preempt(self) -> bool:
        """See Supervisor; they are told soon, as this may be called by a signal handler."""
        self._preempting = any(worker.read_status().preemptible for worker in self.workers)
        return self._preempting

    def kill(self) -> None:
        self._send_stop(lambda _: AT_ONCE)

    def signal_groups(self, signum: signal.Signals) -> None:
        for worker in self.running:
            self.server.send(worker.channel, kind="signal", number=int(signum))

    def _interrupt(self, error: BaseException) -> None:
        if not isinstance(error, EngineError):
            super()._interrupt(error)

    # -- 1. start ------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self.server.start()
        self.debugger.start()
        port = self._listener.getsockname()[1]
        addresses = [(address, port) for address in self._addresses()]
        told = {
            "launcher": addresses,
            "token": self._token.hex(),
            "engine": self.engine.environment(),
            "page": self.offered_page,
            "heartbeat_s": None if self.elastic is None else self.elastic.heartbeat_s,
        }
        env = worker_environment(0, self.job.workers, address=self._store.address, run_id=self.run_id, threads=1)
        self._started = self.engine.start(
            Work(
                workers=self.job.engine_places,
                agent=agent_command(self.engine.python_there()),
                env={AGENT: json.dumps(told), "UNISONO_RUN": env["UNISONO_RUN"]},
                addresses=addresses,
                token=self._token.hex(),
                elastic=self.job.elastic is not None,
            )
        )
        self._guard = guard.Guard(self.run_id, self._started.sessions())
        self._open_control()

    def _open_store(self) -> StoreServer:
        """Open a store whose secret follows from the run's token: agents have that, so the secret need not travel."""
        secret = derive_secret(self._secret.encode(), "store")
        return StoreServer(self.engine.listen(self._backlog), secret, is_encrypted=self.is_encrypted)

    def _fresh_store(self) -> StoreServer:
        """A new store for each attempt: torch's groups would take an earlier attempt's addresses for this one's."""
        if self._store.serving:
            self._store.close()
            self._store = self._open_store()
        self._store.start()
        return self._store

    def _addresses(self) -> list[str]:
        """Where other hosts may reach this one: the addresses from which it would speak to them."""
        if own := self.engine.own_addresses():
            return list(own)
        named: list[str] = []
        if asked := os.environ.get(INTERFACE, ""):
            with contextlib.suppress(OSError):  # the workers' hosts have it; this one need not
                named = [str(one) for card in find_own_addresses(asked) for one in card]
        hosts = [*self.engine.hosts_to_reach(), *ANYWHERE]
        found = [address for host in hosts if (address := address_towards(host))]
        return list(dict.fromkeys([*named, *found, socket.gethostname()]))

    # -- 2. meet -------------------------------------------------------------------------------------------------------

    def _on_frames(self, channel: Channel, frames: list[Frame]) -> None:
        for frame in frames:
            if (worker := self.agents.get(channel)) is None:
                self._on_hello(channel, frame)
            else:
                self._on_frame(worker, frame)

    def _on_lost(self, channel: Channel, why: str = "") -> None:
        worker = self.agents.pop(channel, None)
        if worker is not None:
            self._on_loss(worker, why)

    def _on_hello(self, channel: Channel, frame: Frame) -> None:
        hello = frame.json()
        if hello.get("kind") == "host":  # of ssh.py: one a host, which starts the agents there
            self._hosts.append(channel)
            return
        if hello.get("kind") == "join":
            self._on_join(channel, hello)
            return
        rank, size = int(hello["rank"]), int(hello["size"])
        if size != (self.job.places if hello.get("joined") else self.job.engine_places):
            asked = self.job.engine_places
            self._wrong = f"{self.engine.name} started {size} workers, not the {asked} that were asked for"
            return
        worker = RemoteWorker(
            rank=rank, host=str(hello["host"]), channel=channel, identity=str(hello["identity"]), page=hello.get("page")
        )
        self.agents[channel] = worker
        self._add_waiting(worker, hello)

    def _on_join(self, channel: Channel, message: dict[str, Any]) -> None:
        """Another host asks for places (joining.py)."""
        why = "this run has as many workers as it was started with: it takes others if started with -n MIN:MAX"
        self.server.send(channel, kind="refused", why=why, full=False)

    def _add_waiting(self, worker: RemoteWorker, hello: dict[str, Any]) -> None:
        """Note an agent that waits for its start, and what it has said."""
        self.waiting[worker.rank] = worker

    def start_worker(self, worker: RemoteWorker, **fields: Any) -> None:
        """Tell an agent to start its worker."""
        worker.started = time.monotonic()
        self.job.note("worker started", rank=worker.rank, host=worker.host)
        if self._payload is not None:
            self.server.send_frame(worker.channel, "P", self._payload)
        self.server.send(
            worker.channel,
            kind="start",
            program=list(self.job.program),
            function=self._payload is not None,
            folder=os.getcwd(),
            env=self._forwarded_variables(),
            threads=self.job.threads or self.engine.threads(self.job.places),
            faults=self.faults.write_for(worker.rank),
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
        """Tell every worker that asked for it, once, to save and leave."""
        for worker in self.running if self._preempting else ():
            if worker.read_status().preemptible and not worker.told:
                worker.told = True
                self.server.send(worker.channel, kind="preempt")

    def _check_start(self, now: float) -> None:
        if not self._wrong and not self.has_begun and now > self._since + self.engine.start_s:
            wanted = self.job.engine_places
            self._wrong = (
                f"{self.engine.name}: {len(self.waiting)} of {wanted} workers had reported to this host "
                f"after {self.engine.start_s:.0f} s (at {', '.join(self._addresses())}, port "
                f"{self._listener.getsockname()[1]}): there are too few free slots, or hosts cannot connect back"
            )
        if self._wrong:
            raise EngineError(self._with_words(self._wrong))

    def _check_engine(self, now: float) -> None:
        """When the engine's job has ended and workers have not said how they did, they never will."""
        assert self._started is not None
        status = self._started.poll()
        if status is None:
            return
        self._engine_ended = self._engine_ended or now
        if now < self._engine_ended + _ENDED_S:
            return
        if not self.has_begun:
            text = f"{self.engine.name} ended (exit status {status}) before {self.job.workers} workers were running"
            raise EngineError(self._with_words(text))
        words = " | ".join(self._started.words().splitlines()[-3:])
        for worker in self.running:
            self._on_loss(worker, f" It ended with exit status {status}. {words}".rstrip())

    def _with_words(self, text: str) -> str:
        words = self._started.words() if self._started is not None else ""
        advice = self.engine.explain(words, self.job.workers)
        lines = [line for line in words.splitlines() if line.strip("- ")]
        quoted = "\n".join(f"  {line}" for line in (lines[:6] if advice else lines[-40:]))
        return "".join([text, f". {advice}" if advice else "", f"\nIt said:\n{quoted}" if quoted else ""])

    def _on_frame(self, worker: RemoteWorker, frame: Frame) -> None:
        if frame.kind in "oe":
            self.output.feed(worker.rank, "stdout" if frame.kind == "o" else "stderr", frame.body)
        elif frame.kind == "r":
            self.take_report(worker, frame.body)
        elif frame.kind == "S":
            if self._told_stacks is not None:
                found = {**frame.json(), "rank": worker.rank, "host": worker.host}
                self._told_stacks[worker.rank] = WorkerStack(**found)
        elif frame.kind == "R":
            worker.result.append(frame.body)
        else:
            message = frame.json()
            worker.take_status(message, time.monotonic())
            if message.get("kind") == "ended":
                worker.take_end(int(message["status"]), time.monotonic(), stopping=self.stop_time is not None)
                self.note_end(worker, host=worker.host)
                self.output.flush(worker.rank)
                self._on_end(worker)

    def _on_end(self, worker: RemoteWorker) -> None:
        """A worker has ended; its agent waits to be told what to do."""
        if worker.failure is None:
            self.server.send(worker.channel, kind="exit", status=0)

    def _on_loss(self, worker: RemoteWorker, more: str = "") -> None:
        if worker is self.waiting.get(worker.rank):
            del self.waiting[worker.rank]
        elif worker.ended is None:
            worker.ended = time.monotonic()
            self.output.flush(worker.rank)
            worker.failure = worker.failure or Failure(
                worker.rank,
                worker.ended,
                "lost",
                1,
                message=f"It no longer answers: host {worker.host} is down or cut off, or {self.engine.name} "
                f"ended the worker.{more}",
            )
            self.note_end(worker, host=worker.host)

    def _on_report(self, worker: RemoteWorker, message: dict[str, Any]) -> None:
        """A worker on a host that does not have the run's folder sends what it would write there."""
        if message.get("kind") == "lines" and isinstance(message.get("text"), str) and self.job.record is not None:
            self.job.record.append(name_rank_file(worker.rank), message["text"])

    def _pump(self, wait_s: float) -> None:
        self.loop.pump(wait_s)
        self.server.drop_late()

    @property
    def has_begun(self) -> bool:
        """Whether workers of this attempt were started."""
        return bool(self.workers)

    # -- 4. stop and clean up ------------------------------------------------------------------------------------------

    def _send_stop(self, schedule: Callable[[Worker], Schedule]) -> None:
        for worker in [*self.workers, *self.waiting.values()]:
            code = worker.failure.code if worker.failure else 1
            if worker.ended is None:
                signals = [[delay, int(signum)] for delay, signum in schedule(worker)]
                self.server.send(worker.channel, kind="stop", schedule=signals)
            self.server.send(worker.channel, kind="exit", status=code or 1)

    def _stop(self, schedule: Callable[[Worker], Schedule]) -> None:
        """See Supervisor: the agents end their workers."""
        start = self.stop_time = time.monotonic()
        self.output.hurry(start + 1.5)
        self._send_stop(schedule)
        while self.running and time.monotonic() < start + 5:
            with contextlib.suppress(OutputClosed):
                self._pump(0.05)

    def _clean_up(self) -> None:
        self._control.close()
        self.server.close_address()
        self.debugger.close()
        if self._started is not None:
            self._end_engine(self._started)
        self.server.close()
        self._store.close()
        self._meeting_page.close()
        guard.sweep(self.run_id, self._started.sessions() if self._started else (), patience_s=0.3)
        if self._started is not None:
            self._started.close()
        if self._guard is not None:
            self._guard.done()
        self.loop.close()

    def _end_engine(self, started: Started) -> None:
        """Wait for the engine's job to end after its workers; if it does not, end it by signals."""
        well = self.has_begun and not self.running
        for channel in self._hosts if well else ():
            self.server.send(channel, kind="end")
        for signum, wait_s in ((None, 3.0 if well else 0.0), (signal.SIGTERM, 2.0), (signal.SIGKILL, 1.0)):
            if signum is not None and started.poll() is None:
                started.stop(signum)
            deadline = time.monotonic() + wait_s
            while started.poll() is None and time.monotonic() < deadline:
                with contextlib.suppress(OutputClosed):
                    self._pump(0.02)  # agents may still be sending

    # -- the report ----------------------------------------------------------------------------------------------------

    def find_step(self, rank: int) -> int | None:
        return self.workers[rank].read_status().step

    def gather_stacks(self) -> tuple[list[WorkerStack], list[int]]:
        """See Supervisor. The agents are asked; one that does not answer within a moment is said not to."""
        running = self.running
        gone = [worker.rank for worker in self.workers if worker.ended is not None]
        if self._told_stacks is not None:  # asked for while they are being gathered
            return [], gone
        told: dict[int, WorkerStack] = {}
        self._told_stacks = told
        for worker in running:
            self.server.send(worker.channel, kind="stacks")
        deadline = time.monotonic() + _STACKS_S
        try:
            while len(told) < len(running) and time.monotonic() < deadline:
                self._pump(0.02)
        finally:
            self._told_stacks = None
        return [told.get(w.rank, WorkerStack(w.rank, w.pid, w.host)) for w in running], gone

    def describe_activities(self) -> str:
        """See Supervisor; the agents are asked now."""
        for worker in self.running:
            self.server.send(worker.channel, kind="status")
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline:
            self._pump(0.05)
        if not self.running:
            return f"  {len(self.waiting)} of {self.job.workers} workers had reported to the launcher"
        return super().describe_activities()


_TICK_S = 0.1


class RemoteRun(EngineRun):
    """One run of one job on one engine, in one attempt or several."""

    def _watch(self) -> None:
        """Return when all workers have ended, or one has failed for good."""
        while not self.workers or self.running:
            now = time.monotonic()
            failures = self.failures
            if failures and now >= self.find_settling(failures):
                if self._attempt >= self.engine.restarts or self._engine_ended is not None:
                    return
                self._restart(failures)
            if not self.workers and len(self.waiting) == self.job.places:
                self._begin_attempt()
            self._pass_word_on()
            self._check_start(now)
            if self.deadline is not None and now >= self.deadline:
                raise TimedOut(self.describe_activities())
            self._check_engine(now)
            self._pump(_TICK_S)

    def _begin_attempt(self) -> None:
        """All agents are there: tell each its worker's rank on its host, and to start the worker."""
        self.workers = [self.waiting[rank] for rank in range(self.job.workers)]
        self.waiting = {}
        hosts = list(dict.fromkeys(worker.identity for worker in self.workers))
        pages = {worker.page for worker in self.workers} if len(hosts) == 1 else set()
        on_page = pages == {self._meeting_page.number} and len({worker.host for worker in self.workers}) == 1
        store_port = self._fresh_store().address[1]
        attempt = {"attempt": self._attempt, "attempt_id": secrets.token_hex(8)}
        for worker in self.workers:
            near = [other.rank for other in self.workers if other.identity == worker.identity]
            self.start_worker(
                worker,
                local_rank=near.index(worker.rank),
                local_size=len(near),
                host_number=hosts.index(worker.identity),
                hosts=len(hosts),
                store_port=store_port,
                page=on_page,
                **attempt,
            )

    def _restart(self, failures: Sequence[Failure]) -> None:
        """Have the agents end; the engine sees it and starts all workers again."""
        first = first_failure(failures)
        message = " ".join(first.message.split()) if first.kind == "exception" else ""
        self._attempt += 1
        self._meeting_page.renew()
        self.output.say(
            f"unisono: worker {first.rank} failed: {first.headline}{': ' if message else ''}{message[:200]}; "
            f"all workers start again (restart {self._attempt} of {self.engine.restarts})"
        )
        self._send_stop(after_failure)
        for channel in self._hosts:  # one whose workers have all ended well would not know
            self.server.send(channel, kind="again", attempt=self._attempt)
        self.workers = []
        self._since = time.monotonic()

    def _take_results(self) -> list[bytes]:
        return [b"".join(worker.result) for worker in self.workers]


def open_remote_run(job: Job, engine: Engine, payload: bytes | None = None) -> EngineRun:
    """The run of a job on an engine."""
    if job.elastic is None:
        return RemoteRun(job, engine, payload)
    from unisono.launchers.elastic_hosts import ElasticHostsRun

    return ElasticHostsRun(job, engine, payload)
