"""Emulated hosts: network namespaces of this machine without names, each with an address and a link of its own.

Needs Linux, iproute2 and util-linux; root, or the right of every user to make namespaces of their own. `namespaces.py`
makes them, in a process of its own. Here are their descriptors, which keep them alive: nothing is left once this
process and those on the hosts have ended, also by SIGKILL.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

from unisono.launchers.lab import namespaces
from unisono.launchers.runtime.link_emulation import Link
from unisono.launchers.runtime.local_channel import LocalChannel

__all__ = ["EmulatedHosts", "NoNamespaces", "find_obstacle"]

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

    def set_link(self, host: int, how: str) -> None:
        """Take a host's link `down`, or `up` again."""
        subprocess.run(self.command(host, "ip", "link", "set", self.interface, how), check=True)

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
        raise NoNamespaces(f"the namespaces were not made: {words.splitlines()[-1] if words else 'no word of why'}")
    if "obstacle" in found:
        raise NoNamespaces(found["obstacle"])
    return found, fds
