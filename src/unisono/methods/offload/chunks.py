"""Blocks on disk: their chunks, and the few buffers in memory that chunks pass through."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.background import Handle
from unisono.methods.offload.blocks import Block, Chunk
from unisono.methods.offload.disk import ALIGNMENT, Disk, Region, align

CHUNK_ELEMENTS = 4 << 20  # 48 MB for Adam
CHUNK_BUFFERS = 5
_READ_AHEAD = 2


class DiskChunk(Chunk):
    """Some elements of a block on disk, all their lines in one region; empty until it is first written."""

    def __init__(self, block: Block, start: int, stop: int, buffers: ChunkBuffers) -> None:
        super().__init__(start, stop)
        self._layout, self._dtypes = block.lay_out(stop - start, ALIGNMENT), block.dtypes
        self.disk, self.region, self.first = buffers.disk, buffers.disk.place(self._layout.numel), block.first
        buffers.chunks.append(self)
        self.empty = True
        self.following: DiskChunk | None = None  # of the same block
        self._buffers = buffers

    def lines(self, memory: Tensor) -> dict[str, Tensor]:
        """The lines in a buffer that holds this chunk."""
        return dict(zip(self._dtypes, self._layout.views(memory), strict=True))

    def fill(self, memory: Tensor) -> None:
        """Fill a buffer with the first values of a chunk that was never written."""
        memory.zero_()
        for name, line in self.lines(memory).items():
            line.fill_(self.first.get(name, 0.0))

    def open(self) -> Mapping[str, Tensor]:
        memory = self._buffers.open(self)
        if self.following is not None:
            self._buffers.want([self.following], first=True)
        return self.lines(memory)

    def release(self) -> None:
        self._buffers.release(self)

    def prefetch(self) -> None:
        self._buffers.want([self])

    def read(self, name: str, low: int, high: int, into: Tensor) -> Handle[Tensor]:
        buffer = self._buffers.find(self)
        if self.empty:
            return Handle.of(into.fill_(self.first.get(name, 0.0)))
        if buffer is not None and buffer.reading is None:
            return Handle.of(into.copy_(self.lines(buffer.memory)[name][low:high]))
        return self.disk.read(self.find_place(name, low, into.nbytes, self.region), into)

    def find_place(self, name: str, low: int, nbytes: int, region: Region) -> Region:
        """Where elements of a line are in a region that holds this chunk."""
        begin = self._layout.starts[list(self._dtypes).index(name)] + low * self._dtypes[name].itemsize
        return region.slice(begin, nbytes)

    def freeze(self) -> Chunk:
        return FrozenChunk(self)

    def write(self, name: str, low: int, values: Tensor) -> None:
        line = self.lines(self._buffers.open(self))[name]
        line[low : low + values.numel()].copy_(values)
        last = name == "master" and low + values.numel() == self.stop - self.start
        self._buffers.release(self, write=last)


class FrozenChunk(Chunk):
    """A chunk on disk as it is now: to be read by any thread, as long as its `Frozen` is not released."""

    def __init__(self, chunk: DiskChunk) -> None:
        super().__init__(chunk.start, chunk.stop)
        self._chunk, self._disk, self._region, self._empty = chunk, chunk.disk, chunk.region, chunk.empty

    def read(self, name: str, low: int, high: int, into: Tensor) -> Handle[Tensor]:
        if self._empty:
            return Handle.of(into.fill_(self._chunk.first.get(name, 0.0)))
        return self._disk.read(self._chunk.find_place(name, low, into.nbytes, self._region), into)


class Frozen:
    """What blocks on disk were at one moment: chunks that are changed later are written to another place."""

    def __init__(self, chunks: Iterable[DiskChunk]) -> None:
        self.chunks = set(chunks)  # in the place where they were
        self.left: list[tuple[Disk, Region]] = []  # the places of the others
        self.blocks: dict[int, list[Chunk]] = {}  # by index: also those of which a part is in memory
        self.is_over = False

    def freeze(self, block: Block) -> list[Chunk]:
        """A block's chunks as they are now."""
        if block.index not in self.blocks:
            self.blocks[block.index] = [chunk.freeze() for chunk in block.chunks]
        return self.blocks[block.index]

    def release(self) -> None:
        """Nobody reads it any more; any thread may call this."""
        self.is_over = True


