"""The parallel debugger, in a worker: `un.breakpoint()` stops all ranks, and one prompt asks them.

hub.py      where the connections of all workers and of the prompt end
agent.py    the thread in a worker, and how its program stops
rank_pdb.py Python's own debugger, with commands from afar
prompt.py   what a person types, and what all ranks answer
"""

from __future__ import annotations

import os
import pdb
import secrets
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Sequence

from unisono.launchers.runtime import status
from unisono.launchers.runtime.channel import SECRET, derive_secret
from unisono.launchers.runtime.debug_pause import DEBUGGER
from unisono.launchers.runtime.debugger import agent as agents
from unisono.launchers.runtime.debugger.agent import Agent, RankThread, end_agent, find_agent, start_agent
from unisono.launchers.runtime.debugger.hub import Hub, HubConnection, announce, connect_to_hub, forget
from unisono.launchers.runtime.frames import find_user_frame
from unisono.launchers.runtime.variables import read_worker_number

__all__ = ["RankThreads", "breakpoint", "follow", "make_token", "post_mortem"]


def breakpoint(*, rank: int | Sequence[int] | None = None, when: object = True) -> None:  # noqa: A001
    """Stop all workers of the run; one prompt shows where each is, and asks them (docs/debugger.md).

    rank: only this rank, or these, stop here; the others stop wherever they are. when: stop only if it is true, or
    returns true. In a program that runs alone it is Python's own `pdb.set_trace()`.

    >>> breakpoint(when=False)
    """
    if not (when() if callable(when) else when):
        return
    frame = find_user_frame(sys._getframe(1)) or sys._getframe(1)
    mine = find_agent() or _connect()
    if mine is None:
        if not (DEBUGGER in os.environ or agents.is_child or agents.has_agents()):  # no worker, nor started by one
            if rank in (None, 0) or (isinstance(rank, Sequence) and 0 in rank):
                pdb.Pdb().set_trace(frame)
            return
        _warn("un.breakpoint() is passed over: it stops a worker's main thread, and this is another", frame.f_lineno)
        return
    if rank is not None and mine.seat.rank not in ([rank] if isinstance(rank, int) else rank):
        return
    mine.stop_at(frame, "breakpoint", every=rank is None and when is True)
    if mine.problem:
        _warn(f"un.breakpoint() is passed over: the debugger cannot be reached ({mine.problem})", frame.f_lineno)


def post_mortem(error: BaseException) -> None:
    """Stop all workers, this one where it raised `error`; returns when the prompt is left."""
    if type(error).__name__ == "PeerLost":  # the cause is elsewhere
        return
    mine = find_agent() or _connect()
    if mine is not None:
        mine.stop_after(error)


def follow(rank: int, size: int, exchange: Callable[[bytes], list[bytes]], *, is_one_host: bool) -> None:
    """Connect this worker, whose main thread this is, with the debugger's hub; it can be stopped from then on.

    exchange: every rank's bytes; used where no launcher of ours has a hub, and rank 0 makes one.
    """
    if find_agent() is not None or os.environ.get(DEBUGGER) == "0":
        return
    if DEBUGGER in os.environ and status.is_attached():
        _connect()
    elif size > 1 and DEBUGGER not in os.environ:
        mine = _open_hub(is_one_host) if rank == 0 else b""
        told = exchange(mine)[0].decode()
        place, _, token = told.rpartition(" ")
        known = bytes.fromhex(token) if token != "-" else make_token(os.environ[SECRET])
        start_agent(RankThread(rank, size, threading.get_ident()), _open(place, known))


def make_token(secret: str) -> bytes:
    """The token that opens the hub of the run with this secret."""
    return derive_secret(secret.encode(), "debugger")


def _connect() -> Agent | None:
    """Connect to the hub that the environment names; None if this is no worker's main thread."""
    seats = RankThreads.find()
    if seats is not None:
        seats.open()
        return find_agent()
    text = os.environ.get(DEBUGGER, "")
    if text in ("", "0") or not status.is_attached() or agents.is_child or SECRET not in os.environ:
        return None
    if threading.current_thread() is not threading.main_thread():
        return None
    seat = RankThread(read_worker_number() or 0, int(os.environ.get("WORLD_SIZE", "1")), threading.get_ident())
    return start_agent(seat, _open(text, make_token(os.environ[SECRET])))


