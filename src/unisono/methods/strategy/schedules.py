"""The learning rate schedules of an optimizer, which does not know them."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

_known: weakref.WeakValueDictionary[int, LRScheduler] = weakref.WeakValueDictionary()  # by id, once they are watched
_is_watching = False


def watch_schedules() -> None:
    """From now on know every schedule of this process; those that are there already are looked for.

    A look goes through all that the garbage collector knows: 50 to 130 ms in a program that has imported torch, too
    long after each loss. So it is done once. Later ones are noted as they are made, also as copies and when unpickled.
    """
    global _is_watching
    if _is_watching:
        return
    LRScheduler.__new__ = _make  # type: ignore[assignment,method-assign]
    for found in gc.get_referrers(*_list_kinds(LRScheduler)):
        if isinstance(found, LRScheduler):
            _known[id(found)] = found
    _is_watching = True


def _make(cls: type[LRScheduler], *args: Any, **settings: Any) -> LRScheduler:
    """In place of LRScheduler.__new__, which it has from `object` unless a subclass has further bases."""
    above = super(LRScheduler, cls).__new__
    made: LRScheduler = above(cls) if above is object.__new__ else above(cls, *args, **settings)
    _known[id(made)] = made
    return made


def _list_kinds(kind: type[LRScheduler]) -> list[type[LRScheduler]]:
    return [kind, *(found for one in kind.__subclasses__() for found in _list_kinds(one))]


def find_schedules(optimizer: Optimizer) -> list[Any]:
    """Those of an optimizer, in an order that is the same on every rank."""
    watch_schedules()
    found = [one for one in list(_known.values()) if getattr(one, "optimizer", None) is optimizer]
    return sorted(found, key=_describe_schedule)


def _describe_schedule(schedule: Any) -> str:
    """What tells schedules of an optimizer apart: their type and settings, without what changes with the steps."""
    settings = [(k, v) for k, v in vars(schedule).items() if k[0] != "_" and isinstance(v, bool | int | float | str)]
    counters = ("last_epoch", "best", "num_bad_epochs", "cooldown_counter", "T_cur", "T_i")
    return f"{type(schedule).__name__} {sorted((k, v) for k, v in settings if k not in counters)}"


def take_plain(state: dict[str, Any]) -> dict[str, Any]:
    """What can be sent: plain values and tensors."""
    kinds = (bool, int, float, str, list, tuple, Tensor, type(None))
    return {name: copy.deepcopy(value) for name, value in state.items() if isinstance(value, kinds)}
