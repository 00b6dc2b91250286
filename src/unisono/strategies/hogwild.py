"""Hogwild: the workers of one host step one model in shared memory, without locks.

Recht, Re, Wright and Niu, "Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent" (2011).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.batch_norm import move_batch_norm
from unisono.strategies._periodic import PeriodicReplica
from unisono.strategy import Replica, Strategy, share
from unisono.world import World

_ALIGN = 64  # bytes: a parameter starts on a cache line of its own


@dataclass(frozen=True)
class hogwild(Strategy):
    """All workers of one host read and step the same parameters, with no lock and no message: x <- x - lr g(x).

    A worker may read a parameter while another writes it, and two steps on one element may leave only the later
    one. Where gradients are sparse, such meetings are rare. Every worker's step has the full learning rate: with N
    workers the parameters take N steps in the time of one. The optimizer's state (momenta) is each worker's own.

    accumulate: backward passes a window; gradients add up locally, and `optimizer.step()` counts it.
    """

    accumulate: int = 1

    def bind(self, model: nn.Module, optimizer: Optimizer, world: World) -> Replica:
        if type(self.accumulate) is not int or self.accumulate < 1:
            raise ValueError(
                f"accumulate counts backward passes a window: expected a whole number of at least 1, "
                f"got {self.accumulate!r}"
            )
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
        return HogwildReplica(model, optimizer, world, self)


class HogwildReplica(PeriodicReplica):
    """A worker whose parameters lie in the memory of all."""

    strategy: hogwild

    def __init__(self, model: nn.Module, optimizer: Optimizer, world: World, strategy: hogwild) -> None:
        shared = _shared(model, world)
        super().__init__(model, optimizer, world, strategy, accumulate=strategy.accumulate)
        self._place(shared)

    def _place(self, shared: list[Tensor]) -> None:
        """Let the parameters lie in the memory of all; rank 0's values become everyone's."""
        self._lent = shared
        with torch.no_grad():
            for param, view in zip(self.model.parameters(), shared, strict=True):
                if self.world.rank == 0:
                    view.copy_(param)
                param.data = view
        if self.world.size > 1:
            self.world.barrier(tag="hogwild")

    def meet(self) -> None:
        """Nothing is exchanged: what another worker writes is here."""

    def consolidate(self) -> nn.Module:
        """A copy, taken while all workers stand still; with rank 0's buffers."""
        self.meet_if_due()
        if self.world.size == 1:
            return self.model
        self.world.barrier(tag="hogwild")
        made = self.copied()
        self.world.broadcast([b.detach() for b in made.buffers()], tag="buffers").wait()
        self.world.barrier(tag="hogwild")
        return made

    def state_dict(self) -> dict[str, Any]:
        """Every rank calls it: the model is saved as it is when all stand still."""
        if self.world.size > 1:
            self.world.barrier(tag="hogwild")
        return super().state_dict()

    def rebind(self, world: World, *, source: int = 0) -> str:
        self._own()
        self.move_to(world)
        if world.size > 1:
            share(self.model, world, source)
            mine = {"optimizer": self.optimizer.state_dict(), "step": self.step, "steps": world.ledger.step_count}
            packed = world.broadcast_object(mine if world.rank == source else None, source)
            if world.rank != source:
                self.optimizer.load_state_dict(packed["optimizer"])
                self.step = packed["step"]
                world.ledger.resume(packed["steps"])
        move_batch_norm(self.model, world)
        self._place(_shared(self.model, world))
        return f"model, optimizer and step {self.step} from rank {source} of {world.size}, in memory that these share"

    def _own(self) -> None:
        """Bring the parameters back into memory of this worker's own, unless another replica has moved them since."""
        for param, view in zip(self.model.parameters(), self._lent, strict=True):
            if param.data_ptr() == view.data_ptr():
                param.data = param.data.clone()
        self._lent = []

    def close(self) -> None:
        super().close()
        self._own()


def _shared(model: nn.Module, world: World) -> list[Tensor]:
    """Memory of all ranks for every parameter, laid out like it."""
    params = list(model.parameters())
    if world.size == 1:
        return [p.data for p in params]
    sizes = [-(-p.numel() * p.element_size() // _ALIGN) * _ALIGN for p in params]
    line = world.shared(max(1, sum(sizes)), torch.uint8)
    views = []
    for part, param in zip(line[: sum(sizes)].split(sizes), params, strict=True):
        flat = part[: param.numel() * param.element_size()].view(param.dtype)
        dense = torch.empty_like(param, device="meta")  # keeps the order of dimensions, drops gaps
        views.append(flat.as_strided(param.shape, dense.stride()))
    return views
