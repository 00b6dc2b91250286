"""The blocks of the optimizer state that are stepped on the device: some live there, some pass through; and host memory
that the device's copy engines reach.

Staged blocks follow one another through a few buffers of device memory, in three queues beside the current stream:

  load    state from host memory into the next free buffer; runs ahead, also while the model computes
  step    the user's optimizer, and the new values into the memory that computes
  store   state back to host memory; the buffer is free again

So the link to the host works in both directions at once while the CPU steps its own blocks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unisono.background import Handle
from unisono.methods.buckets import FlatLayout
from unisono.methods.offload.blocks import Block, Chunk
from unisono.methods.offload.disk import make_buffer
from unisono.methods.offload.fused import Rounding, round_bits
from unisono.methods.offload.optimizers import Rule, make_rule
from unisono.methods.offload.stepper import StepSettings
from unisono.units import show_size

if TYPE_CHECKING:
    from unisono.methods.offload.pipeline import Mark, Streams

STAGING_BUFFERS = 3  # one is loaded, one stepped, one stored
_SEED = 1
Ranges = Sequence[tuple[int, int]]
Scale = float | Tensor
LINE_BYTES = 256  # lines in a slab begin on such a border


class Slab:
    """Host memory taken in one piece, given out as lines; `pinned`: locked, so that a GPU copies it on its own.

    Memory from `mmap` (on huge pages where the kernel has them), touched by all threads and then registered in one
    call: torch's own pinned memory is rounded up to a power of two.

    >>> slab = Slab(1 << 20)
    >>> slab.take_line(1000, torch.bfloat16).shape, slab.take_line(5, torch.float32).data_ptr() % 256
    (torch.Size([1000]), 0)
    >>> slab.close()
    """

    def __init__(self, nbytes: int, *, pinned: bool = False) -> None:
        self.nbytes = nbytes
        self._memory = make_buffer(nbytes)
        self._used = 0
        self._unpin: Callable[[], Any] | None = None
        if nbytes and pinned:
            self._memory.zero_()
            code = int(torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), nbytes, 0))
            if code != 0:
                raise RuntimeError(
                    f"{show_size(nbytes)} of host memory could not be locked for the GPU (CUDA error {code}). "
                    f"Raise the limit of locked memory (ulimit -l), offload less (a larger device_memory) or use "
                    f"16-bit moments"
                )
            self._unpin = weakref.finalize(self, _unregister, self._memory)

    @staticmethod
    def bytes_for(n: int, dtype: torch.dtype) -> int:
        """The bytes that a line of `n` elements takes up."""
        return -(-n * dtype.itemsize // LINE_BYTES) * LINE_BYTES

    def take_line(self, n: int, dtype: torch.dtype) -> Tensor:
        """A new line of `n` elements, all zero."""
        start, self._used = self._used, self._used + self.bytes_for(n, dtype)
        assert self._used <= self.nbytes, f"a slab of {self.nbytes} bytes was asked for {self._used}"
        return self._memory[start : start + n * dtype.itemsize].view(dtype)

    def close(self) -> None:
        """Unlock the memory; it goes when the last line of it goes."""
        if self._unpin is not None:
            self._unpin()
            self._unpin = None


def _unregister(memory: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def copy_to(values: Tensor, to: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A copy of `values` on a device.

    From a GPU to the host, all threads touch the new memory first: the driver's copy would, with one thread.

    >>> copy_to(torch.ones(2), torch.device("cpu"), torch.float64)
    tensor([1., 1.], dtype=torch.float64)
    """
    if to.type != "cpu" or values.device.type == "cpu":
        return values.detach().to(to, dtype, copy=True)
    line = torch.empty(values.shape, dtype=dtype or values.dtype)
    return line.zero_().copy_(values.detach())


# Blocks that the device steps ----------------------------------------------------------------------------------------


