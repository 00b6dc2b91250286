"""Batch normalisation over the joined batch of all workers, on CPU and CUDA (PyTorch's own needs CUDA)."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from unisono.methods.model_copies import add_hook
from unisono.world import World, join


class Link:
    """The world of a model's `SyncBatchNorm` layers, shared by all of them and by copies of the model.

    After unpickling there is no world: the link joins that of its process when it is first used.
    """

    def __init__(self, world: World | None = None) -> None:
        self._joined = None if world is None else (world, world.channel())

    def __deepcopy__(self, memo: Any) -> Link:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Link, ()

    @property
    def world(self) -> World:
        return self._join()[0]

    @property
    def channel(self) -> World:
        return self._join()[1]

    def _join(self) -> tuple[World, World]:
        if self._joined is None:
            world = join()
            self._joined = world, world.channel()
        return self._joined

    def move(self, world: World) -> None:
        """Continue in another world; every rank of it calls this."""
        if self._joined is not None:
            self._joined[1].close()
        self._joined = world, world.channel()


class _SumOverRanks(torch.autograd.Function):
    """The sum over the ranks.

    The loss is the mean of the ranks' losses, each times its weight (`World.weight`), and what this rank's
    backward gives is multiplied by its own weight at the parameters: so its gradient here is
    (1/weight_i) * sum_j weight_j * gradient_j.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, channel: World, world: World) -> Tensor:
        ctx.channel, ctx.world = channel, world
        total = x.clone()
        world.run_tolerating_loss(lambda: channel.all_reduce(total, "sum", tag="batch norm").wait())
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        weight = ctx.world.weight  # of this backward pass; 1 if the program weighs its losses itself
        total = torch.zeros_like(grads[0]) if weight == 0.0 else grads[0] * weight
        ctx.world.run_tolerating_loss(lambda: ctx.channel.all_reduce(total, "sum", tag="batch norm").wait())
        return total / weight if weight else total, None, None


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """`BatchNorm1d/2d/3d` whose mean and variance are those of all ranks' batches together.

    Each rank sends its count and sum, then its sum of squares about the common mean, so parts of different
    sizes count by their size, and a stand-in batch (weight 0, where there were fewer samples than ranks) does
    not count. State-dict keys are those of the module it replaces.
    """

    def __init__(self, like: nn.modules.batchnorm._BatchNorm, link: Link) -> None:
        super().__init__(like.num_features, like.eps, like.momentum, like.affine, like.track_running_stats)
        self.weight, self.bias = like.weight, like.bias
        if like.track_running_stats:
            self.running_mean, self.running_var = like.running_mean, like.running_var
            self.num_batches_tracked = like.num_batches_tracked
        self.training = like.training
        self.link = link

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002 (the name in torch)
        if input.dim() < 2:
            raise ValueError(f"expected an input of at least 2 dimensions, got {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        self._check_input_dim(input)
        if not self.training or self.link.world.size == 1:
            return super().forward(input)
        axes = [0, *range(2, input.dim())]
        few = self.link.world.weight == 0.0 or _count_values(input) == 1  # known here without waiting for a device
        wide = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        count = torch.full((1,), float(input.numel() // self.num_features), dtype=wide.dtype, device=input.device)
        sums = self._sum(torch.cat([wide.sum(axes), count]))
        total = sums[-1].detach()
        if few and float(total) <= 1.0:  # then `few` is true on every rank, and all of them raise
            raise ValueError(
                f"SyncBatchNorm got one value for each channel over all {self.link.world.size} ranks (an input of "
                f"shape {tuple(input.shape)}), which has no variance: leave a last batch of one sample out "
                "(un.shard(..., drop_last=True)), or take a batch_size that leaves more"
            )
        mean = sums[:-1] / total
        shape = [1, -1] + [1] * (input.dim() - 2)
        centred = wide - mean.view(shape)
        variance = self._sum(centred.square().sum(axes)) / total
        self._track(mean.detach(), variance.detach(), total)
        result = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            result = result * self.weight.view(shape) + self.bias.view(shape)
        output: Tensor = result.to(input.dtype)
        return output

    def _sum(self, x: Tensor) -> Tensor:
        """The sum over the ranks; those with weight 0 take part, with zeros."""
        if self.link.world.weight == 0.0:
            x = x.masked_fill(torch.ones_like(x, dtype=torch.bool), 0.0)
        total: Tensor = _SumOverRanks.apply(x, self.link.channel, self.link.world)  # type: ignore[no-untyped-call]
        return total

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, total: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        factor = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        unbiased = variance * (total / (total - 1).clamp(min=1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)


def watch_batch_norms(model: nn.Module, world: World) -> list[Any]:
    """Make plain batch normalisations raise a helpful error if this rank's part of a batch is a single sample.

    Returns the hooks, to be removed later; none in a world of one, in which PyTorch's own error is clear.
    """
    if world.size == 1:
        return []
    kind, others = nn.modules.batchnorm._BatchNorm, (SyncBatchNorm, nn.SyncBatchNorm)
    return [
        add_hook(module.register_forward_pre_hook, partial(_check_values, name or "the model"))
        for name, module in model.named_modules()
        if isinstance(module, kind) and not isinstance(module, others)
    ]


def _check_values(name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
    if module.training and args and isinstance(args[0], Tensor) and _count_values(args[0]) == 1:
        raise ValueError(
            f"{name} ({type(module).__name__}) got one value for each channel, an input of shape "
            f"{tuple(args[0].shape)}: this rank's part of the batch is a single sample, which has no variance. Take "
            "the statistics over all ranks, model = un.sync_batch_norm(model) before the optimizer is made; or leave a "
            "short last batch out, un.shard(..., drop_last=True); or take a batch_size that leaves each rank two"
        )


def _count_values(x: Tensor) -> int:
    """How many values each channel has."""
    return math.prod(x.shape[:1]) * math.prod(x.shape[2:])


def sync_batch_norm(model: nn.Module, world: World | None = None) -> nn.Module:
    """Replace every batch normalisation in `model` by one over all ranks; returns the model.

    Call it before the optimizer is made, on every rank of `world` (default: `un.join()`). Parameters and state-dict
    keys stay the same.

    >>> model = sync_batch_norm(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), World())
    >>> sorted(model.state_dict())[:3]
    ['0.bias', '0.weight', '1.bias']
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"sync_batch_norm takes a torch.nn.Module, got {type(model).__name__}")
    return _replace(model, Link(world if world is not None else join()))


def move_batch_norm(model: nn.Module, world: World) -> None:
    """Have the model's `SyncBatchNorm`s go on in another world; every rank of it calls this."""
    for link in dict.fromkeys(m.link for m in model.modules() if isinstance(m, SyncBatchNorm)):
        link.move(world)


def _replace(module: nn.Module, link: Link) -> nn.Module:
    if isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(module, SyncBatchNorm):
        return SyncBatchNorm(module, link)
    for name, child in list(module.named_children()):
        replaced = _replace(child, link)
        if replaced is not child:
            setattr(module, name, replaced)
    return module
