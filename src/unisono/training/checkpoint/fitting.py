"""Whether what was saved fits the model and the optimizers that load it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor, nn

from unisono.training.checkpoint.slices import Piece, Stored


def check_model(mine: Mapping[str, Any], saved: Mapping[str, Any], *, strict: bool) -> None:
    problems = []
    if strict:
        problems += [f"it has no {name!r}" for name in mine if name not in saved]
        problems += [f"the model has no {name!r}" for name in saved if name not in mine]
    for name, value in mine.items():
        other: Any = saved.get(name)
        if not isinstance(value, Tensor | Piece) or not isinstance(other, Tensor | Stored):
            continue  # a module's extra state
        if isinstance(value, Tensor) and nn.parameter.is_lazy(value):
            continue
        if value.shape != other.shape:
            problems.append(f"{name!r} has shape {tuple(other.shape)} there, {tuple(value.shape)} in the model")
    if problems:
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise ValueError(
            f"the checkpoint does not fit the model: {'; '.join(problems[:8])}{more}. "
            "Build the model it was saved from" + (", or load with strict=False" if strict else "")
        )


class Kind:
    """What tells optimizers apart: their classes, and the sizes of each one's groups."""

    def __init__(self, names: str, counts: Sequence[int], groups: Sequence[Any]) -> None:
        sizes, ends = [len(group["params"]) for group in groups], list(accumulate(counts))
        self.names = names
        self.sizes = [sizes[end - count : end] for count, end in zip(counts, ends, strict=True)]

    def __str__(self) -> str:
        several = f"{len(self.sizes)} optimizers, " if len(self.sizes) > 1 else ""
        return f"{several}{self.names} with groups of {', '.join(map(str, self.sizes))}"


def check_optimizer(mine: Kind, saved: Kind, *, strict: bool) -> bool:
    """Whether the saved optimizers have the classes and the parameter groups of these."""
    if (mine.names, mine.sizes) == (saved.names, saved.sizes):
        return True
    problem = f"the checkpoint's optimizer is {saved} parameters, this one is {mine}"
    if strict:
        raise ValueError(f"{problem}: make the optimizer as it was made for the checkpoint")
    warnings.warn(f"{problem}: its state is not loaded", stacklevel=2)
    return False
