"""CocktailSGD: of numbers drawn at random the largest, in a few bits, with error feedback.

Wang et al. 2023, "CocktailSGD: Fine-tuning Foundation Models over 500Mbps Networks" (ICML).
"""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from typing import Annotated

import torch
from torch import Tensor

from unisono.methods.buckets import Bucket
from unisono.methods.checks import Range, validate
from unisono.methods.facts import Convergence, Example, Facts
from unisono.methods.kernels.sets import SparseSets, cut
from unisono.methods.reducer import Reducer
from unisono.methods.reducers._chunked import Chunk, ValueBits, build_sparse, check_count, count_chunked
from unisono.methods.reducers._random_places import RandomPlaces

FACTS = Facts(
    [
        Example("cocktail(random=0.5, k=0.2, chunk=64)", bytes=count_chunked(64, 0.2, 4, drawn=0.5)),
        Example(
            "cocktail(random=0.3, k=8, chunk=32, bits=2, feedback=False)",
            memory=False,
            bytes=count_chunked(32, 8, 2, drawn=0.3),
        ),
    ],
    refuses={
        "random=0": "drawn",
        "random=20": "random=0.2",
        "k=0": "of those drawn",
        "k=0.5, bits=1": "bits",
        "chunk=64, k=65": "at most 64",
        "seed=0.5": "seed",
    },
    convergence=Convergence("compressed", "the largest of numbers drawn at random; the rest is made up for later"),
    plans=["cocktail"],
)


@validate
def cocktail(
    random: Annotated[float, Range("the fraction of a tensor that is drawn", above=0, at_most=1, percent=True)] = 0.2,
    *,
    k: Annotated[int | float, Range("the fraction of those drawn that is sent, or how many of a chunk", above=0)] = 0.1,
    bits: ValueBits = 4,
    chunk: Chunk = 4096,
    feedback: bool = True,
    seed: int = 0,
) -> Reducer:
    """Three methods, one inside the other: p = e + g; draw the same places of p on every rank; send the k largest of
    each chunk of what is there, in a few bits; e <- p - what arrives.

    Drawing first costs no bytes and makes the selection cheap; selecting first keeps the noise of few bits small. The
    places drawn follow from the seed, the step and the tensor's name. Tensors of fewer than two dimensions go in full.
    When the learning rate changes, e is scaled by old / new. By default 2 % of the numbers are sent, 16 bits each.

    random: the fraction of a tensor that is drawn, at least one number.
    k: how many of each chunk of drawn numbers are sent; a number below 1, or 1.0, is the share.
    bits: of each value, a sign and a level. None: in full.
    chunk: numbers in a chunk: a place takes log2 of them in bits.
    feedback: keep what was not sent for the next steps; otherwise it is lost.
    seed: another seed draws other places.

    >>> from unisono.spec import build
    >>> build("cocktail", kind="reducer").memory
    True
    """
    check_count(chunk, k)
    make_domain = partial(_Drawn, random=random, k=k, chunk=chunk, bits=bits, seed=seed)
    return build_sparse("cocktail", make_domain, feedback=feedback)


class _Drawn:
    """The numbers at random places of a bucket's matrices, each matrix's cut into chunks."""

    def __init__(self, bucket: Bucket, *, random: float, k: float, chunk: int, bits: int | None, seed: int) -> None:
        self._places, self._seed, self._numel = RandomPlaces(bucket, random), seed, bucket.flat.numel()
        starts = accumulate(self._places.counts, initial=0)
        pieces = [p for at, n in zip(starts, self._places.counts, strict=False) for p in cut(at, n, chunk, k)]
        self.sets = SparseSets(pieces, chunk, bits, bucket.device)

    def enter(self, line: Tensor, step: int) -> Tensor:
        low, high = torch.aminmax(line) if len(line) else (line.new_zeros(()), line.new_zeros(()))
        return line.index_select(0, self._places.draw(self._seed, step)) + (low * 0 + high * 0)  # an overflow shows

    def leave(self, numbers: Tensor, step: int) -> Tensor:
        return numbers.new_zeros(self._numel).index_copy_(0, self._places.draw(self._seed, step), numbers)
