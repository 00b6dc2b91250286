"""What is stepped off the device: shards of units, cut into blocks; and their state, as checkpoints read and set it.

Where an element belongs, from the outside in:

  Shard   what this rank has of a unit
  Block   the elements of a shard that are stepped in one place, where their state lives too
  Chunk   the elements of a block whose state is in memory together
  Run     the elements of a parameter: they belong to one group of the optimizer and have been stepped equally often
  Batch   in one step: runs that agree, so that one call of a kernel steps them

PyTorch counts steps per parameter, and a parameter without a gradient is skipped: so each run has its own scalars.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from unisono.background import Handle
from unisono.methods.buckets import FlatLayout
from unisono.methods.offload.disk import make_buffer
from unisono.methods.offload.optimizers import GroupStep, Rule, Scalars, Settings, read_settings

Home = Literal["cpu", "disk", "staged", "resident"]  # see `plan`


@dataclass
class Run:
    """Elements [start, stop) that belong to group `group` of the optimizer's param_groups.

    scalars: what the optimizer keeps once for a parameter, such as its count of steps; None before the first step.
    """

    start: int
    stop: int
    group: int
    scalars: Scalars | None = field(default=None, compare=False, repr=False)


@dataclass
class Batch:
    """Runs that one call can step, and that step of theirs."""

    step: GroupStep
    runs: list[Run] = field(default_factory=list)

    def spans(self) -> list[tuple[int, int]]:
        """The elements of the runs as ranges; adjoining runs are one range."""
        found: list[tuple[int, int]] = []
        for run in self.runs:
            if found and found[-1][1] == run.start:
                found[-1] = (found[-1][0], run.stop)
            else:
                found.append((run.start, run.stop))
        return found


IDLE = -1  # instead of the number of a batch: elements that have no gradient
Spans = list[int]  # start, stop, start, stop, ...
Cell = dict[int, Spans]  # by the number of the batch: elements that one thread steps together


class Runs:
    """The runs of one block, in order. A run is cut in two where only some of its elements have a gradient."""

    def __init__(self, runs: Sequence[Run], length: int, groups: int) -> None:
        self.given = _check_runs(runs, length, groups)
        self._runs = [Run(run.start, run.stop, run.group) for run in self.given]
        self._cells: dict[tuple[int, int, int], tuple[object, list[Cell]]] = {}

    @property
    def now(self) -> Sequence[Run]:
        """The runs as they are cut at present, with their scalars."""
        return self._runs

    def batches(self, absent: Iterable[tuple[int, int]], rule: Rule, groups: Sequence[Settings]) -> list[Batch]:
        """Group the runs outside the `absent` ranges: those that agree form a batch. `groups`: the settings of all."""
        holes = list(absent)
        for start, stop in holes:
            self._cut(start)
            self._cut(stop)
        found: dict[object, Batch] = {}
        keys: dict[int, object] = {}  # most runs share their scalars
        for run in self._runs:
            if any(start <= run.start and run.stop <= stop for start, stop in holes):
                continue
            if id(run.scalars) not in keys:
                keys[id(run.scalars)] = _key(run.scalars)
            key = (run.group, keys[id(run.scalars)])
            if key not in found:
                found[key] = Batch(GroupStep(rule, groups[run.group], run.scalars))
            found[key].runs.append(run)
        return list(found.values())

    def advance(self, batches: Iterable[Batch]) -> None:
        """Keep the scalars that a step has left, for its runs."""
        for batch in batches:
            for run in batch.runs:
                run.scalars = batch.step.after
        self._join()

    def cells(self, batches: Sequence[Batch], start: int, stop: int, size: int) -> list[Cell]:
        """Cut elements [start, stop) after every `size` of them; they are counted from `start`."""
        number = {id(run): i for i, batch in enumerate(batches) for run in batch.runs}
        shape = [(number.get(id(run), IDLE), run.start, run.stop) for run in self._runs]
        known, cells = self._cells.get((start, stop, size), (None, []))
        if known != shape:
            cells = _cut_cells(shape, start, stop, size)
            self._cells[start, stop, size] = (shape, cells)
        return cells

    def scalars(self, at: int) -> Scalars | None:
        """The scalars of the run that holds element `at`; None before its first step."""
        for run in self._runs:
            if run.start <= at < run.stop:
                return run.scalars
        known = [(run.start, run.stop, run.group) for run in self.given]
        raise ValueError(f"element {at} is padding: the runs of this block are {known}")

    def set_scalars(self, start: int, stop: int, scalars: Scalars | None) -> None:
        """Give all runs within [start, stop) these scalars."""
        self._cut(start)
        self._cut(stop)
        for run in self._runs:
            if start <= run.start and run.stop <= stop:
                run.scalars = scalars
        self._join()

    def groups(self, start: int, stop: int) -> set[int]:
        """The groups that have elements within [start, stop)."""
        return {run.group for run in self.given if run.start < stop and start < run.stop}

    def _join(self) -> None:
        """Put neighbours together that were cut and agree again: they step as they did before."""
        if len(self._runs) == len(self.given):
            return
        starts = {run.start for run in self.given}
        joined: list[Run] = []
        for run in self._runs:
            if run.start not in starts and _key(joined[-1].scalars) == _key(run.scalars):
                joined[-1].stop = run.stop
            else:
                joined.append(run)
        self._runs = joined

    def _cut(self, at: int) -> None:
        """Make `at` a border between runs."""
        for i, run in enumerate(self._runs):
            if run.start < at < run.stop:
                rest = Run(at, run.stop, run.group, run.scalars)
                run.stop = at
                self._runs.insert(i + 1, rest)
                return


def _check_runs(runs: Sequence[Run], length: int, groups: int) -> list[Run]:
    found = sorted(runs, key=lambda run: (run.start, run.stop, run.group))
    end = 0
    for run in found:
        if not end <= run.start <= run.stop <= length:
            raise ValueError(
                f"got runs {[(r.start, r.stop, r.group) for r in found]} for a block of {length} elements: expected "
                f"ranges within it that do not overlap"
            )
        if not 0 <= run.group < groups:
            raise ValueError(f"a run belongs to group {run.group}, but the optimizer has {groups} param groups")
        end = run.stop
    return [run for run in found if run.start < run.stop]


def _cut_cells(shape: list[tuple[int, int, int]], start: int, stop: int, size: int) -> list[Cell]:
    cells: dict[int, Cell] = {}
    for batch, first, last in shape:
        low, high = max(first, start), min(last, stop)
        while low < high:
            at = (low - start) // size
            end = min(high, start + (at + 1) * size)
            spans = cells.setdefault(at, {}).setdefault(batch, [])
            if spans and spans[-1] == low - start:
                spans[-1] = end - start
            else:
                spans += [low - start, end - start]
            low = end
    return list(cells.values())


def _key(scalars: Scalars | None) -> object:
    if scalars is None:
        return None
    return tuple((k, v.dtype, v.tolist()) if isinstance(v, Tensor) else (k, v) for k, v in sorted(scalars.items()))


# State ----------------------------------------------------------------------------------------------------------


class OptimizerState:
    """The master values and the optimizer's state of `length` elements: what a checkpoint reads and sets.

    State is in lines, with one number for each element ("master", "exp_avg"), and in scalars, which are kept once for a
    parameter ("step"). No step may be under way.
    """

    length: int

    def names(self) -> list[str]:
        """The lines: "master", then those of the optimizer, such as "exp_avg"."""
        raise NotImplementedError

    def _end(self, start: int, stop: int | None) -> int:
        """Where a range ends; refuses one that is not within the elements."""
        end = self.length if stop is None else stop
        if not 0 <= start <= end <= self.length:
            raise ValueError(f"got elements {start} to {end}: there are {self.length}")
        return end

    def _check_name(self, name: str) -> None:
        if name not in self.names():
            raise ValueError(f"there is no line {name!r}: there are {self.names()}")

    def _check_lines(self, values: Mapping[str, Any], start: int, stop: int) -> None:
        for name in self.names():
            if name in values and values[name].numel() != stop - start:
                raise ValueError(f"got {values[name].numel()} elements of {name!r} for elements {start} to {stop}")


class Chunk:
    """Elements [start, stop) of a block, whose lines are in memory together while they are stepped."""

    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop = start, stop

    def open(self) -> Mapping[str, Tensor]:
        """The lines, to be changed in place."""
        raise NotImplementedError

    def release(self) -> None:
        """Called when the lines have been changed: they may be written back."""

    def prefetch(self) -> None:
        """Begin to read the lines."""

    def read(self, name: str, low: int, high: int, into: Tensor) -> Handle[Tensor]:
        """Copy elements [low, high) of a line, counted from `start`."""
        raise NotImplementedError

    def write(self, name: str, low: int, values: Tensor) -> None:
        """Change elements of a line, from `low` on, counted from `start`."""
        raise NotImplementedError

    def freeze(self) -> Chunk:
        """Its lines as they are now, to be read while it is stepped; not for those on a device."""
        raise NotImplementedError


class MemoryChunk(Chunk):
    """All of a block whose lines are in memory; `twice`: with a second copy of them, to be stepped into."""

    def __init__(self, lines: dict[str, Tensor], *, twice: bool = False) -> None:
        super().__init__(0, lines["master"].numel())
        self._lines = lines
        self._others = {name: line.clone() for name, line in lines.items()} if twice else {}

    def open(self) -> Mapping[str, Tensor]:
        return self._lines

    def open_others(self) -> Mapping[str, Tensor]:
        """The second copy, which may be out of date."""
        return self._others

    def swap(self) -> None:
        """Let the second copy be the lines."""
        self._lines, self._others = self._others, self._lines

    def read(self, name: str, low: int, high: int, into: Tensor) -> Handle[Tensor]:
        return Handle.of(into.copy_(self._lines[name][low:high]))

    def write(self, name: str, low: int, values: Tensor) -> None:
        for lines in filter(None, (self._lines, self._others)):  # padding, which no step writes, is the same in both
            lines[name][low : low + values.numel()].copy_(values)

    def freeze(self) -> Chunk:
        return MemoryChunk({name: line.clone() for name, line in self._lines.items()})


@dataclass(eq=False)
class Block(OptimizerState):
    """Values to be stepped in one place, with the runs of them that belong to the optimizer's groups.

    `master` is a 1-D tensor on the host, stepped in place; elsewhere it is taken over and becomes None. A block that is
    not in memory may also begin without values (`master=None, length=...`): they are zero until `load` sets them.
    unit, start: which elements of which shard these are.
    """

    master: Tensor | None
    runs: Sequence[Run]
    home: Home = "cpu"
    length: int = 0
    dtype: torch.dtype = torch.float32
    unit: int = 0
    start: int = 0
    index: int = field(init=False)  # among the blocks that the same object steps
    version: int = field(init=False, default=0)  # how often the state has been set, other than by steps
    rule: Rule = field(init=False)
    steps: Runs = field(init=False)
    first: dict[str, float] = field(init=False)  # the optimizer's lines, and what they hold before the first step
    dtypes: dict[str, torch.dtype] = field(init=False)  # of all lines
    chunks: list[Chunk] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        if self.home not in ("cpu", "disk", "staged", "resident"):
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

    @property
    def stop(self) -> int:
        """Where the block's elements end in their shard."""
        return self.start + self.length

    @property
    def on_device(self) -> bool:
        """Whether the device steps it."""
        return self.home in ("staged", "resident")

    def prepare(self, index: int, rule: Rule, groups: Sequence[Mapping[str, Any]], moments: torch.dtype) -> None:
        """Find out which state a rule keeps for the block; the memory for it (`chunks`) comes next."""
        self.index, self.rule, self._groups = index, rule, groups
        self.steps = Runs(self.runs, self.length, len(groups))
        self.first = {}
        for group in sorted({run.group for run in self.steps.given}):
            self.first |= rule.find_state(read_settings(groups[group])).lines
        if moments != torch.float32 and self.dtype != torch.float32:
            raise ValueError(f"moments of {moments} need master values of torch.float32, got a block of {self.dtype}")
        narrow = self.dtype if moments == torch.float32 else moments
        self.dtypes = {"master": self.dtype, **dict.fromkeys(self.first, narrow)}

    def lay_out(self, count: int, align_bytes: int) -> FlatLayout:
        """Where `count` elements of every line lie in a piece of memory, counted in bytes."""
        lines = [torch.empty(count, dtype=dtype, device="meta") for dtype in self.dtypes.values()]
        return FlatLayout(lines, torch.uint8, align_bytes=align_bytes, contiguous=True)

    # State: see `Shard`

    def names(self) -> list[str]:
        return [*self.dtypes]

    def read(self, name: str, start: int = 0, stop: int | None = None, chunks: Sequence[Chunk] | None = None) -> Tensor:
        stop = self._end(start, stop)
        self._check_name(name)
        dtype = self.dtypes[name]
        if self.home == "disk":
            found = make_buffer((stop - start) * dtype.itemsize).view(dtype)  # direct I/O needs no copy there
        else:
            found = torch.empty(stop - start, dtype=dtype)
        spans = list(_overlaps(self.chunks if chunks is None else chunks, start, stop))
        reads = [c.read(name, low, high, found[c.start + low - start :][: high - low]) for c, low, high in spans]
        for handle in reads:
            handle.wait()
        return found.to(self.dtype)

    def scalars(self, at: int | None = None) -> dict[str, Any] | None:
        if at is None:
            if not self.steps.given:
                return None
            at = self.steps.given[0].start
        found = self.steps.scalars(at)
        return None if found is None else dict(found)

    def load(self, values: Mapping[str, Any], *, start: int = 0, stop: int | None = None) -> None:
        stop = self._end(start, stop)
        self._check_lines(values, start, stop)
        self.version += 1
        lines = {name: value for name, value in values.items() if name in self.dtypes}
        scalars = {name: value for name, value in values.items() if name not in lines}
        groups = [read_settings(self._groups[group]) for group in self.steps.groups(start, stop)]
        known = {name for group in groups for name in self.rule.find_state(group).scalars}
        if scalars and set(scalars) != known:
            raise ValueError(f"got the state {sorted(scalars)}: expected lines {self.names()} and {sorted(known)}")
        for name, value in lines.items():
            line = value.detach().flatten()
            for chunk, low, high in _overlaps(self.chunks, start, stop):
                chunk.write(name, low, line[chunk.start + low - start :][: high - low])
        if start < stop and (scalars or (not known and set(lines) - {"master"})):
            self.steps.set_scalars(start, stop, self.rule.read_scalars(scalars))

    def reset(self, *, start: int = 0, stop: int | None = None) -> None:
        self.version += 1
        self.steps.set_scalars(start, self._end(start, stop), None)


