"""torch's DistributedDataParallel with torch's PowerSGD hook."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd
from torch.optim import Optimizer

from unisono.methods.checks import AtLeast
from unisono.methods.strategies._torch._replica import DataParallelReplica, TorchStrategy, gradient_bytes
from unisono.methods.strategy import Replica
from unisono.world import World


@dataclass(frozen=True)
class ddp_powersgd(TorchStrategy):
    """Gradients as low-rank factors, by torch's own hook, in one bucket: on gloo it fails with several under way.

    rank: of the factors.
    start: the step from which on it compresses; torch's default is 1000, the least that it takes is 2.
    """

    rank: Annotated[int, AtLeast(1, "columns of a factor")] = 1
    start: Annotated[int, AtLeast(2, "steps before it compresses")] = 2

    def make(self, model: nn.Module, optimizer: Optimizer, world: World) -> Replica:
        state = torch_powersgd.PowerSGDState(None, matrix_approximation_rank=self.rank, start_powerSGD_iter=self.start)
        each = next(p for p in model.parameters() if p.requires_grad).element_size()
        counted = 0

        def count_sent() -> int | None:
            nonlocal counted
            fresh, counted = state.total_numel_after_compression - counted, state.total_numel_after_compression
            return fresh * each if fresh else None

        one_bucket_mb = 2 * math.ceil(gradient_bytes(model) / (1 << 20)) + 1
        replica = DataParallelReplica(model, optimizer, world, self, count_sent=count_sent, bucket_cap_mb=one_bucket_mb)
        replica.not_measured = ("compression",)  # a part of the time that backward waits for the hook
        replica.wrapped.register_comm_hook(state, torch_powersgd.powerSGD_hook)
        return replica
