"""The door of a rank: where the other ranks of its world connect, each proving the run's secret before anything else.

A connection is proven as those of the control plane are (runtime/channel.py): both ends show that they know the secret,
in a fixed number of bytes that nothing parses. Then it says in one message which stream it carries, and is handed to
that stream. A stranger gets no further than the proof, which is limited in number and time; the rank's program and its
connections go on.
"""

from __future__ import annotations

import errno
import math
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import cast

from unisono.launchers.runtime.channel import Channel, ChannelServer, Frame, NotProven, connect_once
from unisono.launchers.runtime.local_channel import EventLoop
from unisono.world.transports.connections import limit_unanswered
from unisono.world.transports.sealing import can_seal, draw_key, seal
from unisono.world.transports.streams import InStream, LinkLost, Wire

__all__ = ["VERSION", "Card", "Door", "Peer"]

VERSION = 2  # of what is said at the door, and of all that follows
_ATTEMPT_S = 3.0  # to connect and prove both ends
_SAID_AFTER_S = 5.0  # of attempts that failed
_UNANSWERED_S = 20.0  # that bytes are on their way until another card is tried
_DYING_S = 0.5  # that a door is closed until its process counts as gone
_REFUSALS = 3  # after which another secret, or another service, is taken for certain
_MOST_EARLY = 65_536  # connections for groups that this rank has yet to come to

Find = Callable[[int, str], InStream]
Card = list[tuple[str, int]]  # of a network card: the addresses at which a rank is reached by it, the likeliest first


class Door:
    """Accepts connections for the groups of one world, in a thread that ends with the last of them.

    listeners: sockets that listen. secret: what callers have to know. is_encrypted: whether nobody else can read the
    connections.
    """

    def __init__(
        self, listeners: Sequence[socket.socket], secret: bytes, *, rank: int, is_encrypted: bool = False
    ) -> None:
        self._rank, self._secret, self.is_encrypted = rank, secret, is_encrypted
        self.ports = [int(listener.getsockname()[1]) for listener in listeners]
        self._lock = threading.Lock()
        self._groups: dict[str, Find] = {}
        self._left: set[str] = set()
        self._early: dict[str, list[tuple[int, str, Wire]]] = {}
        self._ended = False
        self._loop = EventLoop()
        self._server = ChannelServer(
            self._loop,
            listeners,
            secret,
            self._read,
            lambda _: None,
            is_encrypted=is_encrypted,
            name=f"the data port of rank {rank}",
        )
        self._thread = threading.Thread(target=self._serve, name="unisono door", daemon=True)
        self._thread.start()

    def open_group(self, group: str, find: Find) -> None:
        """Hand connections for `group` to the streams that `find(rank, lane)` gives."""
        with self._lock:  # until those that waited are handed over: a later one for the same stream replaces them
            self._groups[group] = find
            for rank, lane, wire in self._early.pop(group, []):
                find(rank, lane).hand(wire)

    def close_group(self, group: str) -> None:
        """Refuse connections for `group` from now on; with the last group the door closes."""
        with self._lock:
            self._left.add(group)
            self._groups.pop(group, None)
            waiting = self._early.pop(group, [])
            self._ended = self._ended or not self._groups
        for _, _, wire in waiting:
            wire.close()
        if self._ended:
            self._loop.wake()
            if threading.current_thread() is not self._thread:
                self._thread.join()

    def forget(self) -> None:
        """In a forked child: close the descriptors, which are its parent's."""
        self._loop.close()  # first: its descriptor is shared, and what is removed from it is removed for the parent too
        self._server.close()

    def _serve(self) -> None:
        _doors.add(self)
        self._server.start()
        while not self._ended:
            self._loop.pump(self._server.drop_late())
        self._server.close()
        self._loop.close()
        with self._lock:
            waiting = [wire for found in self._early.values() for _, _, wire in found]
            self._early.clear()
        for wire in waiting:
            wire.close()

    def _read(self, channel: Channel, frames: list[Frame]) -> None:
        """Hear what a proven connection is for, and answer."""
        asked = frames[0].json()
        group, rank, lane = asked.get("group"), asked.get("rank"), asked.get("lane")
        if asked.get("version") != VERSION or asked.get("to") != self._rank or len(frames) > 1:
            self._refuse(channel, f"this is rank {self._rank}, which speaks version {VERSION}, and was asked {asked}")
            return
        if not isinstance(group, str) or not isinstance(rank, int) or not isinstance(lane, str):
            self._refuse(channel, f"a stream has a group, a rank and a lane, and was asked {asked}")
            return
        with self._lock:
            find, is_left = self._groups.get(group), group in self._left
        is_sealed = can_seal(channel.sock, asked.get("key"))
        self._server.send(channel, gone=is_left, sealed=is_sealed)
        if channel not in self._server.channels:
            return
        if is_left or not lane:  # the question was whether this rank is still there
            self._server.forget(channel)
            return
        self._server.release(channel)
        wire = cast(Wire, seal(channel.sock, asked["key"], connected=False) if is_sealed else channel.sock)
        with self._lock:
            find = self._groups.get(group)
            if find is None:
                waiting = self._early.setdefault(group, [])
                if sum(map(len, self._early.values())) < _MOST_EARLY and group not in self._left:
                    waiting.append((rank, lane, wire))
                else:
                    wire.close()
                return
        try:
            find(rank, lane).hand(wire)
        except KeyError:
            wire.close()

    def _refuse(self, channel: Channel, why: str) -> None:
        self._server.send(channel, refused=why[:500])
        self._server.forget(channel)
        self._server.name_stranger(channel, why)


