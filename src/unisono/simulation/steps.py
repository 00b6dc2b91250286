"""The time of a step by so many workers: closed forms where all is even, draws and events where it is not."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.costs import Anatomy, Network, Operation, replay
from unisono.facts import Grade
from unisono.simulation.cluster import Cluster
from unisono.simulation.methods import Method
from unisono.simulation.neighbours import list_heard, simulate_neighbours
from unisono.simulation.servers import Service, simulate_servers
from unisono.simulation.stragglers import Floats, Stragglers
from unisono.units import show_duration

__all__ = ["Outcome", "draw_slowest_sums", "simulate_method", "slow_down"]

_APPLY_BYTES_PER_S = 2e9  # gradients that a server adds to its parameters in a second
_GRID = 33  # points at which a step is replayed; between them it is a line
_BLOCK = 1 << 22  # draws at a time


@dataclass(frozen=True)
class Outcome:
    """A method at a number of workers.

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
        """Over one worker alone, in samples a second."""
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
        return Outcome(method.spec, method.traits.grade, workers, *unknown, problem=problem)
    step = slow_down(method.at(workers), cluster.crowding(workers))
    rng = np.random.default_rng([seed, workers])
    if workers == 1:
        outcome = _train_alone(method, replace(step, jobs=()), cluster, 1, steps, rng)
    else:
        run = {
            "synchronous": _train_together,
            "windows": _train_in_windows,
            "neighbours": _train_with_neighbours,
            "servers": _train_with_servers,
            "alone": _train_alone,
        }[method.traits.style]
        outcome = run(method, step, cluster, workers, steps, rng)
    waits = method.traits.style in ("synchronous", "windows", "neighbours") or method.traits.staleness == 0
    kept = cluster.failures.keep(cluster.count_hosts(workers), seed, waits=waits)
    return replace(outcome, kept=kept, alone_s=alone_s)


def _find_problem(method: Method, cluster: Cluster, workers: int) -> str:
    """Why a method cannot run there; empty where it can."""
    if method.traits.one_host and workers > cluster.per_host:
        return f"needs all workers on one host, which has {cluster.per_host}"
    if method.traits.style == "servers" and method.traits.servers > workers:
        return f"{method.traits.servers} servers beside {workers} workers"
    if method.traits.graph == "shift_one" and workers % 2 and workers > 1:
        return "pairs workers, so it needs an even number"
    return ""


def slow_down(step: Anatomy, times: float) -> Anatomy:
    """The same step where all work takes so many times as long."""
    if times == 1.0:
        return step
    jobs = tuple(
        replace(job, ready_s=job.ready_s * times, work_s=job.work_s * times, due_s=job.due_s * times)
        for job in step.jobs
    )
    return replace(step, compute_s=step.compute_s * times, jobs=jobs)


def _measure(times: Floats) -> tuple[float, float, float]:
    return float(times.mean()), float(np.quantile(times, 0.1)), float(np.quantile(times, 0.9))


def _outcome(
    method: Method, workers: int, times: Floats, *, compute_s: float, communication_s: float, compression_s: float
) -> Outcome:
    mean, low, high = _measure(times)
    waiting_s = max(0.0, mean - compute_s - communication_s - compression_s)
    parts = (compute_s, communication_s, compression_s, waiting_s)
    return Outcome(method.spec, method.traits.grade, workers, mean, low, high, compute_s, *parts)


# Each way of waiting ----------------------------------------------------------------------------------------------


def _train_together(
    method: Method, step: Anatomy, cluster: Cluster, workers: int, steps: int, rng: np.random.Generator
) -> Outcome:
    """All wait for the slowest, bucket by bucket: the step of the slowest, replayed."""
    network, people = cluster.network(workers), cluster.stragglers
    slowest = people.draw_slowest(rng, workers, steps)
    times = _replay_each(step, network, slowest)
    even = replay(slow_down(step, people.mean), network)
    return _outcome(
        method,
        workers,
        times,
        compute_s=even.compute,
        communication_s=even.exposed,
        compression_s=even.compression,
    )


def _replay_each(step: Anatomy, network: Network, slowest: Floats) -> Floats:
    """Seconds of steps whose slowest worker takes so many times as long."""
    low, high = float(slowest.min()), float(slowest.max())
    if low == high:
        return np.full(len(slowest), replay(slow_down(step, low), network).total)
    grid = np.linspace(low, high, _GRID)
    return np.interp(slowest, grid, [replay(slow_down(step, float(x)), network).total for x in grid])


