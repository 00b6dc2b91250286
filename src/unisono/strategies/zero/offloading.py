"""Optimizer state (and parameters) off the device: on the host or on disk, stepped there, unit by unit.

ZeRO-Offload: Ren et al., 2021, arXiv:2101.06840. ZeRO-Infinity: Rajbhandari et al., 2021, arXiv:2104.07857.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from unisono.checkpoint.slices import Piece, Stored
from unisono.offload.device import SLOTS
from unisono.offload.disk import Disk, DiskError, mapped
from unisono.offload.host import available_bytes, give_back_freed_memory
from unisono.offload.lines import Line
from unisono.offload.pipeline import Pipeline
from unisono.offload.plan import resident_units, staged_share
from unisono.offload.resting import Resting
from unisono.offload.segments import Run
from unisono.offload.stepper import Block, disk_bytes
from unisono.sizes import parse_size, show_size
from unisono.strategies.zero.units import Part, Unit

if TYPE_CHECKING:
    from unisono.strategies.zero import zero

Home = Literal["cpu", "disk"]
MOMENTS = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Place(NamedTuple):
    """Where a parameter stands in the optimizer."""

    group: int
    number: int


Numbers = dict[str, Place]  # by the parameter's name


class Engine(Protocol):
    """Who steps: `Pipeline` where values are on the device, `Resting` where they rest elsewhere."""

    steps: int

    def offer(self, u: int, gradient: Tensor, *, replace: bool = ...) -> Any:
        """Take a unit's gradient."""

    def step(self, scale: float = ..., absent: Any = ..., *, delay: bool | None = ...) -> None:
        """Begin the update."""

    def wait(self, u: int) -> None:
        """Until a unit has its new values."""

    def finish(self) -> None:
        """Until all have."""

    def retry(self) -> None:
        """Go on with a step that an error broke off."""

    def names(self, u: int) -> list[str]:
        """Lines of state."""

    def state(self, u: int, name: str, start: int = ..., stop: int | None = ...) -> Tensor:
        """Part of one."""

    def scalars(self, u: int, at: int = ...) -> dict[str, Any] | None:
        """What is kept once a parameter."""

    def load(self, u: int, values: Mapping[str, Any], *, start: int = ..., stop: int | None = ...) -> None:
        """Set state."""

    def reset(self, u: int, *, start: int = ..., stop: int | None = ...) -> None:
        """Forget state."""

    def close(self) -> None:
        """End."""


