"""Optimizer state (and parameters) off the device: on the host or on disk, stepped there, unit by unit.

ZeRO-Offload: Ren et al., 2021, arXiv:2101.06840. ZeRO-Infinity: Rajbhandari et al., 2021, arXiv:2104.07857.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from unisono.launchers.runtime.machine import available_bytes, give_back_freed_memory
from unisono.methods.offload.blocks import Block, Run, Shard
from unisono.methods.offload.deferred import Deferred
from unisono.methods.offload.device import STAGING_BUFFERS
from unisono.methods.offload.disk import Disk, DiskError, map_file
from unisono.methods.offload.host_shards import HostShards
from unisono.methods.offload.pipeline import Pipeline
from unisono.methods.offload.plan import resident_units, staged_share
from unisono.methods.offload.stepper import disk_bytes
from unisono.methods.strategies.zero.optimizer_shards import as_stored, read_part
from unisono.methods.strategies.zero.units import Part, Unit
from unisono.training.checkpoint.slices import Piece, Stored
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
Engine = Pipeline | Deferred | HostShards


class Offloading:
    """The trainable units of a replica whose state is off the device.

    engine: who steps: `Pipeline` or `Deferred` where values are on the device, `HostShards` where they rest elsewhere.
    """

    def __init__(
        self, optimizer: Optimizer, units: Sequence[Unit], positions: Positions, strategy: zero, device: torch.device
    ) -> None:
        self.optimizer, self.units, self.strategy, self.device = optimizer, list(units), strategy, device
        self._positions = positions
        lost = [name for unit in units for name in unit.names if name not in positions]
        if lost:
            raise ValueError(
                f"{len(lost)} parameter(s) learn but are not in the optimizer, the first {lost[0]!r}, and what is "
                "stepped off the device must be: give them to the optimizer, or freeze them with requires_grad_(False)"
            )
        self._at = {unit: u for u, unit in enumerate(self.units)}
        self.placement = Placement(optimizer, self.units, positions, strategy, device)
        self._engine: Engine | None = None
        self._host_shards: HostShards | None = None  # the engine, while units are added to it
        self._disk: Disk | None = None
        self._steps, self._puts_off = 0, bool(strategy.puts_off)
        self._offered: set[Unit] = set()  # units whose gradient waits for the step
        if "disk" in self.placement.homes:
            give_back_freed_memory()

    # Building --------------------------------------------------------------------------------------------

    def adopt(self, unit: Unit) -> None:
        """A unit has its values. Where they rest on disk, take them at once: memory for all of them is never needed."""
        if self.strategy.params_on == "disk":
            if self._host_shards is None:
                self._host_shards = self._make_host_shards()
            self._host_shards.add(self._shard(unit))
            unit.shard = unit.master = torch.empty(0, dtype=unit.dtype)

    def start(self) -> None:
        """All units have values: build the engine, or, where a budget of the device's memory must be kept, wait for the
        first gradient."""
        if self.strategy.device_memory is None or self.device.type != "cuda":
            self._engine = self._build()

    @property
    def engine(self) -> Engine:
        """Built at the first use."""
        if self._engine is None:
            self._engine = self._build()
        return self._engine

    def _build(self, *, measured: bool = False) -> Engine:
        """`measured`: by now it is known what memory a step takes."""
        on = self.strategy.params_on
        engine: Engine
        if on == "disk":
            engine = self._host_shards or self._make_host_shards()
        elif on == "cpu" and self.device.type != "cpu":
            engine = self._make_host_shards()
            for unit in self.units:
                engine.add(self._shard(unit))
                unit.master = unit.shard  # what the engine has taken over
        else:
            engine = self._make_pipeline(measured=measured)
        engine.steps = self._steps
        return engine

    def _make_host_shards(self) -> HostShards:
        self._disk = self.placement.make_disk()
        keep = self.strategy.params_on == "cpu"
        return HostShards(self.optimizer, moments=self.placement.moments, disk=self._disk, keep=keep)

    def _make_pipeline(self, *, measured: bool) -> Pipeline | Deferred:
        if self.strategy.device_memory is not None:
            self.placement.use_device_memory(measured=measured)
        shards = [self._shard(unit) for unit in self.units]
        for unit in self.units:
            unit.master = unit.shard  # the engine takes them over, one after the other
        options: dict[str, Any] = {
            "device": self.device,
            "moments": self.placement.moments,
            "gradients": None if self.strategy.accumulate == 1 else self.units[0].master_dtype,
        }
        if self.strategy.defer is not None:
            kept = self.strategy.kept_share
            return Deferred(self.optimizer, shards, defer=self.strategy.defer, keep=kept, **options)
        self._disk = self.placement.make_disk()
        return Pipeline(
            self.optimizer,
            shards,
            disk=self._disk,
            delayed=self.strategy.delayed_update,
            ahead=self.strategy.step_ahead,
            resident=self.placement.resident,
            **options,
        )

    def _shard(self, unit: Unit) -> Shard:
        master = None if unit.master is unit.shard else unit.master
        return Shard(unit.shard, self.placement.runs(unit), master, self.placement.homes[self._at[unit]])

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
                "host: give the strategy accumulate=2 (passes per step), or run all but the last in replica.no_sync(); "
                "with activation checkpointing use use_reentrant=False"
            )
        if self._engine is None:
            self._engine = self._build(measured=True)
        self._engine.offer(self._at[unit], unit.gradient, replace=True)
        self._offered.add(unit)
        unit.gradient = None

    def step(self, scale: float, absent: Mapping[Unit, list[tuple[int, int]]]) -> None:
        """Begin the update."""
        self.engine.retry()
        self._steps += 1  # as the engine does
        self._offered = set()
        delay = self._puts_off and self._steps > self.strategy.delay_after
        ranges = {self._at[unit]: found for unit, found in absent.items() if found}
        self.engine.step(scale, ranges, delay=delay)

    def wait(self, unit: Unit) -> None:
        """Wait until a unit has its new values."""
        if self._engine is not None:
            self._engine.wait(self._at[unit])

    def values(self, unit: Unit) -> Tensor:
        """My shard of a unit, with its new values; on the host where they rest there."""
        return unit.shard if self._engine is None else self._engine.values(self._at[unit])

    def finish(self) -> None:
        """Wait until all units have their new values; a step that an error of the disk broke off is resumed."""
        if self._engine is not None:
            self._engine.retry()
            self._engine.finish()

    def close(self) -> None:
        """End threads, give memory and disk back."""
        engine = self._engine or self._host_shards
        if engine is not None:
            engine.close()
        if self._disk is not None:
            self._disk.close()
        self._engine = self._host_shards = self._disk = None

    @property
    def kept_energy(self) -> list[float]:
        """See `ZeroReplica.kept_energy`."""
        return [*self._engine.shares] if isinstance(self._engine, Deferred) else []

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

    def state(self, unit: Unit) -> Shard:
        """The state of my shard of a unit, to be read and set; all steps are done."""
        return self.engine.shard(self._at[unit])

    def piece(self, unit: Unit, slot: int, name: str = "master") -> Piece:
        """One parameter's elements of a line of state, as a checkpoint saves them; read when they are asked for."""
        self.engine.retry()

        def read(part: Part) -> Any:
            return lambda a, b: self.state(unit).read(name, part.at + a - part.start, part.at + b - part.start)

        spans = [(p.start, p.start + p.length, read(p)) for p in unit.parts if p.slot == slot]
        on_disk = any(block.home == "disk" for block in self.state(unit).blocks)
        freeze = partial(self._freeze, unit, slot, name) if on_disk else None
        return Piece(unit.shapes[slot], unit.master_dtype, spans, freeze=freeze)

    def _freeze(self, unit: Unit, slot: int, name: str, kept: dict[Any, Any]) -> Piece | None:
        """The same elements, read from disk as they are now whenever they are asked for; see `Piece.freeze`."""
        shard = self.state(unit)
        stepper = self.engine.stepper
        if any(block.on_device for block in shard.blocks):
            return None
        if stepper not in kept:
            kept[stepper] = stepper.freeze()
        if (frozen := kept[stepper]) is None:
            return None
        chunks = {block.index: frozen.freeze(block) for block in shard.blocks}

        def read(part: Part) -> Any:
            return lambda a, b: shard.read(name, part.at + a - part.start, part.at + b - part.start, chunks)

        spans = [(p.start, p.start + p.length, read(p)) for p in unit.parts if p.slot == slot]
        return Piece(unit.shapes[slot], unit.master_dtype, spans, stays=True)

    def state_pieces(self) -> dict[int, dict[str, Any]]:
        """The optimizer's state by the parameter's number, as far as this rank has it."""
        found: dict[int, dict[str, Any]] = {}
        for unit, _, part, lines, scalars in self._find_stepped():
            number = self._positions[unit.names[part.slot]].number
            found[number] = {**{name: self.piece(unit, part.slot, name) for name in lines}, **scalars}
        return dict(sorted(found.items()))

    def states(self) -> dict[tuple[Unit, int], dict[str, Any]]:
        """The same in memory: by unit and place in `unit.parts`."""
        return {
            (unit, i): {
                **{name: self.state(unit).read(name, part.at, part.at + part.length) for name in lines},
                **scalars,
            }
            for unit, i, part, lines, scalars in self._find_stepped()
        }

    def _find_stepped(self) -> Iterator[tuple[Unit, int, Part, list[str], dict[str, Any]]]:
        """The parts that have been stepped, with the names of their lines and copies of their scalars.

        Copies: an optimizer counts in place, for each parameter by itself.
        """
        for unit in self.units:
            state = self.state(unit)
            lines = [name for name in state.names() if name != "master"]
            for i, part in enumerate(unit.parts):
                scalars = state.scalars(part.at)
                if scalars is not None:
                    own = {key: value.clone() if isinstance(value, Tensor) else value for key, value in scalars.items()}
                    yield unit, i, part, lines, own

    def set_master(self, unit: Unit, values: Tensor) -> None:
        """Set the master values of this rank's shard."""
        for part in unit.parts:
            stop = part.at + part.length
            mine = values[part.at : stop].detach().to("cpu", unit.master_dtype)
            self.state(unit).load({"master": mine}, start=part.at, stop=stop)

    def load_values(self, unit: Unit, part: Part, stored: Stored) -> None:
        """Set the master values of a part from a checkpoint."""
        values = read_part(stored, part, unit.master_dtype)
        self.state(unit).load({"master": values}, start=part.at, stop=part.at + part.length)

    def load_states(self, saved: Mapping[int, Mapping[str, Any]]) -> None:
        """Set the optimizer's state, by the parameter's number; what is missing has not been stepped."""
        for unit in self.units:
            state = self.state(unit)
            names = state.names()
            for part in unit.parts:
                span = {"start": part.at, "stop": part.at + part.length}
                if given := saved.get(self._positions[unit.names[part.slot]].number):
                    state.load({key: _read(x, unit, part, line=key in names) for key, x in given.items()}, **span)
                else:
                    state.reset(**span)