def _train_in_windows(
    method: Method, step: Anatomy, cluster: Cluster, workers: int, steps: int, rng: np.random.Generator
) -> Outcome:
    """All train apart for `every` windows, then wait for the slowest sum of these."""
    network, people, every = cluster.network(workers), cluster.stragglers, step.every
    even = replay(slow_down(step, people.mean), network)
    rounds = -(-steps // every)
    slowest = draw_slowest_sums(people, rng, workers, rounds, every) / every
    exchange_s = (even.total - even.compute) * every
    if step.kind == "delayed":  # behind the windows that follow, of which the slowest worker's are the longest
        whole = sum(network.seconds(o) for o in step.operations) + step.work_s
        times = np.maximum(step.compute_s * slowest, whole / every)
    else:
        times = step.compute_s * slowest + exchange_s / every
    return _outcome(
        method,
        workers,
        times,
        compute_s=even.compute,
        communication_s=even.exposed,
        compression_s=even.compression,
    )


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


def _train_with_neighbours(
    method: Method, step: Anatomy, cluster: Cluster, workers: int, steps: int, rng: np.random.Generator
) -> Outcome:
    """Models travel to neighbours while the window computes."""
    traits, people = method.traits, cluster.stragglers
    network = cluster.network(workers)
    hosts = np.arange(workers) // network.per_host
    flows = 2 if traits.graph == "ring" and workers > 2 else 1
    leaving = flows if traits.graph == "ring" else network.per_host  # at a time, and share the host's link
    far_s = network.seconds(Operation("send", method.push_bytes * leaving)) if network.hosts > 1 else 0.0
    link = network.inside or network.between
    near_s = link.latency_s + method.push_bytes * link.s_per_byte * flows

    def travel_s(who: NDArray[np.int64]) -> Floats:
        return np.where(hosts[who] == hosts, near_s, far_s)

    times = simulate_neighbours(
        step.compute_s,
        people,
        workers,
        steps,
        rng,
        heard=lambda exchange: list_heard(traits.graph, exchange, workers),
        travel_s=travel_s,
        work_s=step.work_s,
        every=traits.every,
        overlap=traits.overlap,
    )[steps // 2 :]  # a slow worker's delay wanders on by a neighbour a step
    compute_s = step.compute_s * people.mean
    longest = max(far_s, near_s if network.per_host > 1 else 0.0)
    exposed = max(0.0, longest - compute_s) if traits.overlap else longest
    return _outcome(
        method,
        workers,
        times,
        compute_s=compute_s,
        communication_s=exposed / traits.every,
        compression_s=step.work_s / traits.every,
    )


def _train_with_servers(
    method: Method, step: Anatomy, cluster: Cluster, workers: int, steps: int, rng: np.random.Generator
) -> Outcome:
    """Pushes and pulls queue at the servers' links."""
    service = _make_service(method, cluster, workers)
    times = simulate_servers(
        service, step.compute_s, cluster.stragglers, workers, steps, rng, staleness=method.traits.staleness
    )
    way = 2 * service.latency_s + max(service.push_s, service.own_push_s) + max(service.pull_s, service.own_pull_s)
    return _outcome(
        method,
        workers,
        times,
        compute_s=step.compute_s * cluster.stragglers.mean,
        communication_s=way + service.apply_s,
        compression_s=step.work_s,
    )


def _make_service(method: Method, cluster: Cluster, workers: int) -> Service:
    """What a push and a pull take. Servers beside the workers of as many hosts each have a host's link; what all
    workers' hosts can send together is a bound as well."""
    network = cluster.network(workers)
    link = network.between if network.hosts > 1 else network.inside or network.between
    line = network.fitted.get("send") or (link.latency_s, link.s_per_byte)
    apart = min(method.traits.servers, network.hosts) if network.hosts > 1 else method.traits.servers
    synchronous = method.traits.staleness == 0
    steps_s = method.model_bytes / _APPLY_BYTES_PER_S / method.traits.servers
    return Service(
        push_s=method.push_bytes * line[1] / apart,
        apply_s=steps_s,
        pull_s=method.model_bytes * line[1] / apart,
        own_push_s=method.push_bytes * line[1] * (min(workers, network.per_host) if synchronous else 1),
        own_pull_s=method.model_bytes * line[1] * (min(workers, network.per_host) if synchronous else 1),
        latency_s=line[0],
    )


def _train_alone(
    method: Method, step: Anatomy, cluster: Cluster, workers: int, steps: int, rng: np.random.Generator
) -> Outcome:
    """Nobody waits: the mean worker's rate."""
    people = cluster.stragglers
    rate = float((1 / people.rates(workers)).mean())
    mean = step.compute_s * people.mean
    draws = step.compute_s * people.draw(rng, (steps,))
    mid = mean / rate
    outcome = _outcome(method, workers, np.full(1, mid), compute_s=mean, communication_s=0.0, compression_s=0.0)
    low_s, high_s = (float(np.quantile(draws, q)) for q in (0.1, 0.9))
    return replace(outcome, low_s=low_s, high_s=high_s, note=_describe_rounds(method, cluster, workers))


def _describe_rounds(method: Method, cluster: Cluster, workers: int) -> str:
    """How often models are averaged behind the programs."""
    if method.traits.round_every_s is None or workers == 1:
        return ""
    round_s = cluster.network(workers).seconds(Operation("all_reduce", method.model_bytes))
    return f"models are averaged every {show_duration(method.traits.round_every_s + round_s)}"
