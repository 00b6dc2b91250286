"""Where the optimizer's state of each unit lives when it is off the device, and whether there is room for it."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from unisono.launchers.runtime.machine import available_bytes
from unisono.methods.offload.blocks import Block, Run
from unisono.methods.offload.device import STAGING_BUFFERS
from unisono.methods.offload.disk import Disk, DiskError, map_file
from unisono.methods.offload.plan import resident_units, staged_share
from unisono.methods.offload.stepper import disk_bytes
from unisono.methods.strategies.zero.units import Unit
from unisono.units import parse_size, show_size

if TYPE_CHECKING:
    from unisono.methods.strategies.zero import zero

MOMENTS = {"fp32": torch.float32, "bf16": torch.bfloat16}
_USABLE = 0.97  # of the device's memory that was allowed: what is freed is not always in one piece


class Position(NamedTuple):
    """Where a parameter stands in the optimizer."""

    group: int
    number: int  # through all groups


Positions = Mapping[str, Position]  # by the parameter's name


class Placement:
    """Chooses, for each unit, whether its state is on the host, on disk or, where there is room, on the device."""

    def __init__(
        self, optimizer: Optimizer, units: Sequence[Unit], positions: Positions, strategy: zero, device: torch.device
    ) -> None:
        self._optimizer, self._units, self._positions = optimizer, units, positions
        self._strategy, self._device = strategy, device
        self.moments = MOMENTS[strategy.moments]
        self.homes = self.choose_homes()
        self.resident: frozenset[int] = frozenset()
        self._check_room(self._most_on_device())

    def runs(self, unit: Unit) -> list[Run]:
        """The elements of my shard by the optimizer's groups."""
        found = [(part, self._positions.get(unit.names[part.slot])) for part in unit.parts]
        return [Run(part.at, part.at + part.length, place.group) for part, place in found if place is not None]

    def choose_homes(self, resident: Set[int] = frozenset()) -> list[Literal["cpu", "disk"]]:
        """On disk: as much as asked for, or what does not fit into the host memory allowed. The last units go first:
        the next forward needs them last. Those whose state is on the device need neither."""
        s = self._strategy
        if s.optimizer_on != "disk":
            return ["cpu"] * len(self._units)
        sizes = [0 if u in resident else self._state_bytes(unit) for u, unit in enumerate(self._units)]
        if s.spill is not None:
            room = (1 - s.spill) * sum(sizes)
        elif s.host_memory is not None:
            room = parse_size(s.host_memory)
        else:
            room = 0.0
        homes: list[Literal["cpu", "disk"]] = []
        for size in sizes:
            room -= size
            homes.append("cpu" if room >= 0 else "disk")
        return homes

    def use_device_memory(self, *, measured: bool) -> None:
        """Let state have what a step leaves of the device's memory; `measured`: what that is, is known by now."""
        self.resident = self._find_resident() if measured else frozenset()
        self.homes = self.choose_homes(self.resident)
        waiting = sum(unit.master.nbytes for unit in self._units if unit.master is not unit.shard)
        self._check_room(sum(self._state_bytes(self._units[u]) for u in self.resident), waiting)

    def make_disk(self) -> Disk | None:
        """The scratch file for what goes to disk."""
        on_disk = [unit for unit, home in zip(self._units, self.homes, strict=True) if home == "disk"]
        return Disk(self._folder(), sum(self._state_bytes(unit) for unit in on_disk)) if on_disk else None

    def map_master(self, unit: Unit) -> Tensor | None:
        """Memory in a file for the master values of a unit, where they wait until they go to disk; None: not needed.

        Where the values rest on disk themselves, or the master values are those that compute, nothing waits.
        """
        on_disk = unit.trainable and self.homes[self._units.index(unit)] == "disk"
        if not on_disk or self._strategy.params_on == "disk" or unit.master_dtype == unit.dtype:
            return None
        try:
            return map_file(self._folder(), unit.shard_length, unit.master_dtype)
        except DiskError:  # the state alone may still fit there; these values then wait in memory
            return None

    def _folder(self) -> str:
        return str(self._strategy.disk or os.environ.get("UNISONO_DISK") or tempfile.gettempdir())

    def _state_bytes(self, unit: Unit) -> int:
        """Bytes of a unit's state: master and moments."""
        block = Block(None, self.runs(unit), "disk", unit.shard_length, unit.master_dtype)
        return disk_bytes(self._optimizer, [block], moments=self.moments)

    def _check_room(self, on_device_bytes: float = 0.0, waiting_bytes: int = 0) -> None:
        """Say what is missing before training starts.

        on_device_bytes: of the state that is to be on the device. waiting_bytes: of its master values that are in
        memory already.
        """
        sizes = [self._state_bytes(unit) for unit in self._units]
        needed = sum(size for size, home in zip(sizes, self.homes, strict=True) if home == "cpu") - on_device_bytes
        free = available_bytes() + waiting_bytes
        if self._strategy.host_memory is not None:
            free = min(free, parse_size(self._strategy.host_memory))
        if needed > free:
            spill = min(1.0, round(1 - 0.8 * free / max(1, sum(sizes)) + 0.005, 2))
            raise ValueError(
                f"the optimizer's state of {show_size(needed)} does not fit into the {show_size(free)} of host memory "
                f"that this worker has: use more workers, moments='bf16', or optimizer_on='disk', spill={spill}"
            )

    def _most_on_device(self) -> float:
        """Bytes of state that may be on the device at most: what a step takes is not known yet."""
        if self._strategy.device_memory is None or self._device.type != "cuda":
            return 0.0
        values = sum(unit.shard_length * unit.dtype.itemsize for unit in self._units)
        return max(0.0, parse_size(self._strategy.device_memory) - values)

    def _find_resident(self) -> frozenset[int]:
        """The units whose state fits on the device, beside what a step has taken so far at its peak."""
        s = self._strategy
        if s.device_memory is None or self._device.type != "cuda":
            return frozenset()
        lengths = [unit.shard_length for unit in self._units]
        state = sum(self._state_bytes(unit) for unit in self._units) / max(1, sum(lengths))
        first = self._units[0]
        return resident_units(
            lengths,
            _USABLE * parse_size(s.device_memory) - torch.cuda.max_memory_allocated(self._device),
            share=staged_share(max(1, torch.get_num_threads() - 1)),
            state_bytes=math.ceil(state),
            gradient_bytes=first.dtype.itemsize if s.accumulate == 1 else first.master_dtype.itemsize,
            delayed=s.delayed_update,
            buffers=STAGING_BUFFERS,
        )
