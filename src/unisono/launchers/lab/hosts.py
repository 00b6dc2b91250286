"""Emulated hosts: network namespaces of this machine without names, each with an address and a link of its own.

Needs Linux, iproute2 and util-linux; root, or the right of every user to make namespaces of their own. `namespaces.py`
makes them, in a process of its own. Here are their descriptors, which keep them alive: nothing is left once this
process and those on the hosts have ended, also by SIGKILL. Only processes can be left, if the launcher and its guard
were both killed: `unisono lab clean` ends them. Versions before this one made namespaces with names, un PID - HOST,
which stay; it removes these too.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

from unisono.launchers.lab import namespaces
from unisono.launchers.runtime.link_emulation import Link
from unisono.launchers.runtime.local_channel import LocalChannel
from unisono.launchers.runtime.machine import read_start

__all__ = ["EmulatedHosts", "NoNamespaces", "clean", "find_obstacle", "find_processes", "mark_of_this_process"]

_MOST_HOSTS = 200  # descriptors that go in one message
_PATIENCE_S = 60.0


class NoNamespaces(RuntimeError):
    """Hosts cannot be emulated by namespaces here; the text says why."""


@cache
def find_obstacle() -> str:
    """Why emulated hosts cannot be made here; empty if they can. Tries it."""
    try:
        EmulatedHosts(1, links=[Link(1e9)]).close()
    except NoNamespaces as error:
        return str(error)
    return ""


class EmulatedHosts:
    """`count` hosts, each with an address of its own; `links`: how each is joined to the others (None: unshaped).

    Only the rates of links are emulated here: the kernel's emulator of latency is not there everywhere.

    with EmulatedHosts(4, links=[Link(1e9)] * 4) as hosts:
        workers = [hosts.start(i, ["python", "train.py"], environment_of(i)) for i in range(4)]
    """

    interface = namespaces.INTERFACE
    launcher_address = namespaces.ADDRESS  # where this process can listen to the hosts, by `listeners`

    def __init__(
        self,
        count: int,
        *,
        links: Sequence[Link] | None = None,
        measure: bool = False,
        listeners: int = 0,
        backlog: int = 128,
    ) -> None:
        """`measure`: what passes over the links, as `bits_per_s` and `latency_s`. Raises NoNamespaces."""
        if not 1 <= count <= _MOST_HOSTS:
            raise ValueError(f"expected 1 to {_MOST_HOSTS} hosts, got {count}")
        if links is not None and len(links) != count:
            raise ValueError(f"expected a link for each of the {count} hosts, got {len(links)}")
        _check_programs()
        self.count = count
        asked = {
            "rates": [None] * count if links is None else [link.bits_per_s for link in links],
            "launcher": os.getpid(),
            "measure": measure,
            "listeners": listeners,
            "backlog": backlog,
        }
        found, fds = _lay_out_as_possible(asked)
        self._spaces = fds[1 : 1 + count]
        self._kept = [fds[0], *fds[1 + count + listeners :]]  # of the bridge; of the user, where that is not root
        self._user = self._kept[1] if len(self._kept) > 1 else None
        self.listeners = [socket.socket(fileno=fd) for fd in fds[1 + count : 1 + count + listeners]]
        self.bits_per_s: list[float] = found.get("bits_per_s", [])  # of payload, by host
        self.latency_s: float = found.get("latency_s", 0.0)

    def address(self, host: int) -> str:
        """The address of a host, from the other hosts."""
        return namespaces.find_address(host)

    def namespaces(self, host: int) -> list[str]:
        """The files of a host's namespaces, in the order in which they are entered: user (not for root), network."""
        fds = [self._spaces[host]] if self._user is None else [self._user, self._spaces[host]]
        return [f"/proc/{os.getpid()}/fd/{fd}" for fd in fds]

    def command(self, host: int, *words: str) -> list[str]:
        """The command line that runs a command on a host."""
        *user, net = self.namespaces(host)
        options = ["--preserve-credentials", f"--user={user[0]}"] if user else []
        return ["nsenter", *options, f"--net={net}", "--", *words]

    def start(self, host: int, command: Sequence[str], env: Mapping[str, str], **options: Any) -> subprocess.Popen[Any]:
        """Run a command on a host."""
        return subprocess.Popen(self.command(host, *command), env=dict(env), **options)

    def close(self) -> None:
        """Let go of the hosts: they end with their last process."""
        for sock in self.listeners:
            sock.close()
        for fd in [*self._spaces, *self._kept]:
            os.close(fd)
        self.listeners, self._spaces, self._kept = [], [], []

    def __enter__(self) -> EmulatedHosts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_kept", None):
            self.close()


