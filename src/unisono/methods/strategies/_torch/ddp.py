"""torch's DistributedDataParallel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import nn
from torch.optim import Optimizer

from unisono.methods.checks import AtLeast
from unisono.methods.strategies._torch._replica import DataParallelReplica, TorchStrategy
from unisono.methods.strategy import Replica
from unisono.world import World


@dataclass(frozen=True)
class ddp(TorchStrategy):
    """Gradients by torch's DistributedDataParallel, on a process group of torch's own.

    bucket_mb: how much travels together, in MiB; torch's default is 25.
    find_unused: let it look for parameters that took no part in forward; without it torch raises for them.
    """

    bucket_mb: Annotated[int, AtLeast(1, "MiB a bucket")] = 25
    find_unused: bool = False

    def make(self, model: nn.Module, optimizer: Optimizer, world: World) -> Replica:
        return DataParallelReplica(
            model, optimizer, world, self, bucket_cap_mb=self.bucket_mb, find_unused_parameters=self.find_unused
        )
