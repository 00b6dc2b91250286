"""The little of HTTP that the page's server speaks: GET and HEAD without a body, one request a connection."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import parse_qs, unquote, urlsplit

__all__ = ["Refused", "Request", "format_head", "is_own_name", "read_request"]

_HEAD_BYTES = 16_384
_HEAD_S = 10.0  # a client that has not said what it wants by then is let go
# Nothing is loaded from elsewhere, nothing may put the page into a frame, and no address leaves with a link.
_SAFETY = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Refused(Exception):
    """A request that is not answered: the status, and why in words."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class Request:
    """A parsed HTTP request."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]  # names in lower case


async def read_request(reader: asyncio.StreamReader) -> Request:
    """The request of a connection. Raises Refused; and ConnectionError where the client has left."""
    try:
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _HEAD_S)
    except asyncio.LimitOverrunError:
        raise Refused(431, f"a request has at most {_HEAD_BYTES} bytes here") from None
    except asyncio.IncompleteReadError:
        raise ConnectionError("the client has left") from None
    except asyncio.TimeoutError:
        raise Refused(408, f"no whole request came in {_HEAD_S:g} s") from None
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not re.fullmatch(r"HTTP/1\.[01]", words[2]) or not words[1].startswith("/"):
        raise Refused(400, "this is not a request of HTTP/1.1")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not line:
            continue
        if not colon or (name.lower() == "host" and "host" in headers):
            raise Refused(400, "a header of the request cannot be read")
        headers[name.lower()] = value.strip()
    if words[0] not in ("GET", "HEAD"):
        raise Refused(405, "this page is read-only: GET and HEAD alone")
    try:
        parts = urlsplit(words[1])
        query = {name: values[-1] for name, values in parse_qs(parts.query, max_num_fields=20).items()}
    except ValueError:
        raise Refused(400, "the address of the request cannot be read") from None
    return Request(words[0], unquote(parts.path), query, headers)


def format_head(status: int, kind: str, length: int | None) -> bytes:
    """Status line and headers of an answer; `length` None: until the connection is closed."""
    fields = {"Content-Type": kind, "Connection": "close", **_SAFETY}
    if length is not None:
        fields["Content-Length"] = str(length)
    if status == 405:
        fields["Allow"] = "GET, HEAD"
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", *(f"{name}: {value}" for name, value in fields.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def is_own_name(host: str, bound: str) -> bool:
    """Whether a Host header names this server. A page of another site that made its own name point here (DNS
    rebinding) sends that name. Ports do not matter: a forwarded one (ssh -L) is another.

    >>> is_own_name("localhost:8080", "127.0.0.1"), is_own_name("evil.org", "127.0.0.1")
    (True, False)
    """
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+)(:\d{1,5})?", host)
    if found is None:
        return False
    name = found[1].strip("[]").lower()
    names = {"localhost", bound.lower()}
    if not _is_loopback(bound):
        names |= {socket.gethostname().lower(), socket.getfqdn().lower()}
    if name in names:
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    return address.is_loopback or not _is_loopback(bound)  # a number is not a name that somebody can point elsewhere


def _is_loopback(bound: str) -> bool:
    try:
        return ipaddress.ip_address(bound).is_loopback
    except ValueError:
        return bound == "localhost"
