"""Tensors that are read in parts: `Piece`, a rank's elements of a split tensor, and `Stored`, a tensor in a checkpoint.

Both are read a bounded number of bytes at a time, so that state that is larger than memory can be saved and loaded.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

CHUNK_BYTES = 8 << 20  # the most that is read at a time

Read = Callable[[int, int], Tensor]
Held = tuple[str, list[int], list[list[int]]]  # dtype, shape, and the spans that a rank holds


class Span(NamedTuple):
    """Elements `start` to `stop` of a flattened tensor, and how to get them.

    `read(first, last)` gives the elements from `first` up to `last`, counted in the WHOLE flattened tensor and inside
    the span, as a 1-D CPU tensor (a view is welcome).
    """

    start: int
    stop: int
    read: Read


@dataclass(frozen=True, eq=False)
class Piece:
    """The elements that this rank holds of a tensor that is split over the ranks; possibly none.

    `shape` and `dtype` are the whole tensor's, row-major. Over all ranks, the spans hold each element exactly once.
    A tensor that has several names is one Piece under all of them. `held`: the elements of the only span, if they lie
    in memory (a device's, too). `freeze(kept)`: of elements on a disk, the
    same as they are now, not to be copied: a piece that `stays` so until the values of `kept`, which are those of one
    save, are released; None if the disk has no room for that.

    >>> shard = torch.arange(3.0)                        # rank 1's half of a tensor of 2 rows and 3 columns
    >>> Piece.of(shard, 3, shape=(2, 3)).spans[0][:2]
    (3, 6)
    """

    shape: Sequence[int]
    dtype: torch.dtype
    spans: Sequence[Span | tuple[int, int, Read]] = ()
    held: Tensor | None = None
    freeze: Callable[[dict[Any, Any]], Piece | None] | None = None
    stays: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", torch.Size(self.shape))
        object.__setattr__(self, "spans", _order(self.spans, self.numel()))

    @classmethod
    def of(cls, held: Tensor, start: int, *, shape: Sequence[int]) -> Piece:
        """A piece whose elements, from number `start` on, lie in memory: `held`, of one dimension."""
        if not held.numel():
            return cls(shape, held.dtype)
        span = Span(start, start + held.numel(), lambda a, b: held.detach()[a - start : b - start])
        return cls(shape, held.dtype, [span], held.detach())

    def numel(self) -> int:
        """How many elements the whole tensor has."""
        return math.prod(self.shape)

    def describe(self) -> Held:
        """dtype and shape of the whole, and this rank's spans, as plain values that can be sent."""
        return str(self.dtype).removeprefix("torch."), list(self.shape), [[a, b] for a, b, _ in self.spans]

    def chunks(self, start: int, stop: int, read: Read) -> Iterator[Tensor]:
        """The elements of one span in order, a bounded number at a time; each checked."""
        step = max(1, CHUNK_BYTES // self.dtype.itemsize)
        for first in range(start, stop, step):
            yield _read_checked(read, first, min(first + step, stop), self.dtype)


class Stored:
    """A whole tensor that lies in a checkpoint (or in memory); only what is asked for is read.

    >>> stored = Stored.of(torch.arange(6).reshape(2, 3))
    >>> stored.shape, stored.dtype, stored.read(2, 5)
    (torch.Size([2, 3]), torch.int64, tensor([2, 3, 4]))
    """

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, spans: Iterable[Span | tuple[int, int, Read]], name: str = ""
    ) -> None:
        self.shape, self.dtype, self.name = torch.Size(shape), dtype, name
        self._spans = _order(spans, self.numel())
        self._starts = [span.start for span in self._spans]
        self._memory: Tensor | None = None
        if hole := _find_hole([[a, b] for a, b, _ in self._spans], self.numel()):
            raise ValueError(f"{name or 'a stored tensor'} of {self.numel()} elements: {hole}")

    @classmethod
    def of(cls, tensor: Tensor, name: str = "") -> Stored:
        """A `Stored` whose values lie in memory."""
        line = tensor.detach().reshape(-1)
        stored = cls(tensor.shape, tensor.dtype, [Span(0, line.numel(), lambda a, b: line[a:b])], name)
        stored._memory = tensor
        return stored

    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """How many bytes its values take."""
        return self.numel() * self.dtype.itemsize

    def read(self, start: int, stop: int, *, out: Tensor | None = None) -> Tensor:
        """Elements `start` to `stop` of the flattened tensor, as a 1-D CPU tensor.

        `out`, a 1-D tensor of that length of any dtype on any device, receives them (converted) and is returned;
        beyond it the reading takes no more than some MiB, whatever the length.
        """
        if not 0 <= start <= stop <= self.numel():
            raise ValueError(f"elements {start} to {stop} of {self!r}: expected 0 <= start <= stop <= {self.numel()}")
        if out is None:
            if (single := self._single(start, stop)) is not None:
                return single
            out = torch.empty(stop - start, dtype=self.dtype)
        if out.shape != (stop - start,):
            raise ValueError(f"out has shape {tuple(out.shape)}; expected ({stop - start},) for the elements asked for")
        for first, part in self._parts(start, stop):
            out.detach()[first - start : first - start + part.numel()].copy_(part)
        return out

    def full(self) -> Tensor:
        """The whole tensor, in its shape; if it lies in memory, the same object each time."""
        if self._memory is not None:
            return self._memory
        return self.read(0, self.numel()).reshape(self.shape)

    def chunks(self) -> Iterator[Tensor]:
        """All elements in order, a bounded number at a time."""
        return (part for _, part in self._parts(0, self.numel()))

    def view_as(self, dtype: torch.dtype, shape: Sequence[int]) -> Stored:
        """These bytes (of dtype uint8) as a tensor of another dtype and shape."""
        size = dtype.itemsize
        span = Span(0, math.prod(shape), lambda a, b: self.read(a * size, b * size).view(dtype))
        if span.stop * size != self.nbytes:
            raise ValueError(f"{self!r} has {self.nbytes} bytes, a {dtype} of shape {list(shape)} takes others")
        return Stored(shape, dtype, [span], self.name)

    def _single(self, start: int, stop: int) -> Tensor | None:
        """Elements that a single read of a file gives, which are the caller's own without a copy; else None."""
        if self._memory is not None or not 0 < (stop - start) * self.dtype.itemsize <= CHUNK_BYTES:
            return None
        span = self._spans[bisect_right(self._starts, start) - 1]
        return _read_checked(span.read, start, stop, self.dtype) if stop <= span.stop else None

    def _parts(self, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        step = max(1, CHUNK_BYTES // self.dtype.itemsize)
        index = max(0, bisect_right(self._starts, start) - 1)
        while start < stop:
            span = self._spans[index]
            last = min(stop, span.stop, start + step)
            yield start, _read_checked(span.read, start, last, self.dtype)
            start = last
            index += start == span.stop

    def __repr__(self) -> str:
        return f"Stored({self.name or 'tensor'}: {self.dtype} {list(self.shape)})"


def list_runs(shape: Sequence[int], block: Sequence[int], offset: Sequence[int]) -> tuple[int, list[int]]:
    """A rectangular block of a tensor as runs of one length that lie together in the flattened tensor: that length, and
    where each begins.

    >>> list_runs((2, 4), (2, 2), (0, 1))
    (2, [1, 5])
    """
    if math.prod(block) == 0:
        return 0, []
    last = max(len(shape) - 1, 0)  # the outermost dimension from which on runs lie together
    while last > 0 and block[last] == shape[last]:
        last -= 1
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    starts = [sum(o * s for o, s in zip(offset, strides, strict=True))]
    for i in range(last):
        starts = [start + j * strides[i] for start in starts for j in range(block[i])]
    return math.prod(block[last:]), starts


def find_gaps(holds: Sequence[dict[str, Held]]) -> list[str]:
    """Problems with the pieces of all ranks: names with different wholes, elements that no rank or several hold."""
    problems = []
    for name in dict.fromkeys(name for held in holds for name in held):
        ranks = [(rank, held[name]) for rank, held in enumerate(holds) if name in held]
        first, (dtype, shape, _) = ranks[0]
        other = next((r for r, (d, s, _) in ranks if (d, list(s)) != (dtype, list(shape))), None)
        if other is not None:
            there = holds[other][name]
            problems.append(f"{name} is {dtype} {shape} on rank {first}, {there[0]} {list(there[1])} on rank {other}")
        elif hole := _find_hole(sorted(span for _, (_, _, spans) in ranks for span in spans), math.prod(shape)):
            problems.append(f"{name} {shape}: {hole}")
    return problems


def _order(spans: Iterable[Any], numel: int) -> tuple[Span, ...]:
    ordered = sorted((Span(*span) for span in spans), key=lambda span: span[:2])
    for start, stop, _ in ordered:
        if not 0 <= start <= stop <= numel:
            raise ValueError(f"a span from {start} to {stop} of a tensor of {numel} elements")
    return tuple(span for span in ordered if span.start < span.stop)


def _find_hole(spans: Iterable[Sequence[int]], numel: int) -> str:
    """The first place at which sorted spans do not hold each of `numel` elements exactly once, in words; else empty."""
    position = 0
    for start, stop in spans:
        if start > position:
            return f"no rank holds elements {position} to {start}"
        if start < position:
            return f"elements {start} to {min(position, stop)} are held twice"
        position = stop
    return f"no rank holds elements {position} to {numel}" if position < numel else ""


def _read_checked(read: Read, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    got = read(start, stop)
    if got.dtype != dtype or got.shape != (stop - start,):
        raise RuntimeError(
            f"reading elements {start} to {stop} gave {got.dtype} of shape {tuple(got.shape)}; "
            f"expected {dtype} of shape ({stop - start},)"
        )
    return got.detach().cpu().contiguous()


def map_state(value: Any, kinds: Any, change: Callable[[Any], Any]) -> Any:
    """A value of an optimizer's state with what is of these kinds changed, in lists and dicts too."""
    if isinstance(value, kinds):
        return change(value)
    if isinstance(value, dict):
        return {key: map_state(x, kinds, change) for key, x in value.items()}
    return type(value)(map_state(x, kinds, change) for x in value) if type(value) in (list, tuple) else value


def as_pieces(value: Any) -> Any:
    """A value of an optimizer's state with a Piece for every tensor in it: nobody else has it."""
    return map_state(value, Tensor, lambda x: Piece.of(x.reshape(-1), 0, shape=x.shape) if x.dim() else x)
