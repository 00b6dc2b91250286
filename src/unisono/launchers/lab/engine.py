"""The lab as an engine: workers on emulated hosts of this machine, joined by links of given speeds.

The kernel does it where it can: hosts are network namespaces (hosts.py), workers have addresses of their own and real
connections. Latency, and everything where there are no namespaces, is done by the workers' transport
(world/transports/shaped.py), which is told so by UNISONO_NET. What passes over the links is measured before use; over
links that the transport emulates, on the loopback device.
"""

from __future__ import annotations

import itertools
import os
import select
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from unisono.launchers.engines.engine import Engine, EngineError, Work, agent_command
from unisono.launchers.engines.ssh import HostCommand, HostsStarted, divide, write_setup
from unisono.launchers.lab.hosts import EmulatedHosts, NoNamespaces, mark_of_this_process
from unisono.launchers.processes import threads_per_worker
from unisono.launchers.runtime.link_emulation import Link, Wire, parse_links
from unisono.units import show_rate, show_s

__all__ = ["Lab", "measure_wire"]

Shaper = Literal["auto", "kernel", "transport"]
_SHAPERS = ("auto", "kernel", "transport")
_REACHED, _NEARLY_REACHED = 0.85, 0.5  # of the rate that was asked for; headers take 4 % of it
_MOST_HOSTS = 200
_MOST_RESTARTS = 40  # each has a socket to listen on, made with the hosts


@dataclass(frozen=True)
class Lab(Engine):
    """Emulated hosts on this machine, for experiments with slow networks.

    Arguments:
        hosts: how many; None: one for each worker.
        net: how each is joined to the others, such as "100mbit", "1gbit,20ms", or "3x1gbit/100mbit" with a link for
            each host; "": as fast as the machine.
        max_restarts: how often all workers are started again after one has failed.
        shaper: what holds bytes back. "kernel": network namespaces and `tc`; "transport": the workers themselves;
            "auto": the kernel where it can.
    """

    name: ClassVar[str] = "lab"

    hosts: int | None = None
    net: str = ""
    max_restarts: int = 0
    shaper: Shaper = "auto"

    def environment(self) -> str:
        return "torchrun"

    @property
    def restarts(self) -> int:
        return self.max_restarts

    def threads(self, workers: int) -> int | None:
        """The cores of this machine divided by all workers: it is one machine."""
        return None if "OMP_NUM_THREADS" in os.environ else threads_per_worker(workers)

    def check(self, workers: int) -> None:
        hosts = self._count_hosts(workers)
        parse_links(self.net or "0ms", hosts)
        if not 0 <= self.max_restarts <= _MOST_RESTARTS:
            raise ValueError(f"lab: got max_restarts={self.max_restarts}; expected 0 to {_MOST_RESTARTS}")
        if self.shaper not in _SHAPERS:
            raise ValueError(f"lab: got shaper={self.shaper!r}; expected one of {', '.join(_SHAPERS)}")

    def _count_hosts(self, workers: int) -> int:
        if self.hosts is None:
            return workers
        if isinstance(self.hosts, bool) or not isinstance(self.hosts, int) or not 1 <= self.hosts <= _MOST_HOSTS:
            raise ValueError(f"lab: got hosts={self.hosts!r}; expected a number of emulated hosts, 1 to {_MOST_HOSTS}")
        if self.hosts > workers:
            raise ValueError(
                f"lab: got {self.hosts} hosts and {workers} worker{'s' * (workers > 1)}; expected at least a worker "
                "for each host: ask for fewer hosts, or more workers (-n)"
            )
        return self.hosts

    def open(self, workers: int) -> Engine:
        """Lay out the hosts, measure, and say on standard error what was asked for and what was found."""
        self.check(workers)
        hosts = self._count_hosts(workers)
        links = parse_links(self.net or "0ms", hosts)
        network = None if self.shaper == "transport" else self._lay_out(links)
        if network is not None:
            rates, latency_s = network.bits_per_s, network.latency_s
        else:
            rates, latency_s = _best_of(links)
        for line in _describe(links, rates, latency_s, by_kernel=network is not None):
            print(f"unisono: {line}", file=sys.stderr, flush=True)
        _check_rates(links, rates)
        return _OpenLab(hosts, self.net, self.max_restarts, self.shaper, links=links, network=network)

    def _lay_out(self, links: Sequence[Link]) -> EmulatedHosts | None:
        try:
            return EmulatedHosts(
                len(links), links=links, measure=True, listeners=3 + self.max_restarts, backlog=2 * _MOST_HOSTS
            )
        except NoNamespaces as error:
            if self.shaper == "kernel":
                raise EngineError(
                    f"the lab cannot create hosts here: {error}. --shaper auto runs without them"
                ) from None
            print(
                f"unisono: {error}; the workers' own transport throttles the links instead, and groups that a program "
                "makes by torch.distributed are as fast as the machine",
                file=sys.stderr,
            )
            return None


