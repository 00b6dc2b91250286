"""The page's server in a thread of a test, and a client that speaks HTTP to it."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from unisono.observe.live.beside import Opened, open_address
from unisono.observe.live.live_run import LiveRun
from unisono.observe.live.server import PageServer


def no_stacks(folder: Path) -> Mapping[int, str]:
    raise OSError("nobody is there")


class Served:
    """A server that runs, and requests to it."""

    def __init__(self, server: PageServer, opened: Opened, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.server, self.url, self.port, self.token = server, opened.url, opened.port, opened.token

    def get(
        self, name: str = "", *, token: str | None = None, method: str = "GET", headers: Mapping[str, str] | None = None
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Status, headers and body of what is asked for below the token."""
        path = f"/{self.token if token is None else token}/{name}"
        return self.ask(method, path, headers or {})

    def ask(self, method: str, path: str, headers: Mapping[str, str]) -> tuple[int, Mapping[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, headers=dict(headers))
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()

    @contextmanager
    def stream(self, view: str = "recent") -> Iterator[Iterator[dict[str, Any]]]:
        """The messages of the stream, one after the other."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", f"/{self.token}/events?view={view}")
        answer = connection.getresponse()
        assert answer.status == 200
        try:
            yield (json.loads(line[6:]) for line in answer if line.startswith(b"data: "))
        finally:
            answer.close()
            connection.close()


@contextmanager
def serve(
    folder: Path,
    *,
    stays: bool = True,
    stacks: Callable[[Path], Mapping[int, str]] = no_stacks,
    bind: str = "127.0.0.1",
) -> Iterator[Served]:
    """Serve a run folder in a thread."""
    opened = open_address()
    loop = asyncio.new_event_loop()
    server = PageServer(LiveRun(folder), opened.listener, opened.token, opened.bound, stays, stacks, end_s=0.1)
    thread = threading.Thread(target=lambda: loop.run_until_complete(server.serve()))
    thread.start()
    try:
        yield Served(server, opened, loop)
    finally:
        loop.call_soon_threadsafe(server.stop)
        thread.join()
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
