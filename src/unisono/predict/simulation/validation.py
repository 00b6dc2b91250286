"""Simulated against measured: steps at several numbers of workers, from a plan made at one of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from unisono.predict.simulation.cluster import Cluster
from unisono.predict.simulation.plan_file import Plan
from unisono.predict.simulation.steps import simulate_method
from unisono.predict.simulation.stragglers import parse_stragglers

__all__ = ["StepComparison", "compare_with_measured"]


@dataclass(frozen=True)
class StepComparison:
    """A step of a method: simulated, and as it was. error = simulated / measured - 1."""

    spec: str
    workers: int
    simulated_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """How far the simulation is off, as a share of the measured step."""
        return self.simulated_s / self.measured_s - 1


def compare_with_measured(
    plan: Plan,
    measured_s: Mapping[int, Mapping[str, float]],
    *,
    per_host: int | None = None,
    cores: int | None = None,
    threads: int = 1,
    one_machine: bool = False,
    steps: int = 1000,
    seed: int = 0,
) -> list[StepComparison]:
    """`measured_s[workers][spec]`, seconds of a step, against the simulation of a plan made with `plan.ranks` workers.

    per_host: workers a host in these runs (None: as in the plan). cores, threads: of a host, and those that a worker
    needs. one_machine: the hosts are emulated on one machine, whose cores all workers share.
    """
    cluster = Cluster(
        per_host or plan.per_host,
        cores=cores,
        threads=threads,
        hosts_share_cores=one_machine,
        stragglers=parse_stragglers(None, samples=plan.samples),
    )
    if plan.network is not None:
        cluster = cluster.measured_as(plan.network)
    methods = {method.spec: method for method in plan.make_methods(list(plan.anatomies), cluster)}
    found = []
    for workers, by_spec in sorted(measured_s.items()):
        for spec, seconds in by_spec.items():
            if spec not in methods:
                raise ValueError(f"{spec!r} was not measured in the plan, which has {', '.join(sorted(methods))}")
            outcome = simulate_method(methods[spec], cluster, workers, steps=steps, seed=seed)
            found.append(StepComparison(spec, workers, outcome.step_s, seconds))
    return found
