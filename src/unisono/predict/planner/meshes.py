"""When a mesh is worth trying instead of data parallelism alone: where the model does not fit, or exchanging takes most
of a step. Stages and layers are measured on one rank, links between all; the mesh itself is not run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unisono.methods.hybrid import tensor_plan
from unisono.methods.hybrid.stages import measure_steps
from unisono.predict.costs import Network, Operation
from unisono.predict.costs.pipelines import order_single, replay_schedule
from unisono.predict.planner.measured import Measured

MICROBATCHES = 8
_DOMINATES = 0.4  # of a step: exchange that is worth another division of the work
_FASTER = 0.9  # a mesh's step over the best method's, to be worth a word
_FORWARD = 1 / 3  # of a stage's time
_NOT_RUN = (
    "A mesh is not run, also not with --verify: the steps of a plan are those of your own loop, and a pipeline's is "
    "pipe.step. Not known: how fast your model computes microbatches."
)


@dataclass(frozen=True)
class MeshEstimate:
    """A mesh: its step, how much of it is bubble, the part of the model a worker has, and of what that was made."""

    data: int
    pipeline: int
    seconds: float
    bubble: float
    part: float
    tensor: int = 1
    shares: tuple[float, ...] = ()  # of the cost, by stage; empty: stages count as equal

    @property
    def call(self) -> str:
        """The call that makes this mesh."""
        return f"un.mesh(tensor={self.tensor})" if self.tensor > 1 else f"un.mesh(pipeline={self.pipeline})"


# Measuring, on one rank ----------------------------------------------------------------------------------------------


def measure_stages(model: nn.Module, example: tuple[Tensor, ...], ranks: int) -> dict[str, Any]:
    """By number of stages: each one's part of the cost, and the bytes of a batch between them; or "why" not."""
    rows = min(len(x) for x in example)
    part = tuple(x[: max(1, rows // MICROBATCHES)] for x in example)
    try:
        costs = measure_steps(model, part)
    except Exception as error:  # a forward may raise anything when it is followed
        return {"why": str(error).partition("\n")[0]}
    scale = rows / len(part[0])
    found: dict[str, Any] = {}
    for stages in _list_divisors(ranks):
        if (divided := costs.divide(stages)) is not None:
            found[str(stages)] = {"shares": divided[0], "bytes": [round(scale * n) for n in divided[1]]}
    return found or {"why": "its forward has no place at which only tensors with gradients are passed on"}


def measure_tensor(model: nn.Module, example: tuple[Tensor, ...], ranks: int) -> dict[str, Any]:
    """The part of the parameters that `un.tensor_plan` splits, and the bytes that a batch sends in each such layer."""
    try:
        plan = tensor_plan(model, ranks=_list_divisors(ranks)[0])
        nbytes: list[int] = []
        hooks = [
            model.get_submodule(name).register_forward_hook(lambda m, a, out: nbytes.append(out.nbytes))
            for name, style in plan.items()
            if type(style).__name__ == "RowwiseParallel"
        ]
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                model(*example)
        finally:
            for hook in hooks:
                hook.remove()
    except Exception as error:  # the model's own forward, on parts
        return {"why": str(error).partition("\n")[0]}
    split = sum(p.numel() for name in plan for p in model.get_submodule(name).parameters())
    if not nbytes:
        return {"why": "un.tensor_plan splits no pair of its layers"}
    return {"split": split / sum(p.numel() for p in model.parameters()), "bytes": nbytes}


def _list_divisors(ranks: int) -> list[int]:
    return [n for n in range(2, ranks + 1) if ranks % n == 0]


# Pricing -------------------------------------------------------------------------------------------------------------


def estimate_meshes(
    ranks: int, compute_s: float, gradient_bytes: int, network: Network, stages: dict[str, Any] | None = None
) -> list[MeshEstimate]:
    """Every division into stages, at the same global batch: the order of 1F1B is replayed with each stage's part of
    the cost (as measured; else equal ones), messages fill and drain it; then gradients of the largest stage are
    exchanged on the data axis, of neighbouring ranks."""
    found = []
    for count in _list_divisors(ranks):
        known = (stages or {}).get(str(count))
        if stages and known is None:
            continue
        shares = known["shares"] if known else [1 / count] * count
        data = ranks // count
        order = order_single("1f1b", ranks=count, microbatches=MICROBATCHES, ahead=1)
        each = [compute_s * count * share / MICROBATCHES for share in shares]
        run = replay_schedule(
            order,
            lambda a, each=each: each[a[0]] * (_FORWARD if a[1] == "F" else 1 - _FORWARD),  # type: ignore[misc]
        )
        sizes = [count * n / MICROBATCHES for n in (known["bytes"] if known else [])]
        hop = max(map(network.link.seconds, sizes), default=0.0)  # the next stage is on the furthest rank
        length = max(run.length + 2 * (count - 1) * hop, MICROBATCHES * hop)
        there = network.with_ranks(data, per_host=min(network.per_host, data))
        exchange = there.seconds(Operation("all_reduce", gradient_bytes // count)) if data > 1 else 0.0
        bubble = 1 - compute_s / length
        found.append(MeshEstimate(data, count, length + exchange, bubble, 1 / count, shares=tuple(shares)))
    return found


def estimate_tensor(
    ranks: int, compute_s: float, gradient_bytes: int, network: Network, tensor: dict[str, Any]
) -> list[MeshEstimate]:
    """Layers split over 2, 3, ... neighbours, at the same global batch: what is not split is computed by each, and each
    split pair of layers adds up its output in forward, and the gradient of its input in backward."""
    found = []
    for count in _list_divisors(ranks) if "split" in tensor else []:
        split, data = tensor["split"], ranks // count
        near = network.with_ranks(count, per_host=min(network.per_host, count))
        messages = 2 * sum(near.seconds(Operation("all_reduce", count * n)) for n in tensor["bytes"])
        there = network.with_ranks(data, per_host=max(1, network.per_host // count))
        part = split / count + 1 - split
        exchange = there.seconds(Operation("all_reduce", round(gradient_bytes * part))) if data > 1 else 0.0
        seconds = compute_s * count * part + messages + exchange
        found.append(MeshEstimate(data, 1, seconds, 0.0, part, tensor=count))
    return found


# Words ---------------------------------------------------------------------------------------------------------------


def advise_mesh(measured: Measured, best_s: float, exposed_s: float) -> list[str]:
    """Which mesh to try, or why none; and what is not known of it."""
    network = measured.network
    if network is None or measured.ranks < 2:
        return []
    given = (measured.ranks, measured.compute_s, measured.gradient_bytes, network)
    why = measured.stages.get("why")
    piped = [] if why else estimate_meshes(*given, measured.stages or None)
    meshes = [*piped, *estimate_tensor(*given, measured.tensor)]
    said = []
    if measured.settings and meshes:
        small = meshes[0]
        axis = f"tensor={small.tensor}" if small.tensor > 1 else f"pipeline={small.pipeline}"
        said.append(
            f"Mesh: {small.call} holds {small.part:.0%} of model and optimizer on a worker; see "
            f"un.memory(..., workers={measured.ranks}, {axis})."
        )
    best = min(meshes, key=lambda mesh: mesh.seconds, default=None)
    if best is not None and exposed_s > _DOMINATES * best_s and best.seconds < _FASTER * best_s:
        said.append(
            f"Mesh: {exposed_s / best_s:.0%} of a step is exchange. {best.call} would take about "
            f"{best.seconds / best_s:.0%} of this step: {_explain(best)}."
        )
    if said:
        return [*said, *([f"No pipeline: {why}"] if why else []), _NOT_RUN]
    if best is None:
        return [f"No mesh is proposed: {why}; and {measured.tensor.get('why', 'no layer is split')}."]
    return [
        f"No mesh is proposed: {exposed_s / best_s:.0%} of a step is exchange, and the best mesh, {best.call}, would "
        f"take about {best.seconds / best_s:.0%} of this step ({_explain(best)})."
    ]


def _explain(mesh: MeshEstimate) -> str:
    if mesh.tensor > 1:
        return f"a worker computes with {mesh.part:.0%} of the model on {mesh.tensor} times the samples"
    parts = " and ".join(f"{share:.0%}" for share in mesh.shares)
    parts = parts if len(mesh.shares) < 4 else f"up to {max(mesh.shares):.0%}"
    measured = f", stages of {parts} as measured" if mesh.shares else ""
    return (
        f"{MICROBATCHES} microbatches, {mesh.bubble:.0%} of it bubble{measured}; a worker exchanges the gradients of "
        f"its stage alone, between {mesh.data}"
    )
