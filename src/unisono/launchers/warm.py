"""The user's own fork server, kept between commands: `unisono run --warm`.

There is one for each interpreter, version of torch, state of Unisono's sources, set of namespaces, and set of variables
that count when a process starts (fork_context.py). Its socket lies in a folder that only the user can enter, and both
ends ask the kernel who is at the other. It ends after ten minutes without a run, or by `unisono warm stop`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from unisono.launchers.fork_context import process_context, start_variables
from unisono.launchers.forks import NoServer, server_command, server_environment
from unisono.launchers.runtime.files import NotPrivate, find_private_folder
from unisono.launchers.runtime.local_channel import LocalChannel

__all__ = ["WarmServer", "connect_warm", "list_warm", "stop_warm"]

_IDLE_S = 600.0  # UNISONO_WARM_IDLE_S sets another
_PACKAGE = Path(__file__).parents[1]


def connect_warm() -> LocalChannel:
    """A connection to the user's fork server, which is started if there is none."""
    path = _socket_path()
    with contextlib.suppress(OSError):
        return LocalChannel.connect(path)
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # only one of several commands starts it
        with contextlib.suppress(OSError):
            return LocalChannel.connect(path)
        _start(path)
    return LocalChannel.connect(path)


class WarmServer(NamedTuple):
    """A fork server of the user: its process, how long ago it was started, and the runs that it has workers for."""

    pid: int
    age_s: float
    runs: int


def list_warm() -> list[WarmServer]:
    """The user's fork servers."""
    return _ask_all("status")


def stop_warm() -> list[WarmServer]:
    """Have the user's fork servers end after their current runs; returns them."""
    return _ask_all("stop")


def _ask_all(kind: str) -> list[WarmServer]:
    found = []
    for path in sorted(_private_folder().glob("*.socket")):
        with contextlib.suppress(OSError, ValueError), LocalChannel.connect(path, timeout_s=60) as channel:
            channel.send({"kind": kind})
            answer, _ = channel.receive()
            if answer is not None:
                found.append(WarmServer(answer["pid"], answer["age_s"], answer["runs"]))
    return found


def _start(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    quiet = subprocess.DEVNULL
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen(128)
        idle_s = float(os.environ.get("UNISONO_WARM_IDLE_S", _IDLE_S))
        command = server_command(listener.fileno(), idle_s=idle_s, path=str(path))
        env = server_environment({name: value for name, value in os.environ.items() if name != "UNISONO_RUN"})
        streams: dict[str, Any] = {"stdin": quiet, "stdout": quiet, "stderr": quiet}
        # The process that is started forks the server and ends: the server is no child of this command.
        subprocess.run(command, env=env, pass_fds=(listener.fileno(),), start_new_session=True, check=False, **streams)


def _socket_path() -> Path:
    folder = _private_folder()
    facts = [sys.executable, sys.version, str(_PACKAGE), *map(str, _source_times())]
    facts.append(json.dumps(start_variables(server_environment(os.environ)), sort_keys=True))
    facts.append(str(process_context()["namespaces"]))  # a server that was started in others' would refuse every worker
    return folder / f"{hashlib.sha256(' '.join(facts).encode()).hexdigest()[:16]}.socket"


def _private_folder() -> Path:
    try:
        return find_private_folder()
    except NotPrivate as error:
        raise NoServer(str(error)) from None


def _source_times() -> Iterator[int]:
    """When torch and each of Unisono's sources were last changed: a server that imported others is not used."""
    torch = importlib.util.find_spec("torch")
    if torch is not None and torch.origin is not None:
        yield os.stat(torch.origin).st_mtime_ns
    files = sorted(_PACKAGE.rglob("*.py"))
    yield len(files)
    yield max(file.stat().st_mtime_ns for file in files)
