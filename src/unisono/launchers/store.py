"""The store that a launcher hosts, in a thread of its own; workers are given its address and what opens it."""

from __future__ import annotations

import secrets
from socket import create_server, socket
from typing import TYPE_CHECKING

from unisono.launchers.runtime.channel import SECRET, STORE, derive_secret

if TYPE_CHECKING:
    from unisono.launchers.runtime.store_server import StoreServer

__all__ = ["HostedStore", "store_variables"]


class HostedStore:
    """Listens at once; serves from `start` on, and connections made before are served then."""

    def __init__(self, listener: socket | None = None, *, secret: str = "", backlog: int = 128) -> None:
        """`listener`: on this host by default; `secret`: what the workers are given, one of its own by default."""
        self._secret = secret or secrets.token_hex(32)
        self.listener = listener or create_server(("127.0.0.1", 0), backlog=backlog)
        self.address: tuple[str, int] = self.listener.getsockname()[:2]
        self._server: StoreServer | None = None

    @property
    def serving(self) -> bool:
        """Whether it was started."""
        return self._server is not None

    @property
    def variables(self) -> dict[str, str]:
        """What opens it, for the environment of a worker on this host."""
        return store_variables(self.address, self._secret)

    def start(self) -> None:
        """Serve; only now is the server imported, as many programs never ask for it."""
        from unisono.launchers.runtime.store_server import StoreServer

        self._server = StoreServer(self.listener, derive_secret(self._secret.encode(), "store"))
        self._server.start()

    def close(self) -> None:
        """End the store."""
        if self._server is not None:
            self._server.close()
        self.listener.close()


def store_variables(address: tuple[str, int], secret: str) -> dict[str, str]:
    """Variables by which a worker finds the secret for the store at an address (runtime/secret.py)."""
    return {SECRET: secret, STORE: f"{address[0]}:{address[1]}"}