class DeviceChunk(Chunk):
    """All of a block that the device steps: the memory where its state is stored, and that in which it is stepped."""

    def __init__(self, block: Block, turn: int, store: Tensor, work: Tensor, on_write: Callable[[], None]) -> None:
        super().__init__(0, block.length)
        layout = _lay_out(block)
        self.turn = turn  # among the staged blocks
        self.store, self.work = store[: layout.numel], work[: layout.numel]
        self._store_lines, self._work_lines = (
            dict(zip(block.dtypes, layout.views(memory), strict=True)) for memory in (self.store, self.work)
        )
        self._on_write = on_write

    def open(self) -> Mapping[str, Tensor]:
        return self._work_lines

    def read(self, name: str, low: int, high: int, into: Tensor) -> Handle[Tensor]:
        return Handle.of(into.copy_(self._store_lines[name][low:high]))

    def write(self, name: str, low: int, values: Tensor) -> None:
        self._on_write()
        self._store_lines[name][low : low + values.numel()].copy_(values)


def _lay_out(block: Block) -> FlatLayout:
    """Where the lines of a block lie in its memory: the master, then the optimizer's state."""
    return block.lay_out(block.length, LINE_BYTES)


class Kernel:
    """One step of the user's optimizer on a block that lies on the device; it has scratch memory of its own."""

    def __init__(self, rule: Rule, rounding: Rounding, device: torch.device) -> None:
        self._rule, self._rounding, self._device = rule, rounding, device
        self._scratch: dict[tuple[str, torch.dtype], Tensor] = {}

    def reserve(self, block: Block) -> None:
        """Take the scratch memory that `block` needs, before training begins."""
        self._line("gradient", block.length, block.dtype)
        for name, dtype in block.dtypes.items():
            if dtype != block.dtype:
                self._line(name, block.length, block.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of scratch memory."""
        return sum(line.numel() * line.element_size() for line in self._scratch.values())

    def _line(self, name: str, n: int, dtype: torch.dtype) -> Tensor:
        line = self._scratch.get((name, dtype))
        if line is None or line.numel() < n:
            line = self._scratch[name, dtype] = torch.empty(n, dtype=dtype, device=self._device)
        return line[:n]

    @torch.no_grad()
    def __call__(
        self, block: Block, target: Tensor, gradient: Tensor, *, scale: Scale, absent: Ranges, now: StepSettings
    ) -> None:
        """Step the block with `scale * gradient`; `target` gets its new values."""
        held = block.chunks[0].open()
        lines = dict(held)
        narrow = [name for name, line in held.items() if line.dtype != block.dtype]
        for name in narrow:
            lines[name] = self._line(name, block.length, block.dtype).copy_(held[name])
        gradient = self._multiply(gradient, block, scale)
        batches = block.steps.batches(absent, self._rule, now.groups)
        for batch in batches:
            spans = batch.spans()
            values, grads = ([x[a:b] for a, b in spans] for x in (lines["master"], gradient))
            batch.step.step(values, grads, [[lines[name][a:b] for a, b in spans] for name in batch.step.lines])
        block.steps.advance(batches)
        for stream, name in enumerate(narrow):
            place = self._rounding.find_place(now.step, block.index, stream)
            round_bits(lines[name].view(torch.int32), self._rounding.table, place)
            held[name].copy_(lines[name])
        target.copy_(lines["master"])

    def _multiply(self, gradient: Tensor, block: Block, scale: Scale) -> Tensor:
        """Return the gradient to step with, in memory of our own unless it can be used as it is."""
        plain = not isinstance(scale, Tensor) and scale == 1.0
        if plain and gradient.dtype == block.dtype and self._rule.has_kernel:
            return gradient
        gradient = self._line("gradient", block.length, block.dtype).copy_(gradient)
        return gradient if plain else gradient.mul_(scale)


class DeviceStepper:
    """Steps the staged and the resident blocks; see the head of this file."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        blocks: Sequence[Block],
        *,
        moments: torch.dtype,
        streams: Streams,
        buffers: int = STAGING_BUFFERS,
    ) -> None:
        device = streams.device
        rule = make_rule(optimizer).on_device(optimizer)
        rounding = Rounding(_SEED, device)
        self._streams = streams
        self._load_queue, self._step_queue, self._store_queue = (streams.queue() for _ in range(3))
        self._aside, self._here = (Kernel(rule, rounding, device) for _ in range(2))
        for index, block in enumerate(blocks):
            block.prepare(index, rule, optimizer.param_groups, moments)
        staged = [block for block in blocks if block.home == "staged"]
        most = max((_lay_out(block).numel for block in staged), default=0)
        self._buffers = [self._make_memory(most) for _ in range(min(buffers, len(staged)))]
        self.slab = Slab(sum(_lay_out(block).numel for block in staged), pinned=device.type == "cuda")
        self._chunks: dict[Block, DeviceChunk] = {}
        self._staged: list[DeviceChunk] = []  # in their turns
        self._resident: list[DeviceChunk] = []
        for block in blocks:
            self._place(block)
        self._free: list[Mark | None] = [None] * len(self._buffers)
        self._owner = [-1] * len(self._buffers)  # whose state was loaded last
        self._stored: dict[int, Mark] = {}
        self._loaded: dict[int, Mark] = {}

    def _place(self, block: Block) -> None:
        """Give a block its memory."""
        nbytes = _lay_out(block).numel
        if block.home == "staged":
            turn = len(self._staged)
            store = self.slab.take_line(nbytes, torch.uint8)
            chunk = DeviceChunk(block, turn, store, self._buffers[turn % len(self._buffers)], self._forget_loaded)
            self._staged.append(chunk)
            self._aside.reserve(block)
        else:
            here = self._make_memory(nbytes)
            chunk = DeviceChunk(block, 0, here, here, self._forget_loaded)
            self._resident.append(chunk)
            self._here.reserve(block)
        block.chunks, self._chunks[block] = [chunk], chunk

    def _make_memory(self, nbytes: int) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=self._streams.device)

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory held: resident state, buffers and scratch lines."""
        held = sum(t.numel() for t in (*self._buffers, *(chunk.store for chunk in self._resident)))
        return held + self._aside.nbytes + self._here.nbytes

    # Steps ------------------------------------------------------------------------------------------------

    def step(
        self,
        block: Block,
        target: Tensor,
        gradient: Tensor,
        *,
        scale: Scale,
        absent: Ranges,
        now: StepSettings,
        after: Mark,
    ) -> Mark | None:
        """Step a block; `target` gets its new values: by the mark that is returned, if any, else in the current stream.

        Resident blocks are stepped in the current stream, staged ones beside it, once the mark `after` is reached.
        """
        if block.home == "resident":
            self._here(block, target, gradient, scale=scale, absent=absent, now=now)
            return None
        chunk = self._chunks[block]
        self._fetch(chunk.turn)
        if isinstance(scale, Tensor):
            self._streams.lend(scale, self._step_queue)
        ready = self._step_queue.run(
            lambda: self._aside(block, target, gradient, scale=scale, absent=absent, now=now),
            after=[self._loaded.pop(chunk.turn), after],
        )
        stored = self._store_queue.run(lambda: chunk.store.copy_(chunk.work, non_blocking=True), after=[ready])
        self._stored[chunk.turn] = self._free[chunk.turn % len(self._buffers)] = stored
        return ready

    def run_ahead(self) -> None:
        """Begin to load the first blocks of the next step."""
        for turn in range(len(self._buffers)):
            self._fetch(turn)

    def _fetch(self, turn: int) -> None:
        if turn in self._loaded:
            return
        chunk, number = self._staged[turn], turn % len(self._buffers)
        self._loaded.pop(self._owner[number], None)  # loaded ahead, then it had no gradient
        self._owner[number] = turn
        marks = (self._free[number], self._stored.get(turn))
        self._loaded[turn] = self._load_queue.run(
            lambda: chunk.work.copy_(chunk.store, non_blocking=True), after=[m for m in marks if m is not None]
        )

    def _forget_loaded(self) -> None:
        """Drop what was loaded ahead, since it is out of date: it is loaded again."""
        self.wait()
        self._loaded.clear()

    def wait(self) -> None:
        """Block until all state is stored and nothing is on its way."""
        for mark in (*self._stored.values(), *self._loaded.values()):
            mark.wait()

    def close(self) -> None:
        """Give locked host memory back."""
        self.wait()
        self.slab.close()
