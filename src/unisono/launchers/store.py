"""The store that a launcher hosts: torch's key-value server, in a process of its own, so the launcher stays small."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from signal import SIGKILL
from socket import create_server

from unisono.launchers.processes import Command, Process, Starter

__all__ = ["HostedStore"]


class HostedStore:
    """Listens at once; serves from `start` on, and connections made before are served then."""

    def __init__(self, address: str = "127.0.0.1", *, backlog: int = 128) -> None:
        self.listener = create_server((address, 0), backlog=backlog)
        self.address: tuple[str, int] = self.listener.getsockname()[:2]
        self._process: Process | None = None

    @property
    def serving(self) -> bool:
        """Whether it was started."""
        return self._process is not None

    def start(self, env: Mapping[str, str], starter: Starter) -> None:
        """Serve. `env` names this process as the launcher, with which the store ends (see worker/program.py)."""
        quiet = subprocess.DEVNULL  # torch would warn of every client whose address has no name
        program = ["--store", str(self.address[1])]
        descriptors = {"UNISONO_STORE_FD": self.listener.fileno()}
        self._process = starter.start(Command(program, env, descriptors, subprocess.PIPE, quiet, quiet))
        self.listener.close()

    def close(self) -> None:
        """End the store."""
        self.listener.close()
        if self._process is not None:
            self._process.send(SIGKILL)
            self._process.close()
