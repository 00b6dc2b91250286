"""The machines that are imagined: workers a host, links, racks, cores, how evenly they work and how often they fail."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from unisono.predict.costs import Link, Network, Operation
from unisono.predict.costs.network import OPS
from unisono.predict.simulation.stragglers import EVEN, Stragglers
from unisono.units import as_json, show_duration

_FAILURES = 2000  # that a simulation sees
_MEASURED_RECOVERY_S = 0.13  # from a worker's end to the next step: benchmarks/results, "faults"


@dataclass(frozen=True)
class Failures:
    """How often a host fails, and what happens then.

    mtbf_s: mean time between failures of one host; times are exponential. inf: none.
    way: "elastic": the others wait until the loss is noticed and a new generation begins, then go on as fewer, until
        the replacement has started and joins (a new generation again). "restart": all begin again at the last
        checkpoint.
    detect_s: until the loss is noticed (a host that falls silent: the heartbeat).
    recover_s: what a new generation takes.
    start_s: until a replacement is ready: a host found, the program started.
    checkpoint_every_s, checkpoint_s: training between two checkpoints, and how long one is waited for.
    """

    mtbf_s: float = math.inf
    way: Literal["elastic", "restart"] = "elastic"
    detect_s: float = 10.0
    recover_s: float = _MEASURED_RECOVERY_S
    start_s: float = 60.0
    checkpoint_every_s: float = 1800.0
    checkpoint_s: float = 5.0

    def keep(self, hosts: int, seed: int, *, waits: bool = True) -> float:
        """The share of the undisturbed training that is left. `waits`: the others stand still for a lost worker."""
        if math.isinf(self.mtbf_s) and self.way == "elastic":
            return 1.0
        return self._keep_elastic(hosts, seed, waits) if self.way == "elastic" else self._keep_restarting(hosts)

    def _keep_restarting(self, hosts: int) -> float:
        """Expected time of a checkpoint's interval S with its cost d, where a failure costs R and the work since the
        last checkpoint, and may come at any time: exp(R/m) (exp((S + d)/m) - 1) m, with m the time between failures of
        any host (Daly, 2006)."""
        useful, whole = self.checkpoint_every_s, self.checkpoint_every_s + self.checkpoint_s
        if math.isinf(self.mtbf_s):
            return useful / whole
        between = self.mtbf_s / hosts
        exponent = (self.detect_s + self.start_s) / between
        if exponent + whole / between > 500:
            return 0.0
        return useful / (math.exp(exponent) * math.expm1(whole / between) * between)

    def best_interval(self, hosts: int) -> float:
        """The time between checkpoints that leaves the most training, about sqrt(2 d m) (Young, 1974)."""
        between = self.mtbf_s / hosts
        if math.isinf(between) or not self.checkpoint_s:
            return math.inf if math.isinf(between) else 0.0
        # the root of exp((S + d)/m) (1 - S/m) = 1, by halving
        low, high = 0.0, between
        for _ in range(100):
            s = (low + high) / 2
            if math.exp((s + self.checkpoint_s) / between) * (1 - s / between) > 1:
                low = s
            else:
                high = s
        return low

    def _keep_elastic(self, hosts: int, seed: int, waits: bool) -> float:
        """By events: failures at a rate of the hosts that are up, and replacements."""
        rng = np.random.default_rng([seed, hosts])
        now = busy_until = done = 0.0
        up, back = hosts, [math.inf]  # when replacements come
        waits_s: list[float] = rng.exponential(self.mtbf_s, _FAILURES).tolist()
        draws = iter(waits_s)
        failed = next(draws) / hosts
        while True:
            event = min(failed, back[0])
            done += up / hosts * max(0.0, event - max(now, busy_until))
            now = event
            if event == back[0]:
                heapq.heappop(back)
                up += 1
                pause = self.recover_s
            else:
                up -= 1
                heapq.heappush(back, now + self.start_s)
                pause = self.detect_s + self.recover_s
            if waits:
                busy_until = max(busy_until, now + pause)
            if event == failed:
                wait = next(draws, None)
                if wait is None:
                    return done / now
                failed = now + (wait / up if up else math.inf)
            elif math.isinf(failed) and up:
                failed = now + float(rng.exponential(self.mtbf_s)) / up

    def as_json(self) -> dict[str, Any] | None:
        """Plain values; None: no failures."""
        return None if math.isinf(self.mtbf_s) else dict(vars(self))

    def describe(self, hosts: int) -> str:
        """How often hosts fail and what happens then, in words."""
        if math.isinf(self.mtbf_s):
            return "no failures"
        some = f"a host fails every {show_duration(self.mtbf_s)}, one of {hosts} every "
        some += show_duration(self.mtbf_s / hosts)
        if self.way == "elastic":
            return f"{some}; the others continue after {show_duration(self.detect_s + self.recover_s)}"
        return f"{some}; all begin again at a checkpoint, one every {show_duration(self.checkpoint_every_s)}"


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
            raise ValueError("oversubscription applies to racks: set how many hosts share a switch, with --rack 16")

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
        names = ("per_host", "cores", "threads", "rack_hosts", "oversubscription")
        return {
            **{name: getattr(self, name) for name in names},
            **{name: as_json(getattr(self, name)._asdict()) for name in ("between", "inside")},
            "stragglers": self.stragglers.as_json(),
            "failures": self.failures.as_json(),
            "measured_network": self.measured is not None,
        }
