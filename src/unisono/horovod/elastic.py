"""Horovod's elastic state: under `unisono run -n 2:4 train.py` workers come and go while the program goes on.

Training is not interrupted when a worker is lost: the others go on from the step that they are in. So there is nothing
to restore, and `run` calls the function once; the state's own values follow the training to workers that come.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer

from unisono.strategy import follow
from unisono.world import join

__all__ = ["TorchState", "run"]

T = TypeVar("T")


class TorchState:
    """A model, its optimizer, and values of the program's own: `state.epoch`, `state.batch`.

    `commit` notes them, `restore` brings back what was noted last, `sync` makes them those of rank 0.
    """

    def __init__(self, model: nn.Module | None = None, optimizer: Optimizer | None = None, **values: Any) -> None:
        self.__dict__.update(model=model, optimizer=optimizer, _values=dict(values), _noted=None, _followers=[])
        follow(self)
        self.commit()

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_values"][name]
        except KeyError:
            raise AttributeError(
                f"the state has no {name!r}; it has {', '.join(self._values) or 'no values'}"
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__:
            self.__dict__[name] = value
        else:
            self._values[name] = value

    def state_dict(self) -> dict[str, Any]:
        """The program's own values."""
        return dict(self._values)

    def load_state_dict(self, values: dict[str, Any]) -> None:
        """Take the program's own values."""
        self.__dict__["_values"] = dict(values)

    def commit(self) -> None:
        """Note where the program is."""
        parts = {name: self.__dict__[name] for name in ("model", "optimizer") if self.__dict__[name] is not None}
        self.__dict__["_noted"] = copy.deepcopy([{n: part.state_dict() for n, part in parts.items()}, self._values])

    def check_host_updates(self) -> None:
        """Nothing to do: workers that come are taken in between steps."""

    def restore(self) -> None:
        """Go back to what was noted last."""
        parts, values = copy.deepcopy(self._noted)
        for name, part in parts.items():
            self.__dict__[name].load_state_dict(part)
        self.__dict__["_values"] = values

    def sync(self) -> None:
        """Make all of it rank 0's."""
        world = join()
        parts = {name: self.__dict__[name] for name in ("model", "optimizer") if self.__dict__[name] is not None}
        mine = [{name: part.state_dict() for name, part in parts.items()}, self._values]
        states, values = world.broadcast_object(mine)
        if world.rank != 0:
            for name, part in states.items():
                parts[name].load_state_dict(part)
            self.__dict__["_values"] = values
        self.commit()

    def register_reset_callbacks(self, callbacks: list[Callable[[], None]]) -> None:
        """Call these when the world has changed: to set a learning rate by the number of workers, say."""
        follower = _Resets(callbacks)
        self._followers.append(follower)  # the world holds it weakly
        join().follow(follower)


class _Resets:
    def __init__(self, callbacks: list[Callable[[], None]]) -> None:
        self._callbacks = callbacks

    def world_changed(self, _: Any) -> None:
        for call in self._callbacks:
            call()


def run(function: Callable[..., T]) -> Callable[..., T]:
    """Around a training function whose first argument is the state: all workers begin with rank 0's."""

    @functools.wraps(function)
    def begin(state: TorchState, *args: Any, **kwargs: Any) -> T:
        state.sync()
        return function(state, *args, **kwargs)

    return begin
