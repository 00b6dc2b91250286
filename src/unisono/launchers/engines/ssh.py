"""Workers on a list of hosts: ssh to each, and the helper there that starts that host's agents and ends them with us.

The launcher says which host has which ranks: the hosts' own launchers need no store to meet in, and nothing listens on
them. torchrun's would unpickle what lies in theirs, and anybody on the network can write there. What a host needs to
know (and the run's token with it) goes through ssh's standard input, where nobody else can see it: one line of JSON.
Standard input stays open for as long as the launcher lives. The helper is started by worker/start.py, without torch.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from unisono.launchers import guard
from unisono.launchers.engines.engine import (
    AGENT,
    TAKEN,
    UNREACHED,
    Engine,
    EngineError,
    ProcessStarted,
    Work,
    agent_command,
    find_program,
    split_host,
)
from unisono.launchers.processes import pid_fd
from unisono.launchers.runtime.channel import Channel, Unreachable, connect

__all__ = ["HostAgents", "HostCommand", "HostsStarted", "Ssh", "divide", "serve_host", "write_setup"]

_INSTALL = "Debian and Ubuntu: apt-get install openssh-client."
_AGAIN_S = 5.0  # between two attempts to reach a host in an elastic run
_TO_FAIL_FAST = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5")


@dataclass(frozen=True)
class Ssh(Engine):
    """Hosts that ssh reaches without a password, such as ["a", "b"], or ["a:4", "user@b:2"] with a number of workers;
    an IPv6 address with a number is in brackets, "[fd00::7]:2".

    Arguments:
        hosts: where to run.
        max_restarts: how often all workers are started again after one has failed.
        options: further options of ssh, such as ["-p", "2222"].
        python: the Python of the hosts, where it is not where this host has it.
    """

    name: ClassVar[str] = "ssh"

    hosts: Sequence[str] = ()
    max_restarts: int = 0
    options: Sequence[str] = ()
    python: str | None = None

    def environment(self) -> str:
        return "torchrun"

    def python_there(self) -> str | None:
        return self.python

    @property
    def restarts(self) -> int:
        return self.max_restarts

    @property
    def start_s(self) -> float:
        return 60.0

    def hosts_to_reach(self) -> Sequence[str]:
        return [split_host(host)[0].rpartition("@")[2] for host in self.hosts]

    def check(self, workers: int) -> None:
        if isinstance(self.hosts, str) or not self.hosts:
            raise ValueError(f"ssh: got hosts={self.hosts!r}; expected a list of hosts, as in --hosts a,b")
        if self.max_restarts < 0:
            raise ValueError(f"ssh: got max_restarts={self.max_restarts}; expected a whole number from 0 up")
        find_program("ssh", advice=_INSTALL)
        divide(self.hosts, workers)

    def start(self, work: Work) -> HostsStarted:
        program = find_program("ssh", advice=_INSTALL)
        ranks = iter(range(work.workers))
        commands: dict[str, HostCommand] = {}
        for host, count in divide(self.hosts, work.workers).items():
            if not count:
                continue
            command = [program, *_TO_FAIL_FAST, *self.options, host, shlex.join(agent_command(self.python, "host"))]
            here = list(itertools.islice(ranks, count))
            commands[host] = HostCommand(command, write_setup(work, here, max_restarts=self.max_restarts), here)
        return HostsStarted(commands, elastic=work.elastic)

    def explain(self, words: str, workers: int) -> str:
        if "Permission denied" in words:
            return "ssh asks for a password there: set up a key, so that `ssh HOST true` works without one"
        if "No such file or directory" in words or "not found" in words or "No module named" in words:
            return (
                "Python and Unisono must be on every host in the same place as here; or give the hosts' own Python "
                "with python= (un.on.ssh) or --python"
            )
        return ""


class HostCommand(NamedTuple):
    """How a host's agents are started."""

    command: Sequence[str]
    setup: str
    ranks: Sequence[int]
    env: Mapping[str, str] = {}

    def start(self) -> ProcessStarted:
        return ProcessStarted(self.command, self.env, input_text=self.setup)


def write_setup(
    work: Work, ranks: Sequence[int], *, max_restarts: int = 0, env: Mapping[str, str] | None = None
) -> str:
    """The line that tells the helper of a host what to start; `env`: more variables of that host."""
    setup: dict[str, Any] = {
        "launcher": list(work.addresses),
        "token": work.token,
        "env": {**work.env, **(env or {})},
        "agent": list(work.agent),
        "ranks": list(ranks),
        "size": work.workers,
        "max_restarts": max_restarts,
        "elastic": work.elastic,
    }
    return json.dumps(setup) + "\n"