def _read(value: Any, unit: Unit, part: Part, *, line: bool) -> Any:
    """Read a saved value: of a line, the elements of a part."""
    if not isinstance(value, (Stored, Tensor)):
        return value
    return read_part(value, part, unit.master_dtype) if line else as_stored(value).full()


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
        groups = [self._positions[unit.names[part.slot]].group for part in unit.parts]
        return [Run(p.at, p.at + p.length, group) for p, group in zip(unit.parts, groups, strict=True)]

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
        if self._strategy.step_ahead:
            needed *= 2 - self._staged_share()
        free = available_bytes() + waiting_bytes
        if self._strategy.host_memory is not None:
            free = min(free, parse_size(self._strategy.host_memory))
        if needed > free:
            spill = min(1.0, round(1 - 0.8 * free / max(1, sum(sizes)) + 0.005, 2))
            twice, once = ("doubled ", "step_ahead=False, ") if self._strategy.step_ahead else ("", "")
            raise ValueError(
                f"the optimizer's {twice}state of {show_size(needed)} does not fit into the {show_size(free)} of host "
                f"memory that this worker has: use {once}more workers, moments='bf16', or optimizer_on='disk', "
                f"spill={spill}"
            )

    def _staged_share(self) -> float:
        """The share of the state on the host that passes through the device, which steps it."""
        return staged_share(max(1, torch.get_num_threads() - 1)) if self._device.type == "cuda" else 0.0

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
            share=self._staged_share(),
            state_bytes=math.ceil(state),
            gradient_bytes=first.dtype.itemsize if s.accumulate == 1 else first.master_dtype.itemsize,
            delayed=s.delayed_update,
            buffers=STAGING_BUFFERS,
        )
