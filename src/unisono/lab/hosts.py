"""Hosts that are network namespaces of this machine, joined by a bridge with links of a given speed.

Needs Linux, root and iproute2. Everything is removed when the context ends; the kernel's own names carry the
process id, so that several runs do not meet, and what a killed run left is removed by the next.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any


def find_obstacle() -> str:
    """Why emulated hosts cannot be made here; empty if they can."""
    if os.geteuid() != 0:
        return "emulated hosts are network namespaces: run as root"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "emulated hosts need `ip` and `tc`: install iproute2"
    return ""


class EmulatedHosts:
    """`count` hosts, each with an address of its own and a link of `bits_per_s` both ways (None: unshaped).

    with EmulatedHosts(4, bits_per_s=1e9) as hosts:
        workers = [hosts.start(i, ["python", "train.py"], environment_of(i)) for i in range(4)]
    """

    interface = "veth0"

    def __init__(self, count: int, *, bits_per_s: float | None = None) -> None:
        if not 1 <= count <= 200:
            raise ValueError(f"expected 1 to 200 hosts, got {count}")
        if reason := find_obstacle():
            raise RuntimeError(reason)
        self.count, self.bits_per_s = count, bits_per_s
        self._mark = f"un{os.getpid()}"
        self._network = f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 250}"

    def address(self, host: int) -> str:
        """The address of a host, from the other hosts."""
        return f"{self._network}.{host + 1}"

    def namespace(self, host: int) -> str:
        """The name of a host's network namespace."""
        return f"{self._mark}-{host}"

    def start(self, host: int, command: Sequence[str], env: Mapping[str, str], **options: Any) -> subprocess.Popen[Any]:
        """Run a command on a host."""
        return subprocess.Popen(["ip", "netns", "exec", self.namespace(host), *command], env=dict(env), **options)

    def __enter__(self) -> EmulatedHosts:
        _remove_left_over()
        try:
            _run("ip", "link", "add", f"{self._mark}br", "type", "bridge")
            _run("ip", "link", "set", f"{self._mark}br", "up")
            for host in range(self.count):
                self._add(host)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _add(self, host: int) -> None:
        space, outer = self.namespace(host), f"{self._mark}v{host}"
        _run("ip", "netns", "add", space)
        _run("ip", "link", "add", outer, "type", "veth", "peer", "name", self.interface, "netns", space)
        _run("ip", "link", "set", outer, "master", f"{self._mark}br", "up")
        inside = ("ip", "-n", space)
        _run(*inside, "addr", "add", f"{self.address(host)}/24", "dev", self.interface)
        _run(*inside, "link", "set", self.interface, "up")
        _run(*inside, "link", "set", "lo", "up")
        if self.bits_per_s is not None:
            burst = str(max(32_000, min(1_000_000, int(self.bits_per_s / 400))))
            shape = ("root", "tbf", "rate", f"{int(self.bits_per_s)}bit", "burst", burst, "latency", "50ms")
            _run("tc", "qdisc", "add", "dev", outer, *shape)
            _run("tc", "-n", space, "qdisc", "add", "dev", self.interface, *shape)

    def _remove(self) -> None:
        for host in range(self.count):
            subprocess.run(["ip", "netns", "del", self.namespace(host)], capture_output=True)
            subprocess.run(["ip", "link", "del", f"{self._mark}v{host}"], capture_output=True)
        subprocess.run(["ip", "link", "del", f"{self._mark}br"], capture_output=True)


def _remove_left_over() -> None:
    """Remove what killed runs left behind: its names carry the ids of processes that no longer exist."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True).stdout
    for space, pid in re.findall(r"^(un(\d+)-\d+)\b", listed, flags=re.MULTILINE):
        if not os.path.exists(f"/proc/{pid}"):
            subprocess.run(["ip", "netns", "del", space], capture_output=True)
    for link, pid in re.findall(r"^\d+: (un(\d+)(?:br|v\d+))[@:]", links, flags=re.MULTILINE):
        if not os.path.exists(f"/proc/{pid}"):
            subprocess.run(["ip", "link", "del", link], capture_output=True)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.returncode}")
