"""Horovod's elastic state: under `unisono run -n 2:4 train.py` workers come and go while the program goes on.

Training is not interrupted when a worker is lost: the others go on from the step that they are in. So there is nothing
to restore, and `run` calls the function once; the state's own values follow the training to workers that come.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from torch import nn
from torch.optim import Optimizer

from unisono.methods.strategy import follow
from unisono.methods.strategy.healing import Refused
from unisono.world import join

__all__ = ["TorchState", "run"]

T = TypeVar("T")
_NOT_OFFERED = {
    "ElasticSampler": "un.shard(dataset, batch_size=...): it redistributes an epoch when workers join or leave",
    "ObjectState": "TorchState(epoch=0): it takes plain values alone, too",
    "State": "TorchState, or un.follow for an object with state_dict() and load_state_dict()",
}


def __getattr__(name: str) -> NoReturn:
    if name in _NOT_OFFERED:
        raise AttributeError(f"elastic.{name} of Horovod is not offered here; use {_NOT_OFFERED[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class TorchState:
    """A model, its optimizer, others that have a `state_dict()`, and plain values of the program's own: `state.epoch`.

    `commit` notes them, `restore` brings back what was noted last, `sync` makes them those of rank 0.
    """

    def __init__(self, model: nn.Module | None = None, optimizer: Optimizer | None = None, **values: Any) -> None:
        parts = {"model": model, "optimizer": optimizer}
        parts |= {name: x for name, x in values.items() if hasattr(x, "state_dict") and hasattr(x, "load_state_dict")}
        plain = {name: x for name, x in values.items() if name not in parts}
        self.__dict__.update(parts, _parts=tuple(parts), _values=plain, _noted=None, _followers=[])
        follow(self)
        self.save()

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
        """Set the program's own values."""
        self.__dict__["_values"] = dict(values)

    def commit(self) -> None:
        """Keep a copy of everything, for `restore`."""
        self.save()

    def save(self) -> None:
        """The same as `commit`."""
        self.__dict__["_noted"] = copy.deepcopy(self._collect())

    def _collect(self) -> list[Any]:
        return [{name: part.state_dict() for name, part in self._list_parts().items()}, self._values]

    def _list_parts(self) -> dict[str, Any]:
        return {name: part for name in self._parts if (part := self.__dict__[name]) is not None}

    def check_host_updates(self) -> None:
        """Nothing to do: workers that come are taken in between steps."""

    def restore(self) -> None:
        """Go back to the copy that was kept last."""
        states, values = copy.deepcopy(self._noted)
        for name, part in self._list_parts().items():
            part.load_state_dict(states[name])
        self.__dict__["_values"] = values

    def sync(self) -> None:
        """Set everything to rank 0's values."""
        world = join()
        states, values = world.broadcast_object(self._collect())
        if world.rank != 0:
            for name, part in self._list_parts().items():
                part.load_state_dict(states[name])
            self.__dict__["_values"] = values
        self.save()

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
    """Around a training function whose first argument is the state: all workers begin with rank 0's.

    A worker that comes later begins the function, too, and its passes over data go on where the others are: those of
    `un.shard` do. If the data is divided by other means, which go by the number of workers at the start, the worker is
    refused, and the others go on without it.
    """

    @functools.wraps(function)
    def begin(state: TorchState, *args: Any, **kwargs: Any) -> T:
        state.sync()
        world = join()
        if world.elastic is not None and world.elastic.is_joining and not world.shards:
            raise Refused(
                "this worker cannot join the training: the program has divided its data by the number of workers at "
                "its start. Let un.shard do it, before this function is called: it redistributes the rest of an epoch"
            )
        return function(state, *args, **kwargs)

    return begin
