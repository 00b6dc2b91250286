"""The time of a step by so many workers: closed forms where all is even, draws and events where it is not."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from unisono.methods.facts import Grade
from unisono.predict.costs import Anatomy, Operation, replay
from unisono.predict.simulation.cluster import Cluster
from unisono.predict.simulation.methods import Method
from unisono.predict.simulation.stragglers import Floats, Stragglers
from unisono.predict.simulation.waiting import Service, simulate_neighbours, simulate_servers
from unisono.units import show_duration

_APPLY_BYTES_PER_S = 2e9  # gradients that a server adds to its parameters in a second
_GRID = 33  # points at which a step is replayed; between them it is a line
_BLOCK = 1 << 22  # draws at a time


@dataclass(frozen=True)
class Outcome:
    """What a method achieves with so many workers.

    step_s: from one window of a worker to the next, in the mean; failures are not in it.
    low_s, high_s: four of five steps lie between (of ten stretches of a run, where no worker waits for all others).
    alone_s: a step of one worker alone.
    compute_s, communication_s, compression_s, waiting_s: what a step is spent on; waiting for slower workers and for
        servers that serve others.
    kept: the share of time that failures leave.
    """

    spec: str
    grade: Grade
    workers: int
    step_s: float
    low_s: float
    high_s: float
    alone_s: float
    compute_s: float
    communication_s: float
    compression_s: float
    waiting_s: float
    kept: float = 1.0
    problem: str = ""
    note: str = ""

    @property
    def throughput(self) -> float:
        """Windows a second, of all workers."""
        return self.workers / self.step_s * self.kept if not self.problem else 0.0

    @property
    def speed_up(self) -> float:
        """Samples a second over those of one worker alone."""
        return self.throughput * self.alone_s

    @property
    def efficiency(self) -> float:
        """Speed-up over the number of workers."""
        return self.speed_up / self.workers

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        plain = {name: value if value == value else None for name, value in asdict(self).items()}
        more = {name: getattr(self, name) for name in ("throughput", "speed_up", "efficiency")}
        return {**plain, **(more if not self.problem else dict.fromkeys(more))}


def simulate_method(method: Method, cluster: Cluster, workers: int, *, steps: int = 1000, seed: int = 0) -> Outcome:
    """A method on so many workers of a cluster, for so many steps."""
    alone_s = (method.alone_s or method.at(1).compute_s) * cluster.stragglers.mean
    if problem := _find_problem(method, cluster, workers):
        unknown = (math.nan, math.nan, math.nan, alone_s, math.nan, math.nan, math.nan, math.nan)
        return Outcome(method.spec, method.grade, workers, *unknown, problem=problem)
    step = method.at(workers).slowed(cluster.crowding(workers))
    run = _Run(method, step, cluster, workers, steps, np.random.default_rng([seed, workers]))
    style = method.pattern.style if workers > 1 else "alone"
    outcome = {
        "synchronous": run.train_together,
        "windows": run.train_in_windows,
        "neighbours": run.train_with_neighbours,
        "servers": run.train_with_servers,
        "alone": run.train_alone,
    }[style]()
    waits = method.pattern.style in ("synchronous", "windows", "neighbours") or method.pattern.staleness == 0
    kept = cluster.failures.keep(cluster.count_hosts(workers), seed, waits=waits)
    return replace(outcome, kept=kept, alone_s=alone_s)


def _find_problem(method: Method, cluster: Cluster, workers: int) -> str:
    """Why a method cannot run with these workers; empty if it can."""
    if method.pattern.one_host and workers > cluster.per_host:
        return f"needs all workers on one host, which has {cluster.per_host}"
    if method.pattern.style == "servers" and method.pattern.servers > workers:
        return f"{method.pattern.servers} servers beside {workers} workers"
    if method.pattern.even_world and workers % 2 and workers > 1:
        return "pairs workers, so it needs an even number"
    return ""


def draw_slowest_sums(people: Stragglers, rng: np.random.Generator, workers: int, rounds: int, every: int) -> Floats:
    """For each round, the largest sum of `every` factors of a worker."""
    if people.kind == "even":
        return np.full(rounds, every * (people.slow_times if people.count_slow(workers) else 1.0))
    rates = people.rates(workers)
    at_once = max(1, _BLOCK // (workers * every))
    found = [
        (people.draw(rng, (min(at_once, rounds - begun), workers, every)).sum(-1) * rates).max(-1)
        for begun in range(0, rounds, at_once)
    ]
    return np.concatenate(found)


@dataclass
class _Run:
    """A method's steps by so many workers; a function for each way of waiting."""

    method: Method
    step: Anatomy
    cluster: Cluster
    workers: int
    steps: int
    rng: np.random.Generator

    def __post_init__(self) -> None:
        self.pattern, self.people = self.method.pattern, self.cluster.stragglers
        self.network = self.cluster.network(self.workers)

    def _conclude(self, times: Floats, compute_s: float, communication_s: float, compression_s: float) -> Outcome:
        """The outcome; what a step is spent on is that of workers that are all alike."""
        mean, low, high = float(times.mean()), float(np.quantile(times, 0.1)), float(np.quantile(times, 0.9))
        parts = (compute_s, communication_s, compression_s)
        waiting_s = max(0.0, mean - sum(parts))
        spec, grade = self.method.spec, self.method.grade
        return Outcome(spec, grade, self.workers, mean, low, high, compute_s, *parts, waiting_s)

    def train_together(self) -> Outcome:
        """All wait for the slowest, bucket by bucket: the step of the slowest, replayed."""
        slowest = self.people.draw_slowest(self.rng, self.workers, self.steps)
        low, high = float(slowest.min()), float(slowest.max())
        grid = np.linspace(low, high, _GRID) if low < high else np.array([low])
        seconds = [replay(self.step.slowed(float(times)), self.network).total for times in grid]
        even = replay(self.step.slowed(self.people.mean), self.network)
        return self._conclude(np.interp(slowest, grid, seconds), even.compute, even.exposed, even.compression)

    def train_in_windows(self) -> Outcome:
        """All train apart for `every` windows, then wait for the slowest sum of these."""
        step, every = self.step, self.step.every
        even = replay(step.slowed(self.people.mean), self.network)
        rounds = -(-self.steps // every)
        slowest = draw_slowest_sums(self.people, self.rng, self.workers, rounds, every) / every
        if step.kind == "delayed":  # behind the windows that follow, of which the slowest worker's are the longest
            whole = sum(self.network.seconds(o) for o in step.operations) + step.work_s
            times = np.maximum(step.compute_s * slowest, whole / every)
        else:
            times = step.compute_s * slowest + (even.total - even.compute)
        return self._conclude(times, even.compute, even.exposed, even.compression)

    def train_with_neighbours(self) -> Outcome:
        """Models travel to neighbours while the window computes."""
        pattern, people, network, step = self.pattern, self.people, self.network, self.step
        assert pattern.hears is not None, f"{self.method.spec} does not say which neighbours a worker hears"
        hears, ranks = pattern.hears, np.arange(self.workers)
        hosts = ranks // network.per_host
        flows = len(hears(0, ranks, self.workers).heard)
        leaving = flows if pattern.next_door else network.per_host  # at a time, and share the host's link
        push_bytes = self.method.push_bytes
        far_s = network.seconds(Operation("send", push_bytes * leaving)) if network.hosts > 1 else 0.0
        near_s = (network.inside or network.between).seconds(push_bytes * flows)
        times = simulate_neighbours(
            step.compute_s,
            people,
            self.workers,
            self.steps,
            self.rng,
            heard=lambda exchange: hears(exchange, ranks, self.workers).heard,
            travel_s=lambda who: np.where(hosts[who] == hosts, near_s, far_s),
            work_s=step.work_s,
            every=pattern.every,
            overlap=pattern.overlap,
        )[self.steps // 2 :]  # a slow worker's delay wanders on by a neighbour a step
        compute_s = step.compute_s * people.mean
        longest = max(far_s, near_s if network.per_host > 1 else 0.0)
        exposed = max(0.0, longest - compute_s) if pattern.overlap else longest
        return self._conclude(times, compute_s, exposed / pattern.every, step.work_s / pattern.every)

    def train_with_servers(self) -> Outcome:
        """Pushes and pulls queue at the servers' links."""
        service, step = self._make_service(), self.step
        times = simulate_servers(
            service,
            step.compute_s,
            self.people,
            self.workers,
            self.steps,
            self.rng,
            staleness=self.pattern.staleness,
        )
        way = 2 * service.latency_s + max(service.push_s, service.own_push_s) + max(service.pull_s, service.own_pull_s)
        return self._conclude(times, step.compute_s * self.people.mean, way + service.apply_s, step.work_s)

    def _make_service(self) -> Service:
        """What a push and a pull take. Servers beside the workers of as many hosts each have a host's link; what all
        workers' hosts can send together is a bound as well."""
        method, pattern, network = self.method, self.pattern, self.network
        latency_s, s_per_byte = network.fitted.get("send") or (network.link.latency_s, network.link.s_per_byte)
        apart = min(pattern.servers, network.hosts) if network.hosts > 1 else pattern.servers
        sharing = min(self.workers, network.per_host) if pattern.staleness == 0 else 1  # push at a time
        return Service(
            push_s=method.push_bytes * s_per_byte / apart,
            apply_s=method.model_bytes / _APPLY_BYTES_PER_S / pattern.servers,
            pull_s=method.model_bytes * s_per_byte / apart,
            own_push_s=method.push_bytes * s_per_byte * sharing,
            own_pull_s=method.model_bytes * s_per_byte * sharing,
            latency_s=latency_s,
        )

    def train_alone(self) -> Outcome:
        """Nobody waits: the mean worker's rate."""
        people, compute_s = self.people, self.step.compute_s
        rate = float((1 / people.rates(self.workers)).mean())
        mean = compute_s * people.mean
        draws = compute_s * people.draw(self.rng, (self.steps,))
        outcome = self._conclude(np.full(1, mean / rate), mean, 0.0, 0.0)
        low_s, high_s = (float(np.quantile(draws, q)) for q in (0.1, 0.9))
        note, pause_s = "", self.pattern.round_every_s
        if pause_s is not None and self.workers > 1:
            round_s = self.network.seconds(Operation("all_reduce", self.method.model_bytes))
            note = f"models are averaged every {show_duration(pause_s + round_s)}"
        return replace(outcome, low_s=low_s, high_s=high_s, note=note)
