"""The user's own folder for sockets on this host, which nobody else can enter, and a connection to one of them."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path

from unisono.launchers.worker.fork_server import peer_of

__all__ = ["NotPrivate", "connect_to", "find_private_folder", "is_of_this_user"]


class NotPrivate(Exception):
    """The folder is another user's, or others can enter it."""


def find_private_folder() -> Path:
    """The folder, made if need be."""
    wanted = os.environ.get("UNISONO_WARM", "")
    if wanted not in ("", "0", "1"):
        folder = Path(wanted)
    elif "XDG_RUNTIME_DIR" in os.environ:
        folder = Path(os.environ["XDG_RUNTIME_DIR"], "unisono")
    else:
        folder = Path(f"/tmp/unisono-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise NotPrivate(f"{folder} is not a folder of this user alone (mode 700): remove it, or set UNISONO_WARM")
    return folder


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
