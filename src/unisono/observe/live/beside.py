"""The page's server as a process of its own: beside a launcher, or as the command `unisono watch`.

The launcher opens the socket, prints the address and goes on; it waits for nothing, and the server takes nothing from
its one thread. Whoever opens the page before the server is ready waits in the socket's queue.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["NoPage", "Opened", "PageBeside", "open_address", "open_in_browser"]

_VARIABLE = "UNISONO_PAGE"
_IN_USE = (errno.EADDRINUSE, errno.EACCES)


class NoPage(Exception):
    """The page cannot be served; the text says why."""


@dataclass
class Opened:
    """A socket that listens, and the address of the page."""

    listener: socket.socket
    bound: str
    token: str
    note: str = ""  # what the user should know of it

    def __post_init__(self) -> None:
        self.port = int(self.listener.getsockname()[1])

    @property
    def url(self) -> str:
        """The address of the page, with its token."""
        host = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(self.bound, self.bound)
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{self.port}/{self.token}/"


def open_address(bind: str = "127.0.0.1", port: int | None = None) -> Opened:
    """Listen at an address. A port that is taken, or not ours to take, is replaced by a free one, and `note` says so.

    Raises NoPage where there is no such address here.
    """
    note = ""
    try:
        listener = _listen(bind, port or 0)
    except OSError as error:
        if not port or error.errno not in _IN_USE:
            raise NoPage(f"no page: cannot listen at {bind}:{port or 0}: {_explain(error)}") from None
        why = "is in use" if error.errno == errno.EADDRINUSE else "may not be used by this user"
        note = f"port {port} {why}; the page uses another"
        try:
            listener = _listen(bind, 0)
        except OSError as other:
            raise NoPage(f"no page: cannot listen at {bind}: {_explain(other)}") from None
    return Opened(listener, bind, secrets.token_urlsafe(18), note)


def _listen(bind: str, port: int) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(bind, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(64)
    except BaseException:
        listener.close()
        raise
    return listener


def _explain(error: OSError) -> str:
    return error.strerror or str(error)


def open_in_browser(url: str) -> str:
    """Open the page in a browser; returns a note for the user if that fails, else ""."""
    import webbrowser

    try:
        opened = webbrowser.open(url)
    except webbrowser.Error:
        opened = False
    return "" if opened else "no browser could be opened here: open the address yourself"


class PageBeside:
    """The page of a run that this process launches. It ends soon after the run, or stays with `stays`."""

    def __init__(self, folder: Path, opened: Opened, *, stays: bool) -> None:
        self.stays = stays
        fd = opened.listener.fileno()
        about = {"token": opened.token, "bound": opened.bound, "fd": fd, "parent": os.getpid()}
        arguments = [str(folder), *(["stays"] if stays else [])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "unisono.observe.live.beside", *arguments],
            env={**os.environ, _VARIABLE: json.dumps(about)},
            pass_fds=[fd],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the run: the page still shows how that ended
        )
        opened.listener.close()
        self.pid = self._process.pid

    def stop(self) -> None:
        """Stop the page's process, and wait for its end."""
        self._process.terminate()
        self._process.wait()

    def end(self) -> None:
        """The run is over. With `stays`, wait here until the user ends the page; else it ends by itself."""
        if not self.stays or self._process.poll() is not None:
            return
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the run had handlers of its own
            signal.signal(signum, signal.default_int_handler)
        try:
            self._process.wait()
        except KeyboardInterrupt:
            self.stop()


def _main() -> None:
    from unisono.launchers.control import ask_for_stacks
    from unisono.observe.live.server import serve_page

    with contextlib.suppress(OSError):
        os.nice(5)  # training comes first; more would make the page late on a busy machine
    folder, *words = sys.argv[1:]
    about = json.loads(os.environ.pop(_VARIABLE))
    serve_page(
        Path(folder),
        socket.socket(fileno=about["fd"]),
        about["token"],
        bound=about["bound"],
        stays="stays" in words,
        ask_for_stacks=ask_for_stacks,
        parent=about["parent"],
    )


if __name__ == "__main__":
    _main()
