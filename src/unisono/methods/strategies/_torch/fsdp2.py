"""torch's fully_shard (FSDP2): parameters, gradients and optimizer state split over the ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

from unisono.methods.strategies._torch._replica import TorchReplica, TorchStrategy
from unisono.methods.strategy import Replica
from unisono.world import World


@dataclass(frozen=True)
class fsdp2(TorchStrategy):
    """Every repeated block (an element of a ModuleList or of a TransformerEncoder) and the model itself are sharded.

    reshard: give a block's parameters away after forward, and gather them again for backward.
    """

    reshard: bool = True

    def check(self, model: nn.Module, optimizer: Optimizer, world: World) -> None:
        if optimizer.state:
            raise ValueError("torch:fsdp2 needs a fresh optimizer: this one has stepped, and its state is not split")

    def make(self, model: nn.Module, optimizer: Optimizer, world: World) -> Replica:
        return _ShardedReplica(model, optimizer, world, self)


class _ShardedReplica(TorchReplica):
    """The model after `fully_shard`; the optimizer's groups hold the sharded parameters in place of the former."""

    not_measured = ("compute", "communication", "waiting", "compression")  # gathers wait inside forward and backward
    strategy: fsdp2
    no_average = "torch keeps its parts; use zero(stage=3), which has one"

    def __init__(self, model: nn.Module, optimizer: Optimizer, world: World, strategy: fsdp2) -> None:
        super().__init__(model, optimizer, world, strategy)
        blocks = find_blocks(model)
        self._nbytes = _bytes_sent(model, blocks, world.size, reshard=strategy.reshard)
        former = dict(model.named_parameters(remove_duplicate=False))
        for block in blocks:
            fully_shard(block, reshard_after_forward=strategy.reshard)
        fully_shard(model)
        sharded = dict(model.named_parameters(remove_duplicate=False))
        follower = {param: sharded[name] for name, param in former.items()}
        for group in optimizer.param_groups:
            group["params"] = [follower[param] for param in group["params"]]
        self.watch_backward(model.parameters())

    def bytes_a_window(self) -> int:
        return self._nbytes

    def state_dict(self) -> dict[str, Any]:
        raise ValueError("torch:fsdp2 is offered for comparison: un.save cannot save what it has split")


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The elements of the outermost ModuleLists that have parameters."""
    found: list[nn.Module] = []

    def walk(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, nn.ModuleList):
                found.extend(block for block in child if next(block.parameters(), None) is not None)
            else:
                walk(child)

    walk(model)
    return found


def _bytes_sent(model: nn.Module, blocks: list[nn.Module], size: int, *, reshard: bool) -> int:
    """What a rank sends in a step: a gather for forward, one more for backward where parameters were given away (never
    those of the model itself), and a reduce-scatter; each takes (N-1)/N of the bytes."""
    inside = {p: p.numel() * p.element_size() for block in blocks for p in block.parameters()}
    outside = sum(p.numel() * p.element_size() for p in model.parameters() if p not in inside)
    return math.ceil((size - 1) / size * ((3 if reshard else 2) * sum(inside.values()) + 2 * outside))
