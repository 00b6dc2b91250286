"""The store that a launcher hosts: torch's key-value server, in a process of its own, so the launcher stays small."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from socket import create_server

__all__ = ["HostedStore"]

_WORKER = Path(__file__).parent / "worker" / "program.py"


class HostedStore:
    """Listens at once; serves from `start` on, and connections made before are served then."""

    def __init__(self, address: str = "127.0.0.1", *, backlog: int = 128) -> None:
        self.listener = create_server((address, 0), backlog=backlog)
        self.address: tuple[str, int] = self.listener.getsockname()[:2]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def serving(self) -> bool:
        """Whether it was started."""
        return self._process is not None

    def start(self, env: Mapping[str, str]) -> None:
        """Serve. `env` names this process as the launcher, with which the store ends (see worker/program.py)."""
        descriptor = self.listener.fileno()
        self._process = subprocess.Popen(
            [sys.executable, str(_WORKER), "--store", str(descriptor), str(self.address[1])],
            env={"TORCH_CPP_LOG_LEVEL": "ERROR", **env},  # it would warn of every client whose address has no name
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=(descriptor,),
            start_new_session=True,
        )
        self.listener.close()

    def close(self) -> None:
        """End the store."""
        self.listener.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdin is not None
            self._process.stdin.close()
