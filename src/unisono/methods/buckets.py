"""Tensors in flat memory: where each lies, and which parameters share a bucket."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

BUCKET_BYTES = 25 << 20
FIRST_BUCKET_BYTES = 1 << 20  # a bucket of less is not worth a message of its own
LARGE_BUCKET_BYTES = 128 << 20  # where launching kernels takes longer than what they do
ALONE_BUCKET_BYTES = 1 << 30  # where they are all that a bucket costs
_ALIGN_BYTES = 64  # each tensor starts on a cache line
APART_BYTES = 256 << 10  # from here on, copying a tensor into a line costs more than a call for it alone
_PARTS = 8  # parts of a bucket kept: those of methods that choose anew come and go


class FlatLayout:
    """Where tensors lie in a line of memory: one after the other, each on a boundary.

    starts, lengths: of each tensor, in elements of the line. shapes: those that the tensors had when this was made.
    numel: elements of the line, up to a boundary behind the last tensor.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        dtype: torch.dtype | None = None,
        *,
        align_bytes: int = _ALIGN_BYTES,
        contiguous: bool = False,
    ) -> None:
        """`dtype`: that of the line, if it is not the tensors' own; a line of torch.uint8 holds their bytes, whatever
        their dtypes. `align_bytes`: from one boundary to the next, those of cache lines by default; 0: there are no
        gaps. `contiguous`: views are row by row, whatever the tensors' memory order."""
        in_bytes = dtype == torch.uint8
        self.shapes = [x.shape for x in tensors]
        self.lengths = [x.numel() * x.element_size() if in_bytes else x.numel() for x in tensors]
        self._strides = [] if contiguous else [_find_strides(x) for x in tensors]  # by rows: found when views are made
        self._dtypes = [x.dtype for x in tensors] if in_bytes else None
        step = max(1, align_bytes // (dtype or tensors[0].dtype).itemsize) if tensors else 1
        *self.starts, self.numel = accumulate((-(-n // step) * step for n in self.lengths), initial=0)

    def views(self, line: Tensor) -> list[Tensor]:
        """The tensors in a line of this layout."""
        if not self._strides:
            self._strides = [_find_row_strides(shape) for shape in self.shapes]
        places = zip(self.starts, self.shapes, self._strides, strict=True)
        if self._dtypes is None:  # as_strided alone takes a third of the time of a slice and its view
            offset = line.storage_offset()
            return [line.as_strided(shape, strides, offset + start) for start, shape, strides in places]
        parts = [line[a : a + n].view(x) for a, n, x in zip(self.starts, self.lengths, self._dtypes, strict=True)]
        return [part.as_strided(shape, strides) for part, (_, shape, strides) in zip(parts, places, strict=True)]

    def overlaps(self, low: int, high: int) -> Iterator[tuple[int, int, int]]:
        """Each tensor with elements between two places of the line: its number, and where these begin and end."""
        for i, (start, length) in enumerate(zip(self.starts, self.lengths, strict=True)):
            first, last = max(low, start), min(high, start + length)
            if first < last:
                yield i, first, last

    def gaps(self, line: Tensor) -> list[Tensor]:
        """What lies between the tensors of a line, and behind the last."""
        ends = [start + length for start, length in zip(self.starts, self.lengths, strict=True)]
        return [line[a:b] for a, b in zip(ends, [*self.starts[1:], line.numel()], strict=True) if b > a]


def alignment(dtype: torch.dtype) -> int:
    """Elements from one boundary to the next: tensors, and the parts of ranks, begin there."""
    return max(1, _ALIGN_BYTES // dtype.itemsize)


class Bucket:
    """Some parameters of one dtype and device, whose gradients travel together.

    `flat` is the memory, `tensors` its views in the parameters' shapes and strides; each starts on a cache line,
    at `starts`, and what lies between them is zero. `lr` is what each parameter's gradient is multiplied by in
    the end, learning rate over loss scale (NaN: not known), and `decayed` says that a learning rate fell in the
    last window, on some rank: every rank has the same answer. `scale` is the loss scale that the gradients carry.

    `lines` is the memory of all: `flat`. `apart`: the places of tensors that have memory of their own instead: who
    fills the bucket puts them into `tensors`, in the parameters' strides, and into `lines`.
    """

    def __init__(
        self,
        index: int,
        named: Sequence[tuple[str, Tensor]],
        flat: Callable[[int, torch.dtype], Tensor],
        *,
        apart_bytes: int | None = None,
        flags: int = 0,
        layout: FlatLayout | None = None,
    ) -> None:
        """`apart_bytes`: tensors of so many bytes have memory of their own; None: none have. `flags`: numbers behind
        the tensors, from `layout.numel` on, that travel with them. `layout`: where the tensors lie; None: each begins
        on the next cache line."""
        self.index = index
        self.names = [name for name, _ in named]
        self.params = [param for _, param in named]
        self.tag = f"gradients/{index}"
        self.lr = [math.nan] * len(named)
        self.decayed, self.scale = False, 1.0
        first = self.params[0]
        self.dtype, self.device = first.dtype, first.device
        self.apart = [
            k for k, p in enumerate(self.params) if apart_bytes is not None and p.numel() * p.itemsize >= apart_bytes
        ]
        self.layout = layout or FlatLayout([p for k, p in enumerate(self.params) if k not in self.apart])
        self.starts = self.layout.starts
        numel = self.layout.numel + flags
        self._parts: dict[tuple[int, ...], Bucket] = {}
        self.use(flat(numel, first.dtype) if numel or not self.apart else torch.empty(0, dtype=first.dtype))

    def use(self, flat: Tensor, tensors: list[Tensor] | None = None) -> None:
        """Lie in this memory from now on, with these views of it; None: those that are made here."""
        if tensors is None:
            flat.zero_()
            tensors = self.views(flat)
            for k in self.apart:
                tensors.insert(k, flat[:0])
        self.flat, self.tensors, self.lines = flat, tensors, [flat]
        self._gaps: list[Tensor] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the bucket, tensors with memory of their own included."""
        numel = self.flat.numel() + sum(self.params[k].numel() for k in self.apart)
        return numel * self.flat.element_size()

    def views(self, flat: Tensor) -> list[Tensor]:
        """Views of a line in this bucket's layout, in the parameters' shapes and strides."""
        return self.layout.views(flat)

    def zero_gaps(self) -> None:
        """Make what lies between the tensors zero again, where a method wrote over it."""
        if self._gaps is None:
            self._gaps = self.layout.gaps(self.flat)
        if self._gaps:
            torch._foreach_zero_(self._gaps)

    def part(self, which: Sequence[int]) -> Bucket:
        """The tensors at these places, copied into a bucket of their own; this bucket itself where it is all."""
        key = tuple(which)
        if key == tuple(range(len(self.params))):
            return self
        if key not in self._parts:
            made = Bucket(self.index, [(self.names[i], self.params[i]) for i in key], partial(on_device, self.device))
            if len(self._parts) == _PARTS:
                del self._parts[next(iter(self._parts))]
            self._parts[key] = made
        part = self._parts[key]
        part.tag, part.decayed, part.scale = self.tag, self.decayed, self.scale
        part.lr = [self.lr[i] for i in key]
        part.zero_gaps()
        if key:
            torch._foreach_copy_(part.tensors, [self.tensors[i] for i in key])
        return part


def view_like(line: Tensor, param: Tensor) -> Tensor:
    """`line` in the shape of `param`, and in its memory order where that is dense."""
    return line.as_strided(param.shape, _find_strides(param))


def _find_strides(x: Tensor) -> tuple[int, ...]:
    """The strides of a tensor whose elements lie side by side; else those of its elements row by row."""
    if x.numel():
        dense = torch.empty_strided(x.shape, x.stride(), device="meta")
        if dense.untyped_storage().nbytes() == x.numel() * dense.element_size():
            return x.stride()
    return _find_row_strides(x.shape)


def _find_row_strides(shape: torch.Size) -> tuple[int, ...]:
    return tuple(accumulate(reversed(shape[1:]), lambda a, b: a * max(b, 1), initial=1))[::-1] if shape else ()


def load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """`optimizer.load_state_dict(state)`, with each tensor in the memory order of its parameter.

    Files and messages have tensors row by row; a fused step goes over parameter and state as they lie in memory.
    """
    optimizer.load_state_dict(state)
    for param, entry in optimizer.state.items():
        for name, value in entry.items():
            if isinstance(value, Tensor) and value.shape == param.shape and value.stride() != param.stride():
                line = torch.empty(param.numel(), dtype=value.dtype, device=value.device)
                entry[name] = view_like(line, param).copy_(value)


def group_into_buckets(named: Sequence[tuple[str, Parameter]], bucket_bytes: int) -> list[list[tuple[str, Parameter]]]:
    """Which parameters share a bucket: in the order backward reaches them, by dtype and device.

    The first bucket is small, so that the exchange starts early; not among large ones, each of which costs some time,
    and not in a model that is small itself.
    """
    first = min(bucket_bytes, FIRST_BUCKET_BYTES)
    least = first if first < bucket_bytes else 0
    totals: Counter[tuple[torch.dtype, torch.device]] = Counter()
    for _, param in named:
        totals[param.dtype, param.device] += param.numel() * param.element_size()
    groups: dict[tuple[torch.dtype, torch.device], list[list[tuple[str, Parameter]]]] = {}
    filled: dict[tuple[torch.dtype, torch.device], int] = {}
    order: list[list[tuple[str, Parameter]]] = []
    for name, param in reversed(named):
        key = (param.dtype, param.device)
        nbytes = param.numel() * param.element_size()
        lists = groups.setdefault(key, [])
        is_small = len(lists) == 1 and bucket_bytes < LARGE_BUCKET_BYTES and totals[key] > 2 * first
        limit = first if is_small else bucket_bytes
        if not lists or (filled[key] + nbytes > limit and filled[key] >= least):
            lists.append([])
            order.append(lists[-1])
            filled[key] = 0
        lists[-1].append((name, param))
        filled[key] += nbytes
    return order


def on_device(device: torch.device, n: int, dtype: torch.dtype) -> Tensor:
    """Unset memory for `n` numbers on a device."""
    return torch.empty(n, dtype=dtype, device=device)


def split_evenly(named: Sequence[tuple[str, Parameter]], count: int) -> list[list[tuple[str, Parameter]]]:
    """The parameters in `count` parts of about equal bytes, each in the model's order: the largest first, always to
    the part that has least."""
    weights = [p.numel() * p.element_size() if p.requires_grad else 0 for _, p in named]
    trainable = sum(p.requires_grad for _, p in named)
    if count > trainable:
        raise ValueError(
            f"fragments={count}, but the model has {trainable} trainable tensors: give at most that many fragments"
        )
    loads, parts = [0] * count, [[] for _ in range(count)]  # type: tuple[list[int], list[list[int]]]
    for i in sorted(range(len(named)), key=lambda i: (-weights[i], i)):
        part = loads.index(min(loads))
        loads[part] += weights[i]
        parts[part].append(i)
    return [[named[i] for i in sorted(part)] for part in parts]


def widen(param: Tensor) -> Tensor:
    """A copy that small changes add up in: float32 of 16-bit numbers."""
    return param.detach().to(find_wide_dtype(param.dtype), copy=True)


def find_wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that small changes add up in: float32 for floating point numbers of fewer bits."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype
