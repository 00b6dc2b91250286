"""The reduction of several ranks' numbers into one, for every dtype; the same bits on every rank. Large ones are cut
into tiles, which several cores share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.background import SerialQueue
from unisono.launchers.runtime.machine import usable_cores
from unisono.world.transports import Op

# Sums of narrow floats are kept in fp32 and rounded once: no overflow, no order of rounding.
_WIDE = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.complex32: torch.complex64,
} | {
    getattr(torch, name): torch.float32
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
    if hasattr(torch, name)
}
_SIGN = -(2**63)
STEPS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
}
BITWISE = ("and", "or", "xor")
_MOST_THREADS, _LEAST_ITEMS = 3, 4  # that help; items for each


def check_op(dtype: torch.dtype, op: Op) -> None:
    """Refuse what has no meaning, such as the mean of integers."""
    if op not in STEPS:
        raise ValueError(f"op must be 'sum', 'mean', 'max' or 'min' ('product', 'and', 'or', 'xor'), got {op!r}")
    if op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
        raise TypeError(f"the mean of {dtype} is not defined: use op='sum', or convert to a float dtype")
    if op in ("sum", "product") and dtype == torch.bool:
        raise TypeError(f"the {op} of torch.bool is not defined: use 'max' (any) or 'min' (all), or convert")
    if op in BITWISE and (dtype.is_floating_point or dtype.is_complex):
        raise TypeError(f"'{op}' works on the bits of integers and bools, got {dtype}")
    if op in ("max", "min") and dtype.is_complex:
        raise TypeError(f"{dtype} has no order: '{op}' is not defined")


def count_bytes(parts: Sequence[Tensor]) -> int:
    """Bytes of the elements of these tensors."""
    return sum(p.numel() * p.element_size() for p in parts)


def count_span_bytes(x: Tensor) -> int:
    """Bytes of memory from the first element of `x` to its last; more than its elements have if they lie apart."""
    elements = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    return elements * x.element_size()


def cut_tiles(parts: Sequence[Tensor], start: int, stop: int, room: int) -> Iterator[tuple[Tensor, int]]:
    """Views of the elements from `start` to `stop` of a concatenation, each inside one part and of at most `room`, with
    their places."""
    at = 0
    for part in parts:
        low, high = max(start, at), min(stop, at + part.numel())
        for place in range(low, high, room):
            yield part[place - at : min(place + room, high) - at], place
        at += part.numel()
        if at >= stop:
            return


def cut_share(length: int, rank: int, size: int) -> tuple[int, int]:
    """The part of `length` elements that `rank` reduces, on borders of cache lines."""
    each = -(-length // size)
    each = -(-each // 16) * 16
    return min(rank * each, length), min((rank + 1) * each, length)


def widen(x: Tensor) -> Tensor:
    """`x` in a dtype that sums without loss or overflow: itself, or a copy if its own is narrow."""
    return x.to(_WIDE.get(x.dtype, x.dtype))


def multiply(x: Tensor, times: int) -> None:
    """Replace `x` by the sum of `times` tensors equal to it, for every dtype."""
    if not x.is_meta:
        x.copy_(widen(x).mul(times))


def combine(parts: Sequence[Tensor], op: Op, out: Tensor) -> None:
    """Write the reduction of `parts`, taken in rank order, into `out` (which may be one of them).

    >>> out = torch.empty(2)
    >>> combine([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])], "mean", out)
    >>> out
    tensor([2., 3.])
    """
    dtype = out.dtype
    if dtype == torch.uint64:
        _combine_uint64(parts, op, out)
    elif dtype == torch.float16 and op == "mean" and len(parts) == 2:
        torch.lerp(parts[0], parts[1], 0.5, out=out)  # worked out in fp32, and rounded once
    elif dtype == torch.bfloat16 and op == "mean" and len(parts) == 2:  # not that: a difference may overflow
        a, b = parts[::-1] if parts[1].data_ptr() == out.data_ptr() else parts
        torch.add(torch.mul(a, 0.5, out=out), b, alpha=0.5, out=out)
    elif dtype in _WIDE:
        wide = torch.empty_like(out, dtype=_WIDE[dtype])
        _fold([p.to(wide.dtype) for p in parts], op, wide)
        out.copy_(wide)
    elif len(parts) > 1 and any(p.data_ptr() == out.data_ptr() for p in parts[1:]):
        kept = torch.empty_like(out)
        _fold(parts, op, kept)
        out.copy_(kept)
    else:
        _fold(parts, op, out)


def _fold(parts: Sequence[Tensor], op: Op, out: Tensor) -> None:
    """Combine in the tensors' own dtype; `out` must be none of parts[1:]."""
    step = STEPS[op]
    if len(parts) == 1:
        out.copy_(parts[0])
        return
    step(parts[0], parts[1], out=out)
    for part in parts[2:]:
        step(out, part, out=out)
    if op == "mean":
        out.mul_(1.0 / len(parts))


def _combine_uint64(parts: Sequence[Tensor], op: Op, out: Tensor) -> None:
    signed = [p.view(torch.int64) for p in parts]
    flip = _SIGN if op in ("max", "min") else 0  # the order of signed numbers is that of unsigned ones with it flipped
    kept = torch.empty_like(signed[0])
    _fold([p ^ flip for p in signed], op, kept)
    out.view(torch.int64).copy_(kept ^ flip)


class SpareCores:
    """Cores of this host beyond those that the ranks' own threads need: threads there help with what is large."""

    def __init__(self, size: int) -> None:
        """`size`: ranks of this host."""
        self._cores = usable_cores() // size
        self._queues: list[SerialQueue] = []

    def each(self, do: Callable[..., object], items: Iterable[tuple[Any, ...]]) -> None:
        """Call `do(*item)` for each item, in several threads if there are some free."""
        items = list(items)
        left = iter(items)

        def work() -> None:
            for item in left:
                do(*item)

        free = self._cores // torch.get_num_threads() - 1
        count = max(0, min(_MOST_THREADS, free, len(items) // _LEAST_ITEMS))
        self._queues += [SerialQueue("unisono spare core", moves=True) for _ in range(len(self._queues), count)]
        handles = [queue.submit(work) for queue in self._queues[:count]]
        errors = []
        try:
            work()
        finally:
            for handle in handles:  # all have stopped before an error goes on: they write to the caller's memory
                try:
                    handle.wait()
                except Exception as error:  # noqa: PERF203 - one a thread
                    errors.append(error)
        if errors:
            raise errors[0]

    def close(self) -> None:
        """End the threads."""
        for queue in self._queues:
            queue.close()
