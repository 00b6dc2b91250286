"""What processes of one host tell each other, and the loop in which a thread waits for all that it is told.

- LocalChannel: JSON objects with open files, over a Unix socket. A message is one packet; a long one travels in a file
  without a name. The kernel says who is at the other end.
- EventLoop: descriptors that can be read, each with a function to call.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.launchers.runtime.files import anonymous_file

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

__all__ = ["EventLoop", "LocalChannel"]

PACKET_BYTES = 1 << 16
LONGEST_MESSAGE = 64 << 20
_MOST_FILES = 250  # the kernel passes at most 253 in a packet
_IN_FILE = b"+"  # the message is in the first of the files


class LocalChannel:
    """One end. It blocks until `set_timeout` is called."""

    def __init__(self, sock: socket.socket | int) -> None:
        self.sock = socket.socket(fileno=sock) if isinstance(sock, int) else sock

    @classmethod
    def pair(cls) -> tuple[LocalChannel, LocalChannel]:
        """Both ends of a new connection; one may be inherited by a child."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours), cls(theirs)

    @classmethod
    def connect(cls, path: Path, *, timeout_s: float | None = None) -> LocalChannel:
        """A connection to a process of this user that listens at `path`."""
        channel = cls(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        try:
            channel.set_timeout(timeout_s)
            channel.sock.connect(str(path))
            if not channel.is_of_this_user():
                raise PermissionError(f"{path} belongs to another user")
        except BaseException:
            channel.close()
            raise
        return channel

    def __enter__(self) -> LocalChannel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        """The socket's descriptor, for event loops."""
        return self.sock.fileno()

    def set_timeout(self, seconds: float | None) -> None:
        """How long `send` and `receive` wait: 0 not at all (BlockingIOError), None without end, else TimeoutError."""
        self.sock.settimeout(seconds)

    def read_peer(self) -> tuple[int, int]:
        """Process and user at the other end, as the kernel says."""
        pid, uid, _ = struct.unpack("3i", self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return pid, uid

    def is_of_this_user(self) -> bool:
        """Whether a process of this user is at the other end."""
        return self.read_peer()[1] == os.getuid()

    def send(self, message: dict[str, Any], files: Sequence[int] = ()) -> None:
        """Send a message with open files, which the other end gets copies of."""
        data = json.dumps(message).encode()
        if len(data) <= PACKET_BYTES:
            socket.send_fds(self.sock, [data], list(files))
            return
        with open(anonymous_file("unisono-message"), "wb") as file:
            file.write(data)
            file.flush()
            socket.send_fds(self.sock, [_IN_FILE], [file.fileno(), *files])

    def receive(self) -> tuple[dict[str, Any] | None, list[int]]:
        """The next message and its open files, which are the caller's to close; (None, []) if the other end is gone.

        Raises ValueError if it is no JSON object; its files are closed then.
        """
        try:
            data, files, _, _ = socket.recv_fds(self.sock, PACKET_BYTES, _MOST_FILES)
        except (BlockingIOError, TimeoutError):
            raise
        except OSError:
            return None, []
        if not data:
            return None, []
        for fd in files:
            os.set_inheritable(fd, False)  # recv_fds does not pass the flag for it on to the kernel
        try:
            if data == _IN_FILE and files:
                data = os.pread(files[0], LONGEST_MESSAGE, 0)
                os.close(files.pop(0))
            message = json.loads(data)
            if not isinstance(message, dict):
                raise ValueError("expected a JSON object")
        except BaseException as error:
            for fd in files:
                os.close(fd)
            if isinstance(error, RecursionError | OSError):  # OSError: a file that is none of ours
                raise ValueError(f"expected a JSON object: {error}") from None
            raise
        return message, files

    def close(self) -> None:
        """Close this end."""
        self.sock.close()


class EventLoop:
    """Belongs to one thread; `wake` may be called from others."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wakes, self.waker = socket.socketpair()  # `waker` may be given to signal.set_wakeup_fd
        for sock in (self._wakes, self.waker):
            sock.setblocking(False)
        self.watch(self._wakes, lambda: self._wakes.recv(4096))

    def watch(self, source: FileDescriptorLike, call: Callable[[], object]) -> None:
        """Have `call` called by `pump` whenever `source` can be read."""
        self._selector.register(source, selectors.EVENT_READ, call)

    def watch_writing(self, source: FileDescriptorLike, wanted: bool) -> None:
        """Whether the function of a watched source is also to be called when it can be written."""
        key = self._selector.get_key(source)
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if wanted else 0)
        if key.events != events:
            self._selector.modify(source, events, key.data)

    def forget(self, source: FileDescriptorLike) -> None:
        """Watch `source` no more, if it is watched."""
        with contextlib.suppress(KeyError, ValueError):  # ValueError: it was closed, and not watched
            self._selector.unregister(source)

    def find_call(self, source: FileDescriptorLike) -> Callable[[], object] | None:
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
