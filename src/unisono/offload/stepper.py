"""The optimizer step on the host: blocks of master values and their state, in memory or on disk, chunk by chunk.

ZeRO-Offload (Ren et al., 2021, arXiv:2101.06840) and ZeRO-Infinity (Rajbhandari et al., 2021, arXiv:2104.07857). A
block is walked in cells that fit in the cache: the gradient is cast, the optimizer steps, the new values are cast.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from unisono.offload import homes
from unisono.offload.cells import Engine, Moments, Running, Task
from unisono.offload.disk import Disk
from unisono.offload.homes import DiskHome, Home, MemoryHome, Parts
from unisono.offload.optimizers import Kept, Rule, Settings, rule_for, settings_of
from unisono.offload.segments import Batch, Run, Segments

__all__ = ["Block", "Run", "StepSettings", "Stepper", "disk_bytes"]


@dataclass
class Block:
    """One line of values to be stepped, with the runs of it that belong to the optimizer's groups.

    `master` is a 1-D tensor on the host, stepped in place; on disk it is taken over and becomes None. A block on disk
    may also begin without values (`master=None, length=...`): they are zero until `Stepper.load` fills them.
    """

    master: Tensor | None
    runs: Sequence[Run]
    home: Literal["cpu", "disk"] = "cpu"
    length: int = 0
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.home not in ("cpu", "disk"):
            raise ValueError(f'got home={self.home!r}: expected "cpu" or "disk"')
        if self.master is None:
            if self.home == "cpu":
                raise ValueError("a block in memory needs its master line: give a 1-D tensor on the CPU")
        else:
            if self.master.dim() != 1 or self.master.device.type != "cpu" or not self.master.is_contiguous():
                raise ValueError(
                    f"got a master of shape {tuple(self.master.shape)} on {self.master.device}: expected a contiguous "
                    f"1-D tensor on the CPU"
                )
            self.length, self.dtype = self.master.numel(), self.master.dtype
        if not self.dtype.is_floating_point:
            raise ValueError(f"got a block of {self.dtype}: expected floating point numbers")


PART_ELEMENTS = 4 << 20  # of a block on disk that are in memory together: 48 MB for Adam


class StepSettings(NamedTuple):
    """The settings of all param groups for one step, what each keeps under them, and the step's number."""

    groups: list[Settings]
    kept: list[Kept]
    step: int


class _Held(NamedTuple):
    """A block as the stepper keeps it."""

    segments: Segments
    home: Home
    length: int
    dtype: torch.dtype
    names: tuple[str, ...]  # of its state lines


