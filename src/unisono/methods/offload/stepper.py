"""The optimizer step on the host: blocks of master values and their state, in memory or on disk, chunk by chunk.

ZeRO-Offload (Ren et al., 2021, arXiv:2101.06840) and ZeRO-Infinity (Rajbhandari et al., 2021, arXiv:2104.07857). A
chunk is divided into cells; each thread takes the next cell and steps it tile by tile, in its cache: the gradient is
cast, the optimizer steps, the new values are cast.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unisono.methods.offload import native
from unisono.methods.offload.blocks import IDLE, Batch, Block, Cell, Chunk, MemoryChunk, Run, Spans
from unisono.methods.offload.chunks import CHUNK_ELEMENTS, ChunkBuffers, Frozen, bytes_on_disk, place_on_disk
from unisono.methods.offload.disk import Disk, DiskError
from unisono.methods.offload.fused import Rounding, compile_step_tiles, round_bits, step_tiles
from unisono.methods.offload.optimizers import FusedAdam, GroupStep, Rule, Settings, make_rule, read_settings

__all__ = ["Block", "ChunkLines", "Ratios", "Run", "StepSettings", "Stepper", "disk_bytes"]

_TILE = 1 << 17  # elements: their cast gradient is still in a core's cache when the optimizer reads it
_PLAIN_TILE = 1 << 20  # where every call of a tile needs Python's lock
_CELL = 1 << 16  # a thread takes a multiple of these elements at a time
_CELLS = 8  # of a chunk, if there are no more threads than that; else one for each
_OWN_CELL = 1 << 18  # for an optimizer without a fused kernel, which steps a cell at once


class StepSettings(NamedTuple):
    """The settings of all param groups for one step, and the step's number. rule: how to step, if otherwise."""

    groups: list[Settings]
    step: int
    rule: Rule | None = None


