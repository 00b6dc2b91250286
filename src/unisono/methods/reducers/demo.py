"""DeMo: momentum stays on its worker; its strongest frequencies are exchanged, and their sign is the step.

Peng, Quesnelle and Kingma 2024, "DeMo: Decoupled Momentum Optimization" (arXiv:2411.19870).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from unisono.methods.buckets import Bucket
from unisono.methods.checks import AtLeast, Range, validate
from unisono.methods.facts import Convergence, Example, Facts, Sizes
from unisono.methods.kernels.select import count_kept
from unisono.methods.kernels.sets import Piece, SparseSets
from unisono.methods.reducer import Reduced, Reducer, SpareLines, Stages, State, residual_like, staged
from unisono.methods.reducers._chunked import ValueBits, exchange
from unisono.world import World


def _count_bytes(side: int, k: int, bits: int | None) -> Callable[[Sizes], int]:
    """A place and a value for the k strongest frequencies of each chunk, to every other rank."""

    def count(sizes: Sizes) -> int:
        kept = chunks = 0
        for shape in sizes.shapes:
            n = math.prod(shape)
            if n:
                rows = shape[0] if len(shape) >= 2 else 1
                each = _divide(rows, side) * _divide(n // rows, side)
                kept, chunks = kept + n // each * max(1, round(k / side**2 * each)), chunks + n // each
        places = math.ceil(math.log2(side**2))
        return sizes.gather((4 * kept if bits is None else 4 * chunks) + math.ceil(kept * (places + (bits or 0)) / 8))

    return count


def _divide(n: int, most: int) -> int:
    """The largest divisor of n that is at most `most`."""
    return next(d for d in range(min(n, most), 0, -1) if n % d == 0)


FACTS = Facts(
    [
        Example("demo(side=8, k=8)", conserves=False, bytes=_count_bytes(8, 8, None)),
        Example("demo(side=4, k=4, bits=4, decay=0.9)", conserves=False, bytes=_count_bytes(4, 4, 4)),
    ],
    refuses={
        "side=1": "side",
        "k=0": "frequencies",
        "side=4, k=17": "at most 16",
        "decay=1.5": "decay",
        "bits=1": "bits",
    },
    convergence=Convergence("other", "signs of the strongest frequencies of momenta: a learning rate of its own"),
    trains_as=["allreduce(reducer=demo(side=8, k=8, decay=0.9))"],
)


@validate
def demo(
    k: Annotated[int, AtLeast(1, "frequencies of a chunk that are sent")] = 32,
    *,
    side: Annotated[int, AtLeast(2, "numbers along a side of a chunk", most=256)] = 64,
    decay: Annotated[float, Range("how much of the momentum stays", at_least=0, at_most=1)] = 0.999,
    bits: ValueBits = None,
) -> Reducer:
    """Exchange the strongest frequencies of momenta that stay local, and step by the sign of their mean:

        m_i <- decay m_i + g_i,  q_i = the k largest of the DCT-II of each chunk of m_i,  m_i <- m_i - IDCT(q_i)
        out = sign(IDCT(mean of q_i))

    A chunk has at most side x side numbers of a matrix (rows by all other dimensions): its sides are the largest
    divisors of the matrix's that are no longer. Vectors have chunks of one row. The result is a direction, not a mean:
    give an SGD without momentum, with a learning rate as for signs (an Adam's, say); weight decay is the optimizer's.

    k: frequencies of a whole chunk that are sent; of smaller ones the same share, at least one.
    side: numbers along a side of a chunk.
    decay: of the momentum.
    bits: of each value that is sent, a sign and a level. None: in full.

    >>> from unisono.spec import build
    >>> build("demo(k=16)", kind="reducer").exact
    False
    """
    if k > side**2:
        raise ValueError(f"k={k} of the frequencies of a chunk of {side} x {side}: give at most {side**2}")
    works: WeakKeyDictionary[Bucket, _Frequencies] = WeakKeyDictionary()
    spare = SpareLines()

    def stages(bucket: Bucket, state: State, world: World) -> Stages:
        if bucket not in works:
            works[bucket] = _Frequencies(bucket, side, k, bits)
        work, momentum = works[bucket], spare.beside(bucket, state["velocity"], "velocity")
        torch.mul(state["velocity"], decay, out=momentum).add_(bucket.flat, alpha=1 / bucket.scale)
        mean, mine = yield from exchange(work.sets, work.enter(momentum), bucket, world)
        work.leave(mine, momentum, -1.0)
        line = torch.zeros_like(momentum)
        work.leave(mean, line, 1.0)
        step = line.sign().add_(line.mul_(0))  # an overflow shows, which a sign alone would hide
        bucket.flat.copy_(step.mul_(bucket.scale))  # AMP divides by its scale
        return Reduced(bucket.tensors), {"velocity": momentum}

    def sends(bucket: Bucket, size: int) -> int:
        return (size - 1) * _Frequencies(bucket, side, k, bits).sets.nbytes(bucket.flat.element_size())

    return staged(lambda bucket: {"velocity": residual_like(bucket)}, stages, memory=True, sends=sends)


class _Frequencies:
    """The chunks of a bucket's tensors, by frequency: one chunk a row, one tensor after the other."""

    def __init__(self, bucket: Bucket, side: int, k: int, bits: int | None) -> None:
        self._bucket, self._shapes, pieces, at = bucket, [], [], 0
        for x in bucket.tensors:
            rows = x.shape[0] if x.dim() >= 2 else 1
            columns = x.numel() // rows if x.numel() else 0
            high, wide = (_divide(rows, side), _divide(columns, side)) if columns else (1, 1)
            self._shapes.append((rows // high, high, columns // wide, wide))
            if columns:
                pieces.append(Piece(at, x.numel() // (high * wide), high * wide, count_kept(k / side**2, high * wide)))
            at += x.numel()
        self.sets = SparseSets(pieces, side**2, bits, bucket.device)

    def enter(self, line: Tensor) -> Tensor:
        """The frequencies of a line."""
        found = [line[:0]]
        for x, shape in zip(self._bucket.views(line), self._shapes, strict=True):
            blocks = x.reshape(shape).transpose(1, 2)  # by chunk: its rows and columns
            found.append((_dct(shape[1], line) @ blocks @ _dct(shape[3], line).T).reshape(-1))
        return torch.cat(found)

    def leave(self, numbers: Tensor, line: Tensor, factor: float) -> None:
        """Add what these frequencies make to a line, times `factor`."""
        views = self._bucket.views(line)
        for part, view, (a, high, b, wide) in zip(
            numbers.split([x.numel() for x in views]), views, self._shapes, strict=True
        ):
            blocks = _dct(high, line).T @ part.view(a, b, high, wide) @ _dct(wide, line)
            view.add_(blocks.transpose(1, 2).reshape(view.shape), alpha=factor)


_matrices: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}


def _dct(n: int, like: Tensor) -> Tensor:
    """The orthonormal DCT-II of n numbers, as a matrix."""
    key = n, like.dtype, like.device
    if key not in _matrices:
        i = torch.arange(n, dtype=torch.float64)
        made = torch.cos(math.pi / n * i[:, None] * (i + 0.5)) * math.sqrt(2 / n)
        made[0] /= math.sqrt(2)
        _matrices[key] = made.to(like)
    return _matrices[key]
