"""Addresses at which the libraries' own networks reach the ranks of a world."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from unisono.launchers.runtime.machine import address_of_interface, address_towards
from unisono.world import World

__all__ = ["find_own_address", "reserve_port"]


def find_own_address(world: World) -> str:
    """The IPv4 address at which other ranks reach this rank's host; 127.0.0.1 if all are on one host.

    It is that of the interface in GLOO_SOCKET_IFNAME, or else of the one that leads to the launcher.
    """
    if len(set(world.hosts)) == 1:
        return "127.0.0.1"
    if name := os.environ.get("GLOO_SOCKET_IFNAME", ""):
        name = name.split(",")[0]
        try:
            return address_of_interface(name)
        except OSError as error:
            raise OSError(f"GLOO_SOCKET_IFNAME={name}: that interface has no IPv4 address here ({error})") from error
    for target in (os.environ.get("MASTER_ADDR", ""), "192.0.2.1"):
        found = address_towards(target) if target else ""
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
