"""Where a block's lines are: in memory, or on disk with a few buffers that parts of blocks pass through."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from unisono.background import Handle
from unisono.offload.disk import Disk, Slot, aligned

Dtypes = Mapping[str, torch.dtype]


class Home:
    """The lines of one block. `open` gives one part of them to be changed in place, `release` takes it back."""

    parts = 1

    def span(self, part: int) -> tuple[int, int]:
        """The elements of a part."""
        raise NotImplementedError

    def open(self, part: int) -> Mapping[str, Tensor]:
        """The lines of a part, to be changed."""
        raise NotImplementedError

    def release(self, part: int) -> None:
        """The part has been changed."""

    def prefetch(self) -> None:
        """Begin to read."""

    def check(self) -> None:
        """Raise what went wrong so far."""

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """A copy of some elements of a line."""
        raise NotImplementedError

    def write(self, name: str, start: int, values: Tensor) -> None:
        """Change some elements of a line."""
        raise NotImplementedError


class MemoryHome(Home):
    """Lines in memory."""

    def __init__(self, lines: dict[str, Tensor]) -> None:
        self._lines = lines

    def span(self, part: int) -> tuple[int, int]:
        return 0, self._lines["master"].numel()

    def open(self, part: int) -> Mapping[str, Tensor]:
        return self._lines

    def read(self, name: str, start: int, stop: int) -> Tensor:
        return self._lines[name][start:stop].clone()

    def write(self, name: str, start: int, values: Tensor) -> None:
        self._lines[name][start : start + values.numel()].copy_(values)


class _Field(NamedTuple):
    offset: int  # bytes
    nbytes: int
    dtype: torch.dtype


class Part:
    """Some elements of a block on disk, all their lines in one slot; empty until it is first written."""

    def __init__(self, slot: Slot, fields: Mapping[str, _Field], first: Mapping[str, float]) -> None:
        self.slot, self.fields, self.first = slot, fields, first
        self.empty = True

    def lines(self, memory: Tensor) -> dict[str, Tensor]:
        """The lines in a buffer that holds this part."""
        return {name: memory[f.offset : f.offset + f.nbytes].view(f.dtype) for name, f in self.fields.items()}

    def fill(self, memory: Tensor) -> None:
        """What an empty part holds."""
        memory.zero_()
        for name, line in self.lines(memory).items():
            line.fill_(self.first.get(name, 0.0))


@dataclass(eq=False)
class _Buffer:
    memory: Tensor
    part: Part | None = None
    reading: Handle[Tensor] | None = None
    writing: Handle[Tensor] | None = None
    dirty: bool = False  # newer than the disk
    ahead: bool = False  # read, or being read, before anybody needed it
    open: bool = False
    error: Exception | None = None  # of its last write

    def bytes(self) -> Tensor:
        assert self.part is not None
        return self.memory[: aligned(self.part.slot.nbytes)]


BUFFERS = 5  # parts of blocks on disk that are in memory at a time


class Parts:
    """The buffers: at most `buffers` parts are in memory, whatever the size of the blocks.

    A part that was changed is written in the background, and its buffer is used again once that is done. If a write
    fails, the part stays in its buffer, so nothing is lost: `flush` tries again.
    """

    def __init__(self, disk: Disk, *, buffers: int = BUFFERS, ahead: int = 2) -> None:
        self.disk = disk
        self._limit, self._ahead = buffers, ahead
        self._buffers: list[_Buffer] = []  # least recently used first
        self._wanted: deque[Part] = deque()

    @property
    def buffer_bytes(self) -> int:
        """The memory that the buffers take."""
        return sum(buffer.memory.numel() for buffer in self._buffers)

    def open(self, part: Part) -> Tensor:
        """The memory that holds a part; it stays there until it is released."""
        with contextlib.suppress(ValueError):
            self._wanted.remove(part)  # it is read now: a second time would be for nothing
        buffer = self.find(part)
        if buffer is None:
            buffer = self._take()
            self._begin_read(buffer, part)
        self._settle(buffer)
        self._finish_read(buffer)
        buffer.open, buffer.ahead = True, False
        self._buffers.remove(buffer)
        self._buffers.append(buffer)
        self._read_ahead()
        return buffer.memory

    def release(self, part: Part, *, write: bool = True) -> None:
        """The part was changed: write it now, or when its buffer is needed."""
        buffer = self.find(part)
        assert buffer is not None
        buffer.open, buffer.dirty, part.empty = False, True, False
        if write:
            self._begin_write(buffer)

    def want(self, parts: Iterable[Part], *, first: bool = False) -> None:
        """These parts will be opened soon, in this order; `first`: before those wanted so far."""
        new = [part for part in parts if self.find(part) is None]
        if first:
            self._wanted.extendleft(part for part in reversed(new) if part not in self._wanted)
        else:
            self._wanted.extend(part for part in new if part not in self._wanted)
        self._read_ahead()

    def find(self, part: Part) -> _Buffer | None:
        """The buffer that holds a part."""
        return next((buffer for buffer in self._buffers if buffer.part is part), None)

    def check(self) -> None:
        """Raise the error of a write that failed."""
        for buffer in self._buffers:
            if buffer.writing is not None and buffer.writing.done():
                self._settle(buffer)
            if buffer.error is not None:
                raise buffer.error

    def flush(self) -> None:
        """Write what has not been written, those that failed again, and wait; raises the first error."""
        for buffer in self._buffers:
            if buffer.dirty and buffer.writing is None:
                self._begin_write(buffer)
        for buffer in self._buffers:
            with contextlib.suppress(OSError):  # raised below, once all have been waited for
                self._settle(buffer)
        self.check()

    def _take(self) -> _Buffer:
        """A buffer for another part; waits for a write where all are in use."""
        buffer = self._spare()
        if buffer is not None:
            return buffer
        for buffer in self._buffers:
            if buffer.dirty and buffer.writing is None and buffer.error is None and not buffer.open:
                self._begin_write(buffer)
        for buffer in self._buffers:
            if buffer.writing is not None:
                self._settle(buffer)
                return self._emptied(buffer)
        for buffer in self._buffers:
            if not buffer.dirty and not buffer.open:
                with contextlib.suppress(OSError):
                    self._finish_read(buffer)
                return self._emptied(buffer)
        self.check()
        raise AssertionError("every buffer is open")

    def _spare(self) -> _Buffer | None:
        """A buffer that can be used at once."""
        for buffer in self._buffers:
            if buffer.writing is not None and buffer.writing.done():
                with contextlib.suppress(OSError):  # kept in the buffer, and raised by check
                    self._settle(buffer)
        for buffer in self._buffers:
            if not (buffer.dirty or buffer.ahead or buffer.open or buffer.reading):
                return self._emptied(buffer)
        if len(self._buffers) < self._limit:
            self._buffers.append(_Buffer(torch.empty(0, dtype=torch.uint8)))
            return self._buffers[-1]
        return None

    def _emptied(self, buffer: _Buffer) -> _Buffer:
        buffer.part, buffer.ahead = None, False
        return buffer

    def _read_ahead(self) -> None:
        while self._wanted and sum(buffer.ahead for buffer in self._buffers) < self._ahead:
            if self.find(self._wanted[0]) is None:
                buffer = self._spare()
                if buffer is None:
                    return
                self._begin_read(buffer, self._wanted[0])
                buffer.ahead = True
            self._wanted.popleft()

    def _begin_read(self, buffer: _Buffer, part: Part) -> None:
        if buffer.memory.numel() < aligned(part.slot.nbytes):
            buffer.memory = self.disk.buffer(aligned(part.slot.nbytes))
        buffer.part = part
        if part.empty:
            part.fill(buffer.memory)
        else:
            buffer.reading = self.disk.read(part.slot, buffer.bytes())

    def _finish_read(self, buffer: _Buffer) -> None:
        reading, buffer.reading = buffer.reading, None
        if reading is not None:
            try:
                reading.wait()
            except BaseException:
                self._emptied(buffer)
                raise

    def _begin_write(self, buffer: _Buffer) -> None:
        assert buffer.part is not None
        buffer.error = None
        buffer.writing = self.disk.write(buffer.part.slot, buffer.bytes())

    def _settle(self, buffer: _Buffer) -> None:
        """Wait for a buffer's write."""
        if buffer.writing is not None:
            try:
                buffer.writing.wait()
            except Exception as error:
                buffer.writing, buffer.error = None, error
                raise
            buffer.writing, buffer.dirty = None, False


