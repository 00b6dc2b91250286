"""torch's reduce operators as this package's: the one that is defined for a dtype, and what is done around it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.world.transports import Op
from unisono.world.world import World

__all__ = ["Reduction", "reduce_sparse"]

_NAMES: dict[str, Op] = {
    "SUM": "sum",
    "AVG": "mean",
    "PRODUCT": "product",
    "MIN": "min",
    "MAX": "max",
    "BAND": "and",
    "BOR": "or",
    "BXOR": "xor",
    "PREMUL_SUM": "sum",
}
_OF_BOOLS: dict[Op, Op] = {"sum": "max", "product": "min"}


class Reduction:
    """One of torch's operators, at work on tensors of one dtype."""

    def __init__(self, operator: Any, dtype: torch.dtype, size: int) -> None:
        kind: Any = getattr(operator, "op", operator)
        name = kind.name
        if name not in _NAMES:
            raise ValueError(f"ReduceOp.{name} is not known to the backend unisono: it has {', '.join(_NAMES)}")
        self.op: Op = _NAMES[name]
        self._factor: Any = operator.factor if name == "PREMUL_SUM" else None
        self._divisor = 0
        if dtype == torch.bool:
            self.op = _OF_BOOLS.get(self.op, self.op)
        elif self.op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
            self.op, self._divisor = "sum", size

    def before(self, parts: Sequence[Tensor]) -> None:
        """Prepare each rank's tensors for the reduction, in place."""
        if self._factor is not None:
            for part in parts:
                part.mul_(self._factor)

    def after(self, parts: Sequence[Tensor]) -> None:
        """Finish the result of the reduction, in place."""
        if self._divisor:
            for part in parts:
                part.copy_(part.div(self._divisor, rounding_mode="trunc"))

    @property
    def changes_input(self) -> bool:
        """Whether `before` does anything."""
        return self._factor is not None


def reduce_sparse(world: World, x: Tensor, op: Op) -> None:
    """Replace a sparse tensor by the sum over the ranks: indices and values of all, added at equal indices."""
    if op not in ("sum", "mean"):
        raise ValueError(f"sparse tensors are summed, or their mean is taken; got {op!r}")
    mine = x.coalesce()
    indices = world.all_gather(mine.indices().t().contiguous(), tag="sparse indices").wait()
    values = world.all_gather(mine.values(), tag="sparse values").wait()
    where, what = torch.cat(indices).t(), torch.cat(values)
    total = torch.sparse_coo_tensor(where, what, x.shape).coalesce()
    x.copy_(total / world.size if op == "mean" else total)
