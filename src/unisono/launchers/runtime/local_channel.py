"""A connection between two processes of one host: JSON objects with open files, over a Unix socket.

A message is one packet; a long one travels in a file without a name. The kernel says who is at the other end.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unisono.launchers.runtime.memfd import anonymous_file

__all__ = ["LocalChannel"]

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