class HostsStarted:
    """One process for each host; one that fails is the end of all, unless the run is elastic."""

    def __init__(
        self, hosts: Mapping[str, HostCommand], *, elastic: bool = False, on_close: Callable[[], None] | None = None
    ) -> None:
        self._commands, self._elastic, self._on_close = hosts, elastic, on_close
        self._hosts = {host: how.start() for host, how in hosts.items()}
        self._began = dict.fromkeys(hosts, time.monotonic())

    def poll(self) -> int | None:
        found = [started.poll() for started in self._hosts.values()]
        failed = [status for status in found if status]
        if failed and not self._elastic:
            return failed[0]
        return None if None in found else max(failed, default=0)

    def revive(self, missing: AbstractSet[int]) -> None:
        """See engine.Started: a host whose process has ended is tried again."""
        for host, how in self._commands.items():
            is_due = time.monotonic() > self._began[host] + _AGAIN_S
            if is_due and missing & set(how.ranks) and self._hosts[host].poll() is not None:
                self._hosts[host].close()
                self._hosts[host] = how.start()
                self._began[host] = time.monotonic()

    def stop(self, signum: signal.Signals) -> None:
        for started in self._hosts.values():
            started.stop(signum)

    def words(self) -> str:
        """What each host said, with its name in front."""
        return "\n".join(
            f"{host}: {line}" for host, started in self._hosts.items() for line in started.words().splitlines()
        )

    def sessions(self) -> Sequence[int]:
        return [pid for started in self._hosts.values() for pid in started.sessions()]

    def close(self) -> None:
        for started in self._hosts.values():
            started.close()
        if self._on_close is not None:
            self._on_close()


def divide(hosts: Sequence[str], workers: int) -> dict[str, int]:
    """How many workers each host gets: hosts with numbers are filled in order, others share evenly.

    >>> divide(["a", "b"], 5), divide(["a:4", "b:4"], 5)
    ({'a': 3, 'b': 2}, {'a': 4, 'b': 1})
    """
    named: dict[str, int | None] = {}
    for text in hosts:
        host, count = split_host(text)
        if not host or host in named or (count is not None and not (count.isdigit() and int(count) > 0)):
            raise ValueError(f"got the host {text!r}; expected different names, with a number of workers: a:4,b:4")
        named[host] = None if count is None else int(count)
    if None in named.values():
        if any(count is not None for count in named.values()):
            raise ValueError(f"got the hosts {','.join(hosts)}; expected a number for all of them, or for none")
        each, more = divmod(workers, len(named))
        return {host: each + (index < more) for index, host in enumerate(named)}
    slots = {host: count or 0 for host, count in named.items()}
    if sum(slots.values()) < workers:
        raise EngineError(
            f"the hosts {','.join(hosts)} have {sum(slots.values())} slots, too few for {workers} workers: ask for "
            "fewer workers, or name more hosts or larger numbers; with -n MIN:MAX, --later leaves places to hosts that "
            "join by themselves"
        )
    left = workers
    for host, slots_there in slots.items():
        slots[host] = min(slots_there, left)
        left -= slots[host]
    return slots


# On the host ---------------------------------------------------------------------------------------------------------


_TO_END_S = 2.0  # that agents have after SIGTERM
_AGENT_AGAIN_S = 2.0  # between two starts of an agent in an elastic run,
_TAKEN_AGAIN_S = 30.0  # and if its place has another
_FINAL = (0, UNREACHED)  # of an agent that is not needed any more, or whose launcher is gone


def serve_host() -> int:
    """Start agents as standard input says, and stay until they or the launcher have ended."""
    setup = json.loads(_first_line())
    try:
        channel = connect([(host, port) for host, port in setup["launcher"]], bytes.fromhex(setup["token"]))
    except Unreachable as error:
        print(f"unisono: {error}", file=sys.stderr)
        return UNREACHED
    channel.send_json(kind="host")
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # of a closed session: what it means is read from standard input
    run_id = secrets.token_hex(12)
    host = HostAgents(setup, channel, run_id)
    try:
        return host.run()
    finally:
        host.stop()
        guard.sweep(run_id, host.started, patience_s=0.5)


def _first_line() -> bytes:
    """Read without a buffer, so that what follows stays visible to `poll`."""
    line = b""
    while not line.endswith(b"\n") and (data := os.read(0, 1)):
        line += data
    return line


