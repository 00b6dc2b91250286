"""Where the debugger's connections end: one of each worker, and one of the prompt. A thread of its own.

The launcher has the hub, or rank 0 where there is no launcher of ours. It passes messages on, and keeps two promises:

1. When one worker stops, all others are asked to.
2. Nobody stays stopped without someone who could let it go on: when the prompt is gone, a worker has died, or no prompt
   came in time, all go on.

`unisono debug` finds the hub of a run by a file in the user's own folder, with its address and what opens it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unisono.launchers.runtime.channel import Channel, ChannelServer, Frame, connect
from unisono.launchers.runtime.debug_pause import DEBUGGER_WAIT_S
from unisono.launchers.runtime.files import NotPrivate, find_private_folder
from unisono.launchers.runtime.local_channel import EventLoop

__all__ = [
    "TEXT_CHARACTERS",
    "Announced",
    "Hub",
    "HubConnection",
    "announce",
    "attach",
    "connect_to_hub",
    "forget",
    "list_announced",
    "read_wait_s",
]

_WAIT_S = 300.0
_LOOK_S = 1.0


def read_wait_s() -> float:
    """How long stopped workers wait for a prompt."""
    text = os.environ.get(DEBUGGER_WAIT_S, "")
    try:
        found = float(text or _WAIT_S)
    except ValueError:
        found = -1.0
    if not found >= 0:
        raise ValueError(f"the environment has {DEBUGGER_WAIT_S}={text!r}; expected seconds, such as {_WAIT_S:g}")
    return found


@dataclass
class _Worker:
    """What the hub knows of a worker."""

    rank: int
    channel: Channel
    hello: dict[str, Any]
    stopped: dict[str, Any] | None = None  # its message, while it is stopped
    stops: int = 0  # how often it has said so
    releases: int = 0  # how often it was let go; its messages say how many of these had come
    has_said_goodbye: bool = False


@dataclass
class Hub:
    """`open_prompt`: gets a prompt for stopped workers; False where there is no terminal. `say`: a line for people.

    how_to_attach: the command that gives a prompt from elsewhere.
    """

    listener: socket.socket
    token: bytes
    say: Callable[[str], None]
    is_encrypted: bool = False
    open_prompt: Callable[[], bool] = field(default=lambda: False)
    how_to_attach: str = "unisono debug"
    wait_s: float = field(default_factory=read_wait_s)

    def __post_init__(self) -> None:
        self.address: tuple[str, int] = self.listener.getsockname()[:2]
        self.run = secrets.token_hex(3)  # the name by which `unisono debug` finds it
        self._loop = EventLoop()
        self._server = ChannelServer(
            self._loop,
            self.listener,
            self.token,
            self._on_frames,
            self._on_lost,
            is_encrypted=self.is_encrypted,
            name="the debugger",
        )
        self._by_channel: dict[Channel, _Worker] = {}
        self._prompt: Channel | None = None
        self._is_stopping = False  # workers are stopped, or asked to be
        self._pause = 0  # how often this began
        self._every = False  # all ranks come to where the first has stopped
        self._is_off = False  # breakpoints are passed over: nobody was there, or whoever was has left
        self._deadline: float | None = None
        self._paused_s, self._paused_since = 0.0, 0.0
        self._is_closing = False
        self._thread: threading.Thread | None = None

    # Life -------------------------------------------------------------------------------------------------------------

    @property
    def is_serving(self) -> bool:
        """Whether the hub was started."""
        return self._thread is not None

    @property
    def paused_s(self) -> float:
        """For how long workers have been stopped in all."""
        return self._paused_s + (time.monotonic() - self._paused_since if self._is_stopping else 0.0)

    @property
    def is_paused(self) -> bool:
        """Whether workers are stopped, or asked to be."""
        return self._is_stopping

    def start(self) -> None:
        """Serve in a thread of its own."""
        self._thread = threading.Thread(target=self._serve, name="unisono debugger's hub", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all connections: whoever is stopped goes on."""
        self._is_closing = True
        if self._thread is not None:
            self._loop.wake()
            self._thread.join(timeout=5.0)
        self._server.close()
        self._loop.close()

    def _serve(self) -> None:
        self._server.start()
        while not self._is_closing:
            self._loop.pump(_LOOK_S)
            self._server.drop_late()
            if self._deadline is not None and time.monotonic() > self._deadline:
                self.say(
                    f"unisono: nobody has attached within {self.wait_s:g} s ({DEBUGGER_WAIT_S}): the workers continue, "
                    "and ignore further breakpoints"
                )
                self._release("leave")
        self._server.close()

    # Connections ------------------------------------------------------------------------------------------------------

    def _on_frames(self, channel: Channel, frames: list[Frame]) -> None:
        for message in [frame.json() for frame in frames]:
            worker = self._by_channel.get(channel)
            if worker is not None:
                self._on_worker(worker, message)
            elif channel is self._prompt:
                self._on_prompt(message)
            else:
                self._on_hello(channel, message)

    def _on_hello(self, channel: Channel, message: dict[str, Any]) -> None:
        if message["kind"] == "worker":
            self._by_channel[channel] = _Worker(int(message["rank"]), channel, message)
            self._tell_prompt(**message)
            if self._is_stopping:
                self._ask_to_stop(channel)
            return
        if message["kind"] != "prompt" or self._prompt is not None:
            self._server.send(channel, kind="busy")
            return
        self._prompt, self._deadline = channel, None
        if self._is_off:
            self._is_off = False
            for worker in self._workers():
                self._server.send(worker.channel, kind="on")
        for worker in self._workers():
            self._server.send(channel, **worker.hello)
            if worker.stopped is not None:
                self._server.send(channel, **worker.stopped)
        self._server.send(channel, kind="ready", stopping=self._is_stopping)

    def _on_lost(self, channel: Channel) -> None:
        worker = self._by_channel.pop(channel, None)
        if channel is self._prompt:
            self._prompt = None
            if self._is_stopping:
                self._release("leave")
        elif worker is not None:
            has_died = not worker.has_said_goodbye
            self._tell_prompt(kind="gone", rank=worker.rank, died=has_died)
            if self._is_stopping and (has_died or not self._workers()):
                self._release("continue")  # the others are to notice, and not to wait for a person
            elif self._is_stopping and self._prompt is None and not any(w.stopped for w in self._workers()):
                self._release("continue")

    # Messages ---------------------------------------------------------------------------------------------------------

    def _on_worker(self, worker: _Worker, message: dict[str, Any]) -> None:
        message["rank"] = worker.rank
        kind = message["kind"]
        if kind == "bye":
            worker.has_said_goodbye = True
        elif kind == "stopped":
            if not self._take_stop(worker, message):
                return
        elif kind == "answer" and message.get("goes_on"):
            worker.stopped = None
        self._tell_prompt(**message)

    def _take_stop(self, worker: _Worker, message: dict[str, Any]) -> bool:
        """Note that a worker has stopped; False if it is let go at once."""
        worker.stopped = message
        worker.stops += 1
        has_crossed = message.get("after", 0) < worker.releases  # a release was on its way to this worker
        if self._is_off and not self._is_stopping:
            self._let_go(worker, "leave")
            return False
        if message["why"] in ("asked", "step") and (has_crossed or not self._is_stopping):  # what it obeyed is over
            self._let_go(worker, "continue")
            if self._is_stopping:
                self._ask_to_stop(worker.channel)
            return False
        if not self._is_stopping:
            self._begin_stop(worker, message)
        message["pause"] = self._pause
        return True

    def _begin_stop(self, first: _Worker | None, message: dict[str, Any]) -> None:
        self._is_stopping, self._paused_since = True, time.monotonic()
        self._pause, self._every = self._pause + 1, bool(message.get("every", False))
        for worker in self._workers():
            if worker is not first:
                self._ask_to_stop(worker.channel)
        if self._prompt is None and not self.open_prompt():
            self._deadline = time.monotonic() + self.wait_s
            self.say(
                f"unisono: rank {message['rank']} has stopped at {message['place']}, and no terminal is here to ask. "
                f"Attach with: {self.how_to_attach}\n"
                f"  The workers wait for {self.wait_s:g} s ({DEBUGGER_WAIT_S}), then they continue."
            )

    def _ask_to_stop(self, channel: Channel) -> None:
        self._server.send(channel, kind="stop", every=self._every)

    def _on_prompt(self, message: dict[str, Any]) -> None:
        match message["kind"]:
            case "continue" if message.get("pause", self._pause) < self._pause:
                pass  # it ends one that is over; the prompt has yet to be told of this one
            case "continue" | "leave" | "abort" as how:
                self._release(how)
            case "stop":
                if not self._is_stopping:
                    self._begin_stop(None, message)
            case "line":
                ranks = message.pop("ranks")
                for worker in self._workers():
                    if worker.rank in ranks:
                        self._server.send(worker.channel, **message)

    def _release(self, how: str) -> None:
        """All go on: "leave" also passes over further breakpoints, "abort" ends the programs."""
        if self._is_stopping:
            self._paused_s, self._is_stopping = self.paused_s, False
        self._deadline, self._is_off = None, self._is_off or how == "leave"
        for worker in self._workers():
            self._let_go(worker, how)

    def _let_go(self, worker: _Worker, how: str) -> None:
        """From the stops that are known here: the worker may have come to another one meanwhile."""
        worker.stopped = None
        worker.releases += 1
        self._server.send(worker.channel, kind=how, stops=worker.stops)

    def _workers(self) -> list[_Worker]:
        return sorted(self._by_channel.values(), key=lambda worker: worker.rank)

    def _tell_prompt(self, **fields: Any) -> None:
        if self._prompt is not None:
            self._server.send(self._prompt, **fields)