def _open(text: str, token: bytes) -> Callable[[], HubConnection]:
    found = [address.rpartition(":") for address in text.split(",")]
    addresses = [(host, int(port)) for host, _, port in found]
    return lambda: connect_to_hub(addresses, token)


def _warn(text: str, line: int) -> None:
    warnings.warn(f"{text} (line {line})", stacklevel=3)


def _open_hub(is_one_host: bool) -> bytes:
    """A hub in this process, for workers that no launcher of ours has started: its addresses, and what opens it.

    That follows from the secret of the run, where its user has given one to all workers (docs/security.md).
    """
    secret = os.environ.get(SECRET, "")
    token = make_token(secret) if secret else secrets.token_bytes(32)
    from unisono.launchers.runtime.addresses import ANYWHERE, address_towards, open_listener
    from unisono.launchers.runtime.encryption import is_control_encrypted

    listener = open_listener("127.0.0.1", ports="") if is_one_host else open_listener("")
    hub = Hub(listener, token, _say, is_control_encrypted(is_one_host=is_one_host))
    hub.how_to_attach = f"unisono debug {hub.run}, as the same user on host {socket.gethostname()}"
    hub.start()
    announce(hub, " ".join(sys.argv)[:200])
    out = [] if is_one_host else [*map(address_towards, ANYWHERE), socket.gethostname()]
    found = [*out, "127.0.0.1"]
    places = ",".join(f"{host}:{hub.address[1]}" for host in dict.fromkeys(found) if host)
    return f"{places} {'-' if secret else token.hex()}".encode()


def _say(text: str) -> None:
    print(text, file=sys.__stderr__, flush=True)


class RankThreads:
    """The ranks of a world of threads (`un.run_threads`), with a hub from the first breakpoint on."""

    _all: dict[int, RankThreads] = {}  # noqa: RUF012 (by thread)

    def __init__(self, size: int) -> None:
        self._size, self._lock = size, threading.Lock()
        self._left = 0  # ranks that are over
        self._seats: list[RankThread] = []
        self._hub: Hub | None = None

    @classmethod
    def find(cls) -> RankThreads | None:
        """The ranks of the world that this thread is a rank of; None if it is none."""
        return cls._all.get(threading.get_ident())

    def enter(self, rank: int) -> None:
        """Register this thread as a rank."""
        with self._lock:
            seat = RankThread(rank, self._size, threading.get_ident())
            self._seats.append(seat)
            self._all[seat.thread] = self
            if self._hub is not None:
                self._take(seat, self._hub)

    def leave(self) -> None:
        """Remove this thread's rank, whose function has returned."""
        with self._lock:
            self._seats = [seat for seat in self._seats if seat.thread != threading.get_ident()]
            del self._all[threading.get_ident()]
            end_agent(threading.get_ident())
            self._left += 1
            if self._left == self._size and self._hub is not None:
                forget(self._hub)
                self._hub.close()

    def open(self) -> None:
        """Open the hub and connect all ranks that have entered."""
        from unisono.launchers.runtime.debugger.prompt import TerminalPrompt

        with self._lock:
            if self._hub is not None:
                return
            token = secrets.token_bytes(32)
            self._hub = Hub(socket.create_server(("127.0.0.1", 0)), token, _say)
            self._hub.open_prompt = TerminalPrompt(self._hub).open
            self._hub.how_to_attach = f"unisono debug {self._hub.run}"
            self._hub.start()
            announce(self._hub, " ".join(sys.argv)[:200])
            for seat in self._seats:
                self._take(seat, self._hub)

    @staticmethod
    def _take(seat: RankThread, hub: Hub) -> None:
        start_agent(seat, lambda: connect_to_hub([hub.address], hub.token))
