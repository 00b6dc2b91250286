"""The agent in a run whose workers come and go: starts one worker after the other, in the same place.

Beyond what agent.py does:

1. It passes on what the worker and the launcher tell each other (runtime/membership.py), and the results that workers
   which come later are given.
2. It tells the launcher twice a second how the worker stands, and listens for as much. A launcher that says nothing for
   the heartbeat's time may be cut off from here: the agent tries to reach it anew. When it does, the worker is ended,
   because the others have gone on without it, and the launcher may ask for another.
3. A worker whose launcher has said nothing for three times that long is ended in any case. An agent that cannot reach
   the launcher for `_GIVE_UP_S` ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Mapping
from typing import Any

from unisono.launchers import guard
from unisono.launchers.engines.engine import UNREACHED
from unisono.launchers.joining import read_versions
from unisono.launchers.runtime import membership
from unisono.launchers.runtime.channel import Channel, Frame, Unreachable, connect
from unisono.launchers.runtime.files import anonymous_file
from unisono.launchers.runtime.launch_env import Place
from unisono.launchers.runtime.local_channel import LocalChannel
from unisono.launchers.runtime.status import StatusPage
from unisono.launchers.worker.agent import Agent

__all__ = ["ElasticAgent"]

_BEAT_S = 0.5
_FENCED_AFTER = 3  # heartbeats
_GIVE_UP_S = 300.0
_TRY_S = 1.0


class ElasticAgent(Agent):
    """The agent of one place, for all workers that it has in turn."""

    def __init__(self, channel: Channel, place: Place, told: Mapping[str, Any]) -> None:
        super().__init__(channel, place, told)
        self._more_greeting = {"versions": read_versions(), "joined": told.get("joined", False)}
        self._page = StatusPage.create(place.size)
        self._heartbeat_s = float(told["heartbeat_s"])
        self._token = bytes.fromhex(told["token"])
        self._launcher: tuple[str, int] = channel.sock.getpeername()[:2]
        self._heard = self._beaten = self._tried = time.monotonic()
        self._fresh_since = self._heard  # neither this process nor the worker was stopped on purpose since
        self._paused = False  # with the launcher, by Ctrl-Z
        self._is_gone = False  # the launcher
        self._next: Channel | None = None  # to the launcher, when the worker of the former one has ended
        self._control: LocalChannel | None = None  # to the worker
        self._log_pieces: list[bytes] = []
        self._log: membership.ResultLog | None = None
        self._log_fd = -1
        self._log_mark: tuple[int, ...] = ()  # of the file, when it was last looked at
        self._log_sent = b""  # what the launcher was sent of it

    def serve(self) -> int:
        self._take_signals()
        self._limit_silence()
        self._say_hello()
        try:
            while True:
                while self._start is None and not self._is_over:
                    self._pump(None)
                if self._start is None:
                    break
                self._start_worker(self._start)
                self._start = None
                self._watch()
                self._retire()
                if self._next is not None:
                    self._take_channel(self._next)
        finally:
            self._clean_up()
        if self._is_gone and self._leave is None:
            return UNREACHED
        return self._leave if self._leave is not None else 128 + signal.SIGTERM

    @property
    def _is_over(self) -> bool:
        return self._is_gone or self._leave is not None or self._terminated

    # -- one worker after the other ------------------------------------------------------------------------------------

    def _follow(self, frame: Frame) -> None:
        self._heard = time.monotonic()
        if frame.kind == "G":
            self._log_pieces.append(frame.body)
            return
        if frame.kind == "C":
            if self._control is not None:
                with contextlib.suppress(OSError):  # it has died, and its end will be noticed
                    self._control.send(frame.json())
            return
        message = frame.json() if frame.kind == "J" else {}
        if message.get("kind") == "beat":
            return
        if message.get("kind") == "summon":
            assert self._page is not None
            self._page.request_regroup(message["generation"])
            return
        if message.get("kind") == "signal" and message["number"] in (signal.SIGSTOP, signal.SIGCONT):
            self._paused = message["number"] == signal.SIGSTOP
        super()._follow(frame)

    def _start_worker(self, start: dict[str, Any]) -> None:
        assert self._page is not None
        self._page.clear(self.place.rank)
        self._page.request_regroup(start["summons"])
        self._status = None
        super()._start_worker(start)
        self._theirs.close()

    def _more_descriptors(self) -> dict[str, int]:
        self._control, self._theirs = LocalChannel.pair()
        self._control.set_timeout(0)
        self._loop.watch(self._control, self._on_worker)
        self._log_fd = anonymous_file("unisono-results")
        self._log = membership.ResultLog(self._log_fd)
        self._log.write(membership.cut_entries(b"".join(self._log_pieces))[0])
        self._log_mark = self._log.read_mark()
        self._log_pieces, self._log_sent = [], b""
        return {membership.VARIABLE: self._theirs.fileno(), membership.LOG_VARIABLE: self._log_fd}

    def _environment(self, start: dict[str, Any]) -> dict[str, str]:
        env = super()._environment(start)
        env.update(UNISONO_PLACE=str(self.place.rank), **{membership.OVER_HOSTS: "1"})
        env.update(RANK=str(start["rank"]), WORLD_SIZE=str(start["size"]))
        if start["joining"]:
            env[membership.JOINING] = "1"
        return env

    def _watch(self) -> None:
        super()._watch()
        assert self._process is not None
        self._process.send_group(signal.SIGKILL)  # what it started ends too

    def _drain(self) -> None:
        super()._drain()
        while self._control is not None and self._on_worker():
            pass
        self._send_log()

    def _retire(self) -> None:
        """Close everything that belongs to a worker that has ended."""
        assert self._process is not None
        self._process.forget()
        os.close(self._log_fd)
        self._drop_control()
        for fd in (self._payload, self._result):
            if fd >= 0:
                os.close(fd)
        self._payload = self._result = -1
        self._process.close()
        self._process, self._log, self._schedule = None, None, []

    def _clean_up(self) -> None:
        if self._process is None:  # the last worker was let go: what it left in sessions of their own
            guard.sweep(self.run_id, (), patience_s=0.15, manager_patience_s=0.0 if self._lost else 3.0)
            self._stacks.close()
            self._starter.close()
            self.channel.close()
            return
        super()._clean_up()

    # -- what they tell each other -------------------------------------------------------------------------------------

    def _on_worker(self) -> bool:
        """Pass one message of the worker on to the launcher; False if there is none now."""
        assert self._control is not None
        try:
            message, _ = self._control.receive()
        except BlockingIOError:
            return False
        if message is None:
            self._drop_control()
            return False
        self._send("C", json.dumps(message).encode())
        return True

    def _drop_control(self) -> None:
        if self._control is not None:
            self._loop.forget(self._control)
            self._control.close()
            self._control = None

    def _send_log(self) -> None:
        """What the worker has written since: before its step is told, so that the launcher has all up to that.

        Only rank 0 writes. One that has become rank 0 is sent as a whole: it replaces what the former one wrote.
        """
        if self._log is None or (mark := self._log.read_mark()) == self._log_mark:
            return
        self._log_mark = mark
        data = self._log.read_bytes(0)
        if not self._log_sent or not data.startswith(self._log_sent):
            self._send_json(kind="log", bytes=len(data))
            self._send("L", data)
        elif len(data) > len(self._log_sent):
            self._send("L", data[len(self._log_sent) :])
        self._log_sent = data

    # -- the launcher, and whether it can be reached -------------------------------------------------------------------

    def _pump(self, wait_s: float | None) -> None:
        super()._pump(min(_BEAT_S / 2, _BEAT_S if wait_s is None else wait_s))
        now = time.monotonic()
        if now - self._beaten >= _BEAT_S:
            slept = now - self._beaten > 4 * _BEAT_S + 1.0  # this process was stopped, or the machine was busy
            self._beaten = now
            if slept or self._paused:
                self._heard = self._fresh_since = now
            self._beat(now)
        is_due = now - self._heard > self._heartbeat_s and now - self._tried >= _TRY_S
        if is_due and not self._is_over and self._next is None:
            self._reach_again()
            self._tried = time.monotonic()

    def _beat(self, now: float) -> None:
        if self._process is None or self._status is not None:
            self._send_json(kind="beat")
            return
        assert self._page is not None
        status = self._page.read(self.place.rank)
        self._send_log()
        silent_s = now - max(status.heartbeat, self._fresh_since) if status.heartbeat else 0.0
        step_age_s = now - status.step_at if status.step_at else 0.0
        self._send_status("beat", silent_s=silent_s, step_age_s=step_age_s)

    def _lose_launcher(self) -> None:
        """The connection has broken, or another one works: the others have gone on without this worker."""
        if self._lost:
            return
        self._lost = True
        self._loop.forget(self.channel)
        self.channel.close()
        self._heard = min(self._heard, time.monotonic() - self._heartbeat_s)
        self._tried = 0.0
        self._end_worker()

    def _end_worker(self) -> None:
        if self._process is not None and self._status is None:
            self._process.send_group(signal.SIGKILL)

    def _reach_again(self) -> None:
        """Try another connection: the launcher has said nothing for too long."""
        silent_s = time.monotonic() - self._heard
        try:
            channel = connect([self._launcher], self._token, timeout_s=0.0)
        except Unreachable:
            self._is_gone = silent_s > _GIVE_UP_S or (self._lost and self._is_refused())
            if silent_s > _FENCED_AFTER * self._heartbeat_s or self._is_gone:
                self._end_worker()
            return
        self._lose_launcher()
        if self._process is None:
            self._take_channel(channel)
        else:
            self._next = channel

    def _take_channel(self, channel: Channel) -> None:
        self.channel, self._next, self._lost = channel, None, False
        self._heard = time.monotonic()
        self._log_pieces, self._pieces, self._start = [], [], None
        self._limit_silence()
        self._say_hello()

    def _limit_silence(self) -> None:
        """Have sends to a host that is cut off fail instead of waiting forever."""
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            limit_ms = int(1000 * _FENCED_AFTER * self._heartbeat_s)
            self.channel.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit_ms)

    def _is_refused(self) -> bool:
        """Whether the launcher's host answers, and nothing listens there: the launcher has ended."""
        try:
            socket.create_connection(self._launcher, timeout=_TRY_S).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        return False
