"""A consistent copy of state in host memory, taken between two steps: what a background save writes.

The memory is kept from one save to the next, as a first touch of it costs many times the copy. What lies on a GPU is
copied in the order of its stream, so whatever the program does next cannot change it: inside the device first, if
that has room, and from there into pinned memory beside the kernels that follow; else straight into pinned memory.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.training.checkpoint.slices import Piece, Span

_ALIGN = 64  # bytes
_HUGE = 2 << 20
_SPARE_DEVICE_BYTES = 1 << 30  # of a GPU, left to the program


class Snapshot:
    """Host memory for one copy of a rank's state, used again by the next once it has been written."""

    def __init__(self) -> None:
        self._line = torch.empty(0, dtype=torch.uint8)
        self._is_pinned = False
        self._unpin: Any = lambda: None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._copied: list[torch.cuda.Event] = []
        self._kept: dict[Any, Any] = {}  # of disks, by whoever uses them

    @property
    def nbytes(self) -> int:
        """The host memory that it holds."""
        return self._line.numel()

    def warm(self, nbytes: int) -> None:
        """Take host memory for a copy of so many bytes, and touch it."""
        self._reserve(nbytes, pinned=False)
        self._line.zero_()

    def freeze(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """Keep what is on a disk as it is now, without reading it, until `release()`; pieces that cannot be kept are as
        they were."""
        found = {}
        for name, value in parts.items():
            freeze = value.freeze if isinstance(value, Piece) else None
            found[name] = value if freeze is None else freeze(self._kept) or value
        return found

    def release(self) -> None:
        """Nobody needs any more what was kept on a disk."""
        for kept in self._kept.values():
            if kept is not None:
                kept.release()
        self._kept = {}

    def take(self, parts: Sequence[Mapping[str, Tensor | Piece]]) -> list[dict[str, Any]]:
        """Copy tensors and pieces; returns the same with the copies in their place.

        Those from a GPU are complete after `wait()`, and are what the tensors were when this was called.
        """
        sources = [list(_list_sources(value)) for part in parts for value in part.values()]
        self._reserve(
            sum(_round_up(x.nbytes if isinstance(x, Tensor) else x[1]) for one in sources for x in one),
            pinned=any(isinstance(x, Tensor) and x.is_cuda for one in sources for x in one),
        )
        self._copied, late = [], dict[torch.device, list[tuple[Tensor, Tensor]]]()
        position, found = 0, []
        remaining = iter(sources)
        for part in parts:
            copies: dict[str, Any] = {}
            for name, value in part.items():
                lines = []
                for source in next(remaining):
                    nbytes = source.nbytes if isinstance(source, Tensor) else source[1]
                    line = self._line[position : position + nbytes]
                    position += _round_up(nbytes)
                    lines.append(self._copy(source, line, late))
                copies[name] = _replace(value, lines)
            found.append(copies)
        self._copy_late(late)
        return found

    def wait(self) -> None:
        """Wait until what was on a GPU has arrived."""
        for event in self._copied:
            event.synchronize()

    def _reserve(self, nbytes: int, *, pinned: bool) -> None:
        if nbytes <= self._line.numel() and (self._is_pinned or not pinned):
            return
        self._unpin()
        self._line = torch.empty(0, dtype=torch.uint8)  # the former memory goes first
        pages = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if nbytes >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages
                pages.madvise(mmap.MADV_HUGEPAGE)
        self._line = torch.frombuffer(pages, dtype=torch.uint8)
        self._is_pinned = pinned
        if pinned:  # torch's own allocator would round up to a power of two
            runtime, address = torch.cuda.cudart(), self._line.data_ptr()
            if int(runtime.cudaHostRegister(address, self._line.numel(), 0)):
                self._line = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            else:
                self._unpin = weakref.finalize(self, runtime.cudaHostUnregister, address)
                self._unpin.atexit = False

    def _copy(self, source: Any, line: Tensor, late: dict[torch.device, list[tuple[Tensor, Tensor]]]) -> Tensor:
        """Copy one tensor, or the elements of a span as they are read, into its place."""
        if not isinstance(source, Tensor):
            chunks, _, dtype = source
            view, start = line.view(dtype), 0
            for chunk in chunks:
                view[start : start + chunk.numel()].copy_(chunk)
                start += chunk.numel()
            return view
        view = line.view(source.dtype).reshape(source.shape)
        if source.is_cuda:
            late.setdefault(source.device, []).append((view, source))
        else:
            view.copy_(source)
        return view

    def _copy_late(self, late: Mapping[torch.device, list[tuple[Tensor, Tensor]]]) -> None:
        for device, pairs in late.items():
            with torch.cuda.device(device):
                room = torch.cuda.mem_get_info(device)[0] - _SPARE_DEVICE_BYTES
                behind = []
                for view, source in pairs:
                    if source.nbytes <= room:
                        room -= source.nbytes
                        behind.append((view, source.clone()))
                    else:
                        view.copy_(source, non_blocking=True)
                side = self._streams.setdefault(device, torch.cuda.Stream(device))
                side.wait_stream(torch.cuda.current_stream(device))
                with torch.cuda.stream(side):
                    for view, copy in behind:
                        view.copy_(copy, non_blocking=True)
                        copy.record_stream(side)
                    event = torch.cuda.Event()
                    event.record(side)
                self._copied.append(event)


def _list_sources(value: Tensor | Piece) -> Iterator[Any]:
    """What is to be copied: tensors; for a span that must be read, its chunks, their bytes and their dtype."""
    if isinstance(value, Tensor):
        yield value.detach()
    elif value.held is not None:
        yield value.held
    elif not value.stays:
        for start, stop, read in value.spans:
            yield value.chunks(start, stop, read), (stop - start) * value.dtype.itemsize, value.dtype


def _replace(value: Tensor | Piece, lines: Sequence[Tensor]) -> Tensor | Piece:
    if isinstance(value, Tensor):
        return lines[0]
    if value.stays:
        return value
    spans = [
        Span(start, stop, _make_read(line, start)) for (start, stop, _), line in zip(value.spans, lines, strict=True)
    ]
    return Piece(value.shape, value.dtype, spans)


def _make_read(line: Tensor, start: int) -> Any:
    return lambda a, b: line[a - start : b - start]


def _round_up(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
