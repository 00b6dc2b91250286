"""Exact top-k of a line of memory, tensor by tensor: error feedback, selection by threshold, packing.

Nothing is sorted. A sample of the numbers gives a guess of the k-th magnitude, one pass over them collects those
that reach it, and the exact choice is made among these few. The guess only saves time: where it was too high, it is
lowered; the result does not depend on it.

The order of numbers is that of the bits of |x|: infinity is larger than every number, NaN larger than infinity, and
of equal magnitudes the first comes first. The choice is therefore one set, on every device.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 17  # elements: what is at work stays in the cache
_SAMPLE = 1 << 14
_SMALL = 1 << 14  # tensors up to this size are candidates as a whole

Ints = NDArray[Any]


class Segment(NamedTuple):
    """`length` numbers of a line from `start` on, of which `kept` are selected."""

    start: int
    length: int
    kept: int


class Plan:
    """The segments of a line, in order; `total` numbers are selected. Kernels keep their tables in `tables`."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = list(segments)
        self.total = sum(s.kept for s in self.segments)
        self.tables: dict[Any, Any] = {}


def count_kept(k: float, length: int) -> int:
    """How many of `length` numbers a fraction is: at least one.

    >>> count_kept(0.01, 250), count_kept(0.01, 7), count_kept(1.0, 7)
    (2, 1, 7)
    """
    return min(length, max(1, round(k * length)))


def select_top(plan: Plan, grad: Tensor, residual: Tensor | None, out: Tensor, values: Tensor, indices: Tensor) -> None:
    """Select from p = residual + grad the `kept` largest magnitudes of each segment.

    `out` becomes p less what was selected. `values` (in the dtype that is sent) and `indices` (int32, places in the
    line, ascending) have room for `plan.total`. Without a residual, `out` must be `grad`, and stays as it is.
    What lies between segments is not read and may be overwritten in `out`.
    """
    if grad.is_cuda and has_triton():
        from unisono.methods.kernels import select_triton

        select_triton.select_top(plan, grad, residual, out, values, indices)
        return
    at = 0
    for start, length, count in plan.segments:
        part = slice(start, start + length)
        kept = None if residual is None else residual[part]
        if grad.is_cuda:
            chosen = _select_by_sorting(grad[part], kept, out[part], count)
        else:
            chosen = torch.from_numpy(_select_by_threshold(grad[part], kept, out[part], count))
        torch.add(chosen, start, out=indices[at : at + count])
        at += count
    picked = out.index_select(0, indices)
    values.copy_(narrow_to(picked, values.dtype))
    if residual is not None:
        left = picked - values if values.dtype != out.dtype else torch.zeros_like(picked)
        out.index_copy_(0, indices.long(), left)


def narrow_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in the dtype that is sent; finite numbers stay finite, so that an overflow means one of the gradient's."""
    if x.element_size() <= dtype.itemsize:
        return x
    most = torch.finfo(dtype).max
    return torch.where(x.isinf(), x, x.clamp(-most, most)).to(dtype)


def spread(total: Tensor, values: Tensor, indices: Tensor, ranks: int, flag: Tensor, *, first: bool) -> None:
    """Add 1/ranks of a rank's values to `total` at their places; the first rank's are written there, over zeros.

    `flag` (one number) becomes NaN if a value is not finite.
    """
    if total.is_cuda and has_triton():
        from unisono.methods.kernels import select_triton

        select_triton.spread(total, values, indices, ranks, flag, first=first)
        return
    part = values.to(total.dtype) * (1 / ranks)
    if first:
        total.index_copy_(0, indices.long(), part)
    else:
        total.index_add_(0, indices, part)
    flag.add_(values.mul(0).sum())


def restore(flag: Tensor, before: Tensor, line: Tensor) -> None:
    """Make `line` what it was `before`, if `flag` (one number) is NaN; on CUDA the host does not wait to know."""
    if line.is_cuda:
        if has_triton():
            from unisono.methods.kernels import select_triton

            select_triton.restore(flag.float(), before, line)
        else:
            torch.where(flag.isnan(), before, line, out=line)
    elif math.isnan(flag.item()):
        line.copy_(before)


@lru_cache(maxsize=1)
def has_triton() -> bool:
    """Whether Triton is there to compile kernels."""
    return importlib.util.find_spec("triton") is not None


# Selection on CPUs ---------------------------------------------------------------------------------------------


def _select_by_threshold(grad: Tensor, residual: Tensor | None, out: Tensor, count: int) -> Ints:
    """Fold the residual in, and the places of the `count` largest, ascending."""
    n = grad.numel()
    if n <= _SMALL:
        fold(grad, residual, out)
        return _find_largest(_read_keys(out), count)
    places, target = _draw_sample(n), _choose_target(count, n)
    sample = grad.index_select(0, places)
    if residual is not None:
        sample = sample.to(out.dtype).add_(residual.index_select(0, places))
    keys = _read_keys(sample)
    found = _find_reaching(grad, residual, out, _guess(keys, target))
    if len(found[0]) < count:  # the sample misled
        found = _find_reaching(grad, None, out, _guess(keys, 4 * target))
    if len(found[0]) < count:
        found = _find_reaching(grad, None, out, 1)
    places_found, keys_found = found
    if len(places_found) >= count:
        return places_found[_find_largest(keys_found, count)]
    zeros = _find_zeros(out, count - len(places_found))
    return np.sort(np.concatenate([places_found, zeros]))


