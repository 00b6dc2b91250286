"""The connections of one rank to the others of its world: how they meet, and the streams between them.

Each rank opens a door (door.py) and leaves in the run's store where it is. A stream is connected when it is first used,
by the rank that sends. Groups of ranks that are split off use the same doors.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from unisono.launchers.runtime.addresses import (
    ANYWHERE,
    INTERFACE,
    address_towards,
    find_network,
    find_own_addresses,
    is_loopback,
    is_public,
    list_own_addresses,
    open_listener,
)
from unisono.launchers.runtime.channel import SECRET, derive_secret
from unisono.launchers.runtime.machine import usable_cores
from unisono.launchers.runtime.variables import read_encrypt
from unisono.world.transports import PeerLost
from unisono.world.transports.connections import find_address, is_of_process, is_open
from unisono.world.transports.door import VERSION, Card, Door, Peer
from unisono.world.transports.streams import InStream, LinkLost, OutStream, Wire

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["Address", "Links", "choose_addresses", "choose_encryption", "count_encrypted_bytes", "meet", "meet_again"]

_MOST_LANES = 4
_LOOPBACK, _LOOPBACK_6 = "127.0.0.1", "::1"


class Links:
    """The streams of one rank within one group of ranks."""

    def __init__(self, door: Door, peers: Sequence[Peer], rank: int, group: str, lanes: int) -> None:
        """`peers`: of every rank of the group, mine included; `lanes`: over which a large operation is spread."""
        self.rank, self.size, self.lanes = rank, len(peers), lanes
        self._door, self._peers, self._group = door, list(peers), group
        self._places = {peer.rank: place for place, peer in enumerate(peers)}
        self._lock = threading.Lock()
        self._outs: dict[tuple[int, str], OutStream] = {}
        self._ins: dict[tuple[int, str], InStream] = {}
        self._ended = ""
        self._is_counted = False
        _living.add(self)
        door.open_group(group, self._find)

    def open_out(self, to: int, lane: str) -> OutStream:
        """The stream to a rank of the group."""
        with self._lock:
            stream = self._outs.get((to, lane))
            if stream is None:
                peer, group = self._peers[to], self._group

                def connect() -> tuple[Wire, bytes] | None:
                    self.check()
                    return peer.connect(group, lane)

                stream = self._outs[to, lane] = OutStream(connect)
            return stream

    def open_in(self, source: int, lane: str) -> InStream:
        """The stream from a rank of the group."""
        with self._lock:
            stream = self._ins.get((source, lane))
            if stream is None:
                peer, group = self._peers[source], self._group
                stream = self._ins[source, lane] = InStream(lambda: peer.check(group))
            return stream

    def split(self, members: Sequence[int], name: str) -> Links:
        """The links among some ranks of this group."""
        group, place = f"{self._group}/{name}", list(members).index(self.rank)
        return Links(self._door, [self._peers[r] for r in members], place, group, self.lanes)

    def check(self) -> None:
        """Raise if this group has ended here."""
        if self._ended:
            raise LinkLost(self._ended)

    def tend(self) -> None:
        """Look after all streams: who waits for one may itself be waited for in another. A rank that has left ends only
        what waits for it."""
        with self._lock:
            outs = list(self._outs.values())
        for stream in outs:
            with contextlib.suppress(LinkLost):
                stream.tend()

    def end(self, why: str) -> None:
        """End all waits of this group, from any thread: its connections are shut down, and `check` raises."""
        self._ended = self._ended or why
        with self._lock:
            wires = [stream.wire for stream in self._outs.values()]
            wires += [stream.wire for stream in self._ins.values()]
        for wire in wires:
            if wire is not None:
                try:
                    wire.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue  # it has ended by itself

    def forget(self) -> None:
        """In a forked child: close the descriptors, which are its parent's; else nobody sees that the parent ends."""
        wires = [stream.wire for stream in self._outs.values()] + [stream.wire for stream in self._ins.values()]
        for wire in wires:
            if wire is not None:
                wire.close()

    def close(self) -> None:
        """Close all connections of this group, and refuse others."""
        self._ended = self._ended or "the connections of this world were closed, or lost before"
        self._door.close_group(self._group)
        with self._lock:
            outs, ins = list(self._outs.values()), list(self._ins.values())
        _closed.append(self.encrypted_bytes)
        self._is_counted = True
        for out in outs:
            out.close()
        for source in ins:
            source.close()

    @property
    def encrypted_bytes(self) -> int:
        """Bytes that this rank has sent and received here so that nobody else could read them, until it is closed."""
        if not self.is_encrypted or self._is_counted:
            return 0
        sent = sum(stream.sent for stream in list(self._outs.values()))
        return sent + sum(stream.received for stream in list(self._ins.values()))

    @property
    def is_encrypted(self) -> bool:
        """Whether nobody else can read what passes here."""
        return self._door.is_encrypted

    @property
    def paused_s(self) -> float:
        """Seconds for which connections of mine that had broken were not there, and were then made again."""
        return sum(stream.paused_s for stream in list(self._outs.values()))

    def _find(self, number: int, lane: str) -> InStream:
        return self.open_in(self._places[number], lane)