class Ratios(NamedTuple):
    """For every `each` elements of a block, a ratio: see `step_tiles`."""

    values: list[float]
    each: int

    def cut(self, start: int, stop: int) -> tuple[list[float], int, int]:
        """Those of elements [start, stop), as `step_tiles` takes them."""
        first = start // self.each
        return self.values[first : (stop - 1) // self.each + 1], self.each, first


class Stepper:
    """Steps the optimizer over blocks, one at a time, in place.

    `moments=torch.bfloat16` keeps the state lines in 16 bits, rounded at random in proportion (`seed`), and computes in
    the precision of the block. `ahead`: blocks in memory have a second copy of their lines, for `start_ahead`.

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
        chunk_elements: int = CHUNK_ELEMENTS,
        seed: int = 0,
        ahead: bool = False,
    ) -> None:
        if moments not in (torch.float32, torch.bfloat16):
            raise ValueError(f"got moments={moments}: expected torch.float32 or torch.bfloat16")
        self.optimizer = optimizer
        self.steps = 0  # calls of begin() so far; part of the state, as the rounding of 16-bit moments depends on it
        self.blocks: list[Block] = []
        self.buffers: ChunkBuffers | None = None  # that blocks on disk pass through
        self._rule: Rule = make_rule(optimizer)
        self._moments = moments
        self._rounding = Rounding(seed, torch.device("cpu"))
        self._workers = _Workers(threads)
        compiled = isinstance(self._rule, FusedAdam) and native.load() is not None
        self._pool = native.NativePool(self._workers.threads) if compiled else None
        self._disk, self._chunk_elements, self._ahead = disk, chunk_elements, ahead
        self._settings: StepSettings | None = None
        self._unfinished: dict[int, int] = {}  # blocks whose step an error broke off, with the next chunk to step
        self._lock = threading.RLock()
        for block in blocks:
            self.add(block)

    def add(self, block: Block) -> Block:
        """Take one more block, under the next index. One on disk is written there, and its `master` let go."""
        block.prepare(len(self.blocks), self._rule, self.optimizer.param_groups, self._moments)
        if block.home == "cpu":
            assert block.master is not None
            lines = {name: torch.full((block.length,), x, dtype=block.dtypes[name]) for name, x in block.first.items()}
            block.chunks = [MemoryChunk({"master": block.master.detach(), **lines}, twice=self._ahead)]
        else:
            if self._disk is None:
                raise ValueError('a block has home="disk" but no disk: Stepper(..., disk=Disk(folder, nbytes))')
            if self.buffers is None:
                self.buffers = ChunkBuffers(self._disk)
            place_on_disk(block, self.buffers, self._chunk_elements)
        self.blocks.append(block)
        return block

    def begin(self) -> StepSettings:
        """Begin a step: the groups' settings as they are now hold for it, whatever a scheduler changes meanwhile."""
        self._settings = self.foresee()
        self.steps = self._settings.step
        return self._settings

    def foresee(self) -> StepSettings:
        """What `begin` would return now."""
        return StepSettings([read_settings(group) for group in self.optimizer.param_groups], self.steps + 1)

    def step(self, index: int, gradient: Tensor, out: Tensor | None = None, **settings: Any) -> None:
        """Step one block: `start`, and wait."""
        self.start(index, gradient, out, **settings)()

    def start(
        self,
        index: int,
        gradient: Tensor,
        out: Tensor | None = None,
        *,
        scale: float = 1.0,
        absent: Iterable[tuple[int, int]] = (),
        settings: StepSettings | None = None,
        ratios: Ratios | None = None,
    ) -> Callable[[], None]:
        """Begin to step one block with `scale * gradient`; `out` receives the new values in its own dtype. Call what is
        returned to wait for the end, before the block is used again.

        `absent` are ranges of elements without a gradient: they and their state stay as they are. `settings` is what
        `begin` returned for this step, the latest by default. `ratios`: of a block in memory, see `step_tiles`. Padding
        between the runs is never stepped.
        A block in memory is stepped in the background: another may be begun meanwhile. One on disk is done at once; if
        the disk fails, `DiskError` is raised, and after a `flush` that succeeds the same call goes on where it ended.
        """
        with self._lock:
            settings = settings or self._settings
            if settings is None:
                raise RuntimeError("call begin() before the first step: it reads the optimizer's settings")
            block = self.blocks[index]
            batches = self._find_batches(block, gradient, out, absent, settings)
            begin = partial(self._begin_chunk, block, batches, settings, gradient, out, float(scale), ratios=ratios)
            if block.home == "cpu":
                return partial(self._finish, block, batches, begin(block.chunks[0]))
            assert self.buffers is not None
            self.buffers.check()
            for number in range(self._unfinished.get(index, 0), len(block.chunks)):
                begin(block.chunks[number])()
                self._unfinished[index] = number + 1
                block.chunks[number].release()
            self._unfinished.pop(index, None)
            block.steps.advance(batches)
            return lambda: None

    def start_ahead(
        self, index: int, gradient: Tensor, out: Tensor, absent: Iterable[tuple[int, int]], *, settings: StepSettings
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        """Begin to step a block in memory into the second copy of its lines: as `start` would, but its state stays as
        it is. Returns two calls: to wait for the end, and then, if at all, to let the step have happened."""
        with self._lock:
            block = self.blocks[index]
            batches = self._find_batches(block, gradient, out, absent, settings)
            chunk = block.chunks[0]
            assert isinstance(chunk, MemoryChunk)
            into = chunk.open_others()
            wait = self._begin_chunk(block, batches, settings, gradient, out, 1.0, chunk, into)
        return wait, partial(self._take, block, batches, chunk)

    def _take(self, block: Block, batches: Sequence[Batch], chunk: MemoryChunk) -> None:
        with self._lock:
            chunk.swap()
            block.master = None  # it is not the one that was given, from here on
            block.steps.advance(batches)

    def _find_batches(
        self,
        block: Block,
        gradient: Tensor,
        out: Tensor | None,
        absent: Iterable[tuple[int, int]],
        settings: StepSettings,
    ) -> list[Batch]:
        """What one step of a block does; refuses what it cannot."""
        _check_line("gradient", gradient, block.length)
        if out is not None:
            _check_line("out", out, block.length)
        batches = block.steps.batches(absent, settings.rule or self._rule, settings.groups)
        self._check_state(block, settings)
        return batches

    def _begin_chunk(
        self,
        block: Block,
        batches: list[Batch],
        settings: StepSettings,
        gradient: Tensor,
        out: Tensor | None,
        scale: float,
        chunk: Chunk,
        into: Mapping[str, Tensor] | None = None,
        ratios: Ratios | None = None,
    ) -> Callable[[], None]:
        """`into`: lines that are written, instead of the chunk's own."""
        start, stop = chunk.start, chunk.stop
        lines, places = ChunkLines(chunk.open(), into), dict.fromkeys(block.first, 0)
        if self._moments == torch.bfloat16:
            places = {
                k: start + self._rounding.find_place(settings.step, block.index, i) for i, k in enumerate(block.first)
            }
        mine, new = gradient[start:stop], None if out is None else out[start:stop]
        flags = [flag for batch in batches if batch.step.kernel is not None for flag in batch.step.kernel.flags]
        if self._pool is not None and not any(flags) and native.fits(lines.old, mine, new):
            whole = block.steps.cells(batches, start, stop, stop - start)
            return self._begin_native(self._pool, batches, whole, lines, mine, new, scale, [*places.values()], ratios)
        cells = block.steps.cells(batches, start, stop, self._workers.choose_cell(stop - start, self._rule))
        make = partial(_make_fused_step, ratios=ratios) if self._rule.has_kernel else _make_own_step
        steps = {
            i: make(batch.step, lines, mine, new, scale, self._rounding.table, places)
            for i, batch in enumerate(batches)
        }
        return self._workers.start({**steps, IDLE: partial(_copy_out, lines, new)}, cells)

    def _begin_native(
        self,
        pool: native.NativePool,
        batches: Sequence[Batch],
        cells: Sequence[Cell],
        lines: ChunkLines,
        gradient: Tensor,
        out: Tensor | None,
        scale: float,
        places: Sequence[int],
        ratios: Ratios | None,
    ) -> Callable[[], None]:
        """The same by compiled code; `cells`: all that is to be done."""
        old, new, waits = [*lines.old.values()], [*lines.new.values()], []
        for number, spans in (each for cell in cells for each in cell.items()):
            kind, numbers, count, fresh = 0, None, 1.0, False
            if number != IDLE:
                now = batches[number].step
                assert now.kernel is not None
                kind, numbers, count = now.kernel.kind, now.kernel.numbers, float(now.scalars["step"])
                fresh = now.is_fresh
            head = (kind, numbers, count, fresh, spans, old, new, gradient, scale, out)
            waits.append(pool.start(native.Step(*head, self._rounding.table, places, ratios, pool.width)))

        def wait() -> None:
            for each in waits:
                each()

        return wait

    def _finish(self, block: Block, batches: Sequence[Batch], wait: Callable[[], None]) -> None:
        wait()
        with self._lock:
            block.steps.advance(batches)

    def prefetch(self, index: int) -> None:
        """Begin to read a block from disk, as far as there are buffers for it."""
        with self._lock:
            for chunk in self.blocks[index].chunks:
                chunk.prefetch()

    def flush(self) -> None:
        """Wait until everything is on disk; writes that failed are tried again. Raises `DiskError` if that fails."""
        with self._lock:
            if self.buffers is not None:
                self.buffers.flush()

    def freeze(self) -> Frozen | None:
        """Keep what is on disk as it is now (see `ChunkBuffers.freeze`); None if there is no room for that."""
        with self._lock:
            try:
                return None if self.buffers is None else self.buffers.freeze()
            except DiskError:
                return None

    def close(self) -> None:
        """End the threads. The disk stays open: whoever made it closes it."""
        self._workers.close()
        if self._pool is not None:
            self._pool.close()

    def _check_state(self, block: Block, settings: StepSettings) -> None:
        """Refuse settings that need state which the block has no lines for."""
        for group in block.steps.groups(0, block.length):
            missing = set(self._rule.find_state(settings.groups[group]).lines) - set(block.first)
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
    chunk_elements: int = CHUNK_ELEMENTS,
) -> int:
    """The size of the `Disk` that a Stepper needs for those of the blocks whose home is "disk".

    >>> optimizer = torch.optim.AdamW([torch.zeros(1)])
    >>> disk_bytes(optimizer, [Block(None, [Run(0, 1 << 20, 0)], "disk", length=1 << 20)])
    12582912
    """
    rule, total = make_rule(optimizer), 0
    for block in blocks:
        if block.home == "disk":
            block.prepare(0, rule, optimizer.param_groups, moments)
            total += bytes_on_disk(block, chunk_elements)
    return total


def _check_line(what: str, line: Tensor, length: int) -> None:
    fits = line.shape == (length,) and line.is_contiguous() and line.dtype.is_floating_point
    if not fits or line.device.type != "cpu":
        raise ValueError(
            f"got a {what} of shape {tuple(line.shape)}, strides {line.stride()}, {line.dtype}, on {line.device}: "
            f"expected a contiguous 1-D floating point tensor of {length} elements on the CPU"
        )


# How the spans of a cell are stepped: made once for a batch and a chunk, called by the threads ----------------------

StepSpans = Callable[["_Worker", Spans], None]


class ChunkLines:
    """The lines of a chunk as they are before a step, and where it writes them: there too, if not elsewhere."""

    def __init__(self, old: Mapping[str, Tensor], new: Mapping[str, Tensor] | None) -> None:
        self.old, self.new = old, old if new is None else new

    def carry(self, names: Iterable[str], spans: Spans) -> None:
        """Take elements over that are not stepped, or are to be stepped in place."""
        for name in names if self.new is not self.old else ():
            for low, high in zip(spans[::2], spans[1::2], strict=True):
                self.new[name][low:high].copy_(self.old[name][low:high])


def _make_fused_step(
    now: GroupStep, lines: ChunkLines, gradient: Tensor, out: Tensor | None, scale: float, table: Tensor,
    places: Mapping[str, int], *, ratios: Ratios | None,
) -> StepSpans:  # fmt: skip
    assert now.kernel is not None
    kept, master = now.lines, lines.new["master"]
    head = (*now.kernel, now.scalars.get("step", master), now.is_fresh, list(kept.values()))
    state = [lines.new[name] for name in kept]
    before = [lines.old[name] for name in ("master", *kept)] if lines.new is not lines.old else []
    others = lines.new.keys() - {"master", *kept}
    narrow = any(line.dtype != master.dtype for line in state)
    begins = [places[name] for name in kept]

    def step(worker: _Worker, spans: Spans) -> None:
        """All spans in one call, which does not need Python's lock: taking it again takes long among many threads."""
        size = min(worker.tile, spans[-1] - spans[0])
        scratch = [worker.scratch(i, size, master.dtype) for i in range(1 + len(state))]
        bits = [line.view(torch.int32) for line in scratch[1:]] if narrow else []
        lines.carry(others, spans)
        mine: tuple[Any, ...] = ([], 0, 0) if ratios is None else ratios.cut(spans[0], spans[-1])
        given = (spans, master, gradient, scale, state, out, scratch, bits, table, begins, size, [master], before)
        worker.step_tiles(*head, *given, *mine)

    return step


def _make_own_step(
    now: GroupStep, lines: ChunkLines, gradient: Tensor, out: Tensor | None, scale: float, table: Tensor,
    places: Mapping[str, int],
) -> StepSpans:  # fmt: skip
    def step(worker: _Worker, spans: Spans) -> None:
        lines.carry(lines.new, spans)
        for low, high in zip(spans[::2], spans[1::2], strict=True):
            step_span(worker, low, high)

    def step_span(worker: _Worker, low: int, high: int) -> None:
        n, master = high - low, lines.new["master"][low:high]
        grad = worker.scratch(0, n, master.dtype)[:n].copy_(gradient[low:high]).mul_(scale)
        wide = {name: lines.new[name][low:high] for name in now.lines}
        narrow = any(line.dtype != master.dtype for line in wide.values())
        if narrow:
            wide = {k: worker.scratch(i + 1, n, master.dtype)[:n].copy_(x) for i, (k, x) in enumerate(wide.items())}
        now.step([master], [grad], [[line] for line in wide.values()])
        if narrow:
            for name, line in wide.items():
                round_bits(line.view(torch.int32), table, places[name] + low)
                lines.new[name][low:high].copy_(line)
        if out is not None:
            out[low:high].copy_(master)

    return step


def _copy_out(lines: ChunkLines, out: Tensor | None, _worker: _Worker, spans: Spans) -> None:
    """Copy the values of elements without a gradient out as they are."""
    lines.carry(lines.new, spans)
    if out is not None:
        for low, high in zip(spans[::2], spans[1::2], strict=True):
            out[low:high].copy_(lines.new["master"][low:high])


# Threads --------------------------------------------------------------------------------------------------------


class _Worker:
    """One thread's memory, and its form of the inner loop."""

    def __init__(self) -> None:
        self.step_tiles = compile_step_tiles()
        self.tile = _PLAIN_TILE if self.step_tiles is step_tiles else _TILE
        self._memory: dict[tuple[int, torch.dtype], Tensor] = {}

    def scratch(self, number: int, n: int, dtype: torch.dtype) -> Tensor:
        """Memory for the gradient (0) or the state lines (from 1)."""
        line = self._memory.get((number, dtype))
        if line is None or line.numel() < n:
            line = self._memory[number, dtype] = torch.empty(n, dtype=dtype)
        return line


class _Workers:
    """Runs the cells of a chunk, on threads of our own with one torch thread each: torch's parallel calls would need a
    barrier after each call of a tile."""

    def __init__(self, threads: int | None) -> None:
        if threads is not None and threads < 1:
            raise ValueError(f"got threads={threads}: expected at least 1")
        here = torch.get_num_threads()
        self.threads = threads or here
        self._pool = None if self.threads == here == 1 else _make_pool(self.threads)
        self._idle = deque(_Worker() for _ in range(self.threads))

    def choose_cell(self, length: int, rule: Rule) -> int:
        """How many elements of a chunk of `length` a thread takes at a time."""
        if not rule.has_kernel:
            return _OWN_CELL
        cells = max(1, _CELLS // self.threads) * self.threads
        return -(-length // (cells * _CELL)) * _CELL

    def start(self, steps: Mapping[int, StepSpans], cells: Sequence[Cell]) -> Callable[[], None]:
        """Step all cells: in the background if there are threads, each taking the next cell that no other has taken.
        Call what is returned to wait until all are stepped: it raises the first error.

        steps: by the number of the batch.
        """
        if self._pool is not None:
            return partial(_wait_for, [self._pool.submit(self._run, steps, cell) for cell in cells])
        for cell in cells:
            self._run(steps, cell)
        return lambda: None

    def _run(self, steps: Mapping[int, StepSpans], cell: Cell) -> None:
        worker = self._idle.pop()
        try:
            with torch.no_grad():
                for batch, spans in cell.items():
                    steps[batch](worker, spans)
        finally:
            self._idle.append(worker)

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()


def _wait_for(running: Sequence[Future[None]]) -> None:
    errors = [one.exception() for one in running]  # waits for all of them
    for error in errors:
        if error is not None:
            raise error


def _make_pool(count: int) -> ThreadPoolExecutor:
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
