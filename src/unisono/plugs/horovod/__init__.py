"""Horovod's names over Unisono: `import unisono.horovod as hvd` in the place of `import horovod.torch as hvd`.

The workers are started by `unisono run -n 4 train.py` (or any other engine) instead of `horovodrun`. What Horovod has
and this has not is refused by name. `DistributedOptimizer(..., strategy="powersgd(rank=4)")` takes any of our methods.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from unisono.methods.spec import build, describe
from unisono.methods.strategy import Strategy, parallel
from unisono.plugs.horovod import collectives
from unisono.plugs.horovod import elastic as elastic
from unisono.plugs.horovod.collectives import *  # noqa: F403
from unisono.plugs.horovod.collectives import Compression, here, refuse
from unisono.training.batch_norm import Link
from unisono.training.batch_norm import SyncBatchNorm as _Joined
from unisono.world import PeerLost, World

__all__ = [
    "DistributedOptimizer",
    "HorovodInternalError",
    "SyncBatchNorm",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "elastic",
    *(name for name in collectives.__all__ if name not in ("here", "refuse")),
]

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)
_links: WeakKeyDictionary[World, Link] = WeakKeyDictionary()  # all layers of a world share one
HorovodInternalError = PeerLost  # a worker was lost in a collective

_NOT_OFFERED = {
    "ProcessSet": "un.join().split([[0, 1], [2, 3]]): a world of some workers",
    "add_process_set": "un.join().split([[0, 1], [2, 3]]): a world of some workers",
    "global_process_set": "no process_set: all workers take part",
    "grouped_reducescatter_async": "hvd.reducescatter_async of each tensor",
    "join": "un.shard: every worker has as many batches, and every sample counts once",
    "remove_process_set": "un.join().split([[0, 1], [2, 3]]): a world of some workers",
    "run": "un.launch(function, workers=4)",
    "sparse_allreduce_async": "hvd.allreduce of the dense tensor",
}


def __getattr__(name: str) -> NoReturn:
    if name in _NOT_OFFERED:
        raise AttributeError(f"{name} of Horovod is not offered here; use {_NOT_OFFERED[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@torch.no_grad()
def broadcast_parameters(params: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], root_rank: int = 0) -> None:
    """Make parameters and buffers (`model.state_dict()` or `model.named_parameters()`) those of `root_rank`."""
    pairs = params.items() if isinstance(params, Mapping) else params
    tensors = [x.data if isinstance(x, Parameter) else x for _, x in pairs if isinstance(x, Tensor)]
    if tensors:
        here().broadcast(tensors, root_rank, tag="hvd.broadcast_parameters").wait()


def broadcast_optimizer_state(optimizer: Optimizer, root_rank: int = 0, model: nn.Module | None = None) -> None:
    """Make an optimizer's state and settings those of `root_rank`."""
    state = here().broadcast_object(optimizer.state_dict(), root_rank)
    if here().rank != root_rank:
        optimizer.load_state_dict(state)


def SyncBatchNorm(
    num_features: int,
    eps: float = 1e-5,
    momentum: float = 0.1,
    affine: bool = True,
    track_running_stats: bool = True,
) -> nn.Module:
    """A layer of batch normalisation over the joined batch of all workers; its input has 2 dimensions or more."""
    link = _links[here()] = _links.get(here()) or Link(here())
    return _Joined(nn.BatchNorm1d(num_features, eps, momentum, affine, track_running_stats), link)


def DistributedOptimizer(
    optimizer: AnyOptimizer,
    named_parameters: Iterable[tuple[str, Parameter]] | None = None,
    compression: str = Compression.none,
    backward_passes_per_step: int = 1,
    op: str = "mean",
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    *,
    strategy: str | Strategy | None = None,
) -> AnyOptimizer:
    """The same optimizer, whose steps take the mean of all workers' gradients from now on.

    Gradients are means when `backward()` returns (with `op=Sum` sums), so that clipping needs no `synchronize()`, which
    does nothing. `num_groups`, `groups`, `sparse_as_dense` and `gradient_predivide_factor` say how Horovod packs and
    scales on the way to the same mean, and say nothing here.

    strategy: any of ours, such as "powersgd(rank=4)" or "local_sgd(every=8)", instead of `compression`.
    """
    if op == "adasum":
        refuse("Adasum of Horovod", "hvd.Average, or strategy='local_sgd'")
    if op not in ("mean", "sum"):
        raise ValueError(f"op is {op!r}; DistributedOptimizer takes hvd.Average and hvd.Sum")
    if strategy is not None and compression != Compression.none:
        raise ValueError("give either compression or strategy: a strategy says itself how gradients travel")
    if strategy is not None and op == "sum":
        raise ValueError("give either op=hvd.Sum or strategy: a strategy says itself what becomes of gradients")
    built: Strategy = build(strategy if strategy is not None else compression, kind="strategy")
    if getattr(built, "stage", 0) == 3:
        refuse(f"{describe(built)} below DistributedOptimizer", "zero(stage=2), or un.parallel, which knows the model")
    model = _Parameters(named_parameters, optimizer)
    settings: dict[str, Any] = {"accumulate": backward_passes_per_step} if backward_passes_per_step != 1 else {}
    replica = parallel(model, optimizer, built, **settings)

    if op == "sum":  # the mean of size times as much
        for p in model.parameters():
            p.register_hook(lambda gradient: gradient * replica.world.size)

    def synchronize() -> None:
        """Gradients are means already."""

    @contextmanager
    def skip_synchronize() -> Iterator[None]:
        """Around a step, after `synchronize()`: as any other step."""
        yield

    for name, value in (("synchronize", synchronize), ("skip_synchronize", skip_synchronize), ("replica", replica)):
        setattr(optimizer, name, value)
    return optimizer


class _Parameters(nn.Module):
    """A model of parameters alone, under their names."""

    def __init__(self, named: Iterable[tuple[str, Parameter]] | None, optimizer: Optimizer) -> None:
        super().__init__()
        held = [p for group in optimizer.param_groups for p in group["params"]]
        pairs = list(named) if named is not None else []
        names = {p: name for name, p in pairs}
        if named is not None and (missing := [p for p in held if p not in names]):
            raise ValueError(
                f"named_parameters lacks {len(missing)} of the optimizer's parameters, the first of shape "
                f"{tuple(missing[0].shape)}: give model.named_parameters()"
            )
        for i, param in enumerate(held):
            *path, last = names.get(param, f"parameter_{i}").split(".")
            at: nn.Module = self
            for part in path:
                if part not in at._modules:
                    at.add_module(part, nn.Module())
                at = at.get_submodule(part)
            at.register_parameter(last, param)