class Stepper:
    """Steps the optimizer over blocks, one at a time, in place.

    `moments=torch.bfloat16` keeps the state lines in 16 bits, rounded at random in proportion (`seed`), and computes in
    the precision of the block. `engine`: "threads" for threads of our own, "omp" for those of each torch call.

    >>> values = torch.zeros(8)
    >>> optimizer = torch.optim.SGD([values], lr=0.5)
    >>> stepper = Stepper(optimizer, [Block(values, [Run(0, 8, 0)])])
    >>> out = torch.empty(8, dtype=torch.bfloat16)
    >>> _ = stepper.begin()
    >>> stepper.step(0, torch.ones(8, dtype=torch.bfloat16), out)
    >>> out.tolist()[:2], values.tolist()[:2]
    ([-0.5, -0.5], [-0.5, -0.5])
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        blocks: Iterable[Block] = (),
        *,
        moments: torch.dtype = torch.float32,
        disk: Disk | None = None,
        threads: int | None = None,
        engine: Literal["threads", "omp"] = "threads",
        part_elements: int = PART_ELEMENTS,
        seed: int = 0,
    ) -> None:
        if moments not in (torch.float32, torch.bfloat16):
            raise ValueError(f"got moments={moments}: expected torch.float32 or torch.bfloat16")
        self.optimizer = optimizer
        self.steps = 0  # calls of begin() so far; part of the state, as the rounding of 16-bit moments depends on it
        self._rule: Rule = rule_for(optimizer)
        self._moments = Moments(moments, seed)
        self._engine = Engine(engine, threads)
        self._disk, self._part_elements = disk, part_elements
        self._parts: Parts | None = None
        self._settings: StepSettings | None = None
        self._half: dict[int, int] = {}  # blocks whose step an error broke off, with the next part to step
        self._held: list[_Held] = []
        self._lock = threading.RLock()
        for block in blocks:
            self.add(block)

    def add(self, block: Block) -> int:
        """Take one more block; returns its index. A block on disk is written there, and its `master` let go."""
        segments = Segments(block.runs, block.length, len(self.optimizer.param_groups))
        first = _first_values(self._rule, self.optimizer, segments)
        dtypes = self._moments.dtypes(list(first), block.dtype)
        home: Home
        if block.home == "cpu":
            assert block.master is not None
            lines = {name: torch.full((block.length,), value, dtype=dtypes[name]) for name, value in first.items()}
            home = MemoryHome({"master": block.master.detach(), **lines})
        else:
            if self._disk is None:
                raise ValueError('a block has home="disk" but no disk: Stepper(..., disk=Disk(folder, nbytes))')
            if self._parts is None:
                self._parts = Parts(self._disk)
            home = DiskHome(self._parts, {"master": block.dtype, **dtypes}, block.length, self._part_elements, first)
            if block.master is not None:
                home.write("master", 0, block.master.detach())
                block.master = None
        self._held.append(_Held(segments, home, block.length, block.dtype, tuple(first)))
        return len(self._held) - 1

    def begin(self) -> StepSettings:
        """Begin a step: the groups' settings as they are now hold for it, whatever a scheduler changes meanwhile."""
        groups = [settings_of(group) for group in self.optimizer.param_groups]
        self.steps += 1
        self._settings = settings = StepSettings(groups, [self._rule.kept(group) for group in groups], self.steps)
        return settings

    def step(
        self,
        index: int,
        gradient: Tensor,
        out: Tensor | None = None,
        *,
        scale: float = 1.0,
        absent: Iterable[tuple[int, int]] = (),
        settings: StepSettings | None = None,
    ) -> None:
        """Step one block with `scale * gradient`; `out` receives the new values in its own dtype.

        `absent` are ranges of elements without a gradient: they and their state stay as they are. `settings` is what
        `begin` returned for this step, the latest by default. Padding between the runs is never stepped.
        If the disk fails, `DiskError` is raised; after a `flush` that succeeds, the same call goes on where it ended.
        """
        self.start(index, gradient, out, scale=scale, absent=absent, settings=settings)()

    def start(
        self,
        index: int,
        gradient: Tensor,
        out: Tensor | None = None,
        *,
        scale: float = 1.0,
        absent: Iterable[tuple[int, int]] = (),
        settings: StepSettings | None = None,
    ) -> Callable[[], None]:
        """Begin what `step` does; call what is returned to wait for its end, before the block is used again.

        A block in memory is stepped in the background: another may be begun meanwhile. One on disk is done at once.
        """
        with self._lock:
            settings = settings or self._settings
            if settings is None:
                raise RuntimeError("call begin() before the first step: it reads the optimizer's settings")
            held = self._held[index]
            _check_line("gradient", gradient, held.length)
            if out is not None:
                _check_line("out", out, held.length)
            batches = held.segments.batches(absent, self._rule)
            self._check_kept(held, settings)
            held.home.check()
            places = {k: self._moments.place(settings.step, index, i) for i, k in enumerate(held.names)}

            def begun(part: int) -> Running:
                start, stop = held.home.span(part)
                cells = held.segments.cells(batches, start, stop, self._engine.cell(stop - start, self._rule))
                mine, into = gradient[start:stop], None if out is None else out[start:stop]
                common = (self._rule, self._moments, settings.groups, settings.kept, batches)
                task = Task(*common, mine, into, float(scale), places, held.home.open(part), start)
                return self._engine.start(task, cells)

            if isinstance(held.home, MemoryHome):
                return functools.partial(self._finish, held, batches, begun(0))
            for part in range(self._half.get(index, 0), held.home.parts):
                begun(part).wait()
                self._half[index] = part + 1
                held.home.release(part)
            self._half.pop(index, None)
            held.segments.advance(batches)
            return lambda: None

    def _finish(self, held: _Held, batches: Sequence[Batch], running: Running) -> None:
        running.wait()
        with self._lock:
            held.segments.advance(batches)

    def prefetch(self, index: int) -> None:
        """Begin to read a block from disk, as far as there are buffers for it."""
        with self._lock:
            self._held[index].home.prefetch()

    def flush(self) -> None:
        """Wait until everything is on disk; writes that failed are tried again. Raises `DiskError` if that fails."""
        with self._lock:
            if self._parts is not None:
                self._parts.flush()

    def close(self) -> None:
        """End the threads. The disk stays open: it is its owner's."""
        self._engine.close()

    @property
    def buffer_bytes(self) -> int:
        """The memory that blocks on disk pass through."""
        return 0 if self._parts is None else self._parts.buffer_bytes

    def names(self, index: int | None = None) -> list[str]:
        """The lines of a block, or of any: "master", then the state lines such as "exp_avg"."""
        held = self._held if index is None else [self._held[index]]
        return ["master", *dict.fromkeys(name for one in held for name in one.names)]

    def state(self, index: int, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """A copy of elements [start, stop) of one line of a block, in the precision of its master values."""
        with self._lock:
            held = self._held[index]
            stop = held.length if stop is None else stop
            _check_range(held, start, stop)
            if name not in self.names(index):
                raise ValueError(f"block {index} has no line {name!r}: it has {self.names(index)}")
            return held.home.read(name, start, stop).to(held.dtype)

    def scalars(self, index: int, at: int | None = None) -> dict[str, Any] | None:
        """What the optimizer keeps once for the parameter that holds element `at` (the block's first by default).

        Such as {"step": tensor(3.)}; None if that parameter has not been stepped yet, so that it has no state.
        """
        with self._lock:
            segments = self._held[index].segments
            if at is None:
                if not segments.runs:
                    return None
                at = segments.runs[0].start
            found = segments.scalars(at)
            return None if found is None else dict(found)

    def load(self, index: int, values: Mapping[str, Any], *, start: int = 0, stop: int | None = None) -> None:
        """Set lines (tensors of stop - start elements) and scalars (single values) of elements [start, stop).

        Lines may come in several calls. Parameters count as stepped once their scalars have been given, or, where the
        optimizer keeps none (SGD), one of their state lines.
        """
        with self._lock:
            held = self._held[index]
            stop = held.length if stop is None else stop
            _check_range(held, start, stop)
            lines = {name: value for name, value in values.items() if name in self.names(index)}
            for name, value in lines.items():
                if value.numel() != stop - start:
                    raise ValueError(f"got {value.numel()} elements of {name!r} for elements {start} to {stop}")
            scalars = {name: value for name, value in values.items() if name not in lines}
            known = self._scalar_names(held, start, stop)
            if scalars and set(scalars) != known:
                raise ValueError(
                    f"got the state {sorted(scalars)}: expected lines {self.names(index)} and {sorted(known)}"
                )
            for name, value in lines.items():
                held.home.write(name, start, value.detach().flatten())
            if start < stop and (scalars or (not known and set(lines) - {"master"})):
                held.segments.mark(start, stop, self._rule.scalars(scalars))

    def reset(self, index: int, *, start: int = 0, stop: int | None = None) -> None:
        """Forget the optimizer's state of elements [start, stop): their next step is their first."""
        with self._lock:
            held = self._held[index]
            stop = held.length if stop is None else stop
            _check_range(held, start, stop)
            held.segments.mark(start, stop, None)

    def _scalar_names(self, held: _Held, start: int, stop: int) -> set[str]:
        groups = [self.optimizer.param_groups[group] for group in held.segments.groups(start, stop)]
        return {name for group in groups for name in self._rule.kept(settings_of(group)).scalars}

    def _check_kept(self, held: _Held, settings: StepSettings) -> None:
        """Refuse settings that need state which the block has no lines for."""
        for group in held.segments.groups(0, held.length):
            missing = set(settings.kept[group].lines) - set(held.names)
            if missing:
                raise ValueError(
                    f"group {group} of {type(self.optimizer).__name__} now needs {sorted(missing)}, which it did not "
                    f"as this run began: set amsgrad, momentum and the like before training"
                )


def disk_bytes(
    optimizer: torch.optim.Optimizer,
    blocks: Iterable[Block],
    *,
    moments: torch.dtype = torch.float32,
    part_elements: int = PART_ELEMENTS,
) -> int:
    """The size of the `Disk` that a Stepper needs for those of the blocks whose home is "disk".

    >>> optimizer = torch.optim.AdamW([torch.zeros(1)])
    >>> disk_bytes(optimizer, [Block(None, [Run(0, 1 << 20, 0)], "disk", length=1 << 20)])
    12582912
    """
    rule, keeping, total = rule_for(optimizer), Moments(moments, 0), 0
    for block in blocks:
        if block.home == "disk":
            segments = Segments(block.runs, block.length, len(optimizer.param_groups))
            dtypes = keeping.dtypes(list(_first_values(rule, optimizer, segments)), block.dtype)
            total += homes.disk_bytes({"master": block.dtype, **dtypes}, block.length, part_elements)
    return total


def _first_values(rule: Rule, optimizer: torch.optim.Optimizer, segments: Segments) -> dict[str, float]:
    """The state lines of a block, with the value they begin with."""
    first: dict[str, float] = {}
    for group in sorted({run.group for run in segments.runs}):
        first |= rule.kept(settings_of(optimizer.param_groups[group])).lines
    return first


def _check_line(what: str, line: Tensor, length: int) -> None:
    if line.dim() != 1 or line.numel() != length or line.device.type != "cpu" or not line.dtype.is_floating_point:
        raise ValueError(
            f"got a {what} of shape {tuple(line.shape)}, {line.dtype}, on {line.device}: expected a 1-D floating point "
            f"tensor of {length} elements on the CPU"
        )


def _check_range(held: _Held, start: int, stop: int) -> None:
    if not 0 <= start <= stop <= held.length:
        raise ValueError(f"got elements {start} to {stop}: the block has {held.length}")
