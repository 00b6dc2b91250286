"""Collectives inside `torch.inference_mode()`, where an evaluation sums up what it has counted.

Memory that is made inside it cannot be written outside, by another thread or later. So a collective works outside it,
on copies of what was made inside, and writes the result back.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from unisono.background import Handle

__all__ = ["in_plain_memory", "leave_inference", "name_frame"]

F = TypeVar("F", bound=Callable[..., Any])


def in_plain_memory(collective: F) -> F:
    """Decorate a collective so that it may be called inside `torch.inference_mode()`."""

    @wraps(collective)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.is_inference_mode_enabled():
            return leave_inference(collective, args, kwargs)
        return collective(*args, **kwargs)

    return name_frame(call, collective)


def name_frame(call: Callable[..., Any], collective: F) -> F:
    """`call`, whose frame has the name of the collective that it wraps: errors name the program's call by it."""
    made = cast(FunctionType, call)
    made.__code__ = made.__code__.replace(co_name=collective.__name__)
    return cast(F, made)


def leave_inference(collective: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a collective with copies of tensors made in inference mode, and copy the results back to them."""
    copies: list[tuple[Tensor, Tensor]] = []

    def copy(x: Any) -> Any:
        if isinstance(x, list | tuple):
            return [copy(y) for y in x]
        if isinstance(x, Tensor) and x.is_inference():
            copies.append((x, x.clone()))
            return copies[-1][1]
        return x

    with torch.inference_mode(False):
        names = ("x", "parts", "out")
        given = collective(*map(copy, args), **{name: copy(x) if name in names else x for name, x in kwargs.items()})
    if not isinstance(given, Handle):
        return given

    def finish() -> Any:
        with torch.inference_mode(False):
            found = given.wait()
        with torch.inference_mode():
            for mine, copied in copies:
                mine.copy_(copied)
        own = {id(copied): mine for mine, copied in copies}  # the program's tensors, in the place of their copies
        return [own.get(id(x), x) for x in found] if isinstance(found, list) else own.get(id(found), found)

    return Handle(finish, given.done)
