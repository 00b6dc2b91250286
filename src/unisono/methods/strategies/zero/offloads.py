"""Several optimizers off the device: each has an engine of its own, found by the unit that is asked about.

Units whose tensors are stepped whole have none: the optimizer's own code steps them on the host (see `Unit.owners`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.methods.offload.blocks import Shard
from unisono.methods.strategies.zero.offloading import Offloading, Position, Positions
from unisono.methods.strategies.zero.units import Part, Unit
from unisono.training.checkpoint.slices import Piece, Stored
from unisono.units import parse_size

if TYPE_CHECKING:
    from unisono.methods.strategies.zero import zero


class Offloads:
    """The engines of the optimizers that step elements; `Offloading` says what each method does."""

    def __init__(
        self,
        members: Sequence[Optimizer],
        units: Sequence[Unit],
        positions: Positions,
        strategy: zero,
        device: torch.device,
    ) -> None:
        self.units = list(units)
        total = sum(unit.shard_length for unit in units)
        self._engines: dict[int, Offloading] = {}
        for i, member in enumerate(members):
            mine = [unit for unit in units if unit.member == i]
            if mine:
                part = sum(unit.shard_length for unit in mine) / max(1, total)
                asked = strategy if len(members) == 1 else _share_memory(strategy, part)
                self._engines[i] = Offloading(member, mine, positions, asked, device)

    def of(self, unit: Unit) -> Offloading:
        """The engine that steps a unit."""
        return self._engines[unit.member]

    def map_master(self, unit: Unit) -> Tensor | None:
        return self.of(unit).placement.map_master(unit) if not unit.steps_here else None

    def adopt(self, unit: Unit) -> None:
        self.of(unit).adopt(unit)

    def start(self) -> None:
        for engine in self._engines.values():
            engine.start()

    # A step ----------------------------------------------------------------------------------------------

    def offer(self, unit: Unit, fresh: bool) -> None:
        self.of(unit).offer(unit, fresh)

    def step(self, member: int, scale: float, absent: Mapping[Unit, list[tuple[int, int]]]) -> None:
        if member in self._engines:
            self._engines[member].step(scale, absent)

    def wait(self, unit: Unit) -> None:
        if not unit.steps_here:
            self.of(unit).wait(unit)

    def values(self, unit: Unit) -> Tensor:
        return self.of(unit).values(unit)

    def finish(self) -> None:
        for engine in self._engines.values():
            engine.finish()

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()

    @property
    def kept_energy(self) -> list[float]:
        return [share for engine in self._engines.values() for share in engine.kept_energy]

    @property
    def steps(self) -> int | list[int]:
        """Updates so far; of several optimizers, of each."""
        found = [engine.steps for engine in self._engines.values()]
        return found[0] if len(found) == 1 else found

    @steps.setter
    def steps(self, count: int | list[int]) -> None:
        each = count if isinstance(count, list) else [count] * len(self._engines)
        for engine, number in zip(self._engines.values(), each, strict=False):
            engine.steps = number

    # State -----------------------------------------------------------------------------------------------

    def state(self, unit: Unit) -> Shard:
        return self.of(unit).state(unit)

    def piece(self, unit: Unit, slot: int) -> Piece:
        return self.of(unit).piece(unit, slot)

    def state_pieces(self) -> dict[int, dict[str, Any]]:
        return {n: one for engine in self._engines.values() for n, one in engine.state_pieces().items()}

    def states(self, device: torch.device) -> dict[tuple[Unit, int], dict[str, Any]]:
        """The optimizer's state of each part, on a device."""
        every = {place: one for engine in self._engines.values() for place, one in engine.states().items()}
        return {
            place: {key: x.to(device) if isinstance(x, Tensor) and x.dim() else x for key, x in one.items()}
            for place, one in every.items()
        }

    def set_master(self, unit: Unit, values: Tensor) -> None:
        self.of(unit).set_master(unit, values)

    def load_values(self, unit: Unit, part: Part, stored: Stored) -> None:
        self.of(unit).load_values(unit, part, stored)

    def reset(self, params: Container[Tensor]) -> None:
        """Forget the optimizer's state of some parameters."""
        for unit in self.units:
            for part in unit.parts:
                if unit.params[part.slot] in params:
                    self.state(unit).reset(start=part.at, stop=part.at + part.length)

    def load_states(self, saved: Mapping[int, Mapping[str, Any]], member: int | None = None) -> None:
        """`member`: of one of several optimizers alone."""
        for number, engine in self._engines.items():
            if member in (None, number):
                engine.load_states(saved)


def _share_memory(strategy: zero, part: float) -> zero:
    """A strategy whose limits of memory are a part of what was given."""
    on_device, on_host = (
        None if size is None else max(1, int(parse_size(size) * part))
        for size in (strategy.device_memory, strategy.host_memory)
    )
    return dataclasses.replace(strategy, device_memory=on_device, host_memory=on_host)


def find_positions(model: nn.Module, members: Sequence[Optimizer]) -> dict[str, Position]:
    """By name, where parameters stand in their optimizer's groups, and their numbers among those of all."""
    names = {p: name for name, p in model.named_parameters()}
    every = [(names[p], g) for one in members for g, group in enumerate(one.param_groups) for p in group["params"]]
    return {name: Position(g, number) for number, (name, g) in enumerate(every)}
