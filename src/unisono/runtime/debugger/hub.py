"""Where the debugger's connections end: one of each worker, and one of the prompt. A thread of its own.

The launcher has the hub, or rank 0 where there is no launcher of ours. It passes messages on, and keeps two promises:

1. When one worker stops, all others are asked to.
2. Nobody stays stopped without someone who could let it go on: when the prompt is gone, a worker has died, or no prompt
   came in time, all go on.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from unisono.runtime.channel import GREETING_S, Channel, accept, flush

__all__ = ["WAIT_VARIABLE", "Hub", "read_wait_s"]

WAIT_VARIABLE = "UNISONO_DEBUG_WAIT_S"  # how long stopped workers wait for a prompt where there is no terminal
_WAIT_S = 300.0
_LOOK_S = 1.0


def read_wait_s() -> float:
    """How long stopped workers wait for a prompt."""
    text = os.environ.get(WAIT_VARIABLE, "")
    try:
        found = float(text or _WAIT_S)
    except ValueError:
        found = -1.0
    if not found >= 0:
        raise ValueError(f"the environment has {WAIT_VARIABLE}={text!r}; expected seconds, such as {_WAIT_S:g}")
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
    open_prompt: Callable[[], bool] = field(default=lambda: False)
    how_to_attach: str = "unisono debug"
    wait_s: float = field(default_factory=read_wait_s)

    def __post_init__(self) -> None:
        self.listener.setblocking(False)
        self.address: tuple[str, int] = self.listener.getsockname()[:2]
        self.run = secrets.token_hex(3)  # the name by which `unisono debug` finds it
        self._selector = selectors.DefaultSelector()
        self._wakes, self._waker = socket.socketpair()
        self._channels: dict[Channel, _Worker | None] = {}
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
            self._waker.send(b"x")
            self._thread.join(timeout=5.0)
        for sock in (self.listener, self._wakes, self._waker):
            sock.close()
        self._selector.close()

    def _serve(self) -> None:
        self._selector.register(self.listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wakes, selectors.EVENT_READ, lambda: None)
        while not self._is_closing:
            for key, _ in self._selector.select(_LOOK_S):
                if key.fileobj in self._selector.get_map():
                    key.data()
            self._check_times(time.monotonic())
        for channel in list(self._channels):
            self._forget(channel)

    def _check_times(self, now: float) -> None:
        for channel in [c for c, worker in self._channels.items() if worker is None and c is not self._prompt]:
            if now > channel.since + GREETING_S:
                self._forget(channel)
        if self._deadline is not None and now > self._deadline:
            self.say(
                f"unisono: nobody has attached within {self.wait_s:g} s ({WAIT_VARIABLE}): the workers go on, and pass "
                "over further breakpoints"
            )
            self._release("leave")

    # Connections ------------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        channel = accept(self.listener, self.token, self._channels, self._forget)
        if channel is None:
            return
        self._channels[channel] = None
        self._selector.register(channel, selectors.EVENT_READ, partial(self._on_channel, channel))
        self._flush(channel)

    def _on_channel(self, channel: Channel) -> None:
        try:
            channel.flush()
            frames = channel.receive()
            messages = None if frames is None else [frame.json() for frame in frames]
        except (OSError, ValueError):  # gone, or not one of ours
            messages = None
        if messages is None:
            self._lose(channel)
            return
        for message in messages:
            worker = self._channels.get(channel)
            if worker is not None:
                self._on_worker(worker, message)
            elif channel is self._prompt:
                self._on_prompt(message)
            elif channel in self._channels:
                self._on_hello(channel, message)
        self._flush(channel)

    def _on_hello(self, channel: Channel, message: dict[str, Any]) -> None:
        if message["kind"] == "worker":
            self._channels[channel] = _Worker(int(message["rank"]), channel, message)
            self._tell_prompt(**message)
            if self._is_stopping:
                self._ask_to_stop(channel)
            return
        if message["kind"] != "prompt" or self._prompt is not None:
            self._send(channel, kind="busy")
            return
        self._prompt, self._deadline = channel, None
        if self._is_off:
            self._is_off = False
            for worker in self._workers():
                self._send(worker.channel, kind="on")
        for worker in self._workers():
            self._send(channel, **worker.hello)
            if worker.stopped is not None:
                self._send(channel, **worker.stopped)
        self._send(channel, kind="ready", stopping=self._is_stopping)

    def _lose(self, channel: Channel) -> None:
        worker = self._channels[channel]
        self._forget(channel)
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

    def _forget(self, channel: Channel) -> None:
        self._selector.unregister(channel)
        del self._channels[channel]
        channel.close()

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
                f"  The workers wait for {self.wait_s:g} s ({WAIT_VARIABLE}), then they go on."
            )

    def _ask_to_stop(self, channel: Channel) -> None:
        self._send(channel, kind="stop", every=self._every)

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
                        self._send(worker.channel, **message)

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
        self._send(worker.channel, kind=how, stops=worker.stops)

    def _workers(self) -> list[_Worker]:
        return sorted((w for w in self._channels.values() if w is not None), key=lambda worker: worker.rank)

    def _tell_prompt(self, **fields: Any) -> None:
        if self._prompt is not None:
            self._send(self._prompt, **fields)

    def _send(self, channel: Channel, **fields: Any) -> None:
        if channel in self._channels:
            with contextlib.suppress(OSError):  # its end is noticed when it is read
                channel.send_json(**fields)
            self._flush(channel)

    def _flush(self, channel: Channel) -> None:
        if channel in self._channels:
            flush(channel, self._selector)
