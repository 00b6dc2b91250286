"""Random-k sparsification with error feedback: all workers send the same few places, drawn anew in every step.

Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory" (2018).
"""

from __future__ import annotations

import math
from typing import Annotated
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from unisono.methods.buckets import Bucket
from unisono.methods.checks import Range, validate
from unisono.methods.facts import Convergence, Example, Facts, Sizes
from unisono.methods.kernels.select import fold, narrow_to
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
from unisono.methods.reducers._random_places import RandomPlaces
from unisono.methods.reducers._subsets import Vectors
from unisono.world import World


def _count_bytes(sizes: Sizes) -> int:
    """Of a tenth: values only, as every rank knows the places; vectors in full."""
    kept = sum(max(1, round(0.1 * math.prod(shape))) for shape in sizes.matrices)
    return sizes.all_reduce(4 * (kept + sizes.in_vectors))


FACTS = Facts(
    [
        Example("randomk(k=0.1)", bytes=_count_bytes),
        Example("randomk(k=0.1, feedback=False)", memory=False, bytes=_count_bytes),
    ],
    refuses={"k=0": "fraction", "feedback=1": "feedback", "seed=0.5": "seed"},
    trains_as=["allreduce(reducer=randomk(k=0.3))"],
    convergence=Convergence(
        "other", "some numbers of each gradient, drawn in every step: learns far less from each sample"
    ),
    plans=["randomk(k=0.01)"],
)


@validate
def randomk(
    k: Annotated[float, Range("the fraction of a tensor that is sent", above=0, at_most=1, percent=True)] = 0.01,
    *,
    feedback: bool = True,
    seed: int = 0,
) -> Reducer:
    """K places of each tensor, the same on every rank: p = e + g; all-reduce p there; e <- p - what was sent.

    The places follow from the seed, the step and the tensor's name, so only the numbers are sent: AR(itemsize * K)
    bytes, less than dense for every k. Each number of a tensor is as likely as every other. Tensors of fewer than
    two dimensions go in full. When the learning rate changes, e is scaled by old / new.

    k: the fraction of a tensor that is sent, at least one number.
    feedback: keep what was not sent (e) for the next steps; otherwise it is lost, and nothing is scaled up for it.
    seed: another seed draws other places.

    >>> import torch
    >>> from unisono.world import World
    >>> bucket = Bucket(0, [("w", torch.zeros(2, 2))], lambda n, dtype: torch.empty(n, dtype=dtype))
    >>> _ = bucket.tensors[0].copy_(torch.tensor([[1.0, -4.0], [2.0, 0.5]]))
    >>> reducer = randomk(0.25)
    >>> reduced, state = reducer.reduce(bucket, reducer.init(bucket), World())
    >>> int((reduced.mean[0] != 0).sum()), int((state["residual"] != 0).sum())
    (1, 3)
    """
    works: WeakKeyDictionary[Bucket, _Workspace] = WeakKeyDictionary()
    spare = SpareLines()

    def init(bucket: Bucket) -> State:
        state: State = {"step": 0}
        if feedback:
            state |= {"residual": residual_like(bucket), "lr": [None] * len(bucket.names)}
        return state

    def stages(bucket: Bucket, state: State, world: World) -> Stages:
        work = works.get(bucket)
        if work is None:
            work = works[bucket] = _Workspace(bucket, k)
        if feedback:
            rescale(bucket, state)
        places = work.random.draw(seed, state["step"])
        kept = spare.beside(bucket, state["residual"]) if feedback else None
        line = work.take_line(bucket, state, places, kept)
        given = line.clone()
        reducing = world.all_reduce(line, "mean", tag=bucket.tag) if line.numel() else None
        bucket.flat.zero_()
        yield
        if reducing is not None:
            reducing.wait()
        if kept is not None:
            state["residual"] = kept
        overflow = line.mul(0).sum(dtype=torch.float32)
        work.put(bucket.flat, places, line)
        state["step"] += 1
        return Reduced(bucket.tensors, lambda _: work.sent(bucket, places, given), overflow), state

    def sends(bucket: Bucket, size: int) -> int:
        return all_reduce_bytes(_Workspace(bucket, k).numbers * bucket.flat.element_size(), size)

    return staged(init, stages, memory=feedback, sends=sends)


class _Workspace:
    """What reducing a bucket needs besides its state: which tensors go how."""

    def __init__(self, bucket: Bucket, k: float) -> None:
        self._dense = Vectors(bucket)
        self.random = RandomPlaces(bucket, k)
        self.numbers = sum(self.random.counts) + sum(self._dense.lengths)

    def take_line(self, bucket: Bucket, state: State, places: Tensor, kept: Tensor | None) -> Tensor:
        """What is sent: the numbers of p at the places, then the tensors that go in full. The rest of p is in `kept`.

        A NaN or infinity that was not drawn shows as NaN in what is sent.
        """
        p = bucket.flat
        if kept is not None:
            p = kept
            fold(bucket.flat, state["residual"], p)
        picked = torch.cat([p.index_select(0, places), *self._dense.views(p)])
        sent = narrow_to(picked, bucket.dtype)
        if len(places):
            low, high = torch.aminmax(p)
            sent = sent + (low * 0 + high * 0).to(bucket.dtype)
        if kept is not None:
            self.put(p, places, picked - sent)
        return sent

    def put(self, flat: Tensor, places: Tensor, line: Tensor) -> None:
        """Write a line that was sent to where it belongs."""
        flat.index_copy_(0, places, line[: len(places)])
        self._dense.put(flat, line[len(places) :])

    def sent(self, bucket: Bucket, places: Tensor, given: Tensor) -> list[Tensor]:
        """My part of the mean, as tensors."""
        flat = torch.zeros_like(bucket.flat)
        self.put(flat, places, given)
        return bucket.views(flat)
