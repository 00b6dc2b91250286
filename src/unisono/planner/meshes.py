"""When a mesh is worth trying instead of data parallelism alone: where the model does not fit, or exchanging takes most
of a step. By formula: stages were not measured."""

from __future__ import annotations

from dataclasses import dataclass

from unisono.costs import Network, Operation
from unisono.planner.measured import Measured

__all__ = ["MeshEstimate", "advise_mesh", "estimate_meshes"]

MICROBATCHES = 8
_DOMINATES = 0.4  # of a step: exchange that is worth another division of the work
_FASTER = 0.9  # a mesh's step over the best method's, to be worth a word
_UNKNOWN = (
    "Not known: what stages send each other, whether your model can be cut into equal ones, and how fast it computes "
    "microbatches. The tensor axis is not priced: what its ranks send in every layer was not measured."
)


@dataclass(frozen=True)
class MeshEstimate:
    """A mesh of data × pipeline, by formula: the step, how much of it is bubble, and the part of the model a worker
    has."""

    data: int
    pipeline: int
    seconds: float
    bubble: float
    part: float


def estimate_meshes(ranks: int, compute_s: float, gradient_bytes: int, network: Network) -> list[MeshEstimate]:
    """Every division into stages, at the same global batch: a worker computes as much, and waits (p - 1)/(m + p - 1) of
    its step; then gradients of its stage are exchanged on the data axis, of neighbouring ranks."""
    found = []
    for stages in range(2, ranks + 1):
        if ranks % stages:
            continue
        data = ranks // stages
        bubble = (stages - 1) / (MICROBATCHES + stages - 1)
        there = network.with_ranks(data, per_host=min(network.per_host, data))
        exchange = there.seconds(Operation("all_reduce", gradient_bytes // stages)) if data > 1 else 0.0
        found.append(MeshEstimate(data, stages, compute_s / (1 - bubble) + exchange, bubble, 1 / stages))
    return found


def advise_mesh(measured: Measured, best_s: float, exposed_s: float) -> list[str]:
    """What to try, and what is not known of it; nothing where data parallelism does well."""
    if measured.network is None or measured.ranks < 2:
        return []
    meshes = estimate_meshes(measured.ranks, measured.compute_s, measured.gradient_bytes, measured.network)
    said = []
    if measured.settings:
        small = meshes[0]
        said.append(
            f"Mesh: un.mesh(pipeline={small.pipeline}) holds {small.part:.0%} of model and optimizer on a worker; see "
            f"un.memory(..., workers={measured.ranks}, pipeline={small.pipeline})."
        )
    best = min(meshes, key=lambda mesh: mesh.seconds)
    if exposed_s > _DOMINATES * best_s and best.seconds < _FASTER * best_s:
        said.append(
            f"Mesh: {exposed_s / best_s:.0%} of a step is exchange. un.mesh(pipeline={best.pipeline}) with "
            f"{MICROBATCHES} microbatches would take about {best.seconds / best_s:.0%} of this step, {best.bubble:.0%} "
            f"of it bubble: a worker exchanges the gradients of its stage alone, between {best.data}."
        )
    return [*said, _UNKNOWN] if said else []
