"""Sparse sets in chunks, with error feedback: what `topk(chunk=...)` and the methods built on it have in common."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from functools import partial
from typing import Annotated, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from unisono.methods.buckets import Bucket, widen
from unisono.methods.checks import Note, Satisfies
from unisono.methods.facts import Sizes
from unisono.methods.kernels.select import narrow_to
from unisono.methods.kernels.sets import Piece, SparseSets, cut
from unisono.methods.reducer import (
    Reduced,
    Reducer,
    SpareLines,
    Stages,
    State,
    all_reduce_bytes,
    rescale,
    residual_like,
    staged,
)
from unisono.methods.reducers._subsets import Vectors
from unisono.world import World

Chunk = Annotated[int, Satisfies(lambda n: 16 <= n <= 65536 and not n & (n - 1), "a power of two from 16 to 65536")]
ValueBits = Annotated[Literal[2, 3, 4, 5, 6, 7, 8] | None, Note("a sign and a level; None: values in full")]


def count_chunked(chunk: int, k: float, bits: int | None) -> Callable[[Sizes], int]:
    """For FACTS: places and values of what is sent of matrices, and 4 bytes a chunk for the levels; vectors in full.
    Written apart from `sends`, so that one proves the other."""

    def count(sizes: Sizes) -> int:
        kept = chunks = 0
        for n in map(math.prod, sizes.matrices):
            share = k / chunk if isinstance(k, int) else k
            kept += n // chunk * max(1, round(share * chunk)) + (max(1, round(share * (n % chunk))) if n % chunk else 0)
            chunks += math.ceil(n / chunk)
        places = 0 if k in (chunk, 1.0) else int(math.log2(chunk))
        levels = 4 * kept if bits is None else 4 * chunks
        return sizes.gather(levels + math.ceil(kept * (places + (bits or 0)) / 8)) + sizes.all_reduce(
            4 * sizes.in_vectors
        )

    return count


def check_count(chunk: int, k: float) -> None:
    """Refuse more of a chunk than it has."""
    if k > (chunk if isinstance(k, int) else 1):
        raise ValueError(f"k={k} of each chunk of {chunk}: give at most {chunk}, or a share of at most 1.0")


def build_chunked(
    name: str, chunk: int, k: float, bits: int | None, decay: float = 1.0, *, feedback: bool = True
) -> Reducer:
    """The reducer of this name: p = decay e + g; send the k largest of each chunk of p; e <- p - what arrives."""
    check_count(chunk, k)
    if decay != 1.0 and not feedback:
        raise ValueError(f"decay={decay:g} is of what was kept: it needs feedback=True")
    works: WeakKeyDictionary[Bucket, _Workspace] = WeakKeyDictionary()
    spare = SpareLines()

    def find_work(bucket: Bucket) -> _Workspace:
        if bucket not in works:
            works[bucket] = _Workspace(bucket, chunk, k, bits)
        return works[bucket]

    def init(bucket: Bucket) -> State:
        return {"residual": residual_like(bucket), "lr": [None] * len(bucket.names)} if feedback else {}

    def stages(bucket: Bucket, state: State, world: World) -> Stages:
        work = find_work(bucket)
        if feedback:
            rescale(bucket, state)
            kept = spare.beside(bucket, state["residual"])
            torch.mul(state["residual"], decay, out=kept).add_(bucket.flat)
        else:
            kept = widen(bucket.flat)
        vectors = narrow_to(work.vectors.take(kept), bucket.dtype)
        given = vectors.clone()
        reducing = world.all_reduce(vectors, "mean", tag=bucket.tag) if len(vectors) else None
        mean, places, values = yield from exchange(work.sets, kept, bucket, world)
        if reducing is not None:
            reducing.wait()
        kept.index_add_(0, places, values, alpha=-1)
        work.vectors.put(kept, work.vectors.take(kept) - given)
        bucket.flat.copy_(narrow_to(mean, bucket.dtype))
        work.vectors.put(bucket.flat, vectors)
        after = {**state, "residual": kept} if feedback else state
        return Reduced(bucket.tensors, partial(work.sent, bucket, places, values, given)), after

    stages.__module__ = f"unisono.methods.reducers.{name}"  # where its factory is found

    def sends(bucket: Bucket, size: int) -> int:
        work = _Workspace(bucket, chunk, k, bits)
        itemsize = bucket.flat.element_size()
        full = all_reduce_bytes(sum(work.vectors.lengths) * itemsize, size)
        return (size - 1) * work.sets.nbytes(itemsize) + full

    return staged(init, stages, memory=feedback, sends=sends)


class _Workspace:
    """Which of a bucket's tensors go how."""

    def __init__(self, bucket: Bucket, chunk: int, k: float, bits: int | None) -> None:
        self.vectors = Vectors(bucket)
        pieces: list[Piece] = []
        for at, x in zip(bucket.starts, bucket.tensors, strict=True):
            if x.dim() >= 2:
                pieces += cut(at, x.numel(), chunk, k)
        self.sets = SparseSets(pieces, chunk, bits, bucket.device)

    def sent(self, bucket: Bucket, places: Tensor, values: Tensor, given: Tensor, _: list[Tensor]) -> list[Tensor]:
        """My part of the mean, as tensors."""
        line = residual_like(bucket).index_copy_(0, places, values)
        self.vectors.put(line, given)
        return bucket.views(line)


def exchange(
    sets: SparseSets, line: Tensor, bucket: Bucket, world: World
) -> Generator[None, None, tuple[Tensor, Tensor, Tensor]]:
    """The mean over the ranks of what each sends of its line; and where this rank's part of it is, with its values."""
    message, places, values = sets.encode(line, bucket.dtype)
    handle = world.all_gather(message, even=True, tag=bucket.tag) if sets.total else None
    yield
    mean = torch.zeros_like(line)
    for one in handle.wait() if handle is not None else ():
        there, came = sets.decode(one, bucket.dtype, line.dtype)
        mean.index_add_(0, there, came, alpha=1 / world.size)
    return mean, places, values
