"""The learning rate schedules of an optimizer, which does not know them."""

from __future__ import annotations

import copy
import gc
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def find_schedules(optimizer: Optimizer) -> list[Any]:
    """Those of an optimizer, which does not know them: they hold it, in their dict or (where nobody asked for that yet)
    in themselves. Not all objects are looked at: to hold a tuple that another thread is about to make breaks it.

    Each look goes through all that the garbage collector knows, some 50 ms: only a dict of a schedule is followed."""
    kinds = (torch.optim.lr_scheduler.LRScheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    holders = gc.get_referrers(optimizer)
    mine = [x for x in holders if type(x) is dict and x.get("optimizer") is optimizer]
    dicts = [x for x in mine if "last_epoch" in x or "_last_lr" in x]  # a ChainedScheduler has the second only
    owners = gc.get_referrers(*dicts) if dicts else []
    found = {id(o): o for o in (*holders, *owners) if issubclass(type(o), kinds) and o.optimizer is optimizer}
    return sorted(found.values(), key=_describe_schedule)


def _describe_schedule(schedule: Any) -> str:
    """What tells schedules of an optimizer apart: their type and settings, without what changes with the steps."""
    settings = [(k, v) for k, v in vars(schedule).items() if k[0] != "_" and isinstance(v, bool | int | float | str)]
    counters = ("last_epoch", "best", "num_bad_epochs", "cooldown_counter", "T_cur", "T_i")
    return f"{type(schedule).__name__} {sorted((k, v) for k, v in settings if k not in counters)}"


def take_plain(state: dict[str, Any]) -> dict[str, Any]:
    """What can be sent: plain values and tensors."""
    kinds = (bool, int, float, str, list, tuple, Tensor, type(None))
    return {name: copy.deepcopy(value) for name, value in state.items() if isinstance(value, kinds)}
