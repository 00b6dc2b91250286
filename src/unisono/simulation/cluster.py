"""The machines that are imagined: workers a host, links, racks, cores, and how evenly and how long they work."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from unisono.costs import Link, Network, Operation
from unisono.simulation.failures import Failures
from unisono.simulation.stragglers import EVEN, Stragglers

__all__ = ["Cluster", "ClusterNetwork"]


@dataclass(frozen=True)
class Cluster:
    """A cluster of any number of workers.

    per_host: workers a host. between, inside: the links of hosts, and what ranks of a host share.
    cores: of a host; where its workers need more (`threads` each), all compute is slower by as much. None: enough.
    rack_hosts, oversubscription: so many hosts share a switch, whose uplink passes 1/oversubscription of what they can
        send. 0 hosts: one switch for all.
    measured: a network on which operations were measured; links count as measured there.
    """

    per_host: int = 1
    between: Link = Link(1e-4, 1e9)
    inside: Link = Link(5e-6, 80e9)
    cores: int | None = None
    threads: int = 1
    rack_hosts: int = 0
    oversubscription: float = 1.0
    stragglers: Stragglers = EVEN
    failures: Failures = field(default_factory=Failures)
    measured: Network | None = None

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
        """Of so many workers."""
        return -(-workers // self.per_host)

    def crowding(self, workers: int) -> float:
        """How many times as long compute takes where workers share cores.

        >>> Cluster(per_host=8, cores=2).crowding(4), Cluster(per_host=8, cores=8).crowding(100)
        (2.0, 1.0)
        """
        if self.cores is None:
            return 1.0
        return max(1.0, min(workers, self.per_host) * self.threads / self.cores)

    def network(self, workers: int) -> ClusterNetwork:
        """Of so many workers."""
        return ClusterNetwork(self, workers)

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
            name: {"latency_s": link.latency_s, "bits_per_s": link.bits_per_s if math.isfinite(link.bits_per_s) else None}
            for name, link in (("between", self.between), ("inside", self.inside))
        }
        plain = {name: getattr(self, name) for name in ("per_host", "cores", "threads", "rack_hosts", "oversubscription")}
        return {
            **plain,
            **links,
            "stragglers": self.stragglers.as_json(),
            "failures": self.failures.as_json(),
            "measured_network": self.measured is not None,
        }


class ClusterNetwork(Network):
    """The network of so many workers of a cluster; racks make what leaves them slower."""

    def __init__(self, cluster: Cluster, workers: int) -> None:
        per_host = min(cluster.per_host, workers)
        base = cluster.measured.with_ranks(workers, per_host) if cluster.measured is not None else None
        fitted = base.fitted if base is not None else {}
        curves = cluster.measured.curves if cluster.measured is not None and cluster.measured.ranks == workers else {}
        super().__init__(workers, per_host, cluster.between, cluster.inside, fitted, curves)
        object.__setattr__(self, "_cluster", cluster)

    def seconds(self, operation: Operation) -> float:
        """How long it takes, where a rack's uplink may be what passes the least."""
        plain = super().seconds(operation)
        slower = self.slowed(operation.op)
        if slower == 1.0 or operation.among == "inside":
            return plain
        free = super().seconds(replace(operation, nbytes=0))
        return free + (plain - free) * slower

    def slowed(self, op: str) -> float:
        """By what an operation's bytes take longer for the uplinks. A ring or a chain of hosts in order crosses each
        uplink once; of what all send to all, most leaves the rack."""
        cluster: Cluster = self._cluster  # type: ignore[attr-defined]
        racks_of = cluster.rack_hosts
        if not racks_of or self.hosts <= racks_of:
            return 1.0
        if op in ("all_to_all", "exchange"):
            return max(1.0, cluster.oversubscription * (self.hosts - racks_of) / (self.hosts - 1))
        return max(1.0, cluster.oversubscription / racks_of)
