"""Sparse sets of a bucket, with error feedback: what `topk(chunk=...)` and the methods built on it have in common."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from functools import partial
from typing import Annotated, Literal, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from unisono.methods.buckets import Bucket, widen
from unisono.methods.checks import Note, Satisfies
from unisono.methods.facts import Sizes
from unisono.methods.kernels.select import narrow_to
from unisono.methods.kernels.sets import SparseSets, cut
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


def count_set(lengths: list[int], chunk: int, k: float, bits: int | None) -> int:
    """For FACTS: bytes of a message: a place and a value for each number of these tensors that is sent, and 4 bytes a
    chunk for its levels. Written apart from `SparseSets.nbytes`, so that one proves the other."""
    share, kept, chunks = k / chunk if isinstance(k, int) else k, 0, 0
    for n in lengths:
        kept += n // chunk * max(1, round(share * chunk)) + (max(1, round(share * (n % chunk))) if n % chunk else 0)
        chunks += math.ceil(n / chunk)
    places = 0 if k in (chunk, 1.0) else int(math.log2(chunk))
    return (4 * kept if bits is None else 4 * chunks) + math.ceil(kept * (places + (bits or 0)) / 8)


def count_chunked(chunk: int, k: float, bits: int | None, drawn: float = 1.0) -> Callable[[Sizes], int]:
    """For FACTS: the message of all matrices (or of a share of each, drawn at random) to every other rank; vectors in
    full."""

    def count(sizes: Sizes) -> int:
        lengths = [max(1, round(drawn * math.prod(shape))) for shape in sizes.matrices]
        return sizes.gather(count_set(lengths, chunk, k, bits)) + sizes.all_reduce(4 * sizes.in_vectors)

    return count


class Domain(Protocol):
    """What sets are selected from: a line of numbers that a bucket's line is turned into, and back."""

    sets: SparseSets

    def enter(self, line: Tensor, step: int) -> Tensor:
        """The numbers to select from, of a line in the bucket's layout."""

    def leave(self, numbers: Tensor, step: int) -> Tensor:
        """Such numbers as a line in the bucket's layout, zero where they say nothing."""


class Chunks:
    """A bucket's matrices as they are, each cut into chunks."""

    def __init__(self, bucket: Bucket, chunk: int, k: float, bits: int | None) -> None:
        pairs = zip(bucket.starts, bucket.tensors, strict=True)
        pieces = [piece for at, x in pairs if x.dim() >= 2 for piece in cut(at, x.numel(), chunk, k)]
        self.sets = SparseSets(pieces, chunk, bits, bucket.device)

    def enter(self, line: Tensor, step: int) -> Tensor:
        return line

    def leave(self, numbers: Tensor, step: int) -> Tensor:
        return numbers


def check_count(chunk: int, k: float) -> None:
    """Refuse more of a chunk than it has."""
    if k > (chunk if isinstance(k, int) else 1):
        raise ValueError(f"k={k} of each chunk of {chunk}: give at most {chunk}, or a share of at most 1.0")


def build_sparse(
    name: str, make_domain: Callable[[Bucket], Domain], *, decay: float = 1.0, feedback: bool = True
) -> Reducer:
    """The reducer of this name: p = decay e + g; send a set of p's numbers in a domain; e <- p - what arrives of it.
    Tensors of fewer than two dimensions go in full."""
    if decay != 1.0 and not feedback:
        raise ValueError(f"decay={decay:g} is of what was kept: it needs feedback=True")
    works: WeakKeyDictionary[Bucket, tuple[Domain, Vectors]] = WeakKeyDictionary()
    spare = SpareLines()

    def init(bucket: Bucket) -> State:
        kept = {"residual": residual_like(bucket), "lr": [None] * len(bucket.names)} if feedback else {}
        return {"step": 0, **kept}

    def stages(bucket: Bucket, state: State, world: World) -> Stages:
        if bucket not in works:
            works[bucket] = make_domain(bucket), Vectors(bucket)
        domain, vectors = works[bucket]
        step = state["step"]
        if feedback:
            rescale(bucket, state)
            kept = spare.beside(bucket, state["residual"])
            torch.mul(state["residual"], decay, out=kept).add_(bucket.flat)
        else:
            kept = widen(bucket.flat)
        full = narrow_to(vectors.take(kept), bucket.dtype)
        given = full.clone()
        reducing = world.all_reduce(full, "mean", tag=bucket.tag) if len(full) else None
        mean, mine = yield from exchange(domain.sets, domain.enter(kept, step), bucket, world)
        if reducing is not None:
            reducing.wait()
        sent = domain.leave(mine, step)
        vectors.put(sent, given)
        kept.sub_(sent)
        bucket.flat.copy_(narrow_to(domain.leave(mean, step), bucket.dtype))
        vectors.put(bucket.flat, full)
        after = {**state, "step": step + 1, **({"residual": kept} if feedback else {})}
        return Reduced(bucket.tensors, partial(_view, bucket, sent)), after

    stages.__module__ = f"unisono.methods.reducers.{name}"  # where its factory is found

    def sends(bucket: Bucket, size: int) -> int:
        itemsize = bucket.flat.element_size()
        full = all_reduce_bytes(sum(Vectors(bucket).lengths) * itemsize, size)
        return (size - 1) * make_domain(bucket).sets.nbytes(itemsize) + full

    return staged(init, stages, memory=feedback, sends=sends)


def _view(bucket: Bucket, line: Tensor, _: list[Tensor]) -> list[Tensor]:
    return bucket.views(line)


def exchange(
    sets: SparseSets, numbers: Tensor, bucket: Bucket, world: World
) -> Generator[None, None, tuple[Tensor, Tensor]]:
    """The mean over the ranks of what each sends of its numbers, and this rank's part of it."""
    message, places, values = sets.encode(numbers, bucket.dtype)
    handle = world.all_gather(message, even=True, tag=bucket.tag) if sets.total else None
    yield
    mean = torch.zeros_like(numbers)
    for one in handle.wait() if handle is not None else ():
        there, came = sets.decode(one, bucket.dtype, numbers.dtype)
        mean.index_add_(0, there, came, alpha=1 / world.size)
    return mean, torch.zeros_like(numbers).index_copy_(0, places, values)
