"""Addresses at which the libraries' own networks reach the ranks of a world."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from unisono.world import World

__all__ = ["find_own_address", "reserve_port"]


def find_own_address(world: World) -> str:
    """The IPv4 address of this rank's host, as the others see it; 127.0.0.1 where all are on one host.

    Of several, the interface in GLOO_SOCKET_IFNAME; else the one that leads to the launcher.
    """
    if len(set(world.hosts)) == 1:
        return "127.0.0.1"
    if name := os.environ.get("GLOO_SOCKET_IFNAME", ""):
        return _read_interface(name.split(",")[0])
    launcher = os.environ.get("UNISONO_LAUNCHER", "").rpartition(":")[0]
    for target in (launcher, os.environ.get("MASTER_ADDR", ""), "192.0.2.1"):
        found = _find_address_towards(target) if target else ""
        if found and not found.startswith("127."):
            return found
    raise OSError(
        f"no address of {socket.gethostname()} is known at which other hosts reach it: set GLOO_SOCKET_IFNAME to the "
        "name of its network interface"
    )


@contextmanager
def reserve_port() -> Iterator[tuple[int, socket.socket]]:
    """A free port, held until the socket is closed: close it just before the library takes the port."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        yield held.getsockname()[1], held


def _find_address_towards(host: str) -> str:
    """The address from which this host speaks to another; nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def _read_interface(name: str) -> str:
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
        except OSError as error:
            raise OSError(f"GLOO_SOCKET_IFNAME={name}: that interface has no IPv4 address here ({error})") from error
    return socket.inet_ntoa(answer[20:24])
