"""Cells of a block, stepped by several threads: each takes the next cell and steps it tile by tile, in its cache."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unisono.kernels.noise import noise
from unisono.offload.optimizers import Fused, Kept, Own, Rule, Settings
from unisono.offload.segments import IDLE, Batch, Cell
from unisono.offload.strips import compiled, round_bits, strip

_TILE = 1 << 17  # elements: their cast gradient is still in a core's cache when the optimizer reads it
_PLAIN_TILE = 1 << 20  # where every call of a tile needs Python's lock
_CELL = 1 << 16  # a thread takes a multiple of these elements at a time
_TAKES = 8  # cells of a part, if there are no more threads than that; else one for each
_OWN_CELL = 1 << 18  # for an optimizer without a fused kernel, which steps a cell at once
_PERIOD = 1 << 14  # random numbers for rounding: all elements use them in turn, from a place that changes every step


class Moments:
    """How state lines are kept: in the block's precision, or in bfloat16.

    Rounded to nearest, an average whose change is under 1/512 of itself stands still: Adam's second moment would never
    decay at beta2 = 0.999. So numbers are rounded up or down at random, in proportion, which is right on average.
    Values that fit in bfloat16 stay as they are.
    """

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        self.dtype, self.seed = dtype, seed
        order = torch.randperm(_PERIOD, generator=torch.Generator().manual_seed(seed)).to(torch.int32)
        self.table = (order * (65536 // _PERIOD) + 65536 // _PERIOD // 2).repeat(2)

    def dtypes(self, names: Sequence[str], block: torch.dtype) -> dict[str, torch.dtype]:
        """The dtype of each state line of a block."""
        if self.dtype == torch.float32:
            return dict.fromkeys(names, block)
        if block != torch.float32:
            raise ValueError(f"moments of {self.dtype} need master values of torch.float32, got a block of {block}")
        return dict.fromkeys(names, self.dtype)

    def place(self, step: int, block: int, stream: int) -> int:
        """Where in the table the first element of a block begins, for one of its lines in one step."""
        return noise(self.seed, step, bucket=block, stream=stream).shift % _PERIOD


class Task(NamedTuple):
    """What the cells of one part of a block have in common."""

    rule: Rule
    moments: Moments
    groups: Sequence[Settings]
    kept: Sequence[Kept]  # of each group
    batches: Sequence[Batch]
    gradient: Tensor  # of the part
    out: Tensor | None
    scale: float
    places: Mapping[str, int]  # of each line, in the table of random numbers
    lines: Mapping[str, Tensor]
    base: int  # the element that the lines begin with


class _Call(NamedTuple):
    """What all calls of `strip` for one batch of a part have in common."""

    rule: tuple[Any, ...]
    lines: tuple[Any, ...]
    places: list[int]


def _call(task: Task, rule: Fused, batch: Batch) -> _Call:
    kept, master = task.kept[batch.group].lines, task.lines["master"]
    step = batch.scalars.get("step", master)
    head = (*rule.call(task.groups[batch.group]), step, batch.fresh, list(kept.values()))
    lines = (master, task.gradient, task.scale, [task.lines[name] for name in kept], task.out)
    return _Call(head, lines, [task.places[name] + task.base for name in kept])


class _Worker:
    """One thread's memory, and what it does with a cell."""

    def __init__(self, lanes: int) -> None:
        self._strip = compiled()
        self._tile = lanes * (_PLAIN_TILE if self._strip is strip else _TILE)
        self._memory: dict[tuple[int, torch.dtype], Tensor] = {}

    def run(self, task: Task, calls: Sequence[_Call], cell: Cell) -> None:
        with torch.no_grad():
            for batch, spans in _spans(cell, task.base).items():
                if batch == IDLE:
                    _pass(task, spans)
                elif isinstance(task.rule, Own):
                    for low, high in zip(spans[::2], spans[1::2], strict=True):
                        self._own(task, task.rule, task.batches[batch], low, high)
                else:
                    self._fused(task, calls[batch], spans)

    def scratch(self, number: int, n: int, dtype: torch.dtype) -> Tensor:
        """Memory for the gradient (0) or the state lines (from 1)."""
        line = self._memory.get((number, dtype))
        if line is None or line.numel() < n:
            line = self._memory[number, dtype] = torch.empty(n, dtype=dtype)
        return line

    def _fused(self, task: Task, call: _Call, spans: list[int]) -> None:
        """All spans in one call, which does not need Python's lock: taking it again takes long among many threads."""
        master = task.lines["master"]
        size = min(self._tile, spans[-1] - spans[0])
        scratch = [self.scratch(i, size, master.dtype) for i in range(1 + len(call.places))]
        bits = [line.view(torch.int32) for line in scratch[1:]] if task.moments.dtype == torch.bfloat16 else []
        self._strip(*call.rule, spans, *call.lines, scratch, bits, task.moments.table, call.places, size, [master])

    def _own(self, task: Task, rule: Own, batch: Batch, low: int, high: int) -> None:
        kept = task.kept[batch.group].lines
        n = high - low
        master = task.lines["master"][low:high]
        gradient = self.scratch(0, n, master.dtype)[:n]
        gradient.copy_(task.gradient[low:high]).mul_(task.scale)
        lines = {name: task.lines[name][low:high] for name in kept}
        if task.moments.dtype == torch.bfloat16:
            lines = {k: self.scratch(i + 1, n, master.dtype)[:n].copy_(x) for i, (k, x) in enumerate(lines.items())}
        pieces = {name: [line] for name, line in lines.items()}
        batch.after = rule.apply(task.groups[batch.group], batch.scalars, batch.fresh, [master], [gradient], pieces)
        if task.moments.dtype == torch.bfloat16:
            for name, line in lines.items():
                round_bits(line.view(torch.int32), task.moments.table, task.places[name] + task.base + low)
                task.lines[name][low:high].copy_(line)
        if task.out is not None:
            task.out[low:high].copy_(master)


