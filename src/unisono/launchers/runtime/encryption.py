"""Connections that nobody else can read: TLS without certificates, bound to the run's secret.

TLS 1.2 with anonymous Diffie-Hellman in the group ffdhe2048 and AES-GCM: the one way that Python's `ssl` has on every
version that we support and that needs no certificate. By itself it protects from listeners only. So the proof of the
secret that follows (channel.py) is made over the handshake's own bytes, too (`tls-unique`): whoever stands in the
middle has two handshakes with different ones, and cannot pass a proof on from one to the other. See decision 22.

Whoever listens decides whether a connection is encrypted, and says so in its first line (channel.py).
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from unisono.launchers.runtime.variables import read_encrypt

__all__ = ["Encrypted", "is_available", "is_control_encrypted", "make_pair", "wrap_client", "wrap_server"]

_T = TypeVar("_T")
_CIPHERS = "ADH-AES128-GCM-SHA256:ADH-AES256-GCM-SHA384:@SECLEVEL=0"  # the level of 0 is for having no certificate
_MOST = 64 << 10  # bytes that are encrypted in one go; one that could not leave is given again as it was
# RFC 7919, ffdhe2048: 2^2048 - 2^1984 + ([2^1918 e] + 560316) 2^64 - 1, and generator 2.
_GROUP = """-----BEGIN DH PARAMETERS-----
MIIBCAKCAQEA//////////+t+FRYortKmq/cViAnPTzx2LnFg84tNpWp4TZBFGQz
+8yTnc4kmz75fS/jY2MMddj2gbICrsRhetPfHtXV/WVhJDP1H18GbtCFY2VVPe0a
87VXE15/V8k1mE8McODmi3fipona8+/och3xWKE2rec1MKzKT0g6eXq8CrGCsyT7
YdEIqUuyyOP7uWrat2DX9GgdT0Kj3jlN9K5W7edjcrsZCwenyO4KbXCeAvzhzffi
7MA0BM0oNC9hkXL+nOmFg/+OTxIy7vKBg8P+OxtMb61zO7X8vC7CIAXFjvGDfRaD
ssbzSibBsu/6iGtCOGEoXJf//////////wIBAg==
-----END DH PARAMETERS-----
"""


def is_control_encrypted(*, is_one_host: bool) -> bool:
    """Whether a store, a launcher or a debugger's hub that listens here encrypts: as UNISONO_ENCRYPT says, else if
    other hosts connect to it and this Python can."""
    asked = read_encrypt()
    return asked if asked is not None else not is_one_host and is_available()


def is_available() -> bool:
    """Whether the OpenSSL of this Python offers it."""
    try:
        _make_context(ssl.PROTOCOL_TLS_SERVER)
    except OSError:
        return False
    return True


class Encrypted(socket.socket):
    """What a socket does for a channel and a stream, over TLS. One thread may send while another receives."""

    def __init__(self, inner: ssl.SSLSocket, timeout_s: float | None) -> None:
        super().__init__(inner.family, inner.type, inner.proto, fileno=os.dup(inner.fileno()))
        self._inner, self._lock = inner, threading.Lock()  # TLS itself is for one thread at a time: nobody waits in it
        inner.setblocking(False)
        super().setblocking(False)
        self._timeout_s = timeout_s

    @property
    def binding(self) -> bytes:
        """What this handshake, and no other, has: both ends find the same bytes."""
        found = self._inner.get_channel_binding("tls-unique")
        if not found:
            raise ConnectionResetError("the connection is not encrypted yet")
        return found

    @property
    def is_ready(self) -> bool:
        """Whether the handshake is complete: until then a server waits for the other end to speak."""
        return self._inner.version() is not None

    def settimeout(self, value: float | None) -> None:
        self._timeout_s = value

    def gettimeout(self) -> float | None:
        return self._timeout_s

    def setblocking(self, flag: bool) -> None:
        self._timeout_s = None if flag else 0.0

    def send(self, data: bytes | memoryview, flags: int = 0) -> int:  # type: ignore[override]
        # Released here: whoever looks at the stacks of all threads keeps the frames in `ssl`, and what they hold, for a
        # moment longer, and a buffer that somebody holds cannot shrink by what has been sent.
        with memoryview(data) as whole, whole[:_MOST] as part:
            return self._run(lambda: self._inner.send(part))

    def recv(self, size: int, flags: int = 0) -> bytes:
        return self._run(lambda: self._inner.recv(size))

    def recv_into(self, data: memoryview, size: int = 0, flags: int = 0) -> int:  # type: ignore[override]
        """All that has come and fits: one call of TLS gives a record of 16 KiB at most."""

        def fill() -> int:
            count = 0
            try:
                while count < len(data) and (more := self._inner.recv_into(data[count:])):
                    count += more
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                if not count:
                    raise
            return count

        return self._run(fill)

    def shake_hands(self) -> None:
        """Do the handshake, within the timeout as a whole."""
        self._run(self._inner.do_handshake)

    def _run(self, step: Callable[[], _T]) -> _T:
        """Call TLS until it is done; between the calls, wait as the timeout says, for what it waits for."""
        deadline = None if not self._timeout_s else time.monotonic() + self._timeout_s
        while True:
            try:
                with self._lock:
                    return step()
            except ssl.SSLWantReadError:
                events = select.POLLIN
            except ssl.SSLWantWriteError:
                events = select.POLLOUT
            except ssl.SSLEOFError:
                raise ConnectionResetError("the other end has closed in mid-word") from None
            if self._timeout_s == 0.0:
                raise BlockingIOError from None
            poller = select.poll()
            poller.register(self.fileno(), events)
            if not poller.poll(None if deadline is None else max(0.0, 1000 * (deadline - time.monotonic()))):
                raise TimeoutError("timed out")

    def close(self) -> None:
        super().close()
        self._inner.close()


def wrap_server(sock: socket.socket) -> Encrypted:
    """A connection that was accepted; the handshake goes on as it is used."""
    return _wrap(sock, ssl.PROTOCOL_TLS_SERVER)


def wrap_client(sock: socket.socket) -> Encrypted:
    """A connection that was made; returns after the handshake."""
    wrapped = _wrap(sock, ssl.PROTOCOL_TLS_CLIENT)
    try:
        wrapped.shake_hands()
    except BaseException:
        wrapped.close()
        raise
    return wrapped


def make_pair() -> tuple[Encrypted, Encrypted]:
    """Two ends of a connection inside this process, to measure with; they do not block."""
    pair = socket.socketpair()
    for sock in pair:
        sock.setblocking(False)
    near, far = _wrap(pair[0], ssl.PROTOCOL_TLS_CLIENT), _wrap(pair[1], ssl.PROTOCOL_TLS_SERVER)
    for end in (near, far) * 2:
        with contextlib.suppress(BlockingIOError):
            end.shake_hands()
    return near, far


def _wrap(sock: socket.socket, protocol: int) -> Encrypted:
    context, timeout_s = _make_context(protocol), sock.gettimeout()
    sock.setblocking(False)
    is_server = protocol == ssl.PROTOCOL_TLS_SERVER
    return Encrypted(context.wrap_socket(sock, server_side=is_server, do_handshake_on_connect=False), timeout_s)


@functools.cache
def _make_context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    # No session is taken up again, and none negotiated anew: each proof stands on a whole handshake of its own.
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION | ssl.OP_SINGLE_DH_USE
    try:
        context.set_ciphers(_CIPHERS)
        if protocol == ssl.PROTOCOL_TLS_SERVER:
            with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:
                file.write(_GROUP)
                file.flush()
                context.load_dh_params(file.name)
    except ssl.SSLError as error:
        raise OSError(
            f"this run is encrypted, and the OpenSSL of this Python does not offer that ({error}): --no-encrypt (or "
            "UNISONO_ENCRYPT=0) turns it off; connect the hosts by a network of their own or a VPN then"
        ) from None
    return context
