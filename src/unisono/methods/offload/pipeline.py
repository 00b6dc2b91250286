"""The optimizer step beside the computation: gradients leave as they come, each unit's new values are waited for alone.

ZeRO-Offload (Ren et al., 2021, arXiv:2101.06840). In one step:

  offer   the gradient of a unit goes to pinned host memory, on a queue of its own, while backward goes on
  step    the update begins, in forward order: the CPU steps its blocks in a background thread and their new values go
          back on another queue, while other blocks pass through the device (see `device.py`); this returns at once
  wait    the next forward waits for the units one by one, as it comes to them

With a delayed update (the paper's one-step delay) a step's gradients are applied while the next step computes. With
steps ahead the CPU steps its blocks of a unit as their gradient arrives, and `step` takes that over (see `ahead.py`).

On a GPU a queue is a CUDA stream and a mark is an event; on the CPU work is done at once. What runs on them is the same
code, so its order can be tested without a GPU.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from unisono.background import SerialQueue
from unisono.methods.offload.ahead import Guess, StepsAhead, Work
from unisono.methods.offload.blocks import Block, Run, Shard
from unisono.methods.offload.device import (
    STAGING_BUFFERS,
    DeviceStepper,
    Ranges,
    Scale,
    Slab,
    copy_to,
)
from unisono.methods.offload.disk import Disk
from unisono.methods.offload.plan import BLOCK_ELEMENTS, clip, cut, find_gaps, staged_share
from unisono.methods.offload.stepper import Stepper, StepSettings

_CLOSE_S = 60.0
_AT_ONCE = 2  # blocks that the CPU works on: threads that are done with one go on with the next

__all__ = [
    "CudaMark",
    "CudaQueue",
    "CudaStreams",
    "Mark",
    "Pipeline",
    "Queue",
    "Run",
    "Shard",
    "Streams",
    "clip_ranges",
]


class Mark:
    """A point in a queue: it is reached once all work given to the queue before is done. On the CPU that is at once."""

    def hold(self) -> None:
        """Let work that the current stream gets from now on begin after this mark."""

    def wait(self) -> None:
        """Block this thread until the mark is reached."""


class Queue:
    """Work in order, beside the current stream. That of a CPU does it at once.

    >>> Queue().run(lambda: print("done")).wait()
    done
    """

    def run(self, work: Callable[[], Any], after: Iterable[Mark] = ()) -> Mark:
        """Do `work` once the marks `after` are reached; the mark of its end. What it reads must stay alive."""
        for mark in after:
            mark.wait()
        work()
        return Mark()


class Streams:
    """The queues of one device; these are a CPU's.

    immediate: work is done when it is given, in memory that the host reaches.
    """

    immediate = True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def queue(self) -> Queue:
        """A new queue."""
        return Queue()

    def now(self) -> Mark:
        """Where the current stream stands."""
        return Mark()

    def lend(self, tensor: Tensor, queue: Queue) -> None:
        """`tensor` may be freed before `queue` has read it: its memory is not given out again until then."""


class CudaMark(Mark):
    """A CUDA event as a mark."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self.device = device
        self.event = torch.cuda.Event()
        self.event.record(stream)

    def hold(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.event)

    def wait(self) -> None:
        self.event.synchronize()