# The other ends ------------------------------------------------------------------------------------------------------


TEXT_CHARACTERS = 200_000  # of one answer: a message fits into one frame


class HubConnection:
    """A worker's or a prompt's connection to the hub; blocking, and usable from any thread."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._lock = threading.Lock()

    def send(self, **fields: Any) -> bool:
        """Send a message; False if the hub is gone."""
        try:
            with self._lock:
                self.channel.send_json(**fields)
        except OSError:
            return False
        return True

    def messages(self) -> Iterator[dict[str, Any]]:
        """Messages from the hub, until it is gone."""
        while True:
            try:
                frames = self.channel.receive()
            except (OSError, ValueError):
                return
            if frames is None:
                return
            for frame in frames:
                yield frame.json()

    def shut(self) -> None:
        """End the connection, also for a thread that reads it now."""
        with contextlib.suppress(OSError):
            self.channel.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the descriptor."""
        self.channel.close()


def connect_to_hub(addresses: Sequence[tuple[str, int]], token: bytes, *, timeout_s: float = 10.0) -> HubConnection:
    """A link to the hub; Unreachable where none of its addresses answers."""
    return HubConnection(connect(addresses, token, timeout_s=timeout_s))


# How `unisono debug` finds a hub -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Announced:
    """A run that can be attached to."""

    run: str
    program: str
    pid: int  # of the hub's process
    address: tuple[str, int]
    token: str


