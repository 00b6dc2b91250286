"""Connections between ranks that nobody else can read: TLS without certificates, bound to the run's secret.

TLS 1.2 with anonymous Diffie-Hellman in the group ffdhe2048 and AES-GCM: the one way that Python's `ssl` has on every
version that we support and that needs no certificate. By itself it protects from listeners only. So the proof of the
secret that follows (runtime/channel.py) is made over the handshake's own bytes, too (`tls-unique`): whoever stands in
the middle has two handshakes with different ones, and cannot pass a proof on from one to the other. See decision 22.
"""

from __future__ import annotations

import functools
import ipaddress
import os
import socket
import ssl
import tempfile
from collections.abc import Iterable

__all__ = ["Encrypted", "is_wanted", "wrap_client", "wrap_server"]

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


def is_wanted(addresses: Iterable[str]) -> bool:
    """Whether this rank asks for encryption: UNISONO_ENCRYPT says so, or one of its addresses is a public one.

    >>> is_wanted(["10.0.0.7"]), is_wanted(["10.0.0.7", "8.8.8.8"])
    (False, True)
    """
    text = os.environ.get("UNISONO_ENCRYPT", "")
    if text not in ("", "0", "1"):
        raise ValueError(f"UNISONO_ENCRYPT is 1 or 0, got {text!r}")
    return text == "1" if text else any(ipaddress.ip_address(address).is_global for address in addresses)


class Encrypted(socket.socket):
    """What a socket does for a channel and a stream, over TLS. Not for two threads at once."""

    def __init__(self, inner: ssl.SSLSocket) -> None:
        super().__init__(inner.family, inner.type, inner.proto, fileno=os.dup(inner.fileno()))
        self._inner = inner
        self.settimeout(inner.gettimeout())

    @property
    def binding(self) -> bytes:
        """What this handshake, and no other, has: both ends find the same bytes."""
        found = self._inner.get_channel_binding("tls-unique")
        if not found:
            raise ConnectionResetError("the connection is not encrypted yet")
        return found

    def settimeout(self, value: float | None) -> None:
        super().settimeout(value)
        self._inner.settimeout(value)

    def setblocking(self, flag: bool) -> None:
        self.settimeout(None if flag else 0.0)

    def send(self, data: bytes | memoryview, flags: int = 0) -> int:  # type: ignore[override]
        try:
            return self._inner.send(memoryview(data)[:_MOST])
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def recv(self, size: int, flags: int = 0) -> bytes:
        try:
            return self._inner.recv(size)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def recv_into(self, data: memoryview, size: int = 0, flags: int = 0) -> int:  # type: ignore[override]
        """All that has come and fits: one call of TLS gives a record of 16 KiB at most."""
        count = 0
        try:
            while count < len(data) and (more := self._inner.recv_into(data[count:])):
                count += more
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            if not count:
                raise BlockingIOError from None
        return count

    def close(self) -> None:
        super().close()
        self._inner.close()


def wrap_server(sock: socket.socket) -> socket.socket:
    """A connection that was accepted; the handshake goes on as it is used, without blocking."""
    inner = _make_context(ssl.PROTOCOL_TLS_SERVER).wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
    return Encrypted(inner)


def wrap_client(sock: socket.socket) -> socket.socket:
    """A connection that was made; returns after the handshake."""
    return Encrypted(_make_context(ssl.PROTOCOL_TLS_CLIENT).wrap_socket(sock))


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
            f"encryption was asked for, and the OpenSSL of this Python does not offer it ({error}): unset "
            "UNISONO_ENCRYPT, and connect the hosts by a network of their own or a VPN"
        ) from None
    return context