class Offloading:
    """The trainable units of a replica whose state is off the device. Built when it is first needed: by then it is
    known how much of the device's memory a step takes."""

    def __init__(
        self, optimizer: Optimizer, units: Sequence[Unit], numbers: Numbers, strategy: zero, device: torch.device
    ) -> None:
        self.optimizer, self.units, self.strategy, self.device = optimizer, list(units), strategy, device
        self._numbers = numbers
        lost = [name for unit in units for name in unit.names if name not in numbers]
        if lost:
            raise ValueError(
                f"{len(lost)} parameter(s) learn but are not in the optimizer, the first {lost[0]!r}, and what is "
                "stepped off the device must be: give them to the optimizer, or freeze them with requires_grad_(False)"
            )
        self._at = {unit: u for u, unit in enumerate(self.units)}
        self._moments = MOMENTS[strategy.moments]
        self._engine: Engine | None = None
        self._disk: Disk | None = None
        self._steps = 0
        self._in_step = False
        self._offered: set[Unit] = set()  # units whose gradient waits for the step
        self.homes = self._choose_homes()
        self._check_room(self._most_on_device())
        if "disk" in self.homes:
            give_back_freed_memory()

    def start(self) -> None:
        """All units have values: the engine is built, or, where a budget of the device's memory must be kept, with the
        first gradient."""
        if self.strategy.device_memory is None or self.device.type != "cuda":
            self.engine  # noqa: B018 - built now

    @property
    def rests(self) -> bool:
        """Whether the values are not on the device that computes."""
        on = self.strategy.params_on
        return on == "disk" or (on == "cpu" and self.device.type != "cpu")

    def waiting_room(self, unit: Unit) -> Tensor | None:
        """Where the master values of a unit wait that will go to disk, while its values compute on the device."""
        on_disk = unit.trainable and self.homes[self._at[unit]] == "disk"
        if not on_disk or self.strategy.params_on == "disk" or unit.master_dtype == unit.dtype:
            return None
        try:
            return mapped(self._folder(), unit.each, unit.master_dtype)
        except DiskError:  # the state alone may still fit there; these values then wait in memory
            return None

    def take(self, unit: Unit) -> None:
        """Where values rest on disk: take a unit's at once, so that memory for all of them is never needed."""
        if self.strategy.params_on == "disk":
            if self._engine is None:
                self._engine = self._resting()
            assert isinstance(self._engine, Resting)
            self._engine.add(self._line(unit))
            unit.shard = unit.master = torch.empty(0, dtype=unit.dtype)

    # Where the state lives -------------------------------------------------------------------------------

    def _state_bytes(self, unit: Unit) -> int:
        """Bytes of a unit's state: master and moments."""
        return disk_bytes(self.optimizer, self._blocks_of(unit), moments=self._moments)

    def _blocks_of(self, unit: Unit) -> list[Block]:
        return [Block(None, self._runs(unit), "disk", unit.each, unit.master_dtype)]

    def _choose_homes(self, resident: Set[int] = frozenset()) -> list[Home]:
        """On disk: as much as asked for, or what does not fit into the host memory allowed. The last units go first:
        the next forward needs them last. Those whose state is on the device need neither."""
        s = self.strategy
        if s.optimizer_on != "disk":
            return ["cpu"] * len(self.units)
        sizes = [0 if u in resident else self._state_bytes(unit) for u, unit in enumerate(self.units)]
        if s.spill is not None:
            room = (1 - s.spill) * sum(sizes)
        elif s.host_memory is not None:
            room = parse_size(s.host_memory)
        else:
            room = 0.0
        homes: list[Home] = []
        for size in sizes:
            room -= size
            homes.append("cpu" if room >= 0 else "disk")
        return homes

    def _check_room(self, on_device_bytes: float = 0.0, waiting_bytes: int = 0) -> None:
        """Say what is missing before training starts.

        on_device_bytes: of the state that is to be on the device. waiting_bytes: of its master values that are in
        memory already.
        """
        sizes = [self._state_bytes(unit) for unit in self.units]
        needed = sum(size for size, home in zip(sizes, self.homes, strict=True) if home == "cpu") - on_device_bytes
        free = available_bytes() + waiting_bytes
        if self.strategy.host_memory is not None:
            free = min(free, parse_size(self.strategy.host_memory))
        if needed > free:
            spill = min(1.0, round(1 - 0.8 * free / max(1, sum(sizes)) + 0.005, 2))
            raise ValueError(
                f"the optimizer's state of {show_size(needed)} does not fit into the {show_size(free)} of host memory "
                f"that this worker has: use more workers, moments='bf16', or optimizer_on='disk', spill={spill}"
            )

    def _most_on_device(self) -> float:
        """Bytes of state that may be on the device at most: what a step takes is not known yet."""
        if self.strategy.device_memory is None or self.device.type != "cuda":
            return 0.0
        values = sum(unit.each * unit.dtype.itemsize for unit in self.units)
        return max(0.0, parse_size(self.strategy.device_memory) - values)

    def _runs(self, unit: Unit) -> list[Run]:
        places = [(part, self._numbers.get(unit.names[part.slot])) for part in unit.held]
        return [Run(part.at, part.at + part.length, place.group) for part, place in places if place is not None]

    @property
    def engine(self) -> Engine:
        """Built at the first use."""
        if self._engine is None:
            s = self.strategy
            if self.rests:
                resting = self._engine = self._resting()
                for unit in self.units:
                    resting.add(self._line(unit))
                    unit.master = unit.shard  # what the engine has taken over
            else:
                resident = self._resident()
                self.homes = self._choose_homes(resident)
                if s.device_memory is not None:  # now it is known how much of it is on the device
                    waiting = sum(unit.master.nbytes for unit in self.units if unit.master is not unit.shard)
                    self._check_room(sum(self._state_bytes(self.units[u]) for u in resident), waiting)
                lines = [self._line(unit) for unit in self.units]
                for unit in self.units:
                    unit.master = unit.shard  # the engine takes them over, one after the other
                self._engine = Pipeline(
                    self.optimizer,
                    lines,
                    device=self.device,
                    moments=self._moments,
                    gradients=None if s.accumulate == 1 else self.units[0].master_dtype,
                    disk=self._scratch(),
                    delayed=s.delayed_update,
                    resident=resident,
                )
            self._engine.steps = self._steps
        return self._engine

    def _resting(self) -> Resting:
        keep = self.strategy.params_on == "cpu"
        return Resting(self.optimizer, moments=self._moments, disk=self._scratch(), keep=keep)

    def _scratch(self) -> Disk | None:
        """The file for what goes to disk."""
        homes = zip(self.units, self.homes, strict=True)
        blocks = [block for unit, home in homes if home == "disk" for block in self._blocks_of(unit)]
        if blocks:
            nbytes = disk_bytes(self.optimizer, blocks, moments=self._moments)
            self._disk = Disk(self._folder(), nbytes)
        return self._disk

    def _folder(self) -> str:
        return str(self.strategy.disk or os.environ.get("UNISONO_DISK") or tempfile.gettempdir())

    def _line(self, unit: Unit) -> Line:
        master = None if unit.master is unit.shard else unit.master
        return Line(unit.shard, self._runs(unit), master, self.homes[self._at[unit]])

    def _resident(self) -> frozenset[int]:
        """The units whose state fits on the device, beside what a step has taken so far at its peak."""
        if self.strategy.device_memory is None or self.device.type != "cuda" or not self._in_step:
            return frozenset()
        s, peak = self.strategy, torch.cuda.max_memory_allocated(self.device)
        lengths = [unit.each for unit in self.units]
        state = sum(self._state_bytes(unit) for unit in self.units) / max(1, sum(lengths))
        return resident_units(
            lengths,
            0.97 * parse_size(self.strategy.device_memory) - peak,
            share=staged_share(max(1, torch.get_num_threads() - 1)),
            state_bytes=math.ceil(state),
            gradient_bytes=self.units[0].dtype.itemsize if s.accumulate == 1 else self.units[0].master_dtype.itemsize,
            delayed=s.delayed_update,
            slots=SLOTS,
        )

    # A step ----------------------------------------------------------------------------------------------

    def offer(self, unit: Unit, fresh: bool) -> None:
        """Take the gradient of a unit, and let it go here. `fresh`: instead of one that was cleared without a step."""
        assert unit.gradient is not None
        if not fresh and unit not in self._offered:
            raise RuntimeError(
                "the gradients of the former step have not been cleared, and were used up by it: call "
                "optimizer.zero_grad() before backward"
            )
        if not fresh:
            raise RuntimeError(
                "another backward pass before optimizer.step(), and the gradients of the former have left for the "
                "host: give the strategy accumulate=2 (passes a step), or run all but the last in replica.no_sync(); "
                "with activation checkpointing use use_reentrant=False"
            )
        self._in_step = True  # by now it is known what memory a step takes
        self.engine.offer(self._at[unit], unit.gradient, replace=True)
        self._offered.add(unit)
        unit.gradient = None

    def step(self, scale: float, absent: Mapping[Unit, list[tuple[int, int]]]) -> None:
        """Begin the update."""
        self.engine.retry()
        self._steps += 1  # as the engine does
        self._offered = set()
        delay = self.strategy.delayed_update and self._steps > self.strategy.delay_after
        ranges = {self._at[unit]: found for unit, found in absent.items() if found}
        self.engine.step(scale, ranges, delay=delay)

    def wait(self, unit: Unit) -> None:
        """Until a unit has its new values."""
        if self._engine is not None:
            self._engine.wait(self._at[unit])

    def values(self, unit: Unit) -> Tensor:
        """My shard of a unit, with its new values; on the host where they rest there."""
        self.wait(unit)
        if isinstance(self._engine, Resting):
            return self._engine.values(self._at[unit])
        return unit.shard

    def finish(self) -> None:
        """Until all have; what an error of the disk broke off goes on."""
        if self._engine is not None:
            self._engine.retry()
            self._engine.finish()

    def close(self) -> None:
        """End threads, give memory and disk back."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        if self._disk is not None:
            self._disk.close()
            self._disk = None

    @property
    def steps(self) -> int:
        """Updates so far: when a delay begins, and how 16-bit moments are rounded, depend on it."""
        return self._steps

    @steps.setter
    def steps(self, count: int) -> None:
        self._steps = count
        if self._engine is not None:
            self._engine.steps = count

    # State -----------------------------------------------------------------------------------------------

    def master(self, unit: Unit) -> Tensor:
        """The values of my shard in the optimizer's precision."""
        return self.engine.state(self._at[unit], "master")

    def master_piece(self, unit: Unit, slot: int) -> Piece:
        """Those of one parameter, read when they are asked for."""
        return self._piece(unit, slot, "master")

    def _piece(self, unit: Unit, slot: int, name: str) -> Piece:
        engine, u = self.engine, self._at[unit]
        engine.retry()

        def reader(part: Part) -> Any:
            return lambda a, b: engine.state(u, name, part.at + a - part.start, part.at + b - part.start)

        spans = [(p.start, p.start + p.length, reader(p)) for p in unit.held if p.slot == slot]
        return Piece(unit.shapes[slot], unit.master_dtype, spans)

    def state_pieces(self) -> dict[int, dict[str, Any]]:
        """The optimizer's state by the parameter's number, as far as this rank has it."""
        found: dict[int, dict[str, Any]] = {}
        for unit in self.units:
            u = self._at[unit]
            lines = [name for name in self.engine.names(u) if name != "master"]
            for part in unit.held:
                place = self._numbers.get(unit.names[part.slot])
                scalars = self.engine.scalars(u, part.at) if place is not None else None
                if place is not None and scalars is not None:
                    pieces = {name: self._piece(unit, part.slot, name) for name in lines}
                    found[place.number] = {**pieces, **_own(scalars)}
        return found

    def states(self) -> dict[tuple[Unit, int], dict[str, Any]]:
        """The same in memory: by unit and place in `unit.held`."""
        found = {}
        for unit in self.units:
            u = self._at[unit]
            lines = [name for name in self.engine.names(u) if name != "master"]
            for i, part in enumerate(unit.held):
                scalars = self.engine.scalars(u, part.at) if unit.names[part.slot] in self._numbers else None
                if scalars is not None:
                    stop = part.at + part.length
                    read = {name: self.engine.state(u, name, part.at, stop) for name in lines}
                    found[unit, i] = {**read, **_own(scalars)}
        return found

    def set_master(self, unit: Unit, values: Tensor) -> None:
        """Someone else has set the values of my shard."""
        u = self._at[unit]
        for part in unit.held:
            stop = part.at + part.length
            mine = values[part.at : stop].detach().to("cpu", unit.master_dtype)
            self.engine.load(u, {"master": mine}, start=part.at, stop=stop)

    def load_values(self, unit: Unit, part: Part, stored: Stored) -> None:
        """Set the values of one parameter's elements here."""
        out = torch.empty(part.length, dtype=unit.master_dtype)
        values = stored.read(part.start, part.start + part.length, out=out)
        self.engine.load(self._at[unit], {"master": values}, start=part.at, stop=part.at + part.length)

    def load_states(self, saved: Mapping[int, Mapping[str, Any]]) -> None:
        """Set the optimizer's state, by the parameter's number; what is missing has not been stepped."""
        for unit in self.units:
            u = self._at[unit]
            for part in unit.held:
                stop = part.at + part.length
                place = self._numbers.get(unit.names[part.slot])
                state = None if place is None else saved.get(place.number)
                if not state:
                    if place is not None:
                        self.engine.reset(u, start=part.at, stop=stop)
                    continue
                lines = self.engine.names(u)
                values = {key: self._taken(value, key in lines, unit, part) for key, value in state.items()}
                self.engine.load(u, values, start=part.at, stop=stop)

    def _taken(self, value: Any, line: bool, unit: Unit, part: Part) -> Any:
        if not isinstance(value, (Stored, Tensor)):
            return value
        stored = value if isinstance(value, Stored) else Stored.of(value)
        if not line:
            return stored.full()
        out = torch.empty(part.length, dtype=unit.master_dtype)
        return stored.read(part.start, part.start + part.length, out=out)


def _own(scalars: Mapping[str, Any]) -> dict[str, Any]:
    """Copies: an optimizer counts in place, for each parameter by itself."""
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in scalars.items()}
