"""The TCP connections of this process: found, probed, and limited in how long they wait for a silent host.

A call such as `check` or `add` waits for the answer without a limit, and a host that is cut off sends neither an answer
nor an end: so the kernel counts on the connection. Our own store (locked_store.py) asks it to. The connections of
torch's stores are found among this process's sockets by the store's port.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import sys
import time
from typing import TYPE_CHECKING, Any

from unisono.world.transports import PeerLost

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed import Store

SAID_AFTER_S = 10.0
_LONGEST_S = 32_000  # what Linux takes for TCP_KEEPIDLE


def find_address(store: Store) -> tuple[str, int] | None:
    """Where the server of a store is; None for one without a server (files, memory)."""
    inner = _find_inner(store)
    return (inner.host, inner.port) if hasattr(inner, "port") else None


def is_of_process(store: Store) -> bool:
    """Whether a store is memory of this process: its ranks are threads."""
    return type(_find_inner(store)).__name__ == "HashStore"


def is_open(store: Store) -> bool:
    """Whether a store is one of torch's own, which anybody on the network can read and write."""
    return type(_find_inner(store)).__name__ == "TCPStore"


def _find_inner(store: Store) -> Any:
    """The store behind its prefixes."""
    inner: Any = store
    while hasattr(inner, "underlying_store"):
        inner = inner.underlying_store
    return inner


def limit_silence(store: Store, seconds: float) -> None:
    """Have calls of the store fail after `seconds` without a word from its server's host.

    A server that is only slow, or stopped, is not silent: its host's kernel answers for it.
    """
    inner, address = _find_inner(store), find_address(store)
    if address is None or sys.platform != "linux":
        return
    if hasattr(inner, "limit_silence"):
        inner.limit_silence(seconds)
        return
    for _, sock in list_sockets():
        if find_peer_port(sock) == address[1]:
            limit_silence_of(sock, seconds)


def limit_silence_of(sock: socket.socket, seconds: float) -> None:
    """Have a connection fail after `seconds` without a word from the other host; on Linux."""
    if sys.platform != "linux":
        return
    whole = min(_LONGEST_S, max(1, round(seconds)))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, whole // 3))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, whole // 3))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    limit_unanswered(sock, whole)  # also while something is unanswered


def limit_unanswered(sock: socket.socket, seconds: float) -> None:
    """Have a connection fail if bytes that were sent are not answered for so long; the kernel would try for longer."""
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * seconds))


def has_ended(store: Store) -> bool:
    """Whether a store's server has closed a connection of this process: torch would print its own frames, and then
    raise, if that were used."""
    inner, address = _find_inner(store), find_address(store)
    if address is None or sys.platform != "linux":
        return False
    if hasattr(inner, "has_ended"):
        return bool(inner.has_ended())
    return any(find_peer_port(sock) == address[1] and is_closed(sock) for _, sock in list_sockets())


def is_closed(sock: socket.socket) -> bool:
    """Whether the other end has closed a connection on which nothing is on its way."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    try:
        return bool(poll.poll(0)) and sock.recv(1, socket.MSG_PEEK) == b""
    except OSError:
        return True


def probe(address: tuple[str, int], seconds: float) -> OSError | None:
    """None if something listens at an address, else why it cannot be reached."""
    try:
        socket.create_connection(address, timeout=seconds).close()
    except OSError as error:
        return error
    return None


class StorePatience:
    """Patience with a store that does not answer yet: its name may not be there yet, or never."""

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        self._what, self._timeout_s = f"no store answers at {host}:{port}", timeout_s
        self._deadline, self._say_at = time.monotonic() + timeout_s, time.monotonic() + SAID_AFTER_S

    def limit(self, seconds: float) -> float:
        """How long one attempt of at most so many seconds may take."""
        return max(0.1, min(seconds, self._deadline - time.monotonic()))

    def check(self, why: OSError) -> None:
        """Called after an attempt: PeerLost if there is no time for another; tells the user once, after a while."""
        if (now := time.monotonic()) > self._deadline:
            raise PeerLost(
                f"{self._what} within {self._timeout_s:g} s ({why}): the process that keeps it, rank 0 or the "
                f"launcher, has not started or cannot be reached from host {socket.gethostname()}"
            ) from None
        if now > self._say_at:
            self._say_at = math.inf
            print(f"unisono: {self._what} ({why}); still trying", file=sys.stderr, flush=True)


def list_sockets() -> Iterator[tuple[int, socket.socket]]:
    """This process's sockets: the kernel's number of each, and a descriptor of our own, which is closed after its turn.

    torch does not give its sockets away: this is how those of its stores are found.
    """
    for name in os.listdir("/proc/self/fd") if sys.platform == "linux" else ():
        with contextlib.suppress(OSError):  # the descriptor of the listing itself, or one that was just closed
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as sock:
                yield os.fstat(sock.fileno()).st_ino, sock


def find_peer_port(sock: socket.socket) -> int | None:
    """The port at the other end of a TCP connection; None for any other socket, and for one that listens."""
    is_tcp = sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM
    try:
        return int(sock.getpeername()[1]) if is_tcp else None
    except OSError:
        return None
