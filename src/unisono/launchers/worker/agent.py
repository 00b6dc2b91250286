"""The agent of one worker: an engine starts it on the worker's host, and it starts and watches that worker.

Started by start.py, without torch. UNISONO_AGENT in the environment is JSON: `launcher` (addresses), `token`, `engine`
(whose variables name the rank), `page` (meeting.py), `heartbeat_s` (None if workers stay), `parent` (the process
with which the agent ends, if any).

1. Reach the launcher, say who this is (the engine's rank), and wait until all workers of this attempt are there.
2. Start the worker (program.py) as the local launcher would: same pipes, same status page.
3. Relay: output, error reports and the result to the launcher; signals from it. The launcher gone means the end.
4. Leave nothing behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from unisono.launchers import guard
from unisono.launchers.engines.engine import AGENT, UNREACHED
from unisono.launchers.meeting import open_page, store_variables
from unisono.launchers.processes import Command, Process, open_starter, threads_per_worker, worker_environment
from unisono.launchers.runtime.addresses import INTERFACE, find_own_addresses, interface_of_address
from unisono.launchers.runtime.channel import Channel, Frame, Unreachable, connect
from unisono.launchers.runtime.files import anonymous_file
from unisono.launchers.runtime.launch_env import Place, read_place
from unisono.launchers.runtime.local_channel import EventLoop
from unisono.launchers.runtime.machine import read_boot_id, read_namespaces
from unisono.launchers.runtime.run_folder import FOLDER, FOLDER_ID
from unisono.launchers.runtime.stacks import VARIABLE as STACKS
from unisono.launchers.runtime.stacks import StackFiles
from unisono.launchers.runtime.status import StatusPage
from unisono.launchers.worker.program import die_with

__all__ = ["Agent", "OneWorkerAgent", "identity", "serve_worker"]

_DRAIN_S = 10.0
_ON_SIGTERM = ((0.0, signal.SIGTERM), (1.0, signal.SIGKILL))
_ON_LOSS = ((0.0, signal.SIGKILL),)
_FRAMES = {"stdout": "o", "stderr": "e", "report": "r"}  # in which the contents of a worker's pipes travel


class Agent(ABC):
    """Base of OneWorkerAgent and of ElasticAgent (elastic_agent.py), whose workers come and go."""

    def __init__(self, channel: Channel, place: Place, told: Mapping[str, Any]) -> None:
        self.channel, self.place = channel, place
        self.run_id = secrets.token_hex(12)
        self._loop = EventLoop()
        self._schedule: list[tuple[float, int]] = []
        self._starter = open_starter("fresh")
        self._process: Process | None = None
        self._page: StatusPage | None = None
        self._payload, self._result = -1, -1
        self._meeting_page = open_page(told["page"])
        self._stacks = StackFiles()
        self._pieces: list[bytes] = []
        self._start: dict[str, Any] | None = None
        self._status: int | None = None  # of the worker, as subprocess counts it
        self._leave: int | None = None  # the exit status that the launcher wants of this agent
        self._lost = self._terminated = False
        self._more_greeting: dict[str, Any] = {}  # that the launcher is told

    @abstractmethod
    def serve(self) -> int:
        """Serve to the end; returns the exit status for the engine."""

    # -- 1. meet -------------------------------------------------------------------------------------------------------

    def _take_signals(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.set_wakeup_fd(self._loop.waker.fileno(), warn_on_full_buffer=False)

    def _say_hello(self) -> None:
        place = self.place
        self.channel.send_json(
            kind="hello",
            rank=place.rank,
            size=place.size,
            host=os.environ.get("UNISONO_HOST", socket.gethostname()),
            identity=identity(),
            page=os.fstat(self._meeting_page).st_ino if self._meeting_page >= 0 else None,
            pid=os.getpid(),
            **self._more_greeting,
        )
        self._loop.watch(self.channel, self._on_launcher)

    def _on_launcher(self) -> None:
        try:
            frames = self.channel.receive()
        except OSError:
            frames = None
        if frames is None:
            self._lose_launcher()
        for frame in frames or ():
            self._follow(frame)

    def _follow(self, frame: Frame) -> None:
        if frame.kind == "P":
            self._pieces.append(frame.body)
            return
        message = frame.json()
        kind = message["kind"]
        if kind == "start":
            self._start = message
        elif kind == "stop":
            self._stop([(delay, signal.Signals(number)) for delay, number in message["schedule"]])
        elif kind == "signal" and self._process is not None and self._status is None:
            self._process.send_group(message["number"])
        elif kind == "preempt" and self._process is not None and self._status is None:
            self._process.send(signal.SIGTERM)
        elif kind == "status":
            self._send_status("doing")
        elif kind == "stacks":
            self._send_stacks()
        elif kind == "exit":
            self._leave = message["status"]

    # -- 2. start ------------------------------------------------------------------------------------------------------

    def _start_worker(self, start: dict[str, Any]) -> None:
        self._set_up(start)
        self._page = self._page or StatusPage.create(self.place.size)
        descriptors = {"UNISONO_STATUS_FD": self._page.fd}
        mpich = os.environ.get("PMI_FD", "")  # its connection for MPI_Init, which it left open for the worker itself
        if mpich.isdigit() and os.path.exists(f"/proc/self/fd/{mpich}"):
            descriptors["PMI_FD"] = int(mpich)
        descriptors[STACKS] = self._stacks.open(self.place.rank)
        descriptors |= self._more_descriptors()
        if start["page"]:
            descriptors["UNISONO_SHM_FD"] = self._meeting_page
        if start["function"]:
            self._payload, self._result = anonymous_file("unisono-function"), anonymous_file("unisono-result")
            with open(self._payload, "wb", closefd=False) as file:
                file.writelines(self._pieces)
            self._pieces.clear()
            descriptors.update(UNISONO_PAYLOAD_FD=self._payload, UNISONO_RESULT_FD=self._result)
        command = Command(
            start["program"],
            self._environment(start),
            descriptors,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        process = self._process = self._starter.start(command)
        process.watch(self._loop, lambda name, data: self._send(_FRAMES[name], data), self._on_exit)
        self._send_status("started")

    def _more_descriptors(self) -> dict[str, int]:
        return {}

    def _set_up(self, start: dict[str, Any]) -> None:
        for name, value in start["env"].items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        try:
            os.chdir(start["folder"])
        except OSError as error:
            if not start["function"]:
                raise SystemExit(
                    f"unisono: the folder {start['folder']}, where the run was started, cannot be used on host "
                    f"{socket.gethostname()} ({error.strerror}): the program must lie in the same place on every host"
                ) from None
        self._name_interface()

    def _name_interface(self) -> None:
        """Tell torch's gloo and NCCL which interface is used: a host's own name often means the loopback device."""
        if asked := os.environ.get(INTERFACE, ""):
            try:
                found = [cards[0].interface for cards in find_own_addresses(asked)]
            except OSError as error:
                raise SystemExit(f"unisono: {error.strerror}") from None
            os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = ",".join(dict.fromkeys(found))
            return
        interface = interface_of_address(self.channel.sock.getsockname()[0])
        if "GLOO_SOCKET_IFNAME" not in os.environ and interface not in ("", "lo"):
            os.environ["GLOO_SOCKET_IFNAME"] = interface

    def _environment(self, start: dict[str, Any]) -> dict[str, str]:
        per_task = os.environ.get("SLURM_CPUS_PER_TASK", "")
        share = int(per_task) if per_task.isdigit() else threads_per_worker(start["local_size"])
        threads = start["threads"] or (None if "OMP_NUM_THREADS" in os.environ else share)
        address = (self.channel.sock.getpeername()[0], start["store_port"])
        env = worker_environment(
            self.place.rank,
            self.place.size,
            address=address,
            run_id=self.run_id,
            threads=threads,
            faults=start["faults"],
        )
        env |= {name: start["env"][name] for name in (FOLDER, FOLDER_ID) if start["env"].get(name)}
        env |= store_variables(address, self.channel.derive_secret("run").hex())
        env.update(
            LOCAL_RANK=str(start["local_rank"]),
            LOCAL_WORLD_SIZE=str(start["local_size"]),
            GROUP_RANK=str(start["host_number"]),
            GROUP_WORLD_SIZE=str(start["hosts"]),
            TORCHELASTIC_RESTART_COUNT=str(start["attempt"]),
            UNISONO_ATTEMPT=start["attempt_id"],
            UNISONO_AGENT_PID=str(os.getpid()),
        )
        return env

    # -- 3. relay ------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Relay until the worker has ended, and tell the launcher how."""
        assert self._process is not None
        while self._status is None:
            self._pump(0.1 if self._process.pid_fd is None or self._schedule else None)
            self._on_exit()
        self._drain()
        size, done = os.fstat(self._result).st_size if self._status == 0 and self._result >= 0 else 0, 0
        while done < size and not self._lost:
            piece = os.pread(self._result, 1 << 20, done)
            self._send("R", piece)
            done += len(piece)
        self._send_status("ended", status=self._status)

    def _pump(self, wait_s: float | None) -> None:
        now = time.monotonic()
        while self._schedule and self._schedule[0][0] <= now:
            number = self._schedule.pop(0)[1]
            if self._process is not None and self._status is None:
                self._process.send(number)
        if self._schedule:
            wait_s = min(self._schedule[0][0] - now, 60.0 if wait_s is None else wait_s)
        self._loop.pump(wait_s)

    def _stop(self, schedule: Sequence[tuple[float, int]]) -> None:
        now = time.monotonic()
        self._schedule = [(now + delay, number) for delay, number in schedule]
        if self._process is None:
            self._leave = self._leave or 128 + signal.SIGTERM

    def _on_sigterm(self, *_: object) -> None:
        """The engine ends this agent: have a worker that asked for it save and leave within the grace time."""
        self._terminated = True
        asked = self._page is not None and self._page.read(self.place.rank).preemptible
        grace_s = self._start["grace_s"] if self._start is not None and asked else 0.0
        self._stop(((0.0, signal.SIGTERM), (grace_s, signal.SIGKILL)) if grace_s else _ON_SIGTERM)

    def _drain(self) -> None:
        """Pass on what the worker has said last."""
        assert self._process is not None
        self._process.drain()

    def _on_exit(self) -> None:
        assert self._process is not None
        if self._status is None:
            self._status = self._process.exit_status()
            if self._status is not None and self._process.pid_fd is not None:
                self._loop.forget(self._process.pid_fd)

    def _send_status(self, kind: str, **fields: Any) -> None:
        assert self._page is not None
        status = self._page.read(self.place.rank)
        since_s = time.monotonic() - status.doing_since if status.doing else 0.0
        pid = self._process.pid if self._process is not None else 0
        self._send_json(kind=kind, pid=pid, step=status.step, doing=status.doing, since_s=since_s, **fields)

    def _send_stacks(self) -> None:
        """Send the worker's stacks to the launcher."""
        if self._process is None or self._page is None or self._status is not None:
            return
        (found,) = self._stacks.gather({self.place.rank: self._process.pid}, self._page)
        self._send("S", json.dumps(asdict(found)).encode())

    def _send(self, kind: str, body: bytes) -> None:
        if not self._lost:
            try:
                self.channel.send(kind, body)
            except OSError:
                self._lose_launcher()

    def _send_json(self, **fields: Any) -> None:
        self._send("J", json.dumps(fields).encode())

    @abstractmethod
    def _lose_launcher(self) -> None:
        """Handle the loss of the connection to the launcher."""

    # -- 4. leave nothing behind ---------------------------------------------------------------------------------------

    def _clean_up(self) -> None:
        if self._process is None:
            return
        if self._status is None:
            self._process.send(signal.SIGKILL)
        guard.sweep(self.run_id, [self._process.pid], patience_s=0.15, manager_patience_s=0.0 if self._lost else 3.0)
        self._process.close()
        self._stacks.close()
        self._starter.close()
        self.channel.close()


