"""Gradients of which every rank keeps a part: their norms, and what may be done to them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.strategies.zero.sharded_gradient import power_sum
from unisono.strategies.zero.units import Unit
from unisono.world import World


class Keeping:
    """What a `ShardedGradient` asks for. Parameters are numbered through, over all units."""

    units: list[Unit]
    world: World
    _places: list[tuple[Unit, int]]  # of each number: its unit, and which of its parameters
    _first: dict[Unit, int]  # the number of a unit's first parameter
    _used: list[bool]  # whether any rank had a gradient, by number
    _stale: bool
    _ended: bool

    def _forget_norms(self) -> None:
        """A new window."""
        self._norms: dict[float, list[Tensor]] = {}
        self._served = -1  # the number whose norm was asked for last
        self._squares: dict[Unit, list[Tensor]] = {}  # of gradients that have left
        self._factors = [1.0] * len(self._places)  # by which they are to be multiplied
        self._last_factor: tuple[Any, float] = (None, 1.0)

    @torch.no_grad()
    def norm(self, number: int, order: float) -> Tensor:
        """The norm of a parameter's gradient, over all ranks.

        Those of all parameters are found with one collective, and serve for one sweep over them: a GradScaler changes
        gradients behind our back. Every rank asks in the same order.
        """
        if order not in self._norms or number <= self._served:
            sums = self._power_sums(order)
            inf = math.isinf(order)
            self.world.all_reduce(sums, "max" if inf else "sum", tag="norms").wait()
            roots = sums if inf else sums ** (1.0 / order)
            self._norms = {order: [x.to(unit.dtype) for x, (unit, _) in zip(roots, self._places, strict=True)]}
        self._served = number
        return self._norms[order][number]

    def _power_sums(self, order: float) -> Tensor:
        device = self.units[0].params[0].device
        wide = any(unit.dtype == torch.float64 for unit in self.units)
        sums = torch.zeros(len(self._places), dtype=torch.float64 if wide else torch.float32, device=device)
        for unit in self.units:
            first = self._first[unit]
            if not unit.steps_here and order != 2:
                raise NotImplementedError(
                    f"the norm of order {order} of gradients that have left for the host: only the 2-norm is known"
                )
            for i, part in enumerate(unit.held):
                number = first + part.slot
                if not unit.steps_here:
                    sums[number] = self._squares[unit][i] * self._factors[number] ** 2
                elif self._used[number] and unit.gradient is not None:
                    sums[number] = power_sum(unit.gradient[part.at : part.at + part.length], order)
        return sums

    @torch.no_grad()
    def scale(self, numbers: Sequence[int], factor: Any) -> None:
        """Multiply my parts of some gradients."""
        self._norms = {}
        chosen = set(numbers)
        if self._stale and not self._ended:  # of a step that is done
            return
        for number in chosen:
            self._factors[number] *= self._number(factor)
        for unit in self.units:
            first = self._first[unit]
            mine = [slot for slot in range(len(unit.params)) if first + slot in chosen]
            if unit.gradient is None or not mine:
                continue
            if len(mine) == len(unit.params):
                unit.gradient.mul_(factor)
            else:
                for part in unit.held:
                    if part.slot in mine:
                        unit.gradient[part.at : part.at + part.length].mul_(factor)

    @torch.no_grad()
    def clamp(self, number: int, low: Any, high: Any) -> None:
        """Limit the elements of a gradient."""
        unit, slot = self._places[number]
        self._norms = {}
        if unit.gradient is None:
            raise NotImplementedError("limits of the elements of gradients that have left for the host: clip the norm")
        for part in unit.held:
            if part.slot == slot:
                unit.gradient[part.at : part.at + part.length].clamp_(low, high)

    def _number(self, factor: Any) -> float:
        """A factor as a number; clipping gives the same tensor for each gradient."""
        if all(unit.steps_here for unit in self.units):
            return 1.0
        if factor is not self._last_factor[0]:
            self._last_factor = (factor, float(factor))
        return self._last_factor[1]

    def factor(self) -> float:
        """What the gradients that left are to be multiplied by."""
        found = {factor for factor, used in zip(self._factors, self._used, strict=True) if used}
        if len(found) > 1:
            raise ValueError(
                "the gradients of this window were multiplied by different numbers after they had left for the host: "
                "multiply all by the same, as clipping does, or use optimizer_on='device'"
            )
        return found.pop() if found else 1.0

    def full(self, number: int) -> Tensor:
        """A parameter's whole gradient, gathered."""
        unit, slot = self._places[number]
        if unit.gradient is None:
            raise RuntimeError(f"{unit.names[slot]!r} has no gradient here: none yet, or it has left for the host")
        parts = self.world.all_gather(unit.gradient, even=True, tag="full gradient").wait()
        return unit.views(torch.cat(parts))[slot].clone()