@dataclass(frozen=True)
class _OpenLab(Lab):
    """The lab of one run. Without a network its workers meet on the loopback device."""

    links: Sequence[Link] = ()
    network: EmulatedHosts | None = field(default=None, compare=False)

    @property
    def local(self) -> bool:
        return self.network is None

    def listen(self, backlog: int) -> socket.socket:
        return super().listen(backlog) if self.network is None else self.network.listeners.pop()

    def own_addresses(self) -> Sequence[str]:
        return super().own_addresses() if self.network is None else [self.network.launcher_address]

    def start(self, work: Work) -> HostsStarted:
        ranks = iter(range(work.workers))
        counts = divide([f"host{host}" for host in range(len(self.links))], work.workers)
        commands = {}
        for number, (host, count) in enumerate(counts.items()):
            env = {"UNISONO_HOST": host, "UNISONO_LAB": mark_of_this_process(), **self._write_net(number)}
            if self.network is not None:
                env["UNISONO_WARM"] = "0"  # a process that stays for the next run would keep the host and its network
            here = list(itertools.islice(ranks, count))
            setup = write_setup(work, here, max_restarts=self.max_restarts, env=env)
            agent = agent_command(None, "host")
            command = agent if self.network is None else self.network.command(number, *agent)
            commands[host] = HostCommand(command, setup, here, env)
        return HostsStarted(commands, elastic=work.elastic, on_close=self.network.close if self.network else None)

    def _write_net(self, host: int) -> dict[str, str]:
        """The UNISONO_NET variable: the links that the workers' transport has to emulate."""
        link = self.links[host]
        if self.network is not None:
            link = Link(None, link.latency_s)
            return {"UNISONO_NET": str(link)} if any(other.latency_s for other in self.links) else {}
        loopback = {"GLOO_SOCKET_IFNAME": "lo"} if "lo" in (name for _, name in socket.if_nameindex()) else {}
        return {"UNISONO_NET": str(link), **loopback}


def _best_of(links: Sequence[Link]) -> tuple[list[float], float]:
    """Measure once, and again if other programs disturbed the first measurement."""
    first = measure_wire(links)
    if _find_worst(links, first[0]) >= _REACHED:
        return first
    second = measure_wire(links)
    return [max(pair) for pair in zip(first[0], second[0], strict=True)], min(first[1], second[1])


def _find_worst(links: Sequence[Link], rates: Sequence[float]) -> float:
    """The worst ratio of a link's measured rate to the rate asked for."""
    parts = [rate / link.bits_per_s for link, rate in zip(links, rates, strict=True) if link.bits_per_s is not None]
    return min(parts, default=1.0)


def _describe(links: Sequence[Link], rates: Sequence[float], latency_s: float, *, by_kernel: bool) -> list[str]:
    """One line for each kind of link."""
    lines = []
    for link in dict.fromkeys(links):
        hosts = [host for host, other in enumerate(links) if other == link]
        who = "" if len(hosts) == len(links) else f", host{'s' * (len(hosts) > 1)} {', '.join(map(str, hosts))}"
        asked = "not held back" if link == Link() else f"asked {link.describe()}"
        measured = f"measured {show_rate(min(rates[host] for host in hosts))} of payload"
        added = f" and {show_s(link.latency_s)} that the transport adds" if by_kernel and link.latency_s else ""
        lines.append(
            f"{len(links)} emulated host{'s' * (len(links) > 1)}{who}: {asked}, {measured}, latency "
            f"{show_s(latency_s)}{added}"
        )
    return lines


def _check_rates(links: Sequence[Link], rates: Sequence[float]) -> None:
    """Warn if a rate is not reached; raise EngineError if it is missed by far."""
    worst = _find_worst(links, rates)
    if worst >= _REACHED:
        return
    host = next(h for h, link in enumerate(links) if link.bits_per_s and rates[h] / link.bits_per_s == worst)
    asked = show_rate(links[host].bits_per_s or 0.0)
    found = f"host{host} was asked for {asked}, and {show_rate(rates[host])} pass"
    if worst < _NEARLY_REACHED:
        raise EngineError(
            f"this machine does not reach the rate: {found} with the links of all {len(links)} hosts in use. Ask for "
            f"less than that, or for fewer hosts"
        )
    print(f"unisono: warning: {found}: others use this machine, or it is too slow for the rate", file=sys.stderr)


# Measuring what the transport emulates -------------------------------------------------------------------------------


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
