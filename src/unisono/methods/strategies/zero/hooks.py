"""Hooks on a model whose ranks hold it together: those of a copy do nothing, and pickling it is refused in words.

A pickled copy names `_do_nothing` by its path: it stays in this module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor


class ModelHook:
    """A hook on a module without which its parameters are not whole, not up to date, or of another precision."""

    def __init__(self, call: Callable[..., Any], *, in_copies: bool = False) -> None:
        """`in_copies`: a deep copy of the model keeps it."""
        self._call, self._in_copies = call, in_copies

    def __call__(self, *given: Any) -> Any:
        return self._call(*given)

    def __deepcopy__(self, memo: Any) -> Callable[..., Any]:
        return self if self._in_copies else _do_nothing

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "got a model under `zero` to pickle, as torch.save(model, file) does: its replica, of which every rank has "
            "a part, cannot be. Save with un.save(folder, replica), or take state = model.state_dict() on every rank "
            "and torch.save(state, file) on one; after replica.restore() and replica.close() on every rank it is an "
            "ordinary model"
        )


def _do_nothing(*_: Any) -> None:
    return


def cast_inputs(dtype: torch.dtype) -> ModelHook:
    """A hook that casts what a model is given. Deep copies of the model, of that dtype too, have it."""

    def cast(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

    return ModelHook(lambda _, args, kwargs: torch.utils._pytree.tree_map(cast, (args, kwargs)), in_copies=True)
