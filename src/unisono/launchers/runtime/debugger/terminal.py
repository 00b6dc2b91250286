"""The prompt in the terminal or the notebook of this process, in a thread of its own.

It reads the terminal by itself, line by line: `input()` could not be given up when the run ends in between, and would
take the next line that is meant for somebody else.
"""

from __future__ import annotations

import contextvars
import os
import select
import sys
import threading
from typing import Protocol

from unisono.launchers.runtime.debugger.hub import Hub
from unisono.launchers.runtime.debugger.link import connect_to_hub

__all__ = ["TerminalPrompt"]


class _Console(Protocol):
    def read(self, prompt: str) -> str:
        """A line, without its end; EOFError: no more."""

    def write(self, text: str) -> None:
        """Show a line or several."""

    def close(self) -> None:
        """End a read that is under way."""


class TerminalPrompt:
    """For the hub of this process; `open` is its `open_prompt`. Made where the terminal belongs to: its context."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._console: _Console | None = None
        self._context = contextvars.copy_context()  # by which a notebook knows the cell

    def open(self) -> bool:
        """Show the prompt; False if there is no terminal."""
        self._console = _find_console()
        if self._console is None:
            return False
        threading.Thread(
            target=self._context.copy().run, args=(self._converse, self._console), name="unisono prompt", daemon=True
        ).start()
        return True

    def _converse(self, console: _Console) -> None:
        from unisono.launchers.runtime.debugger.prompt import Prompt  # most runs are never stopped

        try:
            link = connect_to_hub([("127.0.0.1", self._hub.address[1])], self._hub.token)
        except ConnectionError:  # the hub was closed in this moment
            return
        Prompt(link, console.read, console.write).run()
        link.close()

    def close(self) -> None:
        """End a read that is under way, and read no more."""
        if self._console is not None:
            self._console.close()


class _Terminal:
    """Reads and writes a terminal, whatever the standard streams are."""

    def __init__(self, descriptor: int) -> None:
        self._fd = descriptor
        self._wakes, self._waker = os.pipe()
        self._rest = b""

    def read(self, prompt: str) -> str:
        os.write(self._fd, prompt.encode())
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self._fd, self._wakes], [], [])
            if self._wakes in ready:
                raise EOFError
            data = os.read(self._fd, 4096)
            if not data:
                raise EOFError
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode("utf-8", "replace")

    def write(self, text: str) -> None:
        os.write(self._fd, (text + "\n").encode())

    def close(self) -> None:
        os.write(self._waker, b"x")


class _Notebook:
    """Asks and prints in a notebook's cell."""

    def read(self, prompt: str) -> str:
        return input(prompt)

    def write(self, text: str) -> None:
        print(text, flush=True)

    def close(self) -> None:
        """The kernel's own: the cell may show a field that nobody reads any more."""


def _find_console() -> _Console | None:
    if "ipykernel" in sys.modules:
        return _Notebook()
    try:
        descriptor = os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # none, as under a batch system
        return None
    try:
        is_ours = os.tcgetpgrp(descriptor) == os.getpgrp()
    except OSError:
        is_ours = False
    if not is_ours:  # in the background: reading would stop this process
        os.close(descriptor)
        return None
    return _Terminal(descriptor)