def _select_by_sorting(grad: Tensor, residual: Tensor | None, out: Tensor, count: int) -> Tensor:
    """The same by a stable sort: for devices without a kernel."""
    fold(grad, residual, out)
    bits = _BITS[out.element_size()]
    keys = out.view(bits) & torch.iinfo(bits).max
    order = torch.sort(keys, descending=True, stable=True).indices
    return order[:count].sort().values


def fold(grad: Tensor, residual: Tensor | None, out: Tensor) -> None:
    """out = residual + grad, in the residual's dtype; without a residual, `out` is `grad` and stays as it is."""
    if residual is None:
        return
    if grad.dtype == out.dtype:
        torch.add(residual, grad, out=out)
    else:
        out.copy_(grad).add_(residual)


def _read_keys(x: Tensor) -> Ints:
    """The bits of |x|, whose order as integers is the order that selects."""
    bits: Ints = x.view(_BITS[x.element_size()]).numpy()
    return bits & np.iinfo(bits.dtype).max


@lru_cache(maxsize=256)
def _draw_sample(n: int) -> Tensor:
    """Places of a sample: one at random in each of equal parts, so that no period of the data can hide from it."""
    generator = np.random.default_rng(n)
    places = (np.arange(_SAMPLE) + generator.random(_SAMPLE)) * (n / _SAMPLE)
    return torch.from_numpy(np.minimum(places.astype(np.int64), n - 1))


def _choose_target(count: int, n: int) -> int:
    """The rank in the sample that the guess is taken from: four standard deviations to the safe side."""
    expected = count / n * _SAMPLE
    return math.ceil(expected + 4 * math.sqrt(expected) + 4)


def _guess(keys: Ints, target: int) -> int:
    at = len(keys) - min(len(keys), target)
    return max(1, int(np.partition(keys, at)[at]))


def _find_reaching(grad: Tensor, residual: Tensor | None, out: Tensor, guess: int) -> tuple[Ints, Ints]:
    """Fold the residual in, and the places and keys of what reaches the guess: one pass in chunks."""
    bits: Ints = out.view(_BITS[out.element_size()]).numpy()
    sign = np.iinfo(bits.dtype).max
    keys, reach = np.empty(_CHUNK, bits.dtype), np.empty(_CHUNK, np.bool_)
    all_places, all_keys = [], []
    for at in range(0, len(bits), _CHUNK):
        here = slice(at, min(at + _CHUNK, len(bits)))
        m = here.stop - at
        if residual is not None:
            fold(grad[here], residual[here], out[here])
        np.bitwise_and(bits[here], sign, out=keys[:m])
        np.greater_equal(keys[:m], guess, out=reach[:m])
        places = np.flatnonzero(reach[:m])
        all_keys.append(keys[places])
        all_places.append(places + at)
    return np.concatenate(all_places), np.concatenate(all_keys)


def _find_largest(keys: Ints, count: int) -> Ints:
    """The places of the `count` largest keys, ascending; of equal ones the first."""
    at = len(keys) - count
    least = np.partition(keys, at)[at]
    chosen = keys > least
    ties = np.flatnonzero(keys == least)
    chosen[ties[: count - np.count_nonzero(chosen)]] = True
    return np.flatnonzero(chosen)


def find_largest_of_rows(rows: Tensor, count: int) -> Ints:
    """The places in each row of its `count` largest magnitudes, ascending, row by row: quicker than `torch.topk`,
    as numpy's partition uses the processor's wide registers, on rows that stay in the cache."""
    return np.concatenate([_find_in_rows(some, count) for some in rows.split(max(1, _CHUNK // rows.shape[1]))])


def _find_in_rows(rows: Tensor, count: int) -> Ints:
    keys, width = _read_keys(rows), rows.shape[1]
    least = np.partition(keys, width - count, axis=1)[:, width - count, None]
    chosen = keys >= least
    more = np.count_nonzero(chosen, axis=1) - count
    for row in np.flatnonzero(more):  # of equal ones the first
        ties = np.flatnonzero(keys[row] == least[row])
        chosen[row, ties[len(ties) - more[row] :]] = False
    places: Ints = np.flatnonzero(chosen) % width
    return places


def _find_zeros(x: Tensor, count: int) -> Ints:
    """The places of the first `count` zeros: what fills up where fewer numbers than asked for differ from zero."""
    found: list[Ints] = []
    for at in range(0, x.numel(), _CHUNK):
        found.append(np.flatnonzero(_read_keys(x[at : at + _CHUNK]) == 0)[:count] + at)
        count -= len(found[-1])
        if not count:
            break
    return np.concatenate(found)
