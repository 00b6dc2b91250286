"""`p.grad` where no rank holds all of it: clipping, norms and adding up work on it as on any gradient."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Keeper(Protocol):
    """Who holds the parts (see `Backward`)."""

    def norm(self, number: int, order: float) -> Tensor:
        """The norm of a parameter's gradient, over all ranks."""

    def scale(self, numbers: Sequence[int], factor: Any) -> None:
        """Multiply the gradients of some parameters by a number."""

    def clamp(self, number: int, low: Any, high: Any) -> None:
        """Limit the elements of a gradient."""

    def full(self, number: int) -> Tensor:
        """A parameter's whole gradient."""


class ShardedGradient(Tensor):
    """The mean gradient of a parameter, of which every rank holds a part.

    `norm()`, `torch.nn.utils.clip_grad_norm_`, `mul_` and `zero_` do what they do on a whole gradient; each must be
    called on every rank. `full()` gathers it. Anything else is refused.
    """

    keeper: weakref.ref[Keeper]
    number: int
    local: Tensor | None
    cleared: bool

    @staticmethod
    def __new__(
        cls, shape: torch.Size, dtype: torch.dtype, device: torch.device, keeper: Keeper, number: int
    ) -> ShardedGradient:
        made: ShardedGradient = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        return made

    def __init__(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device, keeper: Keeper, number: int
    ) -> None:
        self.keeper, self.number = weakref.ref(keeper), number
        self.cleared = False  # by zero_()
        self.local = None  # what backward passes have added since, on this rank alone

    def full(self) -> Tensor:
        """The whole gradient, on every rank; every rank calls it."""
        return _keeper(self).full(self.number)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShardedGradient(shape={list(self.shape)}, dtype={self.dtype}; full() gathers it on every rank)"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        handler = _HANDLERS.get(func.overloadpacket)
        if handler is None:
            raise NotImplementedError(
                f"{func.overloadpacket} of a gradient that is split over the ranks: norms, clipping, mul_ and zero_ "
                "work on it; for anything else take grad.full(), on every rank"
            )
        return handler(*args, **(kwargs or {}))


def _keeper(gradient: ShardedGradient) -> Keeper:
    keeper = gradient.keeper()
    if keeper is None:
        raise RuntimeError("the replica that this gradient belongs to is closed")
    return keeper


def _detach(x: ShardedGradient) -> ShardedGradient:
    return x


def _add_(x: ShardedGradient, other: Tensor, alpha: float = 1) -> ShardedGradient:
    """Autograd adds another backward pass's gradient: kept until it is reduced."""
    if not isinstance(x, ShardedGradient) or isinstance(other, ShardedGradient) or alpha != 1:
        raise NotImplementedError("only a backward pass may add to a gradient that is split over the ranks")
    x.local = other.detach() if x.local is None else x.local + other
    return x


def _norm(x: ShardedGradient, order: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    if dim is not None or keepdim:
        raise NotImplementedError("the norm of a split gradient along a dimension: take grad.full(), on every rank")
    found = _keeper(x).norm(x.number, float(order))
    return found if dtype is None else found.to(dtype)


def _plain_norm(x: ShardedGradient, p: float = 2, *rest: Any, **kwargs: Any) -> Tensor:
    if rest or kwargs:
        raise NotImplementedError("the norm of a split gradient along a dimension: take grad.full(), on every rank")
    return _norm(x, p)


def _foreach_norm(xs: Sequence[ShardedGradient], order: float = 2, dtype: Any = None) -> list[Tensor]:
    return [_norm(x, order, dtype=dtype) for x in xs]


def _mul_(x: ShardedGradient, factor: Any) -> ShardedGradient:
    _keeper(x).scale([x.number], factor)
    return x


def _div_(x: ShardedGradient, divisor: Any) -> ShardedGradient:
    return _mul_(x, 1.0 / divisor)


def _foreach_mul_(xs: Sequence[ShardedGradient], factor: Any) -> Sequence[ShardedGradient]:
    if isinstance(factor, (list, tuple)):
        for x, each in zip(xs, factor, strict=True):
            _mul_(x, each)
        return xs
    by_keeper: dict[Any, list[int]] = {}
    for x in xs:
        by_keeper.setdefault(_keeper(x), []).append(x.number)
    for keeper, numbers in by_keeper.items():
        keeper.scale(numbers, factor)
    return xs


def _zero_(x: ShardedGradient) -> ShardedGradient:
    x.local, x.cleared = None, True
    _keeper(x).scale([x.number], 0.0)
    return x


def _clamp_(x: ShardedGradient, min: Any = None, max: Any = None) -> ShardedGradient:  # noqa: A002 - torch's names
    _keeper(x).clamp(x.number, min, max)
    return x


def _foreach_zero_(xs: Sequence[ShardedGradient]) -> None:
    for x in xs:
        _zero_(x)


_aten = torch.ops.aten
_HANDLERS: dict[Any, Any] = {
    _aten.detach: _detach,
    _aten.add_: _add_,
    _aten.linalg_vector_norm: _norm,
    _aten.norm: _plain_norm,
    _aten._foreach_norm: _foreach_norm,
    _aten.mul_: _mul_,
    _aten.div_: _div_,
    _aten._foreach_mul_: _foreach_mul_,
    _aten.zero_: _zero_,
    _aten._foreach_zero_: _foreach_zero_,
    _aten.clamp_: _clamp_,
}


def power_sum(x: Tensor, order: float) -> Tensor:
    """What adds up over ranks to a norm of this order: a sum of powers, or a maximum. In fp64 on the CPU, where x is
    fp64 too; else in fp32."""
    if not x.numel():
        return torch.zeros((), dtype=x.dtype if x.dtype == torch.float64 else torch.float32, device=x.device)
    x = x.abs() if x.is_complex() else x
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    found: Tensor = torch.linalg.vector_norm(x, order, dtype=dtype)
    return found if math.isinf(order) else found**order