class CudaQueue(Queue):
    """A CUDA stream as a queue."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def run(self, work: Callable[[], Any], after: Iterable[Mark] = ()) -> Mark:
        with torch.cuda.stream(self.stream):
            for mark in after:
                mark.hold()
            work()
        return CudaMark(self.device, self.stream)


class CudaStreams(Streams):
    """The streams of one GPU."""

    immediate = False

    def queue(self) -> Queue:
        return CudaQueue(self.device)

    def now(self) -> Mark:
        return CudaMark(self.device, torch.cuda.current_stream(self.device))

    def lend(self, tensor: Tensor, queue: Queue) -> None:
        assert isinstance(queue, CudaQueue)
        tensor.record_stream(queue.stream)


# The step ------------------------------------------------------------------------------------------------------------


@dataclass
class _Transit:
    """The memory in which the gradient of a unit and its new values are on their way; a delayed update has it twice."""

    border: int  # the CPU steps the elements before it, the device the others
    sent: list[Tensor]  # on the host: gradients, then the new values
    values: list[Tensor]  # on the host: the new values; `sent` where the dtype is the same, unless gradients must stay
    kept: list[Tensor]  # on the device: the gradient of what is stepped there
    shadow: Tensor | None  # new values that wait for the end of the step


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
    ahead: dict[int, Guess]  # units that have been stepped, or are about to be, before this step was asked for
    order: frozenset[int]  # the same; they stay so when an update that failed goes on
    at: int = 0  # the next of the CPU's blocks
    ended: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None


class Pipeline:
    """Steps the optimizer over shards whose state is on the host, on disk or, for some, on the device.

    `resident`: units whose state is on the device. `gpu_share`: whether the GPU helps to step what is on the host (a
    number: its share of it). The same settings step every element in the same place, so a resumed run repeats itself.
    `gradients`: the dtype in which gradients are kept until they are used, that of `compute` by default.
    `shards` lose their `master` as it is taken over, so that both need not be in memory at once.
    `delayed`: `step` may delay. `ahead`: units are stepped as their gradients arrive, in memory for a second copy of
    their state. An error of the background thread is raised by the next call of any kind.

    >>> compute = torch.zeros(4, dtype=torch.bfloat16)
    >>> optimizer = torch.optim.SGD([torch.zeros(4)], lr=0.5)
    >>> pipeline = Pipeline(optimizer, [Shard(compute, [Run(0, 4, 0)])], device=torch.device("cpu"))
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
        shards: Sequence[Shard],
        *,
        device: torch.device,
        moments: torch.dtype = torch.float32,
        gradients: torch.dtype | None = None,
        disk: Disk | None = None,
        delayed: bool = False,
        ahead: bool = False,
        resident: AbstractSet[int] = frozenset(),
        gpu_share: bool | float = True,
        threads: int | None = None,
        block: int = BLOCK_ELEMENTS,
        buffers: int = STAGING_BUFFERS,
        streams: Streams | None = None,
    ) -> None:
        cuda = device.type == "cuda"
        self.streams = streams or (CudaStreams(device) if cuda else Streams(device))
        self.optimizer, self.delayed = optimizer, delayed
        self._down, self._up = self.streams.queue(), self.streams.queue()
        threads = threads or max(1, torch.get_num_threads() - cuda)  # one core launches the GPU's kernels
        share = gpu_share if not isinstance(gpu_share, bool) else staged_share(threads) if gpu_share and cuda else 0.0
        if not 0 <= share <= 1:
            raise ValueError(f"gpu_share is True, False or a share from 0 to 1, got {gpu_share!r}")
        disks = {u for u, shard in enumerate(shards) if shard.home == "disk"}
        spans = cut([shard.length for shard in shards], share=share, resident=resident, disk=disks, block=block)
        if delayed and ahead:
            raise ValueError("got delayed=True and ahead=True: a delayed step has time while the next one computes")
        self.stepper = Stepper(optimizer, moments=moments, disk=disk, threads=threads, ahead=ahead)
        self._shards = list(shards)
        self._make_blocks(spans, moments, buffers)
        self._transits = self._make_transits(gradients, ahead)
        self._arrived: dict[int, Mark] = {}
        self._count = 0
        self._update: _Update | None = None
        self._lane = SerialQueue("unisono-offload")
        mine = [block for block in self._host if block.home == "cpu"]
        self.ahead = StepsAhead(self.stepper, self._lane, mine, self._find_work) if ahead else None
        self.streams.now().wait()  # what the current stream has filled so far is used in other queues

    # Making it --------------------------------------------------------------------------------------------

    def _make_blocks(self, spans: Sequence[tuple[int, int, int, Any]], moments: torch.dtype, buffers: int) -> None:
        """Cut the shards into blocks, and hand their values to who steps them."""
        cpu, shards = torch.device("cpu"), self._shards
        blocks: dict[tuple[int, int], Block] = {}  # of the device
        for u, a, b, home in spans:
            if home in ("staged", "resident"):
                runs, dtype = clip(shards[u].runs, a, b), shards[u].master_dtype
                blocks[u, a] = Block(None, runs, home, b - a, dtype, unit=u, start=a)
        options: dict[str, Any] = {"moments": moments, "streams": self.streams, "buffers": buffers}
        self._device = DeviceStepper(self.optimizer, list(blocks.values()), **options) if blocks else None
        self._host: list[Block] = []
        self._padding: dict[Block, list[tuple[int, int]]] = {}
        for u, a, b, home in spans:
            shard = shards[u]
            values = (shard.compute if shard.master is None else shard.master)[a:b].detach()
            block = blocks.get((u, a))
            if block is not None:
                block.load({"master": values})
            else:
                runs, dtype = clip(shard.runs, a, b), shard.master_dtype
                master = copy_to(values, cpu, dtype) if home == "cpu" else values.to(cpu, dtype).contiguous()
                block = self.stepper.add(Block(master, runs, home, unit=u, start=a))
                self._host.append(block)
                self._padding[block] = find_gaps(runs, block.length)
            shard.blocks.append(block)
            del values
            if b == shard.length:
                shard.master = None

    def _make_transits(self, gradients: torch.dtype | None, ahead: bool) -> list[_Transit]:
        """Take all host memory that the device copies, in one piece, at the start. `ahead`: new values do not take the
        gradients' place, from which a unit may have to be stepped again."""
        sides, made = 2 if self.delayed else 1, []
        borders = [max((b.stop for b in self._host if b.unit == u), default=0) for u in range(len(self._shards))]
        units = [(n, s.compute, gradients or s.compute.dtype) for n, s in zip(borders, self._shards, strict=True)]
        aparts = [ahead or dtype != compute.dtype for _, compute, dtype in units]
        rooms = [
            Slab.bytes_for(n, dtype) + (Slab.bytes_for(n, compute.dtype) if apart else 0)
            for (n, compute, dtype), apart in zip(units, aparts, strict=True)
        ]
        self._slab = Slab(
            Slab.bytes_for(1, torch.float64) + sides * sum(rooms), pinned=self.streams.device.type == "cuda"
        )
        self._scale = self._slab.take_line(1, torch.float64)
        for (n, compute, dtype), apart in zip(units, aparts, strict=True):
            sent = [self._slab.take_line(n, dtype) for _ in range(sides)]
            values = [self._slab.take_line(n, compute.dtype) for _ in range(sides)] if apart else sent
            kept = [torch.zeros(compute.numel() - n, dtype=dtype, device=compute.device) for _ in range(sides)]
            made.append(_Transit(n, sent, values, kept, torch.empty_like(compute) if self.delayed else None))
        return made

    @property
    def pinned_bytes(self) -> int:
        """Bytes of host memory that are locked for the device: gradients, new values, and state that passes it."""
        return self._slab.nbytes + (0 if self._device is None else self._device.slab.nbytes)

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory held, beside the values that compute."""
        held = [t for transit in self._transits for t in (*transit.kept, transit.shadow) if t is not None]
        device = 0 if self._device is None else self._device.device_bytes
        return device + sum(t.numel() * t.element_size() for t in held)

    # Steps ------------------------------------------------------------------------------------------------

    def offer(self, u: int, gradient: Tensor, *, replace: bool = False) -> Mark:
        """Take the gradient of unit `u` for the next step, once; `replace`: instead of one that it may have.

        It is copied away: it may be freed at once, but hold the mark that is returned before writing into it.
        """
        shard, transit, side = self._shards[u], self._transits[u], self._count % (2 if self.delayed else 1)
        if gradient.shape != shard.compute.shape:
            raise ValueError(
                f"unit {u} has {shard.length} elements here, its gradient has the shape {tuple(gradient.shape)}"
            )
        if u in self._arrived and not replace:
            raise RuntimeError(f"unit {u} has a gradient already: call step() before it gets the next one")
        self.wait(u)  # its memory is free again
        if (former := self._arrived.pop(u, None)) is not None:
            former.wait()
        with torch.no_grad():
            gradient = gradient.detach().to(transit.sent[side].dtype)
            transit.kept[side].copy_(gradient[transit.border :])
        mark = self.streams.now()
        if transit.border:
            self.streams.lend(gradient, self._down)
            sent = transit.sent[side]
            mark = self._down.run(lambda: sent.copy_(gradient[: transit.border], non_blocking=True), after=[mark])
        self._arrived[u] = mark
        if self.ahead is not None:
            self.ahead.begin(u, mark)
        return mark

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
        settings = self.stepper.begin()
        ahead = {} if self.ahead is None else self.ahead.claim(settings, scale, absent or {})
        update = _Update(
            settings=settings,
            side=self._count % (2 if self.delayed else 1),
            delayed=delay,
            scale=scale,
            absent=absent or {},
            arrived=self._arrived,
            start=start,
            scale_read=self._read_scale(scale, start),
            marks={u: [] for u in self._arrived},
            ready={u: threading.Event() for u in self._arrived},
            ahead=ahead,
            order=frozenset(ahead),
        )
        self._update, self._arrived = update, {}
        self._count += 1
        self._lane.submit(lambda: self._step_host(update))
        if self._device is not None:
            self._step_device(update, self._device)

    def _read_scale(self, scale: Scale, start: Mark) -> Mark:
        if not isinstance(scale, Tensor):
            self._scale.fill_(scale)
            return start
        wide = scale.reshape(1).double()
        self.streams.lend(wide, self._down)
        return self._down.run(lambda: self._scale.copy_(wide, non_blocking=True), after=[self.streams.now()])

    def _step_device(self, update: _Update, device: DeviceStepper) -> None:
        for u in sorted(update.arrived):
            transit, absent = self._transits[u], update.absent.get(u, ())
            target, kept = self._target(u, update), transit.kept[update.side]
            for block in self._shards[u].blocks:
                if not block.on_device:
                    continue
                mark = device.step(
                    block,
                    target[block.start : block.stop],
                    kept[block.start - transit.border : block.stop - transit.border],
                    scale=update.scale,
                    absent=clip_ranges(absent, block.start, block.stop),
                    now=update.settings,
                    after=update.start,
                )
                update.marks[u] += [] if mark is None else [mark]
        device.run_ahead()

    def _target(self, u: int, update: _Update) -> Tensor:
        if not update.delayed:
            return self._shards[u].compute.detach()
        shadow = self._transits[u].shadow
        assert shadow is not None
        return shadow

    def _step_host(self, update: _Update) -> None:
        """The background thread: the CPU's blocks in order; a failed update goes on at `update.at`."""
        begun: deque[tuple[Block, Callable[[], None]]] = deque()
        try:
            update.scale_read.wait()
            scale = float(self._scale)
            mine = self._find_order(update)
            for number in range(update.at, len(mine)):
                block = mine[number]
                if number + 1 < len(mine):
                    self.stepper.prefetch(mine[number + 1].index)
                update.arrived[block.unit].wait()
                begun.append((block, self._start_block(block, update, scale)))
                if len(begun) > _AT_ONCE:
                    self._end_block(*begun.popleft(), update)
            self._end_blocks(begun, update)
            self.stepper.flush()
        except BaseException as error:  # the next call raises it
            update.error = error
            self._end_blocks(begun, update)
        finally:
            update.ended.set()
            for event in update.ready.values():  # also of units that the CPU has no block of
                event.set()

    def _find_order(self, update: _Update) -> list[Block]:
        """The blocks of the update as they are stepped: in forward order; those that were stepped before are sent in
        between, beside the others' steps."""
        mine = [block for block in self._host if block.unit in update.arrived]
        before = [block for block in mine if block.unit in update.order]
        rest = [block for block in mine if block.unit not in update.order]
        head, tail = rest[:_AT_ONCE], rest[_AT_ONCE:]
        pairs = zip_longest(before, tail)
        return [*head, *(block for pair in pairs for block in pair if block is not None)]

    def _start_block(self, block: Block, update: _Update, scale: float) -> Callable[[], None]:
        if block.unit in update.ahead:
            return update.ahead[block.unit].find_take(block)
        if self.ahead is not None:
            self.ahead.end(block.unit)
        absent = clip_ranges(update.absent.get(block.unit, ()), block.start, block.stop)
        gradient = self._transits[block.unit].sent[update.side][block.start : block.stop]
        out = self._out(block, update)
        return self.stepper.start(block.index, gradient, out, scale=scale, absent=absent, settings=update.settings)

    def _find_work(self, block: Block, absent: Ranges) -> Work:
        """What it takes to step a block ahead."""
        transit, here = self._transits[block.unit], slice(block.start, block.stop)
        return Work(transit.sent[0][here], transit.values[0][here], clip_ranges(absent, block.start, block.stop))

    def _is_direct(self, u: int, update: _Update) -> bool:
        """Whether the CPU writes new values where they compute: if it reaches that memory, and they may be seen."""
        return self.streams.immediate and u not in update.ahead

    def _out(self, block: Block, update: _Update) -> Tensor:
        """Where the CPU writes new values."""
        u = block.unit
        line = self._target(u, update) if self._is_direct(u, update) else self._transits[u].values[update.side]
        return line[block.start : block.stop]

    def _end_block(self, block: Block, end: Callable[[], None], update: _Update) -> None:
        """Wait for a block and send its new values."""
        end()
        out = self._out(block, update)
        for low, high in self._padding[block]:
            out[low:high].zero_()
        if not self._is_direct(block.unit, update):
            target = self._target(block.unit, update)[block.start : block.stop]
            mark = self._up.run(lambda: target.copy_(out, non_blocking=True), after=[update.start])
            update.marks[block.unit].append(mark)
        update.at += 1
        if block.stop == self._transits[block.unit].border:
            update.ready[block.unit].set()

    def _end_blocks(self, begun: deque[tuple[Block, Callable[[], None]]], update: _Update) -> None:
        while begun:
            self._end_block(*begun.popleft(), update)

    # Waiting ----------------------------------------------------------------------------------------------

    def wait(self, u: int) -> None:
        """Let the current stream wait until unit `u` has its new values; the thread waits as long as the CPU steps."""
        update = self._update
        if update is None:
            return
        if not update.delayed and u in update.ready:
            if self._transits[u].border:
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
                self._shards[u].compute.detach().copy_(self._target(u, update))
        self._update = None

    def finish(self) -> None:
        """Block until everything is done and every value is the latest; raises what went wrong."""
        self._complete()
        if self._device is not None:
            self._device.wait()
        self.stepper.flush()
        self.streams.now().wait()

    def retry(self) -> None:
        """After an error of the disk: go on with the update where it broke off. Nothing was lost."""
        update = self._update
        if update is None or not update.ended.wait(0) or update.error is None:
            return
        self.stepper.flush()
        update.error, update.ahead = None, {}
        update.ended.clear()
        self._lane.submit(lambda: self._step_host(update))
        self.finish()

    def _check(self, update: _Update) -> None:
        if update.error is not None:
            raise update.error

    def close(self) -> None:
        """Wait for what is under way, end the threads and give the memory back."""
        marks = list(self._arrived.values())
        if self.ahead is not None:
            self.ahead.close()
        if self._update is not None:
            self._update.ended.wait(_CLOSE_S)
            marks += [mark for some in self._update.marks.values() for mark in some]
        for mark in marks:  # copies between this memory and the device
            mark.wait()
        self._lane.close()
        self.stepper.close()
        if self._device is not None:
            self._device.close()
        self.streams.now().wait()
        self._slab.close()

    # State ------------------------------------------------------------------------------------------------

    def shard(self, u: int) -> Shard:
        """The state of unit `u`, to be read and set: all steps are done."""
        self.finish()
        if self.ahead is not None:
            self.ahead.wait(u)
        return self._shards[u]

    def values(self, u: int) -> Tensor:
        """The new values of unit `u`, on the device that computes."""
        self.wait(u)
        return self._shards[u].compute

    @property
    def steps(self) -> int:
        """Steps so far; part of the state, as the rounding of 16-bit moments depends on it."""
        return self.stepper.steps

    @steps.setter
    def steps(self, count: int) -> None:
        self.stepper.steps = count


def clip_ranges(ranges: Sequence[tuple[int, int]], start: int, stop: int) -> list[tuple[int, int]]:
    """The ranges inside [start, stop), counted from `start`.

    >>> clip_ranges([(0, 4), (6, 12)], 3, 8)
    [(0, 1), (3, 5)]
    """
    found = ((max(low, start), min(high, stop)) for low, high in ranges)
    return [(low - start, high - start) for low, high in found if low < high]
