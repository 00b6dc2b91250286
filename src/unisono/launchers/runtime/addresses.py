"""Addresses of this host: which interfaces have them, which of them others may use, and sockets that listen there."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import ipaddress
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

__all__ = [
    "ANYWHERE",
    "INTERFACE",
    "PORTS",
    "OwnAddress",
    "address_towards",
    "find_address_for_others",
    "find_network",
    "find_own_addresses",
    "interface_of_address",
    "is_loopback",
    "is_public",
    "list_own_addresses",
    "open_listener",
    "read_ports",
]

INTERFACE = "UNISONO_INTERFACE"
PORTS = "UNISONO_PORTS"
ANYWHERE = "192.0.2.1", "2001:db8::1"  # addresses that nobody has: which way out would be taken
_IS_UP = 1
_PLACES = {int(socket.AF_INET): (4, 4), int(socket.AF_INET6): (8, 16)}  # of the address in a sockaddr, and its bytes


class OwnAddress(NamedTuple):
    """An address of this host, such as 10.0.0.7/24 at eth0."""

    interface: str
    address: ipaddress.IPv4Interface | ipaddress.IPv6Interface

    def __str__(self) -> str:
        return str(self.address.ip)

    @property
    def is_of_link(self) -> bool:
        """Whether it means something only together with a link's name, as IPv6's fe80:: do."""
        return self.address.version == 6 and self.address.is_link_local


class _Entry(ctypes.Structure):
    """`struct ifaddrs` of Linux's <ifaddrs.h>."""


