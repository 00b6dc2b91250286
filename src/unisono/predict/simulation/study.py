"""Methods at many scales: speed-up curves, where each stops scaling, the best one by scale, what to buy next."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

from unisono.methods.facts import Grade
from unisono.predict.costs import Anatomy
from unisono.predict.planner.candidates import GRADES
from unisono.predict.simulation.cluster import Cluster
from unisono.predict.simulation.methods import Method
from unisono.predict.simulation.steps import Outcome, simulate_method
from unisono.predict.simulation.stragglers import EVEN

LIKE_ALLREDUCE: tuple[Grade, ...] = ("exact", "rounded", "compressed")  # what a plan ranks, too
GROUPS: tuple[tuple[str, tuple[Grade, ...]], ...] = (
    ("exact", ("exact",)),
    ("like all-reduce", LIKE_ALLREDUCE),
    ("any", GRADES),
)
_WORTH_IT = 1.1  # a doubling of the workers is to gain at least so much


@dataclass(frozen=True)
class Purchase:
    """Something that could be bought, and how many times as many samples a second it gives."""

    what: str
    gain: float


@dataclass(frozen=True)
class Study:
    """All outcomes: `outcomes[spec][workers]` has the asked numbers of workers and the doublings between."""

    cluster: Cluster
    workers: tuple[int, ...]
    steps: int
    seed: int
    methods: tuple[Method, ...]
    outcomes: dict[str, dict[int, Outcome]]
    purchases: dict[int, tuple[Outcome, tuple[Purchase, ...]]]

    def best(self, workers: int, grades: Sequence[Grade] = GRADES) -> Outcome | None:
        """The method with the most samples a second."""
        found = [rows[workers] for rows in self.outcomes.values() if workers in rows]
        able = [o for o in found if not o.problem and o.grade in grades]
        return max(able, key=lambda o: o.throughput, default=None)

    def rank(self, workers: int) -> list[Outcome]:
        """All methods, the best first; those that cannot run last."""
        return sorted((rows[workers] for rows in self.outcomes.values()), key=lambda o: -o.throughput)

    def stops_at(self, spec: str) -> int | None:
        """The workers from which no doubling gains a tenth any more; None: none of those simulated."""
        doublings = self.doublings(spec)
        gains = [b.throughput >= _WORTH_IT * a.throughput for a, b in pairwise(doublings)]
        if not gains or gains[-1]:
            return None
        return doublings[max((i + 1 for i, gained in enumerate(gains) if gained), default=0)].workers

    def doublings(self, spec: str) -> list[Outcome]:
        """A method's outcomes with 1, 2, 4, ... workers, as far as it can run."""
        rows = self.outcomes[spec]
        return [rows[n] for n in sorted(rows) if n & (n - 1) == 0 and not rows[n].problem]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "cluster": self.cluster.as_json(),
            "workers": list(self.workers),
            "steps": self.steps,
            "seed": self.seed,
            "methods": [
                {
                    "spec": method.spec,
                    "grade": method.grade,
                    "stops_scaling_at": self.stops_at(method.spec),
                    "outcomes": [self.outcomes[method.spec][n].as_json() for n in sorted(self.outcomes[method.spec])],
                }
                for method in self.methods
            ],
            "best": {
                str(n): {name: found.spec if (found := self.best(n, grades)) else None for name, grades in GROUPS}
                for n in self.workers
            },
            "buy_next": {
                str(n): {"for": chosen.spec, "gains": {p.what: p.gain for p in bought}}
                for n, (chosen, bought) in self.purchases.items()
            },
        }


def study(
    methods: Sequence[Method], cluster: Cluster, workers: Sequence[int], *, steps: int = 1000, seed: int = 0
) -> Study:
    """Simulate every method at these numbers of workers, and at 1, 2, 4, ... up to the largest."""
    largest = max(workers)
    sizes = sorted({*workers, *(1 << i for i in range(largest.bit_length()))})
    outcomes = {
        method.spec: {n: simulate_method(method, cluster, n, steps=steps, seed=seed) for n in sizes}
        for method in methods
    }
    found = Study(cluster, tuple(sorted(workers)), steps, seed, tuple(methods), outcomes, {})
    by_spec = {method.spec: method for method in methods}
    for n in found.workers:
        best = found.best(n, LIKE_ALLREDUCE) or found.best(n)
        if best is not None:
            found.purchases[n] = (best, tuple(_compare_purchases(by_spec[best.spec], cluster, best, steps, seed)))
    return found


def _compare_purchases(method: Method, cluster: Cluster, now: Outcome, steps: int, seed: int) -> list[Purchase]:
    """What each thing that could be bought gains at the same number of workers, the best first."""
    found = []
    offers = [(*offer, now.workers) for offer in _list_offers(cluster)]
    for what, bought, slower, workers in [*offers, ("twice as many workers", cluster, 1.0, 2 * now.workers)]:
        same = replace(method, at=partial(_slow_step, method, slower))
        then = simulate_method(same, bought, workers, steps=steps, seed=seed)
        if now.throughput > 0 and not then.problem:
            found.append(Purchase(what, then.throughput / now.throughput))
    return sorted(found, key=lambda p: -p.gain)


def _list_offers(cluster: Cluster) -> list[tuple[str, Cluster, float]]:
    """Things to buy: their name, the cluster with them, and how many times as long all work takes there."""
    people, failures = cluster.stragglers, cluster.failures
    found = [
        ("links between hosts twice as fast", cluster.with_links(rate=2.0), 1.0),
        ("half the latency between hosts", cluster.with_links(latency=0.5), 1.0),
        ("processors twice as fast", cluster, 0.5),
    ]
    if people.kind != "even" or people.slow_share:
        found.append(("workers that are all alike", replace(cluster, stragglers=EVEN), 1.0))
    if cluster.oversubscription > 1:
        found.append(("switches without oversubscription", replace(cluster, oversubscription=1.0), 1.0))
    if math.isfinite(failures.mtbf_s):
        fewer = replace(failures, mtbf_s=2 * failures.mtbf_s)
        found.append(("hosts that fail half as often", replace(cluster, failures=fewer), 1.0))
    return found


def _slow_step(method: Method, times: float, workers: int) -> Anatomy:
    return method.at(workers).slowed(times)
