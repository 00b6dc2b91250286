"""One model for all workers of a host: parameters and optimizer state once, each worker steps an equal part of them.

Synchronous, as `allreduce`: after backward every gradient is the mean over the workers. Here are the settings;
`replica` is what follows from them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn
from torch.optim import Optimizer

from unisono.methods.facts import Convergence, Example, Facts
from unisono.methods.reducer import Reducer
from unisono.methods.strategies.shared.lines import check_optimizer
from unisono.methods.strategies.shared.replica import SharedReplica
from unisono.methods.strategy import Accumulate, Buffers, Keeps, Pattern, Replica, Strategy
from unisono.methods.strategy.mistakes import refuse_common_memory
from unisono.world import World

FACTS = Facts(
    [Example("shared", exact=True, one_model=True)],
    refuses={"accumulate=0": "accumulate", "accumulate=-1": "accumulate", "buffers=sometimes": "buffers"},
    convergence=Convergence("exact", "as one process on the joined batches; one model a host"),
    plans=[],
    unpredicted="the workers of a host step parts of one model, which one worker by itself does not show",
)


@dataclass(frozen=True)
class shared(Strategy):
    """The workers of a host train one model in memory that all of them map: g = (1/N) sum of all g_i, as `allreduce`.

    After backward each worker takes the mean of its part of the gradients and steps that part of the parameters; the
    others see it there. A host keeps one copy of parameters and optimizer state, and a gradient for each worker.

    reducer: how means are taken between hosts (None: exactly); on one host nothing is sent.
    accumulate: backward passes a window; gradients add up locally and are exchanged with the last one.
    buffers: "broadcast" rank 0's after every exchange, "average" them, or leave them "local".
    """

    reducer: Reducer | None = None
    accumulate: Accumulate = 1
    buffers: Buffers = "broadcast"

    def check(self, model: nn.Module, optimizer: Optimizer, world: World) -> None:
        for name, x in model.named_parameters():
            if x.device.type != "cpu":
                raise ValueError(
                    f"shared trains in the memory of the host, but {name!r} is on {x.device}: keep the model on the "
                    "CPU, un.join(device='cpu'), or use allreduce or zero, which train on devices too"
                )
        check_optimizer(optimizer)
        if world.size > 1:
            refuse_common_memory(model, "shared")

    def why_torch_optimizer(self) -> str:
        return "every worker steps a part of each parameter, by the optimizer's rule"

    def pattern(self) -> Pattern:
        return replace(super().pattern(), keeps=Keeps.as_set(self, once_a_host=True))

    def make(self, model: nn.Module, optimizer: Optimizer, world: World) -> Replica:
        return SharedReplica(model, optimizer, world, self)
