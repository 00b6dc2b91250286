"""The optimizer step beside the computation: gradients leave as they come, each unit's new values are waited for alone.

ZeRO-Offload (Ren et al., 2021, arXiv:2101.06840). In one step:

  offer   the gradient of a unit goes to pinned host memory, on a queue of its own, while backward goes on
  step    the update begins, in forward order: the CPU steps its parts in a background thread and their new values go
          back on another queue, while other parts pass through the device (see `device.py`); this returns at once
  wait    the next forward waits for the units one by one, as it comes to them

With a delayed update (the paper's one-step delay) a step's gradients are applied while the next step computes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from unisono.background import SerialQueue
from unisono.offload.device import SLOTS, DeviceLanes, Ranges, Scale
from unisono.offload.disk import Disk
from unisono.offload.lines import Access, HostPart, Line, Unit, master_dtype
from unisono.offload.plan import PART, clip, clip_ranges, cut, gaps, staged_share
from unisono.offload.segments import Run
from unisono.offload.stepper import Block, Stepper, StepSettings
from unisono.offload.streams import Immediate, Mark, Slab, Streams, copied, streams_of

_CLOSE_S = 60.0
_AT_ONCE = 2  # parts that the CPU works on: threads that are done with one go on with the next

__all__ = ["Line", "Pipeline", "Run"]


@dataclass
class _Update:
    """One step under way."""

    settings: StepSettings
    side: int
    delayed: bool
    scale: Scale
    absent: Mapping[int, Ranges]
    arrived: dict[int, Mark]
    start: Mark
    scale_read: Mark
    marks: dict[int, list[Mark]]
    ready: dict[int, threading.Event]
    at: int = 0  # the next of the CPU's parts
    ended: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None


class Pipeline:
    """Steps the optimizer over lines whose state is on the host, on disk or, for some, on the device.

    `resident`: units whose state is on the device. `gpu_lane`: whether the GPU helps to step what is on the host (a
    number: its share of it). The same settings step every element in the same place, so a resumed run repeats itself.
    `gradients`: the dtype in which gradients are kept until they are used, that of `compute` by default.
    `lines`: those of a list lose their `master` as it is taken over, so that both need not be in memory at once.
    `delayed`: `step` may delay. An error of the background thread is raised by the next call of any kind.

    >>> compute = torch.zeros(4, dtype=torch.bfloat16)
    >>> optimizer = torch.optim.SGD([torch.zeros(4)], lr=0.5)
    >>> pipeline = Pipeline(optimizer, [Line(compute, [Run(0, 4, 0)])], device=torch.device("cpu"))
    >>> _ = pipeline.offer(0, torch.ones(4, dtype=torch.bfloat16))
    >>> pipeline.step(scale=2.0)
    >>> pipeline.wait(0)
    >>> compute.tolist()
    [-1.0, -1.0, -1.0, -1.0]
    >>> pipeline.close()
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        lines: Sequence[Line],
        *,
        device: torch.device,
        moments: torch.dtype = torch.float32,
        gradients: torch.dtype | None = None,
        disk: Disk | None = None,
        delayed: bool = False,
        resident: AbstractSet[int] = frozenset(),
        gpu_lane: bool | float = True,
        threads: int | None = None,
        engine: Literal["threads", "omp"] = "threads",
        part: int = PART,
        slots: int = SLOTS,
        streams: Streams | None = None,
    ) -> None:
        self.streams = streams or streams_of(device)
        self.optimizer, self.delayed = optimizer, delayed
        self._direct = isinstance(self.streams, Immediate)  # new values need no copy of their own
        self._down, self._up = self.streams.queue(), self.streams.queue()
        cuda = device.type == "cuda"
        threads = threads or max(1, torch.get_num_threads() - cuda)  # one core launches the GPU's kernels
        share = gpu_lane if not isinstance(gpu_lane, bool) else staged_share(threads) if gpu_lane and cuda else 0.0
        if not 0 <= share <= 1:
            raise ValueError(f"gpu_lane is True, False or a share from 0 to 1, got {gpu_lane!r}")
        disks = {u for u, line in enumerate(lines) if line.home == "disk"}
        parts = cut([line.compute.numel() for line in lines], share=share, resident=resident, disk=disks, part=part)
        self.parts = parts
        self._stepper = Stepper(optimizer, moments=moments, disk=disk, threads=threads, engine=engine)
        self._device = self._on_device(optimizer, lines, moments, slots)
        self._units = [Unit(line.compute, 0) for line in lines]
        self._host: list[HostPart] = []
        self._take_parts(lines)
        self._take_memory(gradients)
        self._square = torch.zeros((), dtype=torch.float64, device=device)
        self._arrived: dict[int, Mark] = {}
        self._count = 0
        self._update: _Update | None = None
        self._lane = SerialQueue("unisono-offload")
        self._access = Access(self._units, self._stepper, self._device)
        self.streams.now().wait()  # what the current stream has filled so far is used in other queues

    # Making it --------------------------------------------------------------------------------------------

    def _on_device(
        self, optimizer: torch.optim.Optimizer, lines: Sequence[Line], moments: torch.dtype, slots: int
    ) -> DeviceLanes:
        chosen = [
            (part, clip(lines[part.unit].runs, part.start, part.stop), master_dtype(lines[part.unit]))
            for part in self.parts
            if part.lane in ("staged", "resident")
        ]
        return DeviceLanes(optimizer, chosen, moments=moments, streams=self.streams, slots=slots)

    def _take_parts(self, lines: Sequence[Line]) -> None:
        staged, resident = iter(self._device.staged), iter(self._device.resident)
        for part in self.parts:
            unit, line = self._units[part.unit], lines[part.unit]
            values = (line.compute if line.master is None else line.master)[part.start : part.stop].detach()
            if part.lane == "staged":
                unit.staged.append(next(staged))
                unit.staged[-1].home_lines["master"].copy_(values)
            elif part.lane == "resident":
                unit.resident.append(next(resident))
                unit.resident[-1].home_lines["master"].copy_(values)
            else:
                home: Literal["cpu", "disk"] = "cpu" if part.lane == "host" else "disk"
                runs = clip(line.runs, part.start, part.stop)
                dtype, cpu = master_dtype(line), torch.device("cpu")
                master = copied(values, cpu, dtype) if home == "cpu" else values.to(cpu, dtype).contiguous()
                index = self._stepper.add(Block(master, runs, home))
                self._host.append(HostPart(index, part, gaps(runs, part.length)))
                unit.host.append(self._host[-1])
                unit.border = part.stop
            del values
            if part.stop == line.compute.numel() and isinstance(lines, list):
                lines[part.unit] = line._replace(master=None)

    def _take_memory(self, gradients: torch.dtype | None) -> None:
        """All host memory that the device copies, in one piece, at the start."""
        sides = 2 if self.delayed else 1
        size = Slab.room(1, torch.float64)
        dtypes = [gradients or unit.compute.dtype for unit in self._units]
        own = [dtype != unit.compute.dtype for unit, dtype in zip(self._units, dtypes, strict=True)]
        for unit, dtype, apart in zip(self._units, dtypes, own, strict=True):
            size += sides * Slab.room(unit.border, dtype)
            size += sides * Slab.room(unit.border, unit.compute.dtype) if apart else 0
        self._slab = Slab(size, pinned=self.streams.device.type == "cuda")
        self._scale = self._slab.line(1, torch.float64)
        for unit, dtype, apart in zip(self._units, dtypes, own, strict=True):
            n, device = unit.border, unit.compute.device
            unit.sent = [self._slab.line(n, dtype) for _ in range(sides)]
            unit.values = [self._slab.line(n, unit.compute.dtype) for _ in range(sides)] if apart else unit.sent
            unit.kept = [torch.zeros(unit.compute.numel() - n, dtype=dtype, device=device) for _ in range(sides)]
            unit.shadow = torch.empty_like(unit.compute) if self.delayed else None

    @property
    def pinned_bytes(self) -> int:
        """Bytes of host memory that are locked for the device: gradients, new values, and state that passes it."""
        return self._slab.nbytes + self._device.slab.nbytes

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory held, beside the lines that compute."""
        held = [t for unit in self._units for t in (*unit.kept, unit.shadow) if t is not None]
        return self._device.device_bytes + sum(t.numel() * t.element_size() for t in held)

    # Steps ------------------------------------------------------------------------------------------------

    def offer(self, u: int, gradient: Tensor, *, replace: bool = False) -> Mark:
        """Take the gradient of unit `u` for the next step, once; `replace`: instead of one that it may have.

        It is copied away: it may be freed at once, but hold the mark that is returned before writing into it.
        """
        unit, side = self._units[u], self._count % (2 if self.delayed else 1)
        if gradient.shape != unit.compute.shape:
            raise ValueError(
                f"unit {u} has {unit.compute.numel()} elements here, its gradient has the shape {tuple(gradient.shape)}"
            )
        if u in self._arrived and not replace:
            raise RuntimeError(f"unit {u} has a gradient already: call step() before it gets the next one")
        self.wait(u)  # its memory is free again
        if (former := self._arrived.pop(u, None)) is not None:
            former.wait()
        with torch.no_grad():
            wide = torch.float64 if gradient.dtype == torch.float64 else torch.float32
            self._square += torch.linalg.vector_norm(gradient, dtype=wide).double().square_()
            gradient = gradient.detach().to(unit.sent[side].dtype)
            unit.kept[side].copy_(gradient[unit.border :])
        mark = self.streams.now()
        if unit.border:
            self.streams.lend(gradient, self._down)
            sent = unit.sent[side]
            mark = self._down.run(lambda: sent.copy_(gradient[: unit.border], non_blocking=True), after=[mark])
        self._arrived[u] = mark
        return mark

    def squared_norm(self) -> Tensor:
        """The sum of squares of all gradients offered since the last step, on the device."""
        return self._square.clone()

    def step(
        self, scale: Scale = 1.0, absent: Mapping[int, Ranges] | None = None, *, delay: bool | None = None
    ) -> None:
        """Begin the update with `scale` times the gradients offered, and return.

        `absent`: ranges of elements without a gradient, by unit; they and their state stay as they are, as those of
        units that were not offered do. `delay`: the new values are taken over by the next `step` or by `finish`.
        """
        delay = self.delayed if delay is None else delay
        if delay and not self.delayed:
            raise ValueError("got delay=True: give the pipeline delayed=True, so that it has memory for new values")
        self._complete()
        scale = scale.detach() if isinstance(scale, Tensor) else float(scale)
        start = self.streams.now()
        update = _Update(
            settings=self._stepper.begin(),
            side=self._count % (2 if self.delayed else 1),
            delayed=delay,
            scale=scale,
            absent=absent or {},
            arrived=self._arrived,
            start=start,
            scale_read=self._read_scale(scale, start),
            marks={u: [] for u in self._arrived},
            ready={u: threading.Event() for u in self._arrived},
        )
        self._update, self._arrived = update, {}
        self._count += 1
        self._square.zero_()
        self._lane.submit(lambda: self._step_host(update))
        self._step_device(update)

    def _read_scale(self, scale: Scale, start: Mark) -> Mark:
        if not isinstance(scale, Tensor):
            self._scale.fill_(scale)
            return start
        wide = scale.reshape(1).double()
        self.streams.lend(wide, self._down)
        return self._down.run(lambda: self._scale.copy_(wide, non_blocking=True), after=[self.streams.now()])

    def _step_device(self, update: _Update) -> None:
        lanes = self._device
        for u in sorted(update.arrived):
            unit, absent = self._units[u], update.absent.get(u, ())
            target, kept = self._target(unit, update), unit.kept[update.side]
            for stepped in unit.staged:
                part = stepped.part
                at = slice(part.start - unit.border, part.stop - unit.border)
                mark = lanes.step_staged(
                    *(stepped, target[part.start : part.stop], kept[at]),
                    scale=update.scale,
                    absent=clip_ranges(absent, part.start, part.stop),
                    now=update.settings,
                    after=update.start,
                )
                update.marks[u].append(mark)
            for stepped in unit.resident:
                part = stepped.part
                at = slice(part.start - unit.border, part.stop - unit.border)
                lanes.step_resident(
                    *(stepped, target[part.start : part.stop], kept[at]),
                    scale=update.scale,
                    absent=clip_ranges(absent, part.start, part.stop),
                    now=update.settings,
                )
        lanes.run_ahead()

    def _target(self, unit: Unit, update: _Update) -> Tensor:
        if not update.delayed:
            return unit.compute.detach()
        assert unit.shadow is not None
        return unit.shadow

    def _step_host(self, update: _Update) -> None:
        """The background thread: the CPU's parts in order; a failed update goes on at `update.at`."""
        begun: deque[tuple[HostPart, Callable[[], None]]] = deque()
        try:
            update.scale_read.wait()
            scale = float(self._scale)
            mine = [one for one in self._host if one.part.unit in update.arrived]
            for number in range(update.at, len(mine)):
                one = mine[number]
                if number + 1 < len(mine):
                    self._stepper.prefetch(mine[number + 1].index)
                update.arrived[one.part.unit].wait()
                begun.append((one, self._start_part(one, update, scale)))
                if len(begun) == _AT_ONCE:
                    self._end_part(*begun.popleft(), update)
            self._settle(begun, update)
            self._stepper.flush()
        except BaseException as error:  # told by the next call
            update.error = error
            self._settle(begun, update)
        finally:
            update.ended.set()
            for event in update.ready.values():  # also of units that the CPU has no part in
                event.set()

    def _start_part(self, one: HostPart, update: _Update, scale: float) -> Callable[[], None]:
        part = one.part
        unit, at = self._units[part.unit], slice(part.start, part.stop)
        out = self._target(unit, update)[at] if self._direct else unit.values[update.side][at]
        absent = clip_ranges(update.absent.get(part.unit, ()), part.start, part.stop)
        gradient = unit.sent[update.side][at]
        return self._stepper.start(one.index, gradient, out, scale=scale, absent=absent, settings=update.settings)

    def _end_part(self, one: HostPart, end: Callable[[], None], update: _Update) -> None:
        """Wait for a part and send its new values."""
        end()
        part = one.part
        unit, at = self._units[part.unit], slice(part.start, part.stop)
        target = self._target(unit, update)[at]
        out = target if self._direct else unit.values[update.side][at]
        for low, high in one.padding:
            out[low:high].zero_()
        if not self._direct:
            mark = self._up.run(lambda: target.copy_(out, non_blocking=True), after=[update.start])
            update.marks[part.unit].append(mark)
        update.at += 1
        if one is unit.host[-1]:
            update.ready[part.unit].set()

    def _settle(self, begun: deque[tuple[HostPart, Callable[[], None]]], update: _Update) -> None:
        while begun:
            self._end_part(*begun.popleft(), update)

    # Waiting ----------------------------------------------------------------------------------------------

    def wait(self, u: int) -> None:
        """Let the current stream wait until unit `u` has its new values; the thread waits as long as the CPU steps."""
        update = self._update
        if update is None:
            return
        if not update.delayed and u in update.ready:
            if self._units[u].host:
                update.ready[u].wait()
            self._check(update)
            for mark in update.marks[u]:
                mark.hold()
        elif update.ended.is_set():
            self._check(update)

    def _complete(self) -> None:
        """Let the current stream wait for the whole update, and take new values over that were delayed."""
        update = self._update
        if update is None:
            return
        update.ended.wait()
        self._check(update)
        for u, marks in update.marks.items():
            for mark in marks:
                mark.hold()
            if update.delayed:
                unit = self._units[u]
                assert unit.shadow is not None
                unit.compute.detach().copy_(unit.shadow)
        self._update = None

    def finish(self) -> None:
        """Block until everything is done and every value is the latest; raises what went wrong."""
        self._complete()
        self._device.wait()
        self._stepper.flush()
        self.streams.now().wait()

    def retry(self) -> None:
        """After an error of the disk: go on with the update where it broke off. Nothing was lost."""
        update = self._update
        if update is None or not update.ended.wait(0) or update.error is None:
            return
        self._stepper.flush()
        update.error = None
        update.ended.clear()
        self._lane.submit(lambda: self._step_host(update))
        self.finish()

    def _check(self, update: _Update) -> None:
        if update.error is not None:
            raise update.error

    def close(self) -> None:
        """Wait for what is under way, end the threads and give the memory back."""
        marks = list(self._arrived.values())
        if self._update is not None:
            self._update.ended.wait(_CLOSE_S)
            marks += [mark for some in self._update.marks.values() for mark in some]
        for mark in marks:  # copies between this memory and the device
            mark.wait()
        self._lane.close()
        self._stepper.close()
        self._device.close()
        self.streams.now().wait()
        self._slab.close()

    # State ------------------------------------------------------------------------------------------------

    def names(self, u: int) -> list[str]:
        """The lines of state of unit `u`: "master", then those of the optimizer, such as "exp_avg"."""
        return self._access.names(u)

    def state(self, u: int, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """A copy on the host of elements [start, stop) of a line, in the precision of the master."""
        self.finish()
        return self._access.read(u, name, start, stop)

    def scalars(self, u: int, at: int = 0) -> dict[str, Any] | None:
        """What the optimizer keeps once for the parameter that holds element `at`; None before its first step."""
        self.finish()
        return self._access.scalars(u, at)

    def load(self, u: int, values: Mapping[str, Any], *, start: int = 0, stop: int | None = None) -> None:
        """Set lines (tensors of stop - start elements) and scalars of elements [start, stop).

        Parameters count as stepped once their scalars have been given or, where the optimizer keeps none, a line of
        their state. New master values also go to the line that computes.
        """
        self.finish()
        self._access.write(u, values, start, stop)

    def reset(self, u: int, *, start: int = 0, stop: int | None = None) -> None:
        """Forget the optimizer's state of elements [start, stop): their next step is their first."""
        self.finish()
        self._access.reset(u, start, stop)

    @property
    def steps(self) -> int:
        """Steps so far; part of the state, as the rounding of 16-bit moments depends on it."""
        return self._stepper.steps

    @steps.setter
    def steps(self, count: int) -> None:
        self._stepper.steps = count
