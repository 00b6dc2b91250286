"""The machines that are imagined: workers a host, links, racks, cores, and how evenly and how long they work."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from unisono.predict.costs import Link, Network, Operation
from unisono.predict.costs.anatomy import OPS
from unisono.predict.simulation.failures import Failures
from unisono.predict.simulation.stragglers import EVEN, Stragglers

__all__ = ["Cluster"]

_BETWEEN = Link(latency_s=1e-4, bits_per_s=1e9)
_INSIDE = Link(latency_s=5e-6, bits_per_s=80e9)


@dataclass(frozen=True)
class Cluster:
    """A cluster of any number of workers.

    per_host: workers a host. between, inside: the links of hosts, and what ranks of a host share.
    cores: of a host; where its workers need more (`threads` each), all compute is slower by as much. None: enough.
    rack_hosts, oversubscription: so many hosts share a switch, whose uplink passes 1/oversubscription of what they can
        send. 0 hosts: one switch for all.
    measured: a network on which operations were measured; they count as measured there.
    hosts_share_cores: the hosts are emulated on one machine, whose cores all workers share.
    """

    per_host: int = 1
    between: Link = _BETWEEN
    inside: Link = _INSIDE
    cores: int | None = None
    threads: int = 1
    rack_hosts: int = 0
    oversubscription: float = 1.0
    stragglers: Stragglers = EVEN
    failures: Failures = field(default_factory=Failures)
    measured: Network | None = None
    hosts_share_cores: bool = False

    def __post_init__(self) -> None:
        for name in ("per_host", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, expected at least 1")
        if self.cores is not None and self.cores < 1:
            raise ValueError(f"cores: got {self.cores}, expected at least 1")
        if not 1 <= self.oversubscription < math.inf:
            raise ValueError(
                f"oversubscription: got {self.oversubscription:g}, expected at least 1: 4 means that a rack's uplink "
                "passes a quarter of what its hosts can send"
            )
        if self.rack_hosts < 0:
            raise ValueError(f"hosts a rack: got {self.rack_hosts}, expected at least 1, or 0 for one switch")
        if self.oversubscription > 1 and not self.rack_hosts:
            raise ValueError("oversubscription is that of racks: say how many hosts share a switch, with --rack 16")

    def count_hosts(self, workers: int) -> int:
        """Hosts that so many workers fill."""
        return -(-workers // self.per_host)

    def crowding(self, workers: int) -> float:
        """How many times as long compute takes where workers share cores.

        >>> Cluster(per_host=8, cores=2).crowding(4), Cluster(per_host=8, cores=8).crowding(100)
        (2.0, 1.0)
        """
        if self.cores is None:
            return 1.0
        together = workers if self.hosts_share_cores else min(workers, self.per_host)
        return max(1.0, together * self.threads / self.cores)

    def measured_as(self, network: Network) -> Cluster:
        """The same cluster with a network as a plan measured it."""
        if network.hosts == 1:  # its links are those of one host's memory
            return replace(self, inside=network.inside or network.between, measured=network)
        return replace(self, between=network.between, inside=network.inside or self.inside, measured=network)

    def network(self, workers: int) -> Network:
        """The network of so many workers, with what leaves a rack slowed by its uplink."""
        per_host = min(self.per_host, workers)
        crowding = self.crowding(workers)
        inside = Link(self.inside.latency_s * crowding, self.inside.bits_per_s / crowding)
        network = Network(workers, per_host, self.between, inside)
        if self.measured is not None:
            network = self._carry_measured(self.measured, workers, per_host)
        slower = {op: self._slowed(op, network.hosts) for op in OPS}
        if all(times == 1.0 for times in slower.values()):
            return network
        lines = {op: network.fitted.get(op) or tuple(network.formula(Operation(op, 1 << 20))) for op in OPS}
        return replace(network, fitted={op: (line[0], line[1] * slower[op]) for op, line in lines.items()}, curves={})

    def _carry_measured(self, measured: Network, workers: int, per_host: int) -> Network:
        """The measured network for so many workers; inside a host cores move the bytes, so crowding slows it."""
        if (measured.ranks, measured.per_host) == (workers, per_host):
            return measured
        network = replace(measured, inside=measured.inside or self.inside).with_ranks(workers, per_host)
        slower = self.crowding(workers) / replace(self, per_host=measured.per_host).crowding(measured.ranks)
        if slower == 1.0:
            return network
        link = network.inside or self.inside
        network = replace(network, inside=Link(link.latency_s * slower, link.bits_per_s / slower))
        if network.hosts > 1:
            return network
        fitted = {op: (a * slower, b * slower) for op, (a, b) in network.fitted.items()}
        curves = {op: [(nbytes, s * slower) for nbytes, s in points] for op, points in network.curves.items()}
        return replace(network, fitted=fitted, curves=curves)

    def _slowed(self, op: str, hosts: int) -> float:
        """By what an operation's bytes take longer for the uplinks. A ring or a chain of hosts in order crosses each
        uplink once; of what all send to all, most leaves the rack."""
        if not self.rack_hosts or hosts <= self.rack_hosts:
            return 1.0
        if op in ("all_to_all", "exchange"):
            return max(1.0, self.oversubscription * (hosts - self.rack_hosts) / (hosts - 1))
        return max(1.0, self.oversubscription / self.rack_hosts)

    # What could be bought ---------------------------------------------------------------------------------------

    def with_links(self, *, rate: float = 1.0, latency: float = 1.0) -> Cluster:
        """The same with links between hosts of so many times the rate and the latency."""
        link = Link(self.between.latency_s * latency, self.between.bits_per_s * rate)
        measured = self.measured
        if measured is not None:
            lines = {op: (line[0] * latency, line[1] / rate) for op, line in measured.fitted.items()}
            other = Link(measured.between.latency_s * latency, measured.between.bits_per_s * rate)
            measured = replace(measured, between=other, fitted=lines, curves={})
        return replace(self, between=link, measured=measured)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        links = {
            name: {
                "latency_s": link.latency_s,
                "bits_per_s": link.bits_per_s if math.isfinite(link.bits_per_s) else None,
            }
            for name, link in (("between", self.between), ("inside", self.inside))
        }
        plain = {
            name: getattr(self, name) for name in ("per_host", "cores", "threads", "rack_hosts", "oversubscription")
        }
        return {
            **plain,
            **links,
            "stragglers": self.stragglers.as_json(),
            "failures": self.failures.as_json(),
            "measured_network": self.measured is not None,
        }