class HostAgents:
    """The agents of this host, attempt by attempt. The end of `stdin` is the end of the launcher; None: nothing is."""

    def __init__(self, setup: dict[str, Any], channel: Channel, run_id: str, *, stdin: int | None = 0) -> None:
        self._setup, self._channel, self._stdin = setup, channel, stdin
        address = channel.sock.getpeername()[:2]
        told = {**json.loads(setup["env"][AGENT]), "launcher": [address], "parent": os.getpid()}
        self._env = {
            **os.environ,
            **setup["env"],
            "UNISONO_RUN": ":".join(filter(None, [setup["env"].get("UNISONO_RUN"), run_id])),
            AGENT: json.dumps(told),
            "WORLD_SIZE": str(setup["size"]),
            "LOCAL_WORLD_SIZE": str(len(setup["ranks"])),
        }
        self._agents: list[subprocess.Popen[bytes]] = []
        self.started: list[int] = []  # agents of all attempts: each leads a session
        self._wanted = 0  # the attempt that the launcher asked for
        self._launcher_ended = False
        self._told_to_end = False
        self.ended_well: bool | None = None  # how the run ended, if the launcher has said it

    def run(self) -> int:
        """The status for ssh: 0 when every agent ended well, in the last attempt that the launcher asked for."""
        if self._setup["elastic"]:
            return self._run_elastic()
        attempt = 0
        while True:
            self._agents = [self._start(local, rank) for local, rank in enumerate(self._setup["ranks"])]
            failed = self._watch()
            if failed and attempt < self._setup["max_restarts"] and not self._launcher_ended:
                self.stop()
                attempt += 1
                continue
            if failed or self._launcher_ended:
                return failed or 1
            while attempt < self._setup["max_restarts"] and self._wanted <= attempt:
                if self._launcher_ended:
                    return 0
                self._read(())  # a worker of another host may still fail, and then all start again
            if self._wanted <= attempt:
                return 0
            attempt = self._wanted

    def _run_elastic(self) -> int:
        """Start each agent that fails again, until the launcher has ended. One whose place has been given to another
        host asks for it more rarely; if it came later itself, it is not needed any more.

        Agents notice by themselves when the launcher is gone. So where ssh's connection is lost, they are left alone.
        """
        ranks = list(self._setup["ranks"])
        self._agents = [self._start(local, rank) for local, rank in enumerate(ranks)]
        began = [time.monotonic()] * len(ranks)
        final = _FINAL if self._stdin is not None else (*_FINAL, TAKEN)
        while not self._told_to_end:
            found = [agent.poll() for agent in self._agents]
            is_to_hear = self._stdin is None and 0 in found and self._channel.fileno() >= 0  # how the run has ended
            are_final = all(status is not None and (self._launcher_ended or status in final) for status in found)
            if are_final and not is_to_hear:
                break
            for local, status in enumerate(found):
                failed = status is not None and status not in final and not self._launcher_ended
                again_s = _TAKEN_AGAIN_S if status == TAKEN else _AGENT_AGAIN_S
                if failed and time.monotonic() > began[local] + again_s:
                    self._agents[local] = self._start(local, ranks[local])
                    began[local] = time.monotonic()
            self._read(())
        return 0

    def stop(self) -> None:
        """End the agents, which end their workers."""
        for agent in self._agents:
            if agent.poll() is None:
                agent.terminate()
        deadline = time.monotonic() + _TO_END_S
        while any(agent.poll() is None for agent in self._agents) and time.monotonic() < deadline:
            time.sleep(0.02)
        for agent in self._agents:
            agent.kill()
            agent.wait()

    def _start(self, local: int, rank: int) -> subprocess.Popen[bytes]:
        env = {**self._env, "RANK": str(rank), "LOCAL_RANK": str(local)}
        agent = subprocess.Popen(self._setup["agent"], env=env, stdin=subprocess.DEVNULL, start_new_session=True)
        self.started.append(agent.pid)
        return agent

    def _watch(self) -> int:
        """Wait until an agent has failed (its status is returned), all have ended well, or the launcher is gone (0)."""
        ends = [fd for agent in self._agents if (fd := pid_fd(agent.pid)) is not None]
        try:
            while not self._launcher_ended:
                found = [agent.poll() for agent in self._agents]
                failed = [status for status in found if status]
                if failed:
                    return failed[0] if failed[0] > 0 else 128 - failed[0]
                if None not in found:
                    return 0
                self._read([fd for fd, status in zip(ends, found, strict=False) if status is None])
            return 0
        finally:
            for fd in ends:
                os.close(fd)

    def _read(self, ends: Sequence[int]) -> None:
        """Wait at most half a second for the end of an agent or a message of the launcher, and handle that."""
        poll = select.poll()
        for fd in (self._stdin, self._channel.fileno(), *ends):
            if fd is not None and fd >= 0 and not (fd == self._stdin and self._launcher_ended):
                poll.register(fd, select.POLLIN)
        for fd, _ in poll.poll(500):
            if fd == self._stdin:
                self._launcher_ended |= not os.read(fd, 4096)
            elif fd == self._channel.fileno():
                self._follow()

    def _follow(self) -> None:
        try:
            frames = self._channel.receive()
        except OSError:  # this host or the launcher's is cut off
            frames = None
        if frames is None and self._setup["elastic"]:
            self._channel.close()
        elif frames is None:
            self._launcher_ended = True
        for frame in frames or ():
            message = frame.json()
            if message["kind"] == "again":
                self._wanted = max(self._wanted, message["attempt"])
            elif message["kind"] == "end":
                self._launcher_ended = self._told_to_end = True
                self.ended_well = bool(message.get("well", True))
