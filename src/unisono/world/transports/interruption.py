"""Ends what a rank waits for in one generation of a world, from another thread: a peer is known to be lost.

A call of gloo waits for its peers without a limit that would help, and has no way to be called back. But it raises at
once when its connections are shut down. gloo does not give its sockets away: they are those that appear among this
process's descriptors while a group connects, but for connections to the store. (A connection that another thread of the
program makes in that very moment would be taken for one of them.)
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch.distributed import Store

from unisono.world.transports import PeerLost
from unisono.world.transports.connections import find_peer_port, list_sockets

__all__ = ["InterruptibleStore", "Interruption"]

_LOOK_S = 0.05  # between two looks at a group that connects
_SHORTEST_S, _LONGEST_S = 0.001, 0.05  # between two looks into the store


class Interruption:
    """Ends the waits of one generation. `end` may be called at any time, also before anything is waited for.

    `spared`: the port of the store, whose connections stay.
    """

    def __init__(self, spared: int | None = None) -> None:
        self.why, self._spared = "", spared
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._connecting: list[set[int]] = []  # for each group that connects now: the sockets that were there before
        self._sockets: set[int] = set()  # of groups that have connected
        self.stores: list[Store] = []  # torch's C++ holds a store without its Python object, which would then be gone

    def check(self) -> None:
        """Raise PeerLost if this generation has ended."""
        if self.why:
            raise PeerLost(self.why)

    def has_ended(self, within_s: float) -> bool:
        """Whether this generation has ended, or does so within that time."""
        return self._ended.wait(within_s)

    def end(self, why: str) -> None:
        """End all waits of this generation, as a peer is lost."""
        self.why = self.why or why
        self._ended.set()
        while True:
            with self._lock:
                known, before = set(self._sockets), list(self._connecting)
            present = _number_sockets()
            _shut_down(known.union(*(present - old for old in before)), self._spared)
            if not before:
                return
            time.sleep(_LOOK_S)

    @contextmanager
    def connecting(self) -> Iterator[None]:
        """Context in which a gloo group connects: its sockets are noted."""
        self.check()
        before = _number_sockets()
        with self._lock:
            self._connecting.append(before)
        try:
            yield
        finally:
            found = _number_sockets() - before
            with self._lock:
                self._connecting.remove(before)
                self._sockets |= found
        self.check()


class InterruptibleStore(Store):
    """A store in which waiting for the others ends with the generation."""

    timeout: timedelta  # torch's: how long `get` and `wait` wait

    def __init__(self, store: Any, interruption: Interruption) -> None:
        super().__init__()
        self.underlying_store, self._interruption = store, interruption
        self.set_timeout(store.timeout)
        interruption.stores.append(self)

    def set(self, key: str, value: str | bytes) -> None:
        """As torch's store does."""
        self._interruption.check()
        self.underlying_store.set(key, value)

    def get(self, key: str) -> bytes:
        """The value of a key, once it is there."""
        self.wait([key])
        return bytes(self.underlying_store.get(key))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there."""
        limit_s = (self.timeout if timeout is None else timeout).total_seconds()
        deadline, pause_s = time.monotonic() + limit_s, _SHORTEST_S
        while True:
            self._interruption.check()
            if self.underlying_store.check(list(keys)):
                return
            if time.monotonic() > deadline:
                raise RuntimeError(f"wait timeout after {limit_s:g} s for keys {', '.join(keys)}")
            time.sleep(pause_s)
            pause_s = min(_LONGEST_S, 2 * pause_s)

    def check(self, keys: Sequence[str]) -> bool:
        """As torch's store does."""
        return bool(self.underlying_store.check(list(keys)))

    def add(self, key: str, value: int) -> int:
        """As torch's store does."""
        self._interruption.check()
        return int(self.underlying_store.add(key, value))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """As torch's store does."""
        return bytes(self.underlying_store.compare_set(key, expected, desired))

    def delete_key(self, key: str) -> bool:
        """As torch's store does."""
        return bool(self.underlying_store.delete_key(key))

    deleteKey = delete_key  # by which torch's C++ looks for it


def _number_sockets() -> set[int]:
    return {number for number, _ in list_sockets()}


def _shut_down(numbers: set[int], spared: int | None) -> None:
    """Shut down the TCP connections among these sockets; their owner finds them closed."""
    for number, sock in list_sockets():
        if number in numbers and find_peer_port(sock) not in (None, spared):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
