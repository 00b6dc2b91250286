"""The connections of one rank to the others of its world: how they meet, and the streams between them.

Each rank opens a door (door.py) and leaves in the run's store where it is. A stream is connected when it is first used,
by the rank that sends. Groups of ranks that are split off use the same doors.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import os
import secrets
import socket
import threading
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from unisono.launchers.runtime.channel import SECRET, derive_secret
from unisono.launchers.runtime.machine import address_of_interface, address_towards, usable_cores
from unisono.world.transports import PeerLost
from unisono.world.transports.connections import find_address, is_of_process
from unisono.world.transports.door import VERSION, Door, Peer
from unisono.world.transports.encryption import is_wanted, wrap_client, wrap_server
from unisono.world.transports.streams import InStream, LinkLost, OutStream, Wire

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["Links", "meet"]

_MOST_LANES = 4
_LOOPBACK = "127.0.0.1"
_ANYWHERE, _ANYWHERE_6 = "192.0.2.1", "2001:db8::1"  # addresses that nobody has: which way out would be taken


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
        """Look after all streams: who waits for one may itself be waited for in another."""
        with self._lock:
            outs = list(self._outs.values())
        for stream in outs:
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
        for out in outs:
            out.close()
        for source in ins:
            source.close()

    @property
    def paused_s(self) -> float:
        """Seconds for which connections of mine that had broken were not there, and were then made again."""
        return sum(stream.paused_s for stream in list(self._outs.values()))

    def _find(self, number: int, lane: str) -> InStream:
        return self.open_in(self._places[number], lane)


_living: weakref.WeakSet[Links] = weakref.WeakSet()


def _forget_all() -> None:
    for links in list(_living):
        links.forget()


os.register_at_fork(after_in_child=_forget_all)


def meet(store: Store, rank: int, size: int, *, timeout_s: float) -> Links:
    """Meet the other ranks in `store`; every rank calls it alike."""
    if rank == 0:
        store.set("door/secret", secrets.token_hex(32))
    listener, addresses = _listen(store)
    try:
        secret = _find_secret(store.get("door/secret"))
        mine = {"version": VERSION, "at": addresses, "port": _find_port(listener), "lanes": _count_lanes()}
        store.set(f"door/{rank}", json.dumps(mine | {"encrypt": is_wanted(addresses)}))
        keys = [f"door/{r}" for r in range(size)]
        store.wait(keys, timedelta(seconds=timeout_s))
        found = [json.loads(store.get(key)) for key in keys]
    except RuntimeError as error:
        listener.close()
        raise PeerLost(f"not all of the {size} ranks came to connect: {error}") from None
    versions = {r: each["version"] for r, each in enumerate(found) if each["version"] != VERSION}
    if versions:
        listener.close()
        raise ValueError(
            f"this rank speaks version {VERSION} of the data plane, and other ranks do not ({versions}): install one "
            "version of unisono on all hosts"
        )
    is_encrypted = any(each["encrypt"] for each in found)
    door = Door(listener, secret, rank=rank, wrap=wrap_server if is_encrypted else None)
    wrap = wrap_client if is_encrypted else None
    places = [[(host, each["port"]) for host in each["at"]] for each in found]
    peers = [Peer(r, rank, place, secret, wrap=wrap) for r, place in enumerate(places)]
    return Links(door, peers, rank, "world", min(each["lanes"] for each in found))


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


def _listen(store: Store) -> tuple[socket.socket, list[str]]:
    """A socket that listens, and the addresses at which other ranks may reach it, the likeliest first.

    An interface that the user names is the only one. Ranks that meet at an address of this machine alone are all here.
    """
    named = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if named:
        try:
            address = address_of_interface(named)
        except OSError as error:
            raise OSError(f"GLOO_SOCKET_IFNAME={named}: that interface has no IPv4 address here ({error})") from None
        return _open_listener(address), [address]
    place = find_address(store)
    host = place[0] if place is not None else _LOOPBACK if is_of_process(store) else ""
    if _is_loopback(host):
        return _open_listener(_LOOPBACK), [_LOOPBACK]
    known = [address_towards(host) if host else "", address_towards(_ANYWHERE), address_towards(_ANYWHERE_6)]
    return _open_listener(""), list(dict.fromkeys(address for address in known if address)) or [_LOOPBACK]


def _open_listener(address: str) -> socket.socket:
    """A socket that listens at an address, or at all of this host; at a port of UNISONO_PORTS, if that is set."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    dual = not address and socket.has_dualstack_ipv6()
    options: dict[str, Any] = {"family": socket.AF_INET6, "dualstack_ipv6": True} if dual else {"family": family}
    text = os.environ.get("UNISONO_PORTS", "")
    for port in _read_ports(text):
        with contextlib.suppress(OSError) if text else contextlib.nullcontext():  # the next may be free
            return socket.create_server((address, port), backlog=1024, **options)
    raise OSError(errno.EADDRINUSE, f"UNISONO_PORTS={text}: all of these ports are in use on this host")


def _read_ports(text: str) -> range:
    """The ports of "40000-40100"; one that the system picks if there is no text.

    >>> _read_ports("40000-40001")
    range(40000, 40002)
    """
    if not text:
        return range(1)
    first, _, last = text.partition("-")
    try:
        found = range(int(first), int(last or first) + 1)
    except ValueError:
        found = range(0)
    if not found or not 0 < found[0] <= found[-1] < 1 << 16:
        raise ValueError(f"UNISONO_PORTS is a range of ports such as 40000-40100, got {text!r}")
    return found


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
