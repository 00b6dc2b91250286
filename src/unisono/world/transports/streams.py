"""Bytes from one rank to another, in order and each exactly once, over a connection that may have to be made again.

A stream goes one way. Its bytes are numbered: the receiver tells, on the way back, how many it has, and when another
connection takes the place of one that broke, the sender goes on from there. So what has been sent is kept until the
other end has it. Small things are copied; of large ones only a view is kept, so whoever owns that memory leaves it as
it is until `settled` is true.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

__all__ = ["COPIED", "InStream", "LinkLost", "OutStream", "Patience", "Wire", "poll"]

COPIED = 64 << 10  # bytes up to which what is sent is copied, so that nobody waits until the other end has it
_COUNT = struct.Struct("<Q")
_ACK_EVERY = 1 << 20  # bytes received until the sender is told
_HEAR_EVERY = 1 << 20  # bytes sent until the sender looks what it was told
_AGAIN_S = 0.1  # between two attempts to connect, or two questions whether the other end still lives
_FIRST_S = 1.0  # until that is asked of a rank that has not connected yet
_SLICE_S = 0.25  # that a rank sleeps at most before it looks after all its streams, and whether the wait has been ended


class LinkLost(ConnectionError):
    """The other rank is gone, or has not moved a byte for too long."""


class Wire(Protocol):
    """A connection that does not block; a plain socket, or an encrypted one."""

    def fileno(self) -> int: ...

    def send(self, data: memoryview | bytes, /) -> int: ...

    def recv(self, size: int, /) -> bytes: ...

    def recv_into(self, data: memoryview, /) -> int: ...

    def shutdown(self, how: int, /) -> None: ...

    def close(self) -> None: ...


class Patience:
    """How long one operation waits: `timeout_s` without a byte moved, or until `check` raises.

    `tend` is called now and then while it waits: it looks after the streams of other operations. `look_s`: how long it
    goes on looking after something has moved, before it sleeps: to be woken up costs about as much.
    """

    def __init__(
        self, timeout_s: float, check: Callable[[], None], tend: Callable[[], None], *, look_s: float = 0.0
    ) -> None:
        self._timeout_s, self._check, self._tend, self._look_s = timeout_s, check, tend, look_s
        self._since = self._tended = time.monotonic()

    def is_fresh(self) -> bool:
        """Whether something has moved just now, so that it is worth looking again at once."""
        return self._look_s > 0.0 and time.monotonic() - self._since < self._look_s

    def moved(self) -> None:
        """Note that something has moved."""
        self._since = time.monotonic()

    def look(self) -> None:
        """Raise LinkLost if nothing has moved for too long, or what `check` raises."""
        self._check()
        now = time.monotonic()
        if now - self._since > self._timeout_s:
            raise LinkLost(f"nothing has come or gone for {self._timeout_s:g} s")
        if now - self._tended >= _SLICE_S:
            self._tended = now
            self._tend()


class OutStream:
    """The sending end. `connect` makes a proven connection to the other end, and gives what that has said already; it
    returns None if that has to be tried again, and raises LinkLost if the other end is gone for good."""

    def __init__(self, connect: Callable[[], tuple[Wire, bytes] | None]) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self.wire: Wire | None = None
        self._kept: deque[memoryview] = deque()
        self._first = 0  # number of the first byte that is kept
        self._at = 0  # the next of `_kept` to send
        self._offset = 0  # bytes of it that have been sent
        self.sent = self.queued = self.acked = self._heard_at = 0
        self._to_settle = 0  # what has been queued as a view ends here
        self._resuming = False  # a new connection: the other end has yet to say where to go on
        self._told = b""
        self._connected = 0
        self._next_try = 0.0
        self.paused_s = 0.0  # without a connection that was there before
        self._broke_at = 0.0

    def push(self, data: memoryview | bytes) -> None:
        """Queue bytes. Small ones are copied; a larger view must stay as it is until `settled`."""
        size = len(data)
        if not size:
            return
        is_view = isinstance(data, memoryview) and size > COPIED
        with self._lock:
            self._kept.append(memoryview(data if is_view else bytes(data)))
            self.queued += size
            if is_view:
                self._to_settle = self.queued

    @property
    def settled(self) -> bool:
        """Whether all is sent, and the other end has all that was queued as a view."""
        return self.sent == self.queued and self.acked >= self._to_settle

    def pump(self) -> bool:
        """Send what can be sent now, one view at most; whether anything has moved."""
        with self._lock:
            return self._pump()

    def tend(self) -> None:
        """Look after what the other end does not have yet: it may have been lost with a connection, long after it left
        here. Called by any thread; does nothing if another is at it."""
        if self.acked < self.queued and self._lock.acquire(blocking=False):
            try:
                while self.acked < self.queued and self._pump():
                    continue
            finally:
                self._lock.release()

    def _pump(self) -> bool:
        if self.wire is None and not self._open():
            return False
        wire = self.wire
        assert wire is not None
        moved = False
        try:
            if self._resuming or self.sent == self.queued or self.sent - self._heard_at > _HEAR_EVERY:
                with contextlib.suppress(BlockingIOError):
                    self._heard_at = self.sent
                    moved = self._hear(wire)
            if self.sent < self.queued and not self._resuming:
                view = self._kept[self._at]
                while self._offset < len(view):
                    done = wire.send(view[self._offset :] if self._offset else view)
                    self._offset += done
                    self.sent += done
                    moved = True
                self._at, self._offset = self._at + 1, 0
        except BlockingIOError:
            return moved
        except LinkLost:
            raise
        except OSError:
            self.drop()
        return moved

    def wait_for(self) -> tuple[int, int]:
        """The descriptor and the events to sleep for; -1 if it has no connection."""
        if self.wire is None:
            return -1, 0
        hears = self._resuming or self.sent == self.queued
        return self.wire.fileno(), select.POLLIN if hears else select.POLLOUT

    def drop(self) -> None:
        """Close the connection; another may take its place."""
        if self.wire is not None:
            self.wire.close()
            self.wire = None
            self._broke_at = time.monotonic()

    def close(self) -> None:
        """Close the connection for good. What the other end has told is read first: the kernel would answer bytes that
        are unread with a reset, which may overtake what is still on its way."""
        with contextlib.suppress(OSError):
            while self.wire is not None and self.wire.recv(4096):
                continue
        self.drop()

    def _open(self) -> bool:
        now = time.monotonic()
        if now < self._next_try:
            return False
        self._next_try = now + _AGAIN_S
        made = self._connect()
        if made is None:
            return False
        self.wire, self._told = made
        self._resuming = self._connected > 0
        self._connected += 1
        self._follow()
        if self._broke_at:
            self.paused_s += time.monotonic() - self._broke_at
            self._broke_at = 0.0
        return True

    def _hear(self, wire: Wire) -> bool:
        """Read how far the other end has come."""
        heard = wire.recv(4096)
        if not heard:
            raise ConnectionResetError("the other end has closed")
        self._told += heard
        return self._follow()

    def _follow(self) -> bool:
        """Take in how far the other end says it has come; whether it has said that."""
        whole = len(self._told) // _COUNT.size * _COUNT.size
        if not whole:
            return False
        (count,) = _COUNT.unpack_from(self._told, whole - _COUNT.size)
        (first,) = _COUNT.unpack_from(self._told)
        self._told = self._told[whole:]
        if not self.acked <= count <= self.queued:
            raise LinkLost(f"the other end says that it has {count} bytes of {self.queued}")
        if self._resuming:
            self._rewind(first)
            self._resuming = False
        self.acked = max(self.acked, count)
        while self._at and self._first + len(self._kept[0]) <= self.acked:
            self._first += len(self._kept.popleft())
            self._at -= 1
        return True

    def _rewind(self, count: int) -> None:
        """Go on with byte number `count`."""
        self._at, start = 0, self._first
        while self._at < len(self._kept) and start + len(self._kept[self._at]) <= count:
            start += len(self._kept[self._at])
            self._at += 1
        self._offset, self.sent = count - start, count
        self._heard_at = count


class InStream:
    """The receiving end. Its connections come from the door (door.py), in a thread of its own.

    `check` is asked while there is none that works: it raises LinkLost if the other end is gone for good.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        self.wire: Wire | None = None
        self._lock = threading.Lock()
        self._is_closed = False
        self.received = 0
        self._told = 0
        self._next_check = time.monotonic() + _FIRST_S
        self._was_connected = False

    def hand(self, wire: Wire) -> None:
        """Take a new connection in the place of the one before; called by the door.

        The sender is told at once where to go on: whoever reads here may be busy elsewhere, with the sender as well.
        """
        with self._lock:
            old, self.wire = (wire, None) if self._is_closed else (self.wire, wire)
            self._told, self._was_connected = -1, True
            self._acknowledge()
        if old is not None:
            with contextlib.suppress(OSError):
                old.shutdown(socket.SHUT_RDWR)  # whoever sleeps there wakes up
            old.close()

    def recv_into(self, view: memoryview) -> int:
        """Bytes that have come, written to the beginning of `view`; 0 if there are none yet."""
        with self._lock:
            if self.wire is not None:
                return self._read(self.wire, view)
        now = time.monotonic()
        if now >= self._next_check:
            self._next_check = now + (_AGAIN_S if self._was_connected else _FIRST_S)
            self._check()
        return 0

    def acknowledge(self) -> None:
        """Tell the sender how much has come."""
        with self._lock:
            self._acknowledge()

    def can_read(self) -> bool:
        """Whether something has come, or the connection has ended."""
        wire = self.wire
        if wire is None:
            return False
        return getattr(wire, "has_more", False) or bool(poll([(wire.fileno(), select.POLLIN)], 0.0))

    def wait_for(self) -> tuple[int, int]:
        """The descriptor and the events to sleep for; -1 if it has no connection."""
        wire = self.wire
        return (-1, 0) if wire is None else (wire.fileno(), select.POLLIN)

    def close(self) -> None:
        """Close the connection, and every one that comes later."""
        with self._lock:
            self._is_closed = True
            self._drop()

    def _read(self, wire: Wire, view: memoryview) -> int:
        try:
            count = wire.recv_into(view)
            if not count:
                raise ConnectionResetError("the other end has closed")
        except BlockingIOError:
            return 0
        except OSError:
            self._drop()
            return 0
        self.received += count
        if self.received - self._told >= _ACK_EVERY:
            self._acknowledge()
        return count

    def _acknowledge(self) -> None:
        if self.wire is None or self._told == self.received:
            return
        try:
            if self.wire.send(_COUNT.pack(self.received)) < _COUNT.size:
                self._drop()
                return
            self._told = self.received
        except OSError:  # no room, and the numbers are running totals; or its end, and what has come can still be read
            return

    def _drop(self) -> None:
        """Close the connection; another may take its place."""
        if self.wire is not None:
            self.wire.close()
            self.wire = None
            self._next_check = time.monotonic() + _AGAIN_S


def poll(waits: list[tuple[int, int]], timeout_s: float = _SLICE_S) -> list[tuple[int, int]]:
    """Sleep until one of these descriptors is ready; not for long if one has no connection yet."""
    poller = select.poll()
    missing = False
    for fd, events in waits:
        if fd < 0:
            missing = True
        else:
            poller.register(fd, events)
    return poller.poll(1000 * (min(timeout_s, 0.002) if missing else timeout_s))
