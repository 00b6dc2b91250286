"""Hogwild: the workers of one host step one model in shared memory, without locks.

Recht, Re, Wright and Niu, "Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent" (2011).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.methods.buckets import FlatLayout
from unisono.methods.facts import Convergence, Example, Facts
from unisono.methods.strategy import Accumulate, Change, ModelPart, Pattern, PeriodicReplica, Replica, Strategy
from unisono.world import World

FACTS = Facts(
    [Example("hogwild", varies=True)],
    refuses={"accumulate=0": "accumulate", "accumulate=-1": "accumulate"},
    own_gradients=True,
    convergence=Convergence("other", "updates of others may be lost or come in mid-step"),
    unpredicted="the workers write to one memory without waiting",
)


@dataclass(frozen=True)
class hogwild(Strategy):
    """All workers of one host read and step the same parameters, with no lock and no message: x <- x - lr g(x).

    A worker may read a parameter while another writes it, and two steps on one element may leave only the later
    one. Where gradients are sparse, such meetings are rare. Every worker's step has the full learning rate: with N
    workers the parameters take N steps in the time of one. The optimizer's state (momenta) is each worker's own.

    accumulate: backward passes a window; gradients add up locally, and `optimizer.step()` counts it.
    """

    accumulate: Accumulate = 1

    def check(self, model: nn.Module, optimizer: Optimizer, world: World) -> None:
        hosts = list(dict.fromkeys(world.hosts))
        if len(hosts) > 1:
            raise ValueError(
                f"hogwild needs all workers on one host, got {len(hosts)}: {', '.join(hosts)}. Between hosts, use "
                "parameter_server(staleness=None)"
            )
        for name, x in model.named_parameters():
            if x.device.type != "cpu":
                raise ValueError(
                    f"hogwild trains in the memory of the host, but {name!r} is on {x.device}: keep the model on the "
                    "CPU, un.join(device='cpu'), or use parameter_server(staleness=None)"
                )

    def pattern(self) -> Pattern:
        return Pattern("alone", one_host=True)

    def make(self, model: nn.Module, optimizer: Optimizer, world: World) -> Replica:
        return HogwildReplica(model, optimizer, world, self)


class HogwildReplica(PeriodicReplica):
    """A worker whose parameters lie in the memory of all."""

    strategy: hogwild
    slow_ranks = "ignore"
    no_average = (
        "the workers step one memory without waiting for each other, so that no two have the same model after a step. "
        "Use shared, which has one model for all workers of a host too, or allreduce"
    )

    def __init__(self, model: nn.Module, optimizer: Optimizer, world: World, strategy: hogwild) -> None:
        self._shared: list[Tensor] = []  # views of the memory of all, one for each parameter
        super().__init__(model, optimizer, world, strategy)

    def start(self) -> None:
        """Let the parameters lie in the memory of all; rank 0's values become everyone's."""
        params = list(self.model.parameters())
        views: dict[Tensor, Tensor] = {p: p.data for p in params}
        for dtype in dict.fromkeys(p.dtype for p in params) if self.world.size > 1 else ():
            some = [p for p in params if p.dtype == dtype]
            layout = FlatLayout(some)
            views |= zip(some, layout.views(self.world.shared(max(1, layout.numel), dtype)), strict=True)
        self._shared = [views[p] for p in params]
        with torch.no_grad():
            for param, view in zip(self.model.parameters(), self._shared, strict=True):
                if self.world.rank == 0:
                    view.copy_(param)
                param.data = view
        if self.world.size > 1:
            self.world.barrier(tag="hogwild")

    def meet(self) -> None:
        """Nothing is exchanged: what another worker writes is here."""

    def look_for_writes(self) -> None:
        """What the program writes in place is in the memory of all; what it moved (`p.data = x`) is copied there."""
        with torch.no_grad():
            for param, view in zip(self.model.parameters(), self._shared, strict=bool(self._shared)):
                if param.data_ptr() != view.data_ptr():
                    view.copy_(param)
                    param.data = view

    def consolidate(self) -> nn.Module:
        """A copy, taken while all workers stand still; with rank 0's buffers."""
        self.meet_if_due()
        if self.world.size == 1:
            return self.model
        self.world.barrier(tag="hogwild")
        made = self.copy_model()
        self.world.broadcast([b.detach() for b in made.buffers()], tag="buffers").wait()
        self.world.barrier(tag="hogwild")
        return made

    def state_dict(self) -> dict[str, Any]:
        """Every rank calls it: the model is saved as it is when all stand still."""
        if self.world.size > 1:
            self.world.barrier(tag="hogwild")
        return super().state_dict()

    def model_part(self) -> ModelPart:
        return ModelPart(first=list(self.model.buffers()))

    def take_model(self, change: Change) -> str:
        return super().take_model(change) + ", in memory that these share"

    def stop(self, change: Change | None = None) -> None:
        """Bring the parameters back into memory of this worker's own, unless another replica has moved them since."""
        for param, view in zip(self.model.parameters(), self._shared, strict=bool(self._shared)):
            if param.data_ptr() == view.data_ptr():
                param.data = param.data.clone()
        self._shared = []
