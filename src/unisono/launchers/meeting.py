"""Where the workers of a run meet: a page of shared memory, the launcher's store, and the debugger's hub.

- OfferedPage: workers of a local run inherit the page. Those of an engine's run descend from other processes: agents on
  the launcher's host open it through the launcher's entry in /proc. Where every agent could, no store is needed, whose
  client would import torch.
- RunDebugger listens at once. The hub that serves there is imported and made when the first worker connects.
"""

from __future__ import annotations

import contextvars
import os
import sys
from collections.abc import Callable, Sequence
from socket import create_server, socket
from typing import TYPE_CHECKING

from unisono.launchers.job import Job
from unisono.launchers.runtime.channel import SECRET, STORE
from unisono.launchers.runtime.debug_pause import DEBUGGER, DEBUGGER_WAIT_S, PDB
from unisono.launchers.runtime.files import anonymous_file
from unisono.launchers.runtime.machine import read_boot_id, read_namespaces
from unisono.launchers.runtime.variables import may_share_memory

if TYPE_CHECKING:
    from unisono.launchers.runtime.debugger.hub import Hub
    from unisono.launchers.runtime.debugger.prompt import TerminalPrompt

__all__ = ["OfferedPage", "RunDebugger", "open_page", "store_variables"]


class OfferedPage:
    """A page for each attempt, always behind the same descriptor."""

    def __init__(self) -> None:
        self.fd = anonymous_file("unisono-meeting-page")

    @property
    def number(self) -> int:
        """A number that tells this attempt's page from others."""
        return os.fstat(self.fd).st_ino

    def offer(self) -> str:
        """What agents are told of the page; "" if shared memory is not to be used."""
        if sys.platform != "linux" or not may_share_memory():
            return ""
        return f"{_machine_key()} /proc/{os.getpid()}/fd/{self.fd}"

    def renew(self) -> None:
        """Make a new page for the next attempt."""
        fresh = anonymous_file("unisono-meeting-page")
        os.dup2(fresh, self.fd, inheritable=False)
        os.close(fresh)

    def close(self) -> None:
        """Close the launcher's descriptor."""
        os.close(self.fd)


def open_page(offer: str) -> int:
    """A descriptor of the page that was offered; -1 on another host, or if it may not be opened."""
    machine, _, address = offer.rpartition(" ")
    if not machine or not may_share_memory():
        return -1
    try:
        if machine != _machine_key() or "unisono-meeting-page" not in os.readlink(address):
            return -1
        return os.open(address, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return -1


def _machine_key() -> str:
    """Equal for two processes exactly if they can open each other's files in /proc."""
    return " ".join([read_boot_id(), str(os.getuid()), *read_namespaces("net", "pid")])


def store_variables(address: tuple[str, int], secret: str) -> dict[str, str]:
    """Variables by which a worker finds the secret for the store at an address (runtime/secret.py)."""
    return {SECRET: secret, STORE: f"{address[0]}:{address[1]}"}


_TIMEOUT, _DAY_S = "UNISONO_TIMEOUT_S", "86400"


class RunDebugger:
    """Listens at once; serves from `start` on. `secret`: the run's, as its workers have it."""

    def __init__(
        self,
        job: Job,
        secret: str,
        say: Callable[[str], None],
        listener: socket | None = None,
        *,
        is_encrypted: bool = False,
    ) -> None:
        self._job, self._secret, self._say, self._is_encrypted = job, secret, say, is_encrypted
        self.listener = listener or create_server(("127.0.0.1", 0), backlog=max(128, 2 * job.places))
        self._context = contextvars.copy_context()  # by which a notebook knows the cell
        self._hub: Hub | None = None
        self._prompt: TerminalPrompt | None = None
        if DEBUGGER_WAIT_S in os.environ:
            self._make_hub()  # a mistake in it is told before there are workers

    @property
    def paused_s(self) -> float:
        """For how long workers have been stopped at the prompt in all."""
        return 0.0 if self._hub is None else self._hub.paused_s

    @property
    def is_paused(self) -> bool:
        """Whether workers are stopped at the prompt now."""
        return self._hub is not None and self._hub.is_paused

    def variables(self, hosts: Sequence[str] = ("127.0.0.1",)) -> dict[str, str]:
        """For the environment of a worker that can reach this host at one of `hosts`."""
        debugged = "1" if self._job.pdb else "" if self._job.debugpy is None else f"debugpy:{self._job.debugpy}"
        found = {PDB: debugged} if debugged else {}
        if debugged and _TIMEOUT not in os.environ:
            found[_TIMEOUT] = _DAY_S  # messages between hosts count the time in which people think
        if os.environ.get(DEBUGGER) == "0":
            return found | {DEBUGGER: "0"}
        port = self.listener.getsockname()[1]
        return found | {DEBUGGER: ",".join(f"{host}:{port}" for host in hosts)}

    def start(self) -> None:
        """Serve: a worker is about to connect."""
        from unisono.launchers.runtime.debugger.hub import announce

        hub = self._hub or self._make_hub()
        if not hub.is_serving:
            hub.start()
            announce(hub, self._job.describe_program())

    def _make_hub(self) -> Hub:
        from unisono.launchers.runtime.debugger import make_token
        from unisono.launchers.runtime.debugger.hub import Hub
        from unisono.launchers.runtime.debugger.prompt import TerminalPrompt

        self._hub = hub = Hub(self.listener, make_token(self._secret), self._say, self._is_encrypted)
        hub.how_to_attach = f"unisono debug {hub.run}"
        self._prompt = self._context.run(TerminalPrompt, hub)
        hub.open_prompt = self._prompt.open
        return hub

    def close(self) -> None:
        """Nobody is debugged any more."""
        if self._hub is None:
            self.listener.close()
            return
        if self._hub.is_serving:
            from unisono.launchers.runtime.debugger.hub import forget

            forget(self._hub)
        self._hub.close()
        if self._prompt is not None:
            self._prompt.close()
