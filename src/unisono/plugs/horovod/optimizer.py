"""Horovod's DistributedOptimizer: the optimizer itself, after its parameters were given to un.parallel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

from unisono.methods.spec import build, describe
from unisono.methods.strategy import Strategy, parallel

__all__ = ["Compression", "DistributedOptimizer", "refuse"]

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


class Compression:
    """How gradients travel: as they are, or as float16. For more, `DistributedOptimizer(..., strategy=...)`."""

    none = "allreduce"
    fp16 = "allreduce(reducer=fp16)"


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


def refuse(what: str, instead: str) -> NoReturn:
    """Refuse a feature of Horovod's, and name what to use instead."""
    raise NotImplementedError(f"{what} is not offered here; use {instead}")
