"""One loop for all that a thread waits for: descriptors that can be read, each with a function to call."""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections.abc import Callable
from typing import Protocol

__all__ = ["EventLoop"]


class _HasDescriptor(Protocol):
    def fileno(self) -> int: ...


Source = int | _HasDescriptor


class EventLoop:
    """Belongs to one thread; `wake` may be called from others."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wakes, self.waker = socket.socketpair()  # `waker` may be given to signal.set_wakeup_fd
        for sock in (self._wakes, self.waker):
            sock.setblocking(False)
        self.watch(self._wakes, lambda: self._wakes.recv(4096))

    def watch(self, source: Source, call: Callable[[], object]) -> None:
        """Have `call` called by `pump` whenever `source` can be read."""
        self._selector.register(source, selectors.EVENT_READ, call)

    def watch_writing(self, source: Source, wanted: bool) -> None:
        """Whether the function of a watched source is also to be called when it can be written."""
        key = self._selector.get_key(source)
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if wanted else 0)
        if key.events != events:
            self._selector.modify(source, events, key.data)

    def forget(self, source: Source) -> None:
        """Watch `source` no more, if it is watched."""
        with contextlib.suppress(KeyError, ValueError):  # ValueError: it was closed, and not watched
            self._selector.unregister(source)

    def find_call(self, source: Source) -> Callable[[], object] | None:
        """The function of a source; None if it is not watched."""
        with contextlib.suppress(KeyError, ValueError):
            found: Callable[[], object] = self._selector.get_key(source).data
            return found
        return None

    def pump(self, wait_s: float | None) -> None:
        """Call the functions of all sources that are ready, waiting at most `wait_s` (None: without end) for one."""
        for key, _ in self._selector.select(None if wait_s is None else max(0.0, wait_s)):
            call = self.find_call(key.fd)
            if call is not None and call is key.data:  # else another call has dropped it, perhaps for another source
                call()

    def wake(self) -> None:
        """End the wait of a `pump` that is under way, or else of the next."""
        with contextlib.suppress(OSError):  # it is full, or closed
            self.waker.send(b"x")

    def close(self) -> None:
        """Let go of the loop's own descriptors; the sources stay open."""
        self._selector.close()
        self._wakes.close()
        self.waker.close()
