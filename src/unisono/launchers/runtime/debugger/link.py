"""One end of a connection of the debugger: JSON messages over a channel (channel.py), sent from any thread."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from unisono.launchers.runtime.channel import Channel, connect

__all__ = ["TEXT_CHARACTERS", "HubConnection", "connect_to_hub"]

TEXT_CHARACTERS = 200_000  # of one answer: a message fits into one frame


class HubConnection:
    """A worker's or a prompt's connection to the hub; blocking, and usable from any thread."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._lock = threading.Lock()

    def send(self, **fields: Any) -> bool:
        """Send a message; False if the hub is gone."""
        try:
            with self._lock:
                self.channel.send_json(**fields)
        except OSError:
            return False
        return True

    def messages(self) -> Iterator[dict[str, Any]]:
        """Messages from the hub, until it is gone."""
        while True:
            try:
                frames = self.channel.receive()
            except (OSError, ValueError):
                return
            if frames is None:
                return
            for frame in frames:
                yield frame.json()

    def shut(self) -> None:
        """End the connection, also for a thread that reads it now."""
        with contextlib.suppress(OSError):
            self.channel.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the descriptor."""
        self.channel.close()


def connect_to_hub(addresses: Sequence[tuple[str, int]], token: bytes, *, timeout_s: float = 10.0) -> HubConnection:
    """A link to the hub; Unreachable where none of its addresses answers."""
    return HubConnection(connect(addresses, token, timeout_s=timeout_s))