class DiskHome(Home):
    """Lines on disk, in parts."""

    def __init__(
        self, parts: Parts, dtypes: Dtypes, length: int, part_elements: int, first: Mapping[str, float]
    ) -> None:
        self._pool = parts
        self._size = _part_size(part_elements)
        self._length = length
        self._all = []
        for start, stop in _spans(length, self._size):
            fields, nbytes = _layout(dtypes, stop - start)
            self._all.append(Part(parts.disk.place(nbytes), fields, first))
        self.parts = len(self._all)

    def span(self, part: int) -> tuple[int, int]:
        return part * self._size, min(self._length, (part + 1) * self._size)

    def open(self, part: int) -> Mapping[str, Tensor]:
        memory = self._pool.open(self._all[part])
        self._pool.want(self._all[part + 1 : part + 2], first=True)
        return self._all[part].lines(memory)

    def release(self, part: int) -> None:
        self._pool.release(self._all[part])

    def prefetch(self) -> None:
        self._pool.want(self._all)

    def check(self) -> None:
        self._pool.check()

    def read(self, name: str, start: int, stop: int) -> Tensor:
        dtype = self._all[0].fields[name].dtype if self._all else torch.float32
        found = self._pool.disk.buffer((stop - start) * dtype.itemsize).view(dtype)  # direct I/O needs no copy there
        handles = []
        for number, low, high in self._overlaps(start, stop):
            part, at, into = self._all[number], low - number * self._size, found[low - start : high - start]
            buffer = self._pool.find(part)
            if part.empty:
                into.fill_(part.first.get(name, 0.0))
            elif buffer is not None and buffer.reading is None:
                into.copy_(part.lines(buffer.memory)[name][at : at + high - low])
            else:
                slot = part.slot.part(part.fields[name].offset + at * dtype.itemsize, into.nbytes)
                handles.append(self._pool.disk.read(slot, into))
        for handle in handles:
            handle.wait()
        return found

    def write(self, name: str, start: int, values: Tensor) -> None:
        for number, low, high in self._overlaps(start, start + values.numel()):
            part, at = self._all[number], low - number * self._size
            line = part.lines(self._pool.open(part))[name]
            line[at : at + high - low].copy_(values[low - start : high - start])
            self._pool.release(part, write=name == "master" and high == self.span(number)[1])

    def _overlaps(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        for number in range(start // self._size, -(-stop // self._size)):
            first, last = self.span(number)
            yield number, max(start, first), min(stop, last)


def disk_bytes(dtypes: Dtypes, length: int, part_elements: int) -> int:
    """What a block of `length` elements with these lines takes on disk."""
    return sum(aligned(_layout(dtypes, stop - start)[1]) for start, stop in _spans(length, _part_size(part_elements)))


def _part_size(elements: int) -> int:
    """Parts end on a border that no fused kernel's vectors cross, so that they step like the whole."""
    return max(1, -(-elements // 1024)) * 1024


def _spans(length: int, size: int) -> Iterator[tuple[int, int]]:
    return ((start, min(length, start + size)) for start in range(0, length, size))


def _layout(dtypes: Dtypes, n: int) -> tuple[dict[str, _Field], int]:
    fields, offset = {}, 0
    for name, dtype in dtypes.items():
        fields[name] = _Field(offset, n * dtype.itemsize, dtype)
        offset += aligned(n * dtype.itemsize)
    return fields, offset