def _spans(cell: Cell, base: int) -> dict[int, list[int]]:
    """The elements of a cell by batch, as start, stop, start, stop, ..., counted from `base`; neighbours as one."""
    found: dict[int, list[int]] = {}
    for batch, start, stop in cell:
        spans = found.setdefault(batch, [])
        if spans and spans[-1] == start - base:
            spans[-1] = stop - base
        else:
            spans += [start - base, stop - base]
    return found


def _pass(task: Task, spans: list[int]) -> None:
    """Elements without a gradient: their values as they are."""
    if task.out is not None:
        for low, high in zip(spans[::2], spans[1::2], strict=True):
            task.out[low:high].copy_(task.lines["master"][low:high])


class Running:
    """Cells that are being stepped."""

    def __init__(self, count: int) -> None:
        self._left, self._lock, self._ended = count, threading.Lock(), threading.Event()
        self._error: BaseException | None = None
        if not count:
            self._ended.set()

    def done(self, error: BaseException | None) -> None:
        """One more is."""
        with self._lock:
            self._left -= 1
            self._error = self._error or error
            if not self._left:
                self._ended.set()

    def wait(self) -> None:
        """Until all are; raises what went wrong."""
        self._ended.wait()
        if self._error is not None:
            raise self._error


class Engine:
    """Runs the cells of a part: on threads of our own with one torch thread each, or within torch's own parallel calls.

    Threads of our own need no barrier between the calls of a tile.
    """

    def __init__(self, kind: str, threads: int | None) -> None:
        if kind not in ("threads", "omp"):
            raise ValueError(f'got engine={kind!r}: expected "threads" or "omp"')
        if threads is not None and threads < 1:
            raise ValueError(f"got threads={threads}: expected at least 1")
        here = torch.get_num_threads()
        self._threads = 1 if kind == "omp" else threads or here
        self._pool = None if kind == "omp" or self._threads == here == 1 else _pool(self._threads)
        self._idle = deque(_Worker(here if kind == "omp" else 1) for _ in range(self._threads))

    def cell(self, length: int, rule: Rule) -> int:
        """How many elements of a part of `length` a thread takes at a time."""
        if isinstance(rule, Own):
            return _OWN_CELL
        takes = max(1, _TAKES // self._threads) * self._threads
        return -(-length // (takes * _CELL)) * _CELL

    def start(self, task: Task, cells: Sequence[Cell]) -> Running:
        """Step all cells: in the background where there are threads for it, each taking the next that nobody has."""
        running = Running(len(cells))
        calls = [_call(task, task.rule, batch) for batch in task.batches] if isinstance(task.rule, Fused) else []
        for cell in cells:
            if self._pool is None:
                self._run(task, calls, cell, running)
            else:
                self._pool.submit(self._run, task, calls, cell, running)
        return running

    def _run(self, task: Task, calls: Sequence[_Call], cell: Cell, running: Running) -> None:
        worker, error = self._idle.pop(), None
        try:
            worker.run(task, calls, cell)
        except BaseException as raised:  # told by `wait`
            error = raised
        self._idle.append(worker)
        running.done(error)

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()


def _pool(count: int) -> ThreadPoolExecutor:
    """Threads in which a torch call stays on its own thread.

    `torch.set_num_threads` is for the calling thread and for those that start later: it is set back for the latter.
    """
    here = torch.get_num_threads()
    started = threading.Barrier(count + 1)

    def start() -> None:
        torch.get_num_threads()  # reads the default, which would otherwise undo the next line later
        torch.set_num_threads(1)
        started.wait()

    pool = ThreadPoolExecutor(count, "unisono-stepper")
    for _ in range(count):
        pool.submit(start)
    started.wait()
    torch.set_num_threads(here)
    return pool
