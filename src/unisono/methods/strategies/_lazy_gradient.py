"""A gradient whose values lie elsewhere: which operations need no values, and how each method does those."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor


class LazyGradient(Tensor):
    """`p.grad` as a handle: norms, clipping, scaling and clearing are done by its `owner`, without its values.

    A method overrides what follows; `NotImplemented` as an answer, like any operation that is not in the table below,
    leads to `on_values`.
    """

    owner: Callable[[], Any]  # a weak reference: a gradient keeps no replica alive

    @property
    def data(self) -> Tensor:
        """As of any tensor; what is set (`p.grad.data = x`) becomes its values."""
        found: Tensor = Tensor.data.__get__(self)  # type: ignore[attr-defined]
        return found

    @data.setter
    def data(self, values: Tensor) -> None:
        self.copy_(values)

    def find_owner(self) -> Any:
        """The object that has the values."""
        owner = self.owner()
        if owner is None:
            raise RuntimeError("the replica that this gradient belongs to is closed")
        return owner

    def add_pass(self, other: Tensor, alpha: float) -> Any:
        """Autograd adds the gradient of another backward pass: keep it apart, and return `self`."""
        raise NotImplementedError

    def find_norm(self, order: float, dtype: torch.dtype | None) -> Tensor:
        """The norm over all elements."""
        raise NotImplementedError

    def change(self, how: str, number: Any) -> None:
        """Multiply ("mul") or divide ("div") by a number."""
        raise NotImplementedError

    def clear(self) -> None:
        """Become zero."""
        raise NotImplementedError

    def limit(self, low: Any, high: Any) -> Any:
        """Limit every element, and return `self`."""
        return NotImplemented

    @classmethod
    def multiply_all(cls, gradients: Sequence[Any], factor: Any) -> None:
        """Multiply several gradients by the same number."""
        for gradient in gradients:
            gradient.mul_(factor)

    @classmethod
    def unscale_all(cls, gradients: Sequence[Any], found_inf: Tensor, factor: Tensor) -> None:
        """Multiply several gradients as a GradScaler does; set `found_inf` to 1 if some value is not finite."""
        raise NotImplementedError

    @classmethod
    def on_values(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """Do an operation that needs values, or refuse it."""
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        handler = _HANDLERS.get(func.overloadpacket)
        done = NotImplemented if handler is None else handler(*args, **(kwargs or {}))
        return cls.on_values(func, args, kwargs or {}) if done is NotImplemented else done


# What torch calls with at least one such gradient, at whatever place among the arguments ---------------------------


def _norm(x: Any, order: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    if dim is not None or keepdim or not isinstance(x, LazyGradient):
        return NotImplemented
    return x.find_norm(float(order), dtype)


def _change(how: str, x: Any, number: Any, **kwargs: Any) -> Any:
    if kwargs or not isinstance(x, LazyGradient) or (isinstance(number, Tensor) and number.numel() != 1):
        return NotImplemented
    x.change(how, number)
    return x


def _zero_(x: LazyGradient) -> Any:
    x.clear()
    return x


def _clamp_(x: Any, min: Any = None, max: Any = None) -> Any:  # noqa: A002 - torch's names
    return x.limit(min, max) if isinstance(x, LazyGradient) else NotImplemented


def _each(change: Callable[[Any, Any], Any]) -> Callable[..., None]:
    """The operation on a list of gradients, each with a number of its own or all with the same."""

    def change_each(xs: Sequence[Tensor], given: Any = None) -> None:
        every = given if isinstance(given, (list, tuple)) else [given] * len(xs)
        for x, one in zip(xs, every, strict=True):
            change(x, one)

    return change_each


def _foreach_norm(xs: Sequence[Tensor], order: float = 2, dtype: Any = None) -> list[Tensor]:
    return [torch.linalg.vector_norm(x, order, dtype=dtype) for x in xs]


def _foreach_mul_(xs: Sequence[Tensor], factor: Any) -> None:
    if isinstance(factor, (list, tuple)):
        _each(Tensor.mul_)(xs, factor)
        return
    plain, lazy = _sort_out(xs)
    _each(Tensor.mul_)(plain, factor)
    type(lazy[0]).multiply_all(lazy, factor)


def _unscale(xs: Sequence[Tensor], found_inf: Tensor, factor: Tensor) -> None:
    """A GradScaler looks for values that are not finite, and divides by its scale."""
    plain, lazy = _sort_out(xs)
    if plain:
        torch._amp_foreach_non_finite_check_and_unscale_(plain, found_inf, factor)
    type(lazy[0]).unscale_all(lazy, found_inf, factor)


def _sort_out(xs: Sequence[Tensor]) -> tuple[list[Tensor], list[Any]]:
    plain = [x for x in xs if not isinstance(x, LazyGradient)]
    return plain, [x for x in xs if isinstance(x, LazyGradient)]


_aten = torch.ops.aten
_HANDLERS: dict[Any, Any] = {
    _aten.detach: lambda x: x,
    _aten.add_: lambda x, y, alpha=1: x.add_pass(y, alpha) if isinstance(x, LazyGradient) else NotImplemented,
    _aten.linalg_vector_norm: _norm,
    _aten.norm: lambda x, p=2, *rest, **kw: NotImplemented if rest or kw else _norm(x, 2 if p is None else p),
    _aten._foreach_norm: _foreach_norm,
    _aten.mul_: partial(_change, "mul"),
    _aten.div_: partial(_change, "div"),
    _aten._foreach_mul_: _foreach_mul_,
    _aten._foreach_div_: _each(Tensor.div_),
    _aten.zero_: _zero_,
    _aten._foreach_zero_: _each(lambda x, _: x.zero_()),
    _aten.clamp_: _clamp_,
    _aten._foreach_clamp_min_: _each(lambda x, low: x.clamp_(min=low)),
    _aten._foreach_clamp_max_: _each(lambda x, high: x.clamp_(max=high)),
    _aten._amp_foreach_non_finite_check_and_unscale_: _unscale,
}