_Entry._fields_ = [
    ("next", ctypes.POINTER(_Entry)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
    ("mask", ctypes.c_void_p),
    ("other", ctypes.c_void_p),
    ("data", ctypes.c_void_p),
]


def list_own_addresses() -> list[OwnAddress]:
    """All addresses of this host's interfaces that are up; known on Linux only."""
    if sys.platform != "linux":
        return []
    library, first = ctypes.CDLL(None, use_errno=True), ctypes.POINTER(_Entry)()
    if library.getifaddrs(ctypes.byref(first)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    found, at = [], first
    while at:
        entry, at = at.contents, at.contents.next
        family = ctypes.c_ushort.from_address(entry.address).value if entry.address and entry.mask else 0
        start, size = _PLACES.get(family, (0, 0))
        if size and entry.flags & _IS_UP:
            number, mask = (ctypes.string_at(place + start, size) for place in (entry.address, entry.mask))
            text = f"{ipaddress.ip_address(number)}/{int.from_bytes(mask, 'big').bit_count()}"
            found.append(OwnAddress(os.fsdecode(entry.name), ipaddress.ip_interface(text)))
    library.freeifaddrs(first)
    return found


def find_own_addresses(text: str, name: str = INTERFACE) -> list[list[OwnAddress]]:
    """This host's addresses that "eth0", "10.0.0.7", "10.0.0.0/24" or several of these (with commas) name: a list for
    each of them, IPv4 first. OSError if one names none; `name`: the variable or option that it stands in.

    >>> [[str(one) for one in found] for found in find_own_addresses("127.0.0.0/8")]
    [['127.0.0.1']]
    """
    every = list_own_addresses()
    chosen = []
    for item in text.split(","):
        found = [one for one in every if _is_named(one, item.strip()) and not one.is_of_link]
        if not found:
            known = ", ".join(f"{one.interface} ({one.address})" for one in every if not one.is_of_link)
            advice = f"there are {known}" if sys.platform == "linux" else "interfaces are known on Linux only"
            raise OSError(
                errno.EADDRNOTAVAIL,
                f"{name}={item}: host {socket.gethostname()} has no such interface with an address, no such address, "
                f"and none in such a network; {advice}",
            )
        chosen.append(sorted(found, key=lambda one: one.address.version))
    return chosen


def _is_named(one: OwnAddress, item: str) -> bool:
    if one.interface == item:
        return True
    with contextlib.suppress(ValueError):
        network = ipaddress.ip_network(item, strict=False)
        return network.version == one.address.version and one.address.ip in network
    return False


def interface_of_address(address: str) -> str:
    """The network interface that has this address, "" if it cannot be found."""
    plain = address.removeprefix("::ffff:").partition("%")[0]
    return next((one.interface for one in list_own_addresses() if str(one) == plain), "")


def address_towards(host: str) -> str:
    """The address from which this host would speak to another, IPv4 if it can; "" if there is no way. Nothing is sent.

    >>> address_towards("127.0.0.1"), address_towards("::1") in ("::1", "")
    ('127.0.0.1', True)
    """
    try:
        places = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return ""
    for family, *_, place in sorted(places, key=lambda one: one[0] != socket.AF_INET):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    return ""


def find_address_for_others(towards: Sequence[str] = ()) -> str:
    """An address at which other hosts may reach this one: of the interface that the user names, else the one from which
    it would speak to `towards`, or to anywhere; "" if there is none."""
    for name in (INTERFACE, "GLOO_SOCKET_IFNAME"):
        if named := os.environ.get(name, ""):
            return str(find_own_addresses(named, name)[0][0])
    known = (address_towards(host) for host in (*towards, *ANYWHERE) if host)
    return next((found for found in known if found and not is_loopback(found)), "")


# Which networks these are in ------------------------------------------------------------------------------------------


_BLOCKS = [ipaddress.ip_network(text) for text in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7")]


def is_loopback(host: str) -> bool:
    """Whether a name or an address means this host alone.

    >>> is_loopback("localhost"), is_loopback("::1"), is_loopback("10.0.0.7")
    (True, True, False)
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_public(address: str) -> bool:
    """Whether an address is one of the internet, or of a provider's: neither private, nor of a link or this host.

    >>> [is_public(one) for one in ("10.0.0.7", "8.8.8.8", "100.64.0.1", "fd00::7", "2600::1", "127.0.0.1")]
    [False, True, True, False, True, False]
    """
    one = ipaddress.ip_address(address)
    return not (one.is_private or one.is_loopback or one.is_link_local)


def find_network(address: str, own: Sequence[OwnAddress]) -> str:
    """The network that one of this host's addresses is in: "10.0.0.0/24".

    Clouds give addresses of which the kernel knows no network (10.0.0.7/32): then it is the private block, 10.0.0.0/8.

    >>> find_network("10.1.2.3", [])
    '10.0.0.0/8'
    """
    one = ipaddress.ip_address(address)
    known = [mine.address.network for mine in own if mine.address.ip == one and mine.address.network.num_addresses > 1]
    blocks = [block for block in _BLOCKS if block.version == one.version and one in block]
    return str([*known, *blocks, ipaddress.ip_network(address)][0])


# Listening ------------------------------------------------------------------------------------------------------------


def open_listener(address: str, *, ports: str | None = None, backlog: int = 1024) -> socket.socket:
    """A socket that listens at an address, or (for "") at all of this host, IPv4 and IPv6.

    `ports`: a port or a range; by default that of UNISONO_PORTS, or any.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    dual = not address and socket.has_dualstack_ipv6()
    options: dict[str, Any] = {"family": socket.AF_INET6, "dualstack_ipv6": True} if dual else {"family": family}
    text = os.environ.get(PORTS, "") if ports is None else ports
    for port in read_ports(text):
        with contextlib.suppress(OSError) if text else contextlib.nullcontext():  # the next may be free
            return socket.create_server((address, port), backlog=backlog, **options)
    raise OSError(
        errno.EADDRINUSE,
        f"{PORTS if ports is None else 'port'} {text}: all of these are in use on host {socket.gethostname()}, which "
        "needs one for each rank, three for a launcher, and one for the debugger without",
    )


def read_ports(text: str) -> range:
    """The ports of "40000-40100"; one that the system picks if there is no text.

    >>> read_ports("40000-40001")
    range(40000, 40002)
    """
    if not text:
        return range(1)
    first, _, last = text.partition("-")
    try:
        found = range(int(first), int(last or first) + 1)
    except ValueError:
        found = range(0)
    if not found or not 0 < found[0] <= found[-1] < 1 << 16:
        raise ValueError(f"{PORTS} is a range of ports such as 40000-40100, got {text!r}")
    return found
