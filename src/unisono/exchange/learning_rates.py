"""The learning rates of an optimizer, read without holding the program up."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


class LearningRates:
    """What an optimizer's groups are stepped with: by group, and by parameter (NaN where it is not known)."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._groups: dict[Tensor, int] = {}

    def by_group(self) -> list[float]:
        """Each group's rate, now."""
        return [_rate(group) for group in self._optimizer.param_groups]

    def of(self, param: Tensor) -> float:
        """A parameter's rate, now."""
        if param not in self._groups:
            return math.nan
        return _rate(self._optimizer.param_groups[self._groups[param]])

    def find_groups(self) -> None:
        """Find out anew which group each parameter belongs to."""
        groups = enumerate(self._optimizer.param_groups)
        self._groups = {param: i for i, group in groups for param in group["params"]}


def _rate(group: dict[str, Any]) -> float:
    lr = group.get("lr", math.nan)
    if isinstance(lr, Tensor) and lr.is_cuda:
        return math.nan  # reading it from the device would hold the program up
    return float(lr)
