"""The user's own folder for sockets and addresses on this host, which nobody else can enter."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

__all__ = ["NotPrivate", "find_private_folder"]


class NotPrivate(Exception):
    """The folder is another user's, or others can enter it."""


def find_private_folder() -> Path:
    """The folder, made if need be."""
    wanted = os.environ.get("UNISONO_WARM", "")
    if wanted not in ("", "0", "1"):
        folder = Path(wanted)
    elif os.access(runtime := os.environ.get("XDG_RUNTIME_DIR", ""), os.W_OK | os.X_OK):  # may be set and not exist
        folder = Path(runtime, "unisono")
    else:
        folder = Path(f"/tmp/unisono-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise NotPrivate(f"{folder} is not a folder of this user alone (mode 700): remove it, or set UNISONO_WARM")
    return folder
