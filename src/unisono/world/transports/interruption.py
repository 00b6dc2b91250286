"""Ends what a rank waits for in one generation of a world, from another thread: a peer is known to be lost."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import Store

from unisono.world.transports import PeerLost

__all__ = ["InterruptibleStore", "Interruption"]

_SHORTEST_S, _LONGEST_S = 0.001, 0.05  # between two looks into the store


class Interruption:
    """Ends the waits of one generation. `end` may be called at any time, also before anything is waited for."""

    def __init__(self) -> None:
        self.why = ""
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._told: list[weakref.WeakMethod[Callable[[str], None]]] = []
        self.stores: list[Store] = []  # torch's C++ holds a store without its Python object, which would then be gone

    def check(self) -> None:
        """Raise PeerLost if this generation has ended."""
        if self.why:
            raise PeerLost(self.why)

    def has_ended(self, within_s: float) -> bool:
        """Whether this generation has ended, or does so within that time."""
        return self._ended.wait(within_s)

    def tell(self, method: Callable[[str], None]) -> None:
        """Have a method called with the reason when this generation ends; at once if it has ended. It is not kept."""
        with self._lock:
            self._told = [other for other in self._told if other() is not None]
            self._told.append(weakref.WeakMethod(method))
        if self.why:
            method(self.why)

    def end(self, why: str) -> None:
        """End all waits of this generation, as a peer is lost."""
        self.why = self.why or why
        self._ended.set()
        with self._lock:
            told = [method for ref in self._told if (method := ref()) is not None]
        for method in told:
            method(self.why)


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