_living: weakref.WeakSet[Links] = weakref.WeakSet()
_closed: list[int] = []  # encrypted bytes of links that were closed


def count_encrypted_bytes() -> int:
    """Bytes that this process has encrypted and decrypted between ranks."""
    return sum(_closed) + sum(links.encrypted_bytes for links in list(_living))


def _forget_all() -> None:
    for links in list(_living):
        links.forget()


os.register_at_fork(after_in_child=_forget_all)


def meet(store: Store, rank: int, size: int, *, timeout_s: float) -> Links:
    """Meet the other ranks in `store`; every rank calls it alike."""
    if rank == 0:
        store.set("door/secret", secrets.token_hex(32))
    listeners, cards = _listen(store)
    try:
        secret = _find_secret(store.get("door/secret"))
        store.set(f"door/{rank}", json.dumps(_describe(cards)))
        keys = [f"door/{r}" for r in range(size)]
        store.wait(keys, timedelta(seconds=timeout_s))
        found = [json.loads(store.get(key)) for key in keys]
        _check_versions(found)
    except BaseException as error:
        for listener in listeners:
            listener.close()
        if not isinstance(error, RuntimeError):
            raise
        raise PeerLost(f"not all of the {size} ranks came to connect: {error}") from None
    links = _connect(listeners, secret, rank, found)
    if rank == 0 and links.is_encrypted and not os.environ.get(SECRET) and is_open(store):
        text = "tensors are encrypted, but the ranks met in a store of torch's, which asks for no secret"
        print(f"unisono: {text}: set {SECRET} for all workers (docs/security.md)", file=sys.stderr, flush=True)
    return links


def meet_again(store: Store, rank: int, exchange: Callable[[bytes], list[bytes]], *, is_encrypted: bool) -> Links:
    """Links among ranks that can `exchange` bytes already, at doors of their own: encrypted or not, as asked."""
    listeners, cards = _listen(store)
    try:
        found = [json.loads(each) for each in exchange(json.dumps([_describe(cards), secrets.token_hex(32)]).encode())]
    except BaseException:
        for listener in listeners:
            listener.close()
        raise
    secret = _find_secret(found[0][1].encode())
    return _connect(listeners, secret, rank, [each for each, _ in found], is_encrypted=is_encrypted)


def _connect(
    listeners: Sequence[socket.socket],
    secret: bytes,
    rank: int,
    found: Sequence[dict[str, Any]],
    *,
    is_encrypted: bool | None = None,
) -> Links:
    """The links to the ranks that described themselves so."""
    places = [[[Address(*place) for place in card] for card in each["cards"]] for each in found]
    is_exposed, cards = choose_addresses(places)
    if is_encrypted is None:
        is_encrypted = choose_encryption([each["encrypt"] for each in found], is_exposed=is_exposed)
    door = Door(listeners, secret, rank=rank, is_encrypted=is_encrypted)
    peers = [Peer(r, rank, card, secret) for r, card in enumerate(cards)]
    lanes = max(min(each["lanes"] for each in found), min(len(each["cards"]) for each in found))
    return Links(door, peers, rank, "world", lanes)


