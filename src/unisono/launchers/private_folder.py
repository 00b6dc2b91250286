"""The user's own folder for sockets on this host, which nobody else can enter, and a connection to one of them."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from unisono.launchers.worker.fork_server import peer_of
from unisono.runtime.private_folder import NotPrivate, find_private_folder

__all__ = ["NotPrivate", "connect_to", "find_private_folder", "is_of_this_user"]


def connect_to(path: Path, kind: socket.SocketKind, *, timeout_s: float | None = None) -> socket.socket:
    """A connection to a socket of the folder, whose owner the kernel has been asked for."""
    sock = socket.socket(socket.AF_UNIX, kind)
    try:
        sock.settimeout(timeout_s)
        sock.connect(str(path))
        if not is_of_this_user(sock):
            raise PermissionError(f"{path} belongs to another user")
    except BaseException:
        sock.close()
        raise
    return sock


def is_of_this_user(sock: socket.socket) -> bool:
    """Whether a process of this user is at the other end."""
    return peer_of(sock)[1] == os.getuid()
