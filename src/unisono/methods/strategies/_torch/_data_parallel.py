"""DistributedDataParallel below a model that the program goes on calling itself."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from unisono.methods.reducer import all_reduce_bytes
from unisono.methods.strategies._torch._group import TorchReplica
from unisono.methods.strategy import Strategy
from unisono.world import World


def gradient_bytes(model: nn.Module) -> int:
    """Those of all gradients."""
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


class _Forward(nn.Module):
    """A model's forward alone: its hooks have run when the program called the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._forward = model.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)


class DataParallelReplica(TorchReplica):
    """The model's `forward` goes through DistributedDataParallel, which exchanges the gradients in backward."""

    same_parameters = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        world: World,
        strategy: Strategy,
        *,
        count_sent: Callable[[], int | None] = lambda: None,
        **settings: Any,
    ) -> None:
        """`count_sent`: how many bytes of gradients were reduced since it was last asked; None: all of them."""
        super().__init__(model, optimizer, world, strategy)
        devices = [world.device] if world.device.type == "cuda" else None
        self._count_sent = count_sent
        self.wrapped = DistributedDataParallel(_Forward(model), device_ids=devices, **settings)
        forward = model.forward

        def call(*args: Any, **kwargs: Any) -> Any:
            # Evaluation may be one rank's alone; torch would wait there, to share buffers.
            return (self.wrapped if torch.is_grad_enabled() else forward)(*args, **kwargs)

        model.forward = call
        self.watch_backward(model.parameters())

    def is_syncing(self) -> bool:
        return bool(self.wrapped.require_backward_grad_sync)

    def bytes_a_window(self) -> int:
        sent = self._count_sent()
        return all_reduce_bytes(gradient_bytes(self.model) if sent is None else sent, self.world.size)

    def no_sync(self) -> AbstractContextManager[None]:
        """As DistributedDataParallel has it: forward belongs inside the block too."""
        return self.wrapped.no_sync()

    def close(self) -> None:
        super().close()
        self.model.__dict__.pop("forward", None)
