"""Cells of a block, stepped by several threads: each takes the next cell and steps it tile by tile, in its cache."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from unisono.kernels.noise import noise
from unisono.offload.optimizers import Fused, Kept, Own, Rule, Settings
from unisono.offload.segments import IDLE, Batch, Cell
from unisono.offload.strips import compiled, round_bits

_TILE = 1 << 17  # elements: their cast gradient is still in a core's cache when the optimizer reads it
_CELL = (1 << 16, 1 << 20)  # elements: the least and the most that a thread takes at a time
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
    gradient: Tensor
    out: Tensor | None
    scale: float
    places: Mapping[str, int]  # of each line, in the table of random numbers
    lines: Mapping[str, Tensor]
    base: int  # the element that the lines begin with


class _Worker:
    """One thread's memory, and what it does with a cell."""

    def __init__(self, tile: int) -> None:
        self._tile = tile
        self._memory: dict[tuple[int, torch.dtype], Tensor] = {}
        self._strip = compiled()

    def run(self, task: Task, cells: Iterator[Cell]) -> None:
        with torch.no_grad():
            for cell in cells:
                for batch, start, stop in cell:
                    if batch == IDLE:
                        if task.out is not None:
                            task.out[start:stop].copy_(task.lines["master"][start - task.base : stop - task.base])
                    elif isinstance(task.rule, Fused):
                        self._fused(task, task.rule, task.batches[batch], start, stop)
                    elif isinstance(task.rule, Own):
                        self._own(task, task.rule, task.batches[batch], start, stop)

    def scratch(self, number: int, n: int, dtype: torch.dtype) -> Tensor:
        """Memory for the gradient (0) or the state lines (from 1)."""
        line = self._memory.get((number, dtype))
        if line is None or line.numel() < n:
            line = self._memory[number, dtype] = torch.empty(n, dtype=dtype)
        return line

    def _fused(self, task: Task, rule: Fused, batch: Batch, start: int, stop: int) -> None:
        kept = task.kept[batch.group].lines
        low, high = start - task.base, stop - task.base
        master = task.lines["master"][low:high]
        lines = [task.lines[name][low:high] for name in kept]
        size = min(self._tile, stop - start)
        scratch = [self.scratch(i, size, master.dtype) for i in range(1 + len(lines))]
        self._strip(
            *rule.call(task.groups[batch.group]),
            batch.scalars.get("step", master),
            batch.fresh,
            list(kept.values()),
            master,
            task.gradient[start:stop],
            task.scale,
            lines,
            None if task.out is None else task.out[start:stop],
            scratch,
            [line.view(torch.int32) for line in scratch[1:]] if task.moments.dtype == torch.bfloat16 else [],
            task.moments.table,
            [task.places[name] + start for name in kept],
            size,
            [master],
        )

    def _own(self, task: Task, rule: Own, batch: Batch, start: int, stop: int) -> None:
        kept = task.kept[batch.group].lines
        low, high, n = start - task.base, stop - task.base, stop - start
        master = task.lines["master"][low:high]
        gradient = self.scratch(0, n, master.dtype)[:n]
        gradient.copy_(task.gradient[start:stop]).mul_(task.scale)
        lines = {name: task.lines[name][low:high] for name in kept}
        if task.moments.dtype == torch.bfloat16:
            lines = {k: self.scratch(i + 1, n, master.dtype)[:n].copy_(x) for i, (k, x) in enumerate(lines.items())}
        pieces = {name: [line] for name, line in lines.items()}
        batch.after = rule.apply(task.groups[batch.group], batch.scalars, batch.fresh, [master], [gradient], pieces)
        if task.moments.dtype == torch.bfloat16:
            for name, line in lines.items():
                round_bits(line.view(torch.int32), task.moments.table, task.places[name] + start)
                task.lines[name][low:high].copy_(line)
        if task.out is not None:
            task.out[start:stop].copy_(master)


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
        count = 1 if kind == "omp" else threads or here
        self._pool = None if kind == "omp" or count == here == 1 else _pool(count)
        self._workers = [_Worker(_TILE * (here if kind == "omp" else 1)) for _ in range(count)]

    def cell(self, length: int, rule: Rule) -> int:
        """How many elements of a part of `length` a thread takes at a time."""
        if isinstance(rule, Own):
            return _OWN_CELL
        share = length // (4 * len(self._workers))
        return min(_CELL[1], max(_CELL[0], share // _CELL[0] * _CELL[0]))

    def run(self, task: Task, cells: Sequence[Cell]) -> None:
        """Step all cells."""
        shared = iter(cells)  # gives each cell to one thread
        if self._pool is None:
            self._workers[0].run(task, shared)
            return
        futures = [self._pool.submit(worker.run, task, shared) for worker in self._workers[: len(cells)]]
        errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None:
                raise error

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
