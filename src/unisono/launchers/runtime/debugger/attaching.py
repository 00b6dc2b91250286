"""How `unisono debug` finds the hub of a run: a file in the user's own folder, with its address and what opens it."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from unisono.launchers.runtime.debugger.hub import Hub
from unisono.launchers.runtime.debugger.link import HubConnection, connect_to_hub
from unisono.launchers.runtime.private_folder import NotPrivate, find_private_folder

__all__ = ["Announced", "announce", "attach", "forget", "list_announced"]


@dataclass(frozen=True)
class Announced:
    """A run that can be attached to."""

    run: str
    program: str
    pid: int  # of the hub's process
    address: tuple[str, int]
    token: str


def announce(hub: Hub, program: str) -> None:
    """Have `unisono debug` find the hub; if the folder cannot be used, the run goes on without."""
    address = ("127.0.0.1", hub.address[1])
    text = json.dumps(
        {"run": hub.run, "program": program, "pid": os.getpid(), "address": address, "token": hub.token.hex()}
    )
    try:
        path = _find_file(hub.run)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w") as file:
            file.write(text)
    except (OSError, NotPrivate) as error:
        hub.say(f"unisono: `unisono debug` will not find this run: {error}")
        return
    atexit.register(_remove, path, os.getpid())


def forget(hub: Hub) -> None:
    """Remove the file of a hub that was closed."""
    with contextlib.suppress(NotPrivate):
        _remove(_find_file(hub.run), os.getpid())


def list_announced() -> list[Announced]:
    """The runs of this user on this host whose hub is there."""
    found = []
    for path in sorted(find_private_folder().glob("debug-*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # just written, or just removed
            said = json.loads(path.read_text())
            host, port = said["address"]
            run = Announced(said["run"], said["program"], int(said["pid"]), (host, port), said["token"])
            if os.path.exists("/proc") and not os.path.exists(f"/proc/{run.pid}"):
                path.unlink()  # of a process that was killed
            else:
                found.append(run)
    return found


def attach(run: Announced) -> HubConnection:
    """Connect a prompt to a run's hub."""
    return connect_to_hub([run.address], bytes.fromhex(run.token), timeout_s=3.0)


def _find_file(run: str) -> Path:
    return find_private_folder() / f"debug-{run}.json"


def _remove(path: Path, owner: int) -> None:
    if owner == os.getpid():  # not in a forked child
        path.unlink(missing_ok=True)
