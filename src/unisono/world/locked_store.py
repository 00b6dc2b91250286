"""A store that asks for the run's secret, as torch knows stores: gloo's C++ and `PrefixStore` use it like any other.

Every question has a connection to itself while it waits, so threads do not wait for each other. A store whose
connection broke stays broken, as torch's does.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import DistNetworkError, DistStoreError, Store

from unisono.launchers.runtime.channel import Channel, NotProven, connect_once
from unisono.launchers.runtime.store_server import ANSWER, MessageReader, send_message
from unisono.world.transports import PeerLost
from unisono.world.transports.connections import StorePatience, is_closed, limit_silence_of

__all__ = ["LockedStore"]

_ATTEMPT_S = 3.0  # to connect and prove both ends
_REFUSALS = 3  # after which another secret, or another service, is taken for certain
_kept: list[LockedStore] = []  # torch's C++ holds a store without its Python object, which would then be gone


class _Connection:
    """A connection to the store's server, for one question at a time."""

    def __init__(self, channel: Channel) -> None:
        self.channel, self._reader = channel, MessageReader()

    def ask(self, kind: str, parts: Sequence[bytes], timeout_s: float | None) -> tuple[str, list[bytes]]:
        """Send a question and wait for its answer; TimeoutError if that does not come in time."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        sock = self.channel.sock
        sock.settimeout(None)
        send_message(self.channel, kind, parts)
        while True:
            sock.settimeout(None if deadline is None else max(0.001, deadline - time.monotonic()))
            frames = self.channel.receive()
            if frames is None:
                raise ConnectionResetError(errno.ECONNRESET, "its process has ended")
            for message in self._reader.read(frames):
                return message


class LockedStore(Store):
    """A client of runtime/store_server.py. `PrefixStore` passes on all but `list_keys` and queues: torch has no way."""

    timeout: timedelta  # torch's: how long `get` and `wait` wait

    def __init__(self, host: str, port: int, secret: bytes, *, timeout_s: float) -> None:
        """Waits up to `timeout_s` for the store's process; PeerLost if it does not come."""
        super().__init__()
        self.host, self.port, self._secret = host, port, secret
        self.set_timeout(timedelta(seconds=timeout_s))
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()
        self._silence_s: float | None = None
        self._broken = ""
        self._idle.append(self._connect_first(timeout_s))
        _kept.append(self)

    # -- what torch asks -----------------------------------------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        self._ask("S", [key.encode(), _to_bytes(value)])

    def get(self, key: str) -> bytes:
        """The value of a key, once it is there."""
        return self._ask("G", [key.encode()], self.timeout)[0]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there."""
        self._ask("W", _encode_keys(keys), self.timeout if timeout is None else timeout)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return self._ask("C", _encode_keys(keys)) == [b"1"]

    def add(self, key: str, value: int) -> int:
        """Add to the number under a key (0 if there is none), and return the sum."""
        return int(self._ask("A", [key.encode(), b"%d" % value])[0])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Replace the value that is expected there, and return what is there then."""
        return self._ask("X", [key.encode(), _to_bytes(expected), _to_bytes(desired)])[0]

    def delete_key(self, key: str) -> bool:
        """Remove a key; whether it was there."""
        return self._ask("D", [key.encode()]) == [b"1"]

    def num_keys(self) -> int:
        """How many keys there are."""
        return int(self._ask("N", [])[0])

    def list_keys(self) -> list[str]:
        """All keys."""
        return [key.decode() for key in self._ask("K", [])]

    def has_extended_api(self) -> bool:
        """Whether `append`, `multi_get` and `multi_set` are there."""
        return True

    def append(self, key: str, value: str | bytes) -> None:
        """Put a value behind what a key holds."""
        self._ask("P", [key.encode(), _to_bytes(value)])

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of several keys, once all are there."""
        return self._ask("G", _encode_keys(keys), self.timeout)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set several keys."""
        pairs = zip(keys, values, strict=True)
        self._ask("M", [part for key, value in pairs for part in (key.encode(), _to_bytes(value))])

    def queue_push(self, key: str, value: str | bytes) -> None:
        """Put a value at the end of a queue."""
        self._ask("U", [key.encode(), _to_bytes(value)])

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Take the first value of a queue, once there is one."""
        found = self._ask("O", [key.encode(), b"1" if block else b"0"], self.timeout)
        if not found:
            raise DistStoreError(f"the queue {key!r} is empty")
        return found[0]

    def queue_len(self, key: str) -> int:
        """How many values a queue has."""
        return int(self._ask("L", [key.encode()])[0])

    def clone(self) -> LockedStore:
        """This store itself: it can be used by several threads at once."""
        return self

    deleteKey, getNumKeys = delete_key, num_keys  # by which torch's C++ looks for them

    # -- how it fares --------------------------------------------------------------------------------------------------

    def limit_silence(self, seconds: float) -> None:
        """Have questions fail after `seconds` without a word from the server's host: the kernel counts."""
        with self._lock:
            self._silence_s = seconds
            for connection in self._open:
                limit_silence_of(connection.channel.sock, seconds)

    @property
    def is_broken(self) -> bool:
        """Whether the connection has failed; all later questions fail too."""
        return bool(self._broken)

    def has_ended(self) -> bool:
        """Whether the server has closed a connection."""
        with self._lock:
            return bool(self._broken) or any(is_closed(connection.channel.sock) for connection in self._idle)

    def close(self) -> None:
        """Close what is not in use; a later question connects anew."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            self._drop(connection)

    # -- connections ---------------------------------------------------------------------------------------------------

    def _ask(self, kind: str, parts: Sequence[bytes], timeout: timedelta | None = None) -> list[bytes]:
        timeout_s = None if timeout is None or timeout == timedelta(0) else timeout.total_seconds()
        connection = self._take()
        try:
            found, answer = connection.ask(kind, parts, timeout_s)
        except OSError as error:
            self._drop(connection)
            if isinstance(error, TimeoutError) and error.errno is None:
                keys = ", ".join(part.decode(errors="replace") for part in parts[:5])
                raise DistStoreError(
                    f"wait timeout after {timeout_s:g} s for keys {keys} in the store at {self.host}:{self.port}"
                ) from None
            self._broken = f"the store at {self.host}:{self.port} does not answer ({error.strerror or error})"
            raise DistNetworkError(self._broken) from None
        except BaseException:  # the answer may still come, and would be taken for another's
            self._drop(connection)
            raise
        with self._lock:
            self._idle.append(connection)
        if found != ANSWER:
            raise DistStoreError(f"the store at {self.host}:{self.port}: {answer[0].decode(errors='replace')}")
        return answer

    def _take(self) -> _Connection:
        with self._lock:
            if self._pid != os.getpid():  # a fork: the connections are its parent's
                self._pid, self._idle, self._open = os.getpid(), [], set()
            if self._broken:
                raise DistNetworkError(self._broken)
            if self._idle:
                return self._idle.pop()
        try:
            return self._connect(_ATTEMPT_S if self._silence_s is None else min(_ATTEMPT_S, self._silence_s))
        except OSError as error:
            self._broken = f"the store at {self.host}:{self.port} cannot be reached ({error.strerror or error})"
            raise DistNetworkError(self._broken) from None

    def _connect(self, timeout_s: float) -> _Connection:
        connection = _Connection(connect_once(self.host, self.port, self._secret, timeout_s=timeout_s))
        with self._lock:
            self._open.add(connection)
            if self._silence_s is not None:
                limit_silence_of(connection.channel.sock, self._silence_s)
        return connection

    def _connect_first(self, timeout_s: float) -> _Connection:
        patience, refusals = StorePatience(self.host, self.port, timeout_s), 0
        while True:
            try:
                return self._connect(patience.limit(_ATTEMPT_S))
            except OSError as error:
                refusals += isinstance(error, NotProven)
                if refusals >= _REFUSALS:
                    raise PeerLost(
                        f"what listens at {self.host}:{self.port} is not the store of this run ({error}): every worker "
                        "must be given the same secret, and the port must be the store's own"
                    ) from None
                patience.check(error)
            time.sleep(0.02)

    def _drop(self, connection: _Connection) -> None:
        with self._lock:
            self._open.discard(connection)
        connection.channel.close()


def _to_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _encode_keys(keys: Sequence[str]) -> list[bytes]:
    return [key.encode() for key in keys]