class Peer:
    """Another rank, as its door is reached from here."""

    def __init__(self, rank: int, me: int, cards: Sequence[Card], secret: bytes) -> None:
        """`cards`: its network cards; lanes are spread over them."""
        self.rank, self._me, self._secret = rank, me, secret
        self._cards = [list(card) for card in cards]
        self._refused_since: float | None = None
        self._not_proven = 0
        self._failing_since = 0.0

    def connect(self, group: str, lane: str, timeout_s: float = _ATTEMPT_S) -> tuple[Wire, bytes] | None:
        """A connection that carries a stream of `group`, and what has come of it with the answer; None if that has to
        be tried again. LinkLost: it is gone.

        Without a `lane` only whether the rank is still there is asked, and None returned.
        """
        problems: list[OSError] = []
        for card, (host, port) in self._order(lane):
            try:
                channel = connect_once(host, port, self._secret, timeout_s=timeout_s)
                is_open = self._introduce(channel, group, lane, timeout_s)
            except LinkLost:
                raise
            except OSError as error:
                problems.append(error)
                continue
            if card[0] != (host, port):  # what works is tried first; in one go, as other lanes connect meanwhile
                card[:] = [(host, port), *(each for each in card if each != (host, port))]
            self._refused_since, self._failing_since, self._not_proven = None, 0.0, 0
            return (cast(Wire, channel.sock), channel.take_rest()) if is_open else None
        self._judge(problems)
        return None

    def check(self, group: str) -> None:
        """Raise LinkLost if the rank has left the group, or its process is gone."""
        self.connect(group, "", timeout_s=1.0)

    def describe(self) -> str:
        """Where it is reached: "10.0.0.2:40123"."""
        return " or ".join(f"{host}:{port}" for card in self._cards for host, port in card)

    def _order(self, lane: str) -> list[tuple[Card, tuple[str, int]]]:
        """All addresses, in the order in which a lane tries them: "ring1" begins with the second card."""
        number = int(lane[len(lane.rstrip("0123456789")) :] or 0) % len(self._cards)
        cards = self._cards[number:] + self._cards[:number]
        return [(card, address) for card in cards for address in card]

    def _introduce(self, channel: Channel, group: str, lane: str, timeout_s: float) -> bool:
        """Say what the connection is for; whether it stays open."""
        sock = channel.sock
        try:
            sock.settimeout(timeout_s)
            key = draw_key(sock) if lane else ""
            channel.send_json(version=VERSION, group=group, rank=self._me, to=self.rank, lane=lane, key=key)
            frames: list[Frame] | None = []
            while not frames:
                frames = channel.receive()
                if frames is None:
                    raise ConnectionResetError(errno.ECONNRESET, "its door has closed")
            answer = frames[0].json()
            if "refused" in answer:
                raise LinkLost(f"rank {self.rank} at {self.describe()} refused the connection: {answer['refused']}")
            if answer.get("gone"):
                raise LinkLost(f"rank {self.rank} has left")
            if lane:
                sock.setblocking(False)
                if len(self._cards) > 1:  # else nothing is gained, and a rank that is only late would count as cut off
                    limit_unanswered(sock, _UNANSWERED_S)
                if answer.get("sealed") is True:
                    channel.sock = seal(sock, key, connected=True)
                return True
        except BaseException:
            sock.close()
            raise
        sock.close()
        return False

    def _judge(self, problems: list[OSError]) -> None:
        """Raise LinkLost if nobody can be behind the door any more, or never was."""
        self._not_proven += any(isinstance(error, NotProven) for error in problems)
        if self._not_proven >= _REFUSALS:
            raise LinkLost(
                f"what listens at {self.describe()} is not rank {self.rank} of this run ({problems[-1]}): every worker "
                "must be given the same secret"
            )
        now = time.monotonic()
        if not all(isinstance(error, ConnectionRefusedError) for error in problems):
            self._refused_since = None
            self._failing_since = self._failing_since or now
            if now - self._failing_since > _SAID_AFTER_S:
                self._failing_since = math.inf
                text = f"rank {self._me} cannot reach rank {self.rank} at {self.describe()} ({problems[-1]})"
                print(f"unisono: {text}; still trying", file=sys.stderr, flush=True)
            return
        self._refused_since = self._refused_since or now
        if now - self._refused_since > _DYING_S:
            raise LinkLost(f"nothing is listening any more at {self.describe()}, the door of rank {self.rank}")


_doors: weakref.WeakSet[Door] = weakref.WeakSet()


def _forget_all() -> None:
    for door in list(_doors):
        door.forget()


os.register_at_fork(after_in_child=_forget_all)
