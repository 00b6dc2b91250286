"""Batch normalisation over the joined batch of all workers, on CPU and CUDA (PyTorch's own needs CUDA)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from unisono.world import World, join


class _SumOverRanks(torch.autograd.Function):
    """The sum over the ranks; its gradient is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, world: World) -> Tensor:
        ctx.world = world
        total: Tensor = world.all_reduce(x.clone(), "sum", tag="batch norm").wait()
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total: Tensor = ctx.world.all_reduce(grads[0].clone(), "sum", tag="batch norm").wait()
        return total, None


def _sum(x: Tensor, world: World) -> Tensor:
    total: Tensor = _SumOverRanks.apply(x, world)  # type: ignore[no-untyped-call]
    return total


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """`BatchNorm1d/2d/3d` whose mean and variance are those of all ranks' batches together.

    Each rank sends its count, sum and sum of squares about a common shift, so parts of different sizes count
    by their size. State-dict keys are those of the module it replaces.
    """

    def __init__(self, like: nn.modules.batchnorm._BatchNorm, world: World) -> None:
        super().__init__(like.num_features, like.eps, like.momentum, like.affine, like.track_running_stats)
        self.weight, self.bias = like.weight, like.bias
        if like.track_running_stats:
            self.running_mean, self.running_var = like.running_mean, like.running_var
            self.num_batches_tracked = like.num_batches_tracked
        self.training = like.training
        self.world = world

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002 (the name in torch)
        if input.dim() < 2:
            raise ValueError(f"expected an input of at least 2 dimensions, got {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        self._check_input_dim(input)
        if not self.training or self.world.size == 1:
            return super().forward(input)
        axes = [0, *range(2, input.dim())]
        wide = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        count = torch.full((1,), float(input.numel() // self.num_features), dtype=wide.dtype, device=input.device)
        sums = _sum(torch.cat([wide.sum(axes), count]), self.world)
        total = sums[-1].detach()
        mean = sums[:-1] / total
        shape = [1, -1] + [1] * (input.dim() - 2)
        centred = wide - mean.view(shape)
        variance = _sum(centred.square().sum(axes), self.world) / total
        self._track(mean.detach(), variance.detach(), total)
        result = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            result = result * self.weight.view(shape) + self.bias.view(shape)
        output: Tensor = result.to(input.dtype)
        return output

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, total: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        factor = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        unbiased = variance * (total / (total - 1).clamp(min=1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)


def sync_batch_norm(model: nn.Module, world: World | None = None) -> nn.Module:
    """Replace every batch normalisation in `model` by one over all ranks; returns the model.

    Call it before the optimizer is made, on every rank. Parameters and state-dict keys stay the same.

    >>> model = sync_batch_norm(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), World())
    >>> sorted(model.state_dict())[:3]
    ['0.bias', '0.weight', '1.bias']
    """
    return _replace(model, (world if world is not None else join()).channel())


def _replace(module: nn.Module, channel: World) -> nn.Module:
    if isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(module, SyncBatchNorm):
        return SyncBatchNorm(module, channel)
    for name, child in list(module.named_children()):
        replaced = _replace(child, channel)
        if replaced is not child:
            setattr(module, name, replaced)
    return module
