"""The debugger's hub of a run, in the launcher: workers are given its address, and the prompt is in this terminal."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from socket import create_server, socket

from unisono.launchers.job import Job
from unisono.runtime.debugger import PDB_VARIABLE, VARIABLE, make_token
from unisono.runtime.debugger.attaching import announce, forget
from unisono.runtime.debugger.hub import Hub
from unisono.runtime.debugger.terminal import TerminalPrompt

__all__ = ["RunDebugger"]

_TIMEOUT, _DAY_S = "UNISONO_TIMEOUT_S", "86400"


class RunDebugger:
    """Listens at once; serves from `start` on. `secret`: the run's, as its workers have it."""

    def __init__(self, job: Job, secret: str, say: Callable[[str], None], listener: socket | None = None) -> None:
        self._job = job
        self.listener = listener or create_server(("127.0.0.1", 0), backlog=max(128, 2 * job.places))
        self._hub = Hub(self.listener, make_token(secret), say)
        self._hub.how_to_attach = f"unisono debug {self._hub.run}"
        self._prompt = TerminalPrompt(self._hub)
        self._hub.open_prompt = self._prompt.open

    @property
    def paused_s(self) -> float:
        """For how long workers have been stopped at the prompt in all."""
        return self._hub.paused_s

    @property
    def is_paused(self) -> bool:
        """Whether they are now."""
        return self._hub.is_paused

    def variables(self, hosts: Sequence[str] = ("127.0.0.1",)) -> dict[str, str]:
        """For the environment of a worker that can reach this host so."""
        found = {PDB_VARIABLE: "1"} if self._job.pdb else {}
        if self._job.pdb and _TIMEOUT not in os.environ:
            found[_TIMEOUT] = _DAY_S  # messages between hosts count the time in which people think
        if os.environ.get(VARIABLE) == "0":
            return found | {VARIABLE: "0"}
        return found | {VARIABLE: ",".join(f"{host}:{self._hub.address[1]}" for host in hosts)}

    def start(self) -> None:
        """Serve, once a worker has come."""
        if not self._hub.is_serving:
            self._hub.start()
            announce(self._hub, " ".join(self._job.program)[:200])

    def close(self) -> None:
        """Nobody is debugged any more."""
        if self._hub.is_serving:
            forget(self._hub)
        self._hub.close()
        self._prompt.close()