_P = TypeVar("_P", Chunk, Block)


def _overlaps(parts: Iterable[_P], start: int, stop: int) -> Iterator[tuple[_P, int, int]]:
    """The parts that have elements within [start, stop), and which of their own these are."""
    for part in parts:
        low, high = max(start, part.start), min(stop, part.stop)
        if low < high:
            yield part, low - part.start, high - part.start


@dataclass(eq=False)
class Shard(OptimizerState):
    """What this rank has of a unit.

    compute: 1-D, in the dtype that computes; the parameters are views of it, or are gathered from it.
    runs: which of its elements belong to which group of the optimizer; the rest is padding.
    master: the values in the optimizer's precision, taken over by whoever steps; None: those of `compute`.
    home: where the state lives that is not on the device.
    """

    compute: Tensor
    runs: Sequence[Run]
    master: Tensor | None = None
    home: Literal["cpu", "disk"] = "cpu"
    length: int = field(init=False)
    master_dtype: torch.dtype = field(init=False)
    blocks: list[Block] = field(init=False, default_factory=list)  # in the order of their elements

    def __post_init__(self) -> None:
        dtype = self.compute.dtype if self.master is None else self.master.dtype
        self.length = self.compute.numel()
        self.master_dtype = torch.float32 if self.master is None and dtype.itemsize < 4 else dtype

    def names(self) -> list[str]:
        return list(dict.fromkeys(["master", *(name for block in self.blocks for name in block.names())]))

    def read(
        self, name: str, start: int = 0, stop: int | None = None, frozen: Mapping[int, Sequence[Chunk]] | None = None
    ) -> Tensor:
        """A copy on the host of elements [start, stop) of a line, in the precision of the master values.

        frozen: chunks to be read instead of the blocks' own, by the blocks' indices.
        """
        stop = self._end(start, stop)
        self._check_name(name)
        frozen = frozen or {}
        overlaps = _overlaps(self.blocks, start, stop)
        found = [block.read(name, low, high, frozen.get(block.index)) for block, low, high in overlaps]
        return found[0] if len(found) == 1 else torch.cat(found) if found else torch.empty(0, dtype=torch.float32)

    def scalars(self, at: int | None = None) -> dict[str, Any] | None:
        """What the optimizer keeps once for the parameter that holds element `at` (the first element by default), such
        as {"step": tensor(3.)}; None if that parameter has not been stepped yet, so that it has no state."""
        at = 0 if at is None else at
        for block, low, _ in _overlaps(self.blocks, at, self._end(at, at + 1)):
            return block.scalars(low)
        return None

    def load(self, values: Mapping[str, Any], *, start: int = 0, stop: int | None = None) -> None:
        """Set lines (tensors of stop - start elements) and scalars (single values) of elements [start, stop); new
        master values also become those that compute.

        Lines may come in several calls. Parameters count as stepped once their scalars have been given or, if the
        optimizer keeps none (SGD), one of their state lines.
        """
        stop = self._end(start, stop)
        self._check_lines(values, start, stop)
        names = self.names()
        for block, low, high in _overlaps(self.blocks, start, stop):
            at = block.start + low - start
            mine = {k: v.flatten()[at : at + high - low] if k in names else v for k, v in values.items()}
            block.load(mine, start=low, stop=high)
        if "master" in values and self.compute.numel():
            self.compute.detach()[start:stop].copy_(values["master"].flatten())

    def reset(self, *, start: int = 0, stop: int | None = None) -> None:
        """Forget the optimizer's state of elements [start, stop): their next step is their first."""
        for block, low, high in _overlaps(self.blocks, start, self._end(start, stop)):
            block.reset(start=low, stop=high)