def _check_programs() -> None:
    if sys.platform != "linux":
        raise NoNamespaces("network namespaces are a part of Linux")
    packages = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux"}
    missing = [name for name in packages if shutil.which(name) is None]
    if missing:
        raise NoNamespaces(f"`{missing[0]}` is not installed: apt-get install {packages[missing[0]]}")


def _lay_out_as_possible(asked: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
    """As root directly; otherwise, and for a root whose rights a container has taken, in a user namespace."""
    if os.geteuid() != 0:
        return _lay_out({**asked, "user": True})
    try:
        return _lay_out({**asked, "user": False})
    except NoNamespaces as first:
        try:
            return _lay_out({**asked, "user": True})
        except NoNamespaces:
            raise first from None


def _lay_out(asked: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
    """Run namespaces.py; returns what it measured, and the descriptors of what it made."""
    ours, theirs = LocalChannel.pair()
    command = [sys.executable, "-I", "-S", str(Path(namespaces.__file__)), str(theirs.fileno())]
    with ours, theirs:
        process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        theirs.close()
        try:
            ours.set_timeout(_PATIENCE_S)
            ours.send(asked)
            found, fds = ours.receive()
        except OSError as error:
            raise NoNamespaces(f"the namespaces were not made: {error}") from None
        finally:
            process.kill()
            words = process.communicate()[1].decode("utf-8", "replace").strip()
    if found is None:
        raise NoNamespaces(
            f"the namespaces were not made: {words.splitlines()[-1] if words else 'no reason was given'}"
        )
    if "obstacle" in found:
        raise NoNamespaces(found["obstacle"])
    return found, fds


# What killed runs left -----------------------------------------------------------------------------------------------


_VARIABLE = b"UNISONO_LAB="
_TO_END_S = 2.0


def mark_of_this_process() -> str:
    """The mark that a run's processes carry in their environment: the launcher's process id and start time."""
    return f"{os.getpid()}:{read_start(os.getpid())}"


def find_processes() -> dict[int, int]:
    """Processes of this user in runs whose launcher is gone, by process id with the launcher's."""
    found = {}
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            with open(f"/proc/{entry}/environ", "rb") as file:
                marks = [item for item in file.read().split(b"\0") if item.startswith(_VARIABLE)]
        except OSError:  # it ended meanwhile, or is another user's
            continue
        mark = re.fullmatch(rb"UNISONO_LAB=(\d+):(\d+)", marks[0]) if marks else None
        if mark is not None and read_start(int(mark[1])) != int(mark[2]):
            found[int(entry)] = int(mark[1])
    return found


def clean() -> list[str]:
    """End and remove what killed runs left; returns a line for each thing done."""
    done = []
    processes = find_processes()
    for launcher in sorted(set(processes.values())):
        mine = [pid for pid, other in processes.items() if other == launcher]
        done.append(f"ended {len(mine)} process{'es' * (len(mine) > 1)} of a run whose launcher ({launcher}) is gone")
    _end(list(processes))
    return done + _remove_named()


def _end(pids: list[int]) -> None:
    for signum in (signal.SIGTERM, signal.SIGKILL):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)
        deadline = time.monotonic() + _TO_END_S
        while any(pid in find_processes() for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.02)


def _remove_named() -> list[str]:
    """Remove namespaces and links whose names carry the id of a process that is gone."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        return []
    done = []
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True).stdout
    for space, pid in re.findall(r"^(un(\d+)-\d+)\b", spaces, flags=re.MULTILINE):
        if not os.path.exists(f"/proc/{pid}"):
            subprocess.run(["ip", "netns", "del", space], capture_output=True)
            done.append(f"removed the network namespace {space}")
    for link, pid in re.findall(r"^\d+: (un(\d+)(?:br|v\d+))[@:]", links, flags=re.MULTILINE):
        if not os.path.exists(f"/proc/{pid}"):
            subprocess.run(["ip", "link", "del", link], capture_output=True)
            done.append(f"removed the link {link}")
    return done
