"""Methods from a plan: steps measured on a few workers, carried over to any number of them, and compared with what was
measured there."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

from unisono.methods.spec import build
from unisono.methods.strategy import Pattern
from unisono.predict.costs import Anatomy, Job, Network, Operation
from unisono.predict.planner.measured import Measured
from unisono.predict.simulation.cluster import Cluster
from unisono.predict.simulation.methods import DryRun, Method, Workload, count_push, make_method
from unisono.predict.simulation.steps import simulate_method
from unisono.predict.simulation.stragglers import parse_stragglers

_SIMULATED = ("neighbours", "servers", "alone")  # whether or not a step of theirs was measured
_NOT_MEASURED = "not measured in the plan: from the number of parameters, and reducers as fast as here"


@dataclass(frozen=True)
class Plan:
    """What `unisono plan` measured, as far as a simulation needs it."""

    ranks: int
    per_host: int
    parameters: int
    model_bytes: int
    compute_s: float
    network: Network | None
    anatomies: dict[str, Anatomy]
    others: tuple[str, ...]  # methods of the plan that were not measured

    @property
    def samples(self) -> list[float]:
        """Compute times of workers in steps, over the mean of their method's."""
        found = []
        for anatomy in self.anatomies.values():
            if len(anatomy.samples_s) > 1:
                middle = mean(anatomy.samples_s)
                found += [sample / middle for sample in anatomy.samples_s]
        return found

    def make_methods(self, specs: Sequence[str], cluster: Cluster) -> list[Method]:
        """Methods for simulations on `cluster`: measured ones as measured, others on a model of as many parameters."""
        crowding = replace(cluster, per_host=self.per_host).crowding(self.ranks)
        workload = Workload(self.parameters, self.compute_s / crowding, cluster.per_host)
        found = []
        for spec in specs or [*self.anatomies, *self.others]:
            method = make_method(spec, workload)
            if method.pattern.style in _SIMULATED:
                found.append(method)
            elif spec in self.anatomies:
                found.append(self._carry(method, workload, crowding))
            else:
                found.append(replace(method, note=_NOT_MEASURED))
        return found

    def _carry(self, method: Method, workload: Workload, crowding: float) -> Method:
        measured = self.anatomies[method.spec]
        if len(measured.samples_s) > 1:  # the measured step is the slowest worker's; stragglers are drawn apart
            measured = measured.slowed(mean(measured.samples_s) / measured.compute_s)
        growth = Growth(method.pattern, workload, self.ranks)
        base = measured.slowed(1 / crowding)

        def at(ranks: int) -> Anatomy:
            if ranks == 1:
                return replace(base, ranks=1, jobs=())
            return replace(base, ranks=ranks, jobs=tuple(growth.carry(job, ranks) for job in base.jobs))

        push_bytes = count_push(method.pattern, self.model_bytes)
        return replace(method, at=at, model_bytes=self.model_bytes, push_bytes=push_bytes, alone_s=workload.compute_s)


class Growth:
    """How what a method sends changes with the number of ranks: as its reducer's own code says."""

    def __init__(self, pattern: Pattern, workload: Workload, ranks: int) -> None:
        self._ranks = ranks
        reducer = pattern.reducer or build("dense", "reducer")
        largest = max(workload.buckets, key=len)
        self._run = DryRun(reducer, largest, workload.per_host)

    def carry(self, job: Job, ranks: int) -> Job:
        """What a measured job becomes in a world of so many ranks."""
        if ranks == self._ranks:
            return job
        now, then = self._run.at(self._ranks), self._run.at(ranks)
        work_s = job.work_s * (then.work_s / now.work_s if self._run.grows and now.work_s > 0 else 1.0)
        operations: list[Operation] = []
        for operation in job.operations:
            operations += self._carry(operation, now.operations, then.operations, ranks)
        return replace(job, work_s=work_s, operations=tuple(operations))

    def _carry(
        self, operation: Operation, now: Sequence[Operation], then: Sequence[Operation], ranks: int
    ) -> list[Operation]:
        names, others = [o.op for o in now], [o.op for o in then]
        if names != others and len(names) == 1 and operation.op == names[0]:  # done in another way from here on
            scale = operation.nbytes / max(1, now[0].nbytes)
            return [o if o.op == "exchange" else replace(o, nbytes=round(o.nbytes * scale)) for o in then]
        if operation.op in names and names == others:
            before, after = (sum(o.nbytes for o in found if o.op == operation.op) for found in (now, then))
            return [replace(operation, nbytes=round(operation.nbytes * after / max(1, before)))]
        if operation.op == "all_gather" and operation.among == "all":  # of what was scattered before: a share of a rank
            return [replace(operation, nbytes=max(1, round(operation.nbytes * self._ranks / ranks)))]
        return [operation]


def read_plan(path: str) -> Plan:
    """Read the file that `unisono plan --json` wrote."""
    try:
        plain = json.loads(Path(path).read_text(encoding="utf-8"))
        return make_plan(Measured.from_dict(plain["measured"]))
    except OSError as error:
        again = "write one with unisono plan train.py --json FILE"
        raise ValueError(f"--plan: cannot read {path!r}: {error.strerror}; {again}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"--plan: {path!r} is not what this version's `unisono plan train.py --json FILE` writes ({error!r}): "
            "write it again"
        ) from None


def make_plan(measured: Measured) -> Plan:
    """Keep what a simulation needs of a plan's measurements."""
    if not measured.compute_s > 0:
        raise ValueError("the plan has no compute time: the program ended before its steps were measured")
    return Plan(
        measured.ranks,
        measured.per_host,
        measured.parameters,
        measured.gradient_bytes,
        mean(measured.bare_samples_s or [measured.compute_s]),
        measured.network,
        {m.spec: m.anatomy for m in measured.methods if m.anatomy is not None},
        tuple(m.spec for m in measured.methods if m.anatomy is None and build(m.spec).pattern().style in _SIMULATED),
    )


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