class OneWorkerAgent(Agent):
    """The agent of one worker, from the greeting to the end."""

    def serve(self) -> int:
        """Serve to the end; returns the exit status for the engine."""
        self._take_signals()
        self._say_hello()
        while self._start is None and not self._lost and self._leave is None and not self._schedule:
            self._pump(None)
        if self._start is None:
            return self._leave or 1
        try:
            self._start_worker(self._start)
            self._watch()
            # Until the launcher knows how the worker ended, or is gone.
            deadline = time.monotonic() + _DRAIN_S
            while self._leave is None and not self._lost and time.monotonic() < deadline:
                self._pump(deadline - time.monotonic())
                if self._terminated:  # the engine does not wait
                    deadline = min(deadline, time.monotonic() + 0.5)
        finally:
            self._clean_up()
        if self._leave is not None or self._status is None:
            return 1 if self._leave is None else self._leave
        return 128 - self._status if self._status < 0 else self._status

    def _lose_launcher(self) -> None:
        self._lost = True
        self._loop.forget(self.channel)
        self._stop(_ON_LOSS)


def identity() -> str:
    """Equal for two workers exactly if they are on one host and see the same accelerators."""
    parts = [os.environ.get("CUDA_VISIBLE_DEVICES", "")]
    with contextlib.suppress(OSError):
        parts += [read_boot_id(), *read_namespaces("net")]
    return " ".join([os.environ.get("UNISONO_HOST", socket.gethostname()), *parts])


def serve_worker() -> int:
    """Serve the worker whose place the environment names."""
    told = json.loads(os.environ.pop(AGENT))  # the worker has no use for it
    if "parent" in told:
        die_with(told["parent"])
    place = read_place(engine=told["engine"] or None)
    if place is None:
        print("unisono: the engine did not say which worker this is", file=sys.stderr)
        return UNREACHED
    addresses = [(host, port) for host, port in told["launcher"]]
    launched_from = os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "")
    if launched_from and told["engine"] == "Slurm":
        addresses.insert(0, (launched_from, addresses[0][1]))
    try:
        channel = connect(list(dict.fromkeys(addresses)), bytes.fromhex(told["token"]))
    except Unreachable as error:
        print(f"unisono: {error}", file=sys.stderr)
        return UNREACHED
    if told["heartbeat_s"] is None:
        return OneWorkerAgent(channel, place, told).serve()
    from unisono.launchers.worker.elastic_agent import ElasticAgent

    return ElasticAgent(channel, place, told).serve()
