"""Per-host helper that is started over ssh: starts the agents of that host's workers, and ends them with the launcher.

Started by start.py, without torch; one line of JSON on standard input says what to do (ssh.py). Standard input stays
open for as long as the launcher lives. The launcher says which ranks are here, so hosts need not meet by themselves,
and nothing listens on them.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from unisono.launchers import guard
from unisono.launchers.engines.engine import AGENT
from unisono.launchers.processes import pid_fd
from unisono.launchers.runtime.channel import Channel, Unreachable, connect

__all__ = ["serve_host"]

_UNREACHED = 97
_TO_END_S = 2.0  # that agents have after SIGTERM
_AGAIN_S = 2.0  # between two starts of an agent in an elastic run
_FINAL = (0, _UNREACHED)  # of an agent that is not needed any more, or whose launcher is gone


def serve_host() -> int:
    """Start agents as standard input says, and stay until they or the launcher have ended."""
    setup = json.loads(_first_line())
    try:
        channel = connect([(host, port) for host, port in setup["launcher"]], bytes.fromhex(setup["token"]))
    except Unreachable as error:
        print(f"unisono: {error}", file=sys.stderr)
        return _UNREACHED
    channel.send_json(kind="host")
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # of a closed session: what it means is read from standard input
    run_id = secrets.token_hex(12)
    host = _Host(setup, channel, run_id)
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


class _Host:
    """The agents of this host, attempt by attempt."""

    def __init__(self, setup: dict[str, Any], channel: Channel, run_id: str) -> None:
        self._setup, self._channel = setup, channel
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
        """Start each agent that fails again, until the launcher has ended.

        Agents notice by themselves when the launcher is gone. So where ssh's connection is lost, they are left alone.
        """
        ranks = list(self._setup["ranks"])
        self._agents = [self._start(local, rank) for local, rank in enumerate(ranks)]
        began = [time.monotonic()] * len(ranks)
        while not self._told_to_end:
            found = [agent.poll() for agent in self._agents]
            if all(status is not None and (self._launcher_ended or status in _FINAL) for status in found):
                break
            for local, status in enumerate(found):
                failed = status is not None and status not in _FINAL and not self._launcher_ended
                if failed and time.monotonic() > began[local] + _AGAIN_S:
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
        for fd in (0, self._channel.fileno(), *ends):
            if fd >= 0 and not (fd == 0 and self._launcher_ended):
                poll.register(fd, select.POLLIN)
        for fd, _ in poll.poll(500):
            if fd == 0:
                self._launcher_ended |= not os.read(0, 4096)
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
