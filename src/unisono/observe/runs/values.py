"""Values on their way into the record: numbers at once, those of a GPU when they have arrived."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor

__all__ = ["HOWS", "Arriving", "How", "Logged", "Pending", "check_value", "start_copies", "take_settled"]

How = Literal["mean", "sum", "min", "max", "rank"]
HOWS: tuple[str, ...] = get_args(How)


@dataclass
class Arriving:
    """A number of a GPU that is being copied to this host's memory."""

    copy: Tensor
    arrived: Any  # a CUDA event

    def is_here(self) -> bool:
        """Whether the number has arrived and can be read without waiting."""
        return bool(self.arrived.query())


@dataclass
class Logged:
    """The values that a program logged in one call."""

    values: Mapping[str, float | Arriving]
    how: str = "mean"
    step: int | None = None  # None: the step where the rank is
    noticed: bool = False  # not by the program: it is what backward was called on


@dataclass
class Pending:
    """The same with where and when; `numbers` once all are here."""

    step: int
    time: float
    logged: Logged
    numbers: dict[str, float] = field(default_factory=dict)


def start_copies(values: Mapping[str, Any]) -> dict[str, float | Arriving]:
    """Numbers as they are; a tensor of a GPU begins to travel, and nobody waits for it."""
    found: dict[str, float | Arriving] = {}
    for name, value in values.items():
        if isinstance(value, Tensor) and value.is_cuda and value.numel() == 1:
            copy = torch.empty((), dtype=value.dtype, pin_memory=True)
            copy.copy_(value.detach().reshape(()), non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(torch.cuda.current_stream(value.device))
            found[name] = Arriving(copy, arrived)
        else:
            found[name] = float(value.detach() if isinstance(value, Tensor) else value)
    return found


def check_value(name: str, value: Any) -> None:
    """Refuse what is not one number, without reading it."""
    if not isinstance(name, str) or not name:
        raise TypeError(f"un.log: got a value called {name!r}; expected a name")
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex():
            what = f"{value.dtype} of shape {tuple(value.shape)}".removeprefix("torch.")
            raise TypeError(f"un.log: got {name}: {what}; expected one number, such as {name}.mean()")
    elif isinstance(value, str) or not hasattr(value, "__float__"):
        raise TypeError(f"un.log: got {name}={value!r}; expected a number, or a tensor that holds one")


def take_settled(values: Sequence[Pending], *, wait: bool) -> tuple[list[Pending], list[Pending]]:
    """Those whose numbers are here, in their order, and the rest; `wait`: for all."""
    for i, one in enumerate(values):
        if not wait and not all(v.is_here() for v in one.logged.values.values() if isinstance(v, Arriving)):
            return list(values[:i]), list(values[i:])
        for name, value in one.logged.values.items():
            if isinstance(value, Arriving):
                value.arrived.synchronize()
                value = float(value.copy)
            one.numbers[name] = value
    return list(values), []