def announce(hub: Hub, program: str) -> None:
    """Have `unisono debug` find the hub; if the folder cannot be used, the run goes on without."""
    address = ("127.0.0.1", hub.address[1])
    text = json.dumps(
        {"run": hub.run, "program": program, "pid": os.getpid(), "address": address, "token": hub.token.hex()}
    )
    try:
        path = _find_file(hub.run)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w") as file:
            file.write(text)
    except (OSError, NotPrivate) as error:
        hub.say(f"unisono: `unisono debug` will not find this run: {error}")
        return
    atexit.register(_remove, path, os.getpid())


def forget(hub: Hub) -> None:
    """Remove the file of a hub that was closed."""
    with contextlib.suppress(NotPrivate):
        _remove(_find_file(hub.run), os.getpid())


def list_announced() -> list[Announced]:
    """The runs of this user on this host whose hub is there."""
    found = []
    for path in sorted(find_private_folder().glob("debug-*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # just written, or just removed
            said = json.loads(path.read_text())
            host, port = said["address"]
            run = Announced(said["run"], said["program"], int(said["pid"]), (host, port), said["token"])
            if os.path.exists("/proc") and not os.path.exists(f"/proc/{run.pid}"):
                path.unlink()  # of a process that was killed
            else:
                found.append(run)
    return found


def attach(run: Announced) -> HubConnection:
    """Connect a prompt to a run's hub."""
    return connect_to_hub([run.address], bytes.fromhex(run.token), timeout_s=3.0)


def _find_file(run: str) -> Path:
    return find_private_folder() / f"debug-{run}.json"


def _remove(path: Path, owner: int) -> None:
    if owner == os.getpid():  # not in a forked child
        path.unlink(missing_ok=True)