def _describe(cards: list[Card]) -> dict[str, Any]:
    """What the other ranks have to know of this one."""
    own = list_own_addresses()
    return {
        "version": VERSION,
        "cards": [[Address(host, port, find_network(host, own)) for host, port in card] for card in cards],
        "lanes": _count_lanes(),
        "encrypt": read_encrypt(),
    }


def _check_versions(found: Sequence[dict[str, Any]]) -> None:
    versions = {r: each["version"] for r, each in enumerate(found) if each["version"] != VERSION}
    if versions:
        raise ValueError(
            f"this rank speaks version {VERSION} of the data plane, and other ranks do not ({versions}): install one "
            "version of unisono on all hosts"
        )


def choose_encryption(asked: Sequence[bool | None], *, is_exposed: bool) -> bool:
    """Whether the ranks encrypt: if one of them was asked to, else unless one was asked not to, if others may listen.

    >>> choose_encryption([None, True], is_exposed=False), choose_encryption([None, False], is_exposed=True)
    (True, False)
    """
    return True in asked or (False not in asked and is_exposed)


class Address(NamedTuple):
    """Where a rank is reached, and the network that this is in: "10.0.0.0/24"."""

    host: str
    port: int
    network: str


def choose_addresses(ranks: Sequence[Sequence[Sequence[Address]]]) -> tuple[bool, list[list[Card]]]:
    """Which addresses are used, of each rank's cards, and whether bytes may pass where others listen.

    Those in a private network that all ranks are in, if a card has one; else all of it, and others may listen.

    >>> choose_addresses([[[Address("10.0.0.7", 1, "10.0.0.0/24"), Address("2600::7", 1, "2600::/64")]]])
    (False, [[[('10.0.0.7', 1)]]])
    """
    networks = [{place.network for card in cards for place in card} for cards in ranks]
    common = {network for network in set.intersection(*networks) if not is_public(network.partition("/")[0])}
    is_exposed = any(common.isdisjoint(place.network for place in card) for cards in ranks for card in cards)
    return is_exposed, [[_take_common(card, common) for card in cards] for cards in ranks]


def _take_common(card: Sequence[Address], common: set[str]) -> Card:
    return [place[:2] for place in card if place.network in common] or [place[:2] for place in card]


def _find_port(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def _find_secret(shared: bytes) -> bytes:
    """What connections of this world prove: from the store, and from the run's secret if the workers have one."""
    return derive_secret(os.environ.get(SECRET, "").encode() + shared, "data")


def _count_lanes() -> int:
    """Over how many connections a large operation is spread: each has a thread."""
    workers = int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1)
    cores = usable_cores() // max(1, workers)
    return min(_MOST_LANES, cores) if cores > 2 else 1


def _listen(store: Store) -> tuple[list[socket.socket], list[Card]]:
    """Sockets that listen, and the addresses at which other ranks may reach them: of each network card, the likeliest
    first.

    Interfaces that the user names are the only ones. Ranks that meet at an address of this machine alone are all here.
    """
    name = INTERFACE if os.environ.get(INTERFACE) else "GLOO_SOCKET_IFNAME"
    if named := os.environ.get(name, ""):
        listeners, cards = [], []
        for addresses in find_own_addresses(named, name):
            here = [open_listener(str(address)) for address in addresses]
            listeners += here
            cards.append([(str(at), _find_port(one)) for at, one in zip(addresses, here, strict=True)])
        return listeners, cards
    place = find_address(store)
    host = place[0] if place is not None else _LOOPBACK if is_of_process(store) else ""
    if is_loopback(host):
        found = [_LOOPBACK_6 if ":" in host else _LOOPBACK]
        listener = open_listener(found[0])
    else:
        known = [address_towards(target) for target in (host, *ANYWHERE) if target]
        found = list(dict.fromkeys(address for address in known if address)) or [_LOOPBACK]
        listener = open_listener("")
    port = _find_port(listener)
    return [listener], [[(address, port) for address in found]]