@dataclass(eq=False)
class _Buffer:
    memory: Tensor
    chunk: DiskChunk | None = None
    reading: Handle[Tensor] | None = None
    writing: Handle[Tensor] | None = None
    dirty: bool = False  # newer than the disk
    ahead: bool = False  # read, or being read, before anybody needed it
    open: bool = False
    error: Exception | None = None  # of its last write

    def bytes(self) -> Tensor:
        assert self.chunk is not None
        return self.memory[: align(self.chunk.region.nbytes)]


class ChunkBuffers:
    """The buffers: at most `buffers` chunks are in memory, whatever the size of the blocks.

    A chunk that was changed is written in the background, and its buffer is used again once that is done. If a write
    fails, the chunk stays in its buffer, so nothing is lost: `flush` tries again.
    """

    def __init__(self, disk: Disk, *, buffers: int = CHUNK_BUFFERS, ahead: int = _READ_AHEAD) -> None:
        self.disk = disk
        self.chunks: list[DiskChunk] = []
        self._frozen: Frozen | None = None
        self._other: Disk | None = None  # room for a second copy of everything, once one was frozen
        self._spare: list[tuple[Disk, Region]] = []
        self._limit, self._ahead = buffers, ahead
        self._buffers: list[_Buffer] = []  # least recently used first
        self._wanted: deque[DiskChunk] = deque()

    @property
    def nbytes(self) -> int:
        """The memory that the buffers take."""
        return sum(buffer.memory.numel() for buffer in self._buffers)

    def open(self, chunk: DiskChunk) -> Tensor:
        """The memory that holds a chunk; it stays there until it is released."""
        with contextlib.suppress(ValueError):
            self._wanted.remove(chunk)  # it is read now: a second time would be for nothing
        buffer = self.find(chunk)
        if buffer is None:
            buffer = self._take()
            self._begin_read(buffer, chunk)
        self._finish_write(buffer)
        self._finish_read(buffer)
        buffer.open, buffer.ahead = True, False
        self._buffers.remove(buffer)
        self._buffers.append(buffer)
        self._read_ahead()
        return buffer.memory

    def release(self, chunk: DiskChunk, *, write: bool = True) -> None:
        """The chunk was changed: write it now, or when its buffer is needed."""
        buffer = self.find(chunk)
        assert buffer is not None
        buffer.open, buffer.dirty, chunk.empty = False, True, False
        if write:
            self._begin_write(buffer)

    def want(self, chunks: Iterable[DiskChunk], *, first: bool = False) -> None:
        """These chunks will be opened soon, in this order; `first`: before those wanted so far."""
        new = [chunk for chunk in chunks if self.find(chunk) is None]
        if first:
            self._wanted.extendleft(chunk for chunk in reversed(new) if chunk not in self._wanted)
        else:
            self._wanted.extend(chunk for chunk in new if chunk not in self._wanted)
        self._read_ahead()

    def find(self, chunk: DiskChunk) -> _Buffer | None:
        """The buffer that holds a chunk."""
        return next((buffer for buffer in self._buffers if buffer.chunk is chunk), None)

    def check(self) -> None:
        """Raise the error of a write that failed."""
        for buffer in self._buffers:
            if buffer.writing is not None and buffer.writing.done():
                self._finish_write(buffer)
            if buffer.error is not None:
                raise buffer.error

    def flush(self) -> None:
        """Write what has not been written, those that failed again, and wait; raises the first error."""
        for buffer in self._buffers:
            if buffer.dirty and buffer.writing is None:
                self._begin_write(buffer)
        for buffer in self._buffers:
            with contextlib.suppress(OSError):  # raised below, once all have been waited for
                self._finish_write(buffer)
        self.check()

    def freeze(self) -> Frozen:
        """Keep what is on disk as it is now, without reading it, until that is released. Takes as much room again;
        `DiskError` if there is none."""
        self.flush()
        self._end_freezing()
        assert self._frozen is None, "another is being read"
        if self._other is None:
            self._other = Disk(self.disk.folder, self.disk.nbytes)
        self._frozen = Frozen(chunk for chunk in self.chunks if not chunk.empty)
        return self._frozen

    def _end_freezing(self) -> None:
        if self._frozen is not None and self._frozen.is_over:
            self._spare += self._frozen.left
            self._frozen = None

    def _move_away(self, chunk: DiskChunk) -> None:
        """Before a chunk is written: give it another place, if what is in its place is to stay."""
        self._end_freezing()
        if self._frozen is None or chunk not in self._frozen.chunks:
            return
        self._frozen.chunks.discard(chunk)
        self._frozen.left.append((chunk.disk, chunk.region))
        nbytes = chunk.region.nbytes
        place = next((one for one in self._spare if one[1].nbytes == nbytes), None)
        if place is not None:
            self._spare.remove(place)
        else:
            assert self._other is not None
            place = self._other, self._other.place(nbytes)
        chunk.disk, chunk.region = place

    def _take(self) -> _Buffer:
        """A buffer for another chunk; waits for a write where all are in use."""
        buffer = self._find_spare()
        if buffer is not None:
            return buffer
        for buffer in self._buffers:
            if buffer.dirty and buffer.writing is None and buffer.error is None and not buffer.open:
                self._begin_write(buffer)
        for buffer in self._buffers:
            if buffer.writing is not None:
                self._finish_write(buffer)
                return self._empty(buffer)
        for buffer in self._buffers:
            if not buffer.dirty and not buffer.open:
                with contextlib.suppress(OSError):
                    self._finish_read(buffer)
                return self._empty(buffer)
        self.check()
        raise AssertionError("every buffer is open")

    def _find_spare(self) -> _Buffer | None:
        """A buffer that can be used at once."""
        for buffer in self._buffers:
            if buffer.writing is not None and buffer.writing.done():
                with contextlib.suppress(OSError):  # kept in the buffer, and raised by check
                    self._finish_write(buffer)
        for buffer in self._buffers:
            if not (buffer.dirty or buffer.ahead or buffer.open or buffer.reading):
                return self._empty(buffer)
        if len(self._buffers) < self._limit:
            self._buffers.append(_Buffer(torch.empty(0, dtype=torch.uint8)))
            return self._buffers[-1]
        return None

    def _empty(self, buffer: _Buffer) -> _Buffer:
        buffer.chunk, buffer.ahead = None, False
        return buffer

    def _read_ahead(self) -> None:
        while self._wanted and sum(buffer.ahead for buffer in self._buffers) < self._ahead:
            if self.find(self._wanted[0]) is None:
                buffer = self._find_spare()
                if buffer is None:
                    return
                self._begin_read(buffer, self._wanted[0])
                buffer.ahead = True
            self._wanted.popleft()

    def _begin_read(self, buffer: _Buffer, chunk: DiskChunk) -> None:
        if buffer.memory.numel() < align(chunk.region.nbytes):
            buffer.memory = self.disk.make_buffer(align(chunk.region.nbytes))
        buffer.chunk = chunk
        if chunk.empty:
            chunk.fill(buffer.memory)
        else:
            buffer.reading = chunk.disk.read(chunk.region, buffer.bytes())

    def _finish_read(self, buffer: _Buffer) -> None:
        reading, buffer.reading = buffer.reading, None
        if reading is not None:
            try:
                reading.wait()
            except BaseException:
                self._empty(buffer)
                raise

    def _begin_write(self, buffer: _Buffer) -> None:
        assert buffer.chunk is not None
        buffer.error = None
        self._move_away(buffer.chunk)
        buffer.writing = buffer.chunk.disk.write(buffer.chunk.region, buffer.bytes())

    def _finish_write(self, buffer: _Buffer) -> None:
        """Wait for a buffer's write."""
        if buffer.writing is not None:
            try:
                buffer.writing.wait()
            except Exception as error:
                buffer.writing, buffer.error = None, error
                raise
            buffer.writing, buffer.dirty = None, False


def place_on_disk(block: Block, buffers: ChunkBuffers, chunk_elements: int) -> None:
    """Give a block room on disk, and write its master values there, which are let go."""
    chunks = [DiskChunk(block, *span, buffers) for span in _spans(block.length, chunk_elements)]
    for chunk, following in itertools.pairwise(chunks):
        chunk.following = following
    block.chunks = list(chunks)
    if block.master is not None:
        block.load({"master": block.master})
        block.master = None


def bytes_on_disk(block: Block, chunk_elements: int) -> int:
    """Bytes that a block takes on disk."""
    spans = _spans(block.length, chunk_elements)
    return sum(block.lay_out(stop - start, ALIGNMENT).numel for start, stop in spans)


def _spans(length: int, elements: int) -> Iterator[tuple[int, int]]:
    """Chunks end on a border that no fused kernel's vectors cross, so that they step like the whole."""
    size = max(1, -(-elements // 1024)) * 1024
    return ((start, min(length, start + size)) for start in range(0, length, size))
