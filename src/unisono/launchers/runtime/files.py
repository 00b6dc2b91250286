"""Files of one machine: memory without a name, the private folder of a user, and paths told from addresses."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import sys
import tempfile
from pathlib import Path

__all__ = ["NotPrivate", "anonymous_file", "find_private_folder", "local_path", "open_closed_streams"]


def anonymous_file(name: str) -> int:
    """Descriptor of a new empty file in memory (not inherited by other programs unless passed on purpose)."""
    if sys.platform == "linux":
        return os.memfd_create(name)
    with tempfile.TemporaryFile(prefix=name) as file:
        return os.dup(file.fileno())


def open_closed_streams() -> None:
    """Open to /dev/null what the parent has closed of the standard streams (`>&-`), whose places the next files and
    pipes would take."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            stream = open(fd, "w" if fd else "r", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


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


def local_path(path: str | os.PathLike[str]) -> Path:
    """The path; ValueError for an address with a scheme, which would name a folder `s3:` below the working directory.

    >>> local_path("s3://bucket/run")
    Traceback (most recent call last):
        ...
    ValueError: s3://bucket/run has the scheme s3, which is not supported here: expected a path on a disk that all \
workers see; a bucket that is mounted as a folder has one
    """
    text = os.fspath(path)
    if (found := re.match(r"([A-Za-z][A-Za-z0-9+.-]+):/", text)) is not None:  # a Path has made one slash of two
        raise ValueError(
            f"{text} has the scheme {found[1]}, which is not supported here: expected a path on a disk that all "
            "workers see; a bucket that is mounted as a folder has one"
        )
    return Path(text)
