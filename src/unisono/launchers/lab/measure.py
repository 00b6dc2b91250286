"""What passes over a link that is emulated by times (runtime/link_emulation.py), measured on the loopback device."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Sequence

from unisono.launchers.runtime.link_emulation import Link, Wire

__all__ = ["measure_wire"]

_MEASURED_S = 0.2
_MESSAGES = 10
_LARGEST = 8 << 20
_PINGS = 5


def measure_wire(links: Sequence[Link]) -> tuple[list[float], float]:
    """Bits of payload a second over the link of each host, all in use at once, and seconds from host 0 to host 1."""
    wire = Wire(Wire.create(len(links)), len(links))
    pairs = [_connect() for _ in links]
    try:
        return _measure_rates(wire, links, pairs), _measure_latency(wire, links, pairs[0])
    finally:
        for sock in (sock for pair in pairs for sock in pair):
            sock.close()
        wire.close()


def _connect() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    for sock in (near, far):
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return near, far


def _measure_rates(
    wire: Wire, links: Sequence[Link], pairs: Sequence[tuple[socket.socket, socket.socket]]
) -> list[float]:
    sizes = [
        _LARGEST if link.bits_per_s is None else min(_LARGEST, int(link.bits_per_s / 8 * _MEASURED_S / _MESSAGES))
        for link in links
    ]
    passed, began = [0] * len(links), time.monotonic()
    took = [0.0] * len(links)
    ends = [wire.take(host, links[host], up=sizes[host]) for host in range(len(links))]
    while min(took) < _MEASURED_S:
        _pass(pairs, sizes)
        more = [wire.take(host, links[host], up=sizes[host]) for host in range(len(links))]  # the link is never free
        for host in sorted(range(len(links)), key=ends.__getitem__):
            wire.hold(ends[host])
            passed[host] += sizes[host]
            took[host] = time.monotonic() - began
        ends = more
    return [8.0 * count / seconds for count, seconds in zip(passed, took, strict=True)]


def _pass(pairs: Sequence[tuple[socket.socket, socket.socket]], sizes: Sequence[int]) -> None:
    """Send so many bytes from one end of each pair to the other."""
    data, room = bytes(1 << 18), bytearray(1 << 20)
    for (near, far), size in zip(pairs, sizes, strict=True):
        sent = came = 0
        while came < size:
            readable, writable, _ = select.select([far], [near] if sent < size else [], [], 10)
            if writable:
                sent += near.send(memoryview(data)[: min(len(data), size - sent)])
            if readable:
                came += far.recv_into(room)


def _measure_latency(wire: Wire, links: Sequence[Link], pair: tuple[socket.socket, socket.socket]) -> float:
    there = links[1 % len(links)]
    times = []
    for _ in range(_PINGS):
        began = time.monotonic()
        end = wire.take(0, links[0], up=1)
        _pass([pair], [1])
        wire.hold(end + (links[0].latency_s + there.latency_s) / 2)
        times.append(time.monotonic() - began)
    return sorted(times)[_PINGS // 2]
