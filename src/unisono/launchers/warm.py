"""The user's own fork server, kept between commands: `unisono run --warm`.

There is one for each interpreter, version of torch and state of Unisono's sources. Its socket lies in a folder that
only the user can enter, and both ends ask the kernel who is at the other. It ends after ten minutes without a run, or
by `unisono warm stop`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unisono.launchers.forks import NoServer, server_command, server_environment
from unisono.launchers.worker.fork_server import peer_of

__all__ = ["connect_warm", "stop_warm", "warm_status"]

IDLE_S = 600.0
_PACKAGE = Path(__file__).parents[1]


def connect_warm() -> socket.socket:
    """A connection to the user's fork server, which is started where there is none."""
    path = _socket_path()
    with contextlib.suppress(OSError):
        return _connect(path)
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # only one of several commands starts it
        with contextlib.suppress(OSError):
            return _connect(path)
        _start(path)
    return _connect(path)


def warm_status() -> dict[str, Any] | None:
    """Process id, age and number of runs of the user's server; None where there is none."""
    return _ask(b"status")


def stop_warm() -> dict[str, Any] | None:
    """Have the server end, after the runs that it has; what it said, None where there is none."""
    return _ask(b"stop")


def _ask(what: bytes) -> dict[str, Any] | None:
    try:
        with _connect(_socket_path()) as sock:
            sock.settimeout(60)
            sock.send(what)
            answer: dict[str, Any] = json.loads(sock.recv(1 << 16))
            return answer
    except (OSError, ValueError):
        return None


def _connect(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.connect(str(path))
        if peer_of(sock)[1] != os.getuid():
            raise PermissionError(f"{path} belongs to another user")
    except BaseException:
        sock.close()
        raise
    return sock


def _start(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    quiet = subprocess.DEVNULL
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen(128)
        command = server_command(listener.fileno(), idle_s=IDLE_S, path=str(path))
        env = server_environment({name: value for name, value in os.environ.items() if name != "UNISONO_RUN"})
        streams: dict[str, Any] = {"stdin": quiet, "stdout": quiet, "stderr": quiet}
        # The process that is started forks the server and ends: the server is no child of this command.
        subprocess.run(command, env=env, pass_fds=(listener.fileno(),), start_new_session=True, check=False, **streams)


def _socket_path() -> Path:
    folder = _private_folder()
    facts = [sys.executable, sys.version, str(_PACKAGE), *map(str, _source_times())]
    return folder / f"{hashlib.sha256(' '.join(facts).encode()).hexdigest()[:16]}.socket"


def _private_folder() -> Path:
    """The folder for the sockets, made if need be: the user's own, and closed to all others."""
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
        raise NoServer(f"{folder} is not a folder of this user alone (mode 700): remove it, or set UNISONO_WARM")
    return folder


def _source_times() -> Iterator[int]:
    """When torch and each of Unisono's sources were last changed: a server that imported others is not used."""
    torch = importlib.util.find_spec("torch")
    if torch is not None and torch.origin is not None:
        yield os.stat(torch.origin).st_mtime_ns
    files = sorted(_PACKAGE.rglob("*.py"))
    yield len(files)
    yield max(file.stat().st_mtime_ns for file in files)
