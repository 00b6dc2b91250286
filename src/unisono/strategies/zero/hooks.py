"""Hooks on a model whose ranks hold it together: copies of the model keep them, and pickling it is refused in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn


class ModelHook:
    """A hook on a module, that does what `call` does."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *given: Any) -> Any:
        return self._call(*given)

    def __deepcopy__(self, memo: Any) -> ModelHook:
        return self

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "got a model under `zero` to pickle, as torch.save(model, file) does: its replica, of which every rank has "
            "a part, cannot be. Save with un.save(folder, replica), or take state = model.state_dict() on every rank "
            "and torch.save(state, file) on one; after replica.restore() and replica.close() on every rank it is an "
            "ordinary model"
        )
