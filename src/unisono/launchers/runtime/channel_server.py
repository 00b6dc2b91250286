"""The channels that other processes open at one address: accepted, proven, read and written from an event loop.

What strangers can use up is limited: connections that have not proven themselves, the time that they have for it, and
bytes of answers that nobody takes.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from unisono.launchers.runtime.channel import GREETING_S, MOST_UNPROVEN, Channel, Frame, keep_alive
from unisono.launchers.runtime.event_loop import EventLoop

__all__ = ["ChannelServer"]

_NO_DESCRIPTORS_S = 0.05  # until accepting is tried again


class ChannelServer:
    """Serves from `start` on; connections made before are served then.

    on_frames: given a channel and what it has said; NotProven or another ConnectionError drops the channel.
    on_lost: given a channel whose other end is gone, or is not one of ours. It is closed already.
    most_unread: bytes that a channel may leave unread; more drops it. None: no limit.
    wrap: puts another layer, such as encryption, around a connection that was accepted.
    """

    def __init__(
        self,
        loop: EventLoop,
        listener: socket.socket,
        token: bytes,
        on_frames: Callable[[Channel, list[Frame]], None],
        on_lost: Callable[[Channel], None],
        *,
        most_unread: int | None = None,
        wrap: Callable[[socket.socket], socket.socket] | None = None,
    ) -> None:
        self._loop, self._listener, self._token, self._wrap = loop, listener, token, wrap
        self._on_frames, self._on_lost, self._most_unread = on_frames, on_lost, most_unread
        self.channels: dict[Channel, None] = {}  # the oldest first
        self._unproven: dict[Channel, None] = {}
        listener.setblocking(False)

    def start(self) -> None:
        """Accept connections."""
        self._loop.watch(self._listener, self._accept)

    def close_address(self) -> None:
        """Accept no more connections."""
        self._loop.forget(self._listener)
        self._listener.close()

    def close(self) -> None:
        """Close the address and all channels; `on_lost` is not called."""
        self.close_address()
        for channel in list(self.channels):
            self.forget(channel)

    def drop_late(self) -> float | None:
        """Drop channels that have not proven themselves in time; seconds until the next is due, None if there is none.

        To be called each time after `pump`.
        """
        now = time.monotonic()
        for channel in list(self._unproven):
            if (left_s := channel.since + GREETING_S - now) > 0:
                return left_s
            self._lose(channel)
        return None

    def send(self, channel: Channel, **fields: Any) -> None:
        """Send a JSON object; to a channel that is gone, nothing."""
        self.send_frame(channel, "J", json.dumps(fields).encode())

    def send_frame(self, channel: Channel, kind: str, body: bytes) -> None:
        """Send a frame; to a channel that is gone, nothing."""
        if channel in self.channels:
            with contextlib.suppress(OSError):  # its end is noticed when it is read
                channel.send(kind, body)
            self.flush(channel)

    def flush(self, channel: Channel) -> None:
        """Send what can be sent now, and the rest when it can."""
        if channel not in self.channels:
            return
        with contextlib.suppress(OSError):  # its end is noticed when it is read
            channel.flush()
        if self._most_unread is not None and channel.bytes_to_send > self._most_unread:
            self._lose(channel)
        else:
            self._loop.watch_writing(channel, channel.bytes_to_send > 0)

    def forget(self, channel: Channel) -> None:
        """Close a channel; `on_lost` is not called."""
        if channel in self.channels:
            self.release(channel)
            channel.close()

    def release(self, channel: Channel) -> None:
        """Serve a channel no more, and leave it open: its socket has another use from now on."""
        self._loop.forget(channel)
        del self.channels[channel]
        self._unproven.pop(channel, None)

    def _lose(self, channel: Channel) -> None:
        self.forget(channel)
        self._on_lost(channel)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # no descriptors are left, or the caller has gone
            if self._unproven:
                self._lose(next(iter(self._unproven)))
            else:
                time.sleep(_NO_DESCRIPTORS_S)
            return
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            keep_alive(sock)
        channel = Channel(sock if self._wrap is None else self._wrap(sock), self._token, server=True)
        self.channels[channel] = self._unproven[channel] = None
        self._loop.watch(channel, partial(self._read, channel))
        self.flush(channel)
        if len(self._unproven) > MOST_UNPROVEN:
            self._lose(next(iter(self._unproven)))

    def _read(self, channel: Channel) -> None:
        try:
            channel.flush()
            frames = channel.receive()
        except OSError:
            frames = None
        if frames is None:
            self._lose(channel)
            return
        if channel.proven:
            self._unproven.pop(channel, None)
        try:
            if frames:
                self._on_frames(channel, frames)
        except ConnectionError:  # what was said is no message of ours
            if channel in self.channels:
                self._lose(channel)
            return
        self.flush(channel)
