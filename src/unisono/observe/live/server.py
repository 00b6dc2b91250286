"""The live page's server: one thread, read-only, a token in every address, server-sent events; and the little of HTTP
that it speaks, GET and HEAD without a body, one request a connection.

It reads the run folder and nothing else: the launcher and the workers do not know of it, and a page that is slow or
gone costs them nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from importlib import resources
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from unisono.launchers.control import Gone
from unisono.observe.live.feed import VIEWS, Feed
from unisono.observe.live.live_run import LiveRun

__all__ = ["PageServer", "Refused", "Request", "format_head", "is_own_name", "read_request", "serve_page"]

_READ_S = 0.25
_IDLE_S = 1.0  # a message at least so often, so that both ends know of each other
_CONNECTIONS = 200
_UNSENT_BYTES = 16 << 20  # a page that has not taken so much is let go; it comes back by itself
_STACKS_S = 20.0
_FILES = {
    "": ("live.html", "text/html; charset=utf-8"),
    "page.css": ("page.css", "text/css; charset=utf-8"),
    "live.css": ("live.css", "text/css; charset=utf-8"),
    "uPlot.min.css": ("vendor/uPlot.min.css", "text/css; charset=utf-8"),
    "uPlot.js": ("vendor/uPlot.iife.min.js", "text/javascript; charset=utf-8"),
    "live.js": ("live.js", "text/javascript; charset=utf-8"),
    "live_charts.js": ("live_charts.js", "text/javascript; charset=utf-8"),
    "live_ranks.js": ("live_ranks.js", "text/javascript; charset=utf-8"),
}
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
AskForStacks = Callable[[Path], Mapping[int, str]]


@dataclass
class PageServer:
    """Serves one run folder on a socket that listens. `stays`: until it is stopped, not only while the run goes on."""

    live: LiveRun
    listener: socket.socket
    token: str
    bound: str
    stays: bool
    ask_for_stacks: AskForStacks
    end_s: float = 2.0  # beside a run: how long the page is there after its end
    parent: int | None = None  # the process that has it, and with which it ends
    _viewers: dict[asyncio.StreamWriter, str] = field(default_factory=dict)  # with the view of each
    _open: set[asyncio.Task[None]] = field(default_factory=set)
    _strangers: dict[asyncio.StreamWriter, None] = field(default_factory=dict)  # no token shown yet; the oldest first

    def __post_init__(self) -> None:
        self.feed = Feed(self.live)
        self._stopped = asyncio.Event()
        self._asking = asyncio.Lock()

    def stop(self) -> None:
        """Ask the server to shut down; does not wait for it."""
        self._stopped.set()

    async def serve(self) -> None:
        """Answer requests until the run, or this server, is over."""
        self.live.read()
        server = await asyncio.start_server(self._answer, sock=self.listener, limit=_HEAD_BYTES)
        try:
            await self._follow()
        finally:
            self._stopped.set()
            server.close()
            for writer in list(self._viewers):
                self._send(writer, '{"bye":true}')
                writer.close()
            await asyncio.sleep(0)
            left = list(self._open)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    async def _follow(self) -> None:
        """Read the run folder again and again, and send the pages what is new."""
        sent_at, over_at = 0.0, None
        while not self._stopped.is_set():
            is_new = self.live.read()
            now = time.time()
            if is_new or now - sent_at >= _IDLE_S:
                sent_at = now
                updates = self.feed.make_updates(set(self._viewers.values()), now)
                for writer, view in list(self._viewers.items()):
                    self._send(writer, updates[view])
            is_orphan = self.parent is not None and os.getppid() != self.parent
            if is_orphan or (not self.stays and self.live.is_over()):
                over_at = over_at or now
                if now - over_at > self.end_s:
                    return
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), _READ_S)

    def _send(self, writer: asyncio.StreamWriter, text: str) -> None:
        transport = writer.transport
        if transport.is_closing() or transport.get_write_buffer_size() > _UNSENT_BYTES:
            self._viewers.pop(writer, None)
            transport.abort()
            return
        writer.write(f"data: {text}\n\n".encode())

    # Requests --------------------------------------------------------------------------------------------------------

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        self._strangers[writer] = None
        try:
            await self._answer_safely(reader, writer)
        except (ConnectionError, TimeoutError):  # the client has left
            pass
        except asyncio.CancelledError:
            if not self._stopped.is_set():
                raise
        finally:
            self._open.discard(task)
            self._strangers.pop(writer, None)
            self._viewers.pop(writer, None)
            writer.close()

    async def _answer_safely(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if len(self._open) > _CONNECTIONS:
                self._make_room(writer)
            request = await read_request(reader)
            name = self._check(request)
            self._strangers.pop(writer, None)
            if name == "events":
                await self._stream(request, reader, writer)
                return
            kind, body = await self._find(name, request)
            status = 200
        except Refused as refused:
            request, status, kind, body = None, refused.status, "text/plain; charset=utf-8", f"{refused}\n".encode()
        writer.write(format_head(status, kind, len(body)))
        if request is None or request.method == "GET":
            writer.write(body)
        await asyncio.wait_for(writer.drain(), 60.0)

    def _make_room(self, newest: asyncio.StreamWriter) -> None:
        """Let go the connection that has been open for longest without showing the token."""
        oldest = next(iter(self._strangers))
        if oldest is newest:
            raise Refused(503, f"{_CONNECTIONS} connections are open already")
        del self._strangers[oldest]
        oldest.transport.abort()

    def _check(self, request: Request) -> str:
        """What is asked for below the token. Raises Refused for other names of this host and for other tokens."""
        if not is_own_name(request.headers.get("host", ""), self.bound):
            raise Refused(421, "this server does not have that name: open the page by its address")
        if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and (
            request.headers.get("sec-fetch-mode") != "navigate"
        ):
            raise Refused(403, "a page of another site has asked for this")
        _, _, rest = request.path.partition("/")
        token, slash, name = rest.partition("/")
        if not hmac.compare_digest(token.encode(), self.token.encode()) or not slash:
            raise Refused(403, "the address of this page has a token: open the whole line that the command printed")
        return name

    async def _find(self, name: str, request: Request) -> tuple[str, bytes]:
        if name in _FILES:
            file, kind = _FILES[name]
            return kind, (resources.files("unisono.observe.pages") / file).read_bytes()
        if name == "stacks":
            return "application/json", json.dumps(await self._find_stack(request)).encode()
        raise Refused(404, f"there is no {name!r} here")

    async def _stream(self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Send a page its events until it leaves."""
        view = request.query.get("view", "recent")
        if view not in VIEWS:
            raise Refused(404, f"there is no view {view!r} here")
        writer.write(format_head(200, "text/event-stream; charset=utf-8", None))
        if request.method == "HEAD":
            return
        self._viewers[writer] = view
        self._send(writer, self.feed.make_snapshot(view, time.time()))
        await reader.read(1)  # a client says nothing more: this is its end

    async def _find_stack(self, request: Request) -> dict[str, object]:
        """The stack of a place's rank now, or in words why there is none."""
        place = self.live.places.get(int(number)) if (number := request.query.get("place", "")).isdigit() else None
        if place is None:
            raise Refused(404, "there is no such place: /stacks?place=3")
        if self.live.is_over():
            return {"rank": place.rank, "error": "the run is over: there is no process to ask"}
        async with self._asking:
            try:
                asked = asyncio.to_thread(self.ask_for_stacks, self.live.folder)
                stacks = await asyncio.wait_for(asked, _STACKS_S)
            except asyncio.TimeoutError:
                return {"rank": place.rank, "error": f"the launcher did not answer in {_STACKS_S:g} s"}
            except (OSError, ValueError, Gone) as error:
                return {"rank": place.rank, "error": f"the launcher could not be asked: {error}"}
        if place.rank not in stacks:
            return {"rank": place.rank, "error": f"rank {place.rank} gave no stack: it may have ended"}
        return {"rank": place.rank, "text": stacks[place.rank]}


def serve_page(
    folder: Path,
    listener: socket.socket,
    token: str,
    *,
    bound: str,
    stays: bool,
    ask_for_stacks: AskForStacks,
    parent: int | None = None,
) -> None:
    """Serve a run folder until it is over, or until SIGINT or SIGTERM; where `parent` is given, not without it."""

    async def serve() -> None:
        server = PageServer(LiveRun(folder), listener, token, bound, stays, ask_for_stacks, parent=parent)
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, server.stop)
        await server.serve()

    asyncio.run(serve())


# HTTP -----------------------------------------------------------------------------------------------------------------


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
