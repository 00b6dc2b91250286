"""Error feedback around any reducer: what it did not send is kept and added to the next gradient.

Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes" (2019).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from unisono.methods.buckets import Bucket
from unisono.methods.checks import validate
from unisono.methods.facts import Example, Facts
from unisono.methods.reducer import (
    Reduced,
    Reducer,
    SpareLines,
    Stages,
    State,
    rescale,
    residual_like,
    staged,
    stages_of,
)
from unisono.methods.reducers._subsets import check_contracts
from unisono.world import World

_CHUNK = 1 << 18  # numbers added at a time: what was written is still in the cache when it is copied

FACTS = Facts(
    [
        Example("error_feedback(bf16)", rounds_mean=True, bytes=lambda sizes: sizes.sent_by("bf16")),
        Example("error_feedback(nuqsgd)", bytes=lambda sizes: sizes.sent_by("nuqsgd")),
        Example("error_feedback(topk(k=0.1, feedback=False))", bytes=lambda sizes: sizes.sent_by("topk(k=0.1)")),
    ],
    refuses={"dens": "dense", "qsgd(bits=2)": "grow without bound"},
    trains_as=["allreduce(reducer=error_feedback(nuqsgd(bits=4)))"],
    plans=[],
)


@validate
def error_feedback(inner: Reducer) -> Reducer:
    """Keep what `inner` does not send: p = g + e; `inner` reduces p; e <- p - sent.

    Over time nothing is lost: the sum of all results, plus the mean of what is kept, is the sum of all mean
    gradients. When a learning rate changes, what is kept is scaled by old / new. On a step that overflows it stays
    as it was, on every rank. It is kept in float32 for 16-bit gradients, else in their own dtype.

    inner: any reducer. One that has a memory already (top-k, PowerSGD, ...) comes back as it is.

    Sends what `inner` sends. Keeps one number a parameter, and uses memory for another.

    >>> from unisono.spec import build
    >>> build("error_feedback(bf16)", kind="reducer").memory
    True
    """
    if inner.memory:
        return inner
    check_contracts(inner)
    spare = SpareLines()

    def init(bucket: Bucket) -> State:
        return {"residual": residual_like(bucket), "lr": list(bucket.lr), "inner": inner.init(bucket)}

    def stages(bucket: Bucket, state: State, world: World) -> Stages:
        rescale(bucket, state)
        before = state["residual"]
        kept = spare.beside(bucket, before)
        _add(bucket.flat, before, kept)
        reduced, state["inner"] = yield from stages_of(inner, bucket, state["inner"], world)
        given = bucket.views(kept if kept.dtype == bucket.dtype else kept.to(bucket.dtype))
        for part, sent in zip(bucket.views(kept), reduced.sent_of(given), strict=True):
            part.sub_(sent)
        state["residual"] = kept
        return Reduced(reduced.mean, partial(_find_sent, bucket, before, kept), reduced.overflow), state

    shard_codec = inner.codec or inner.shard_codec
    return staged(
        init, stages, memory=True, exact=inner.exact, sends=inner.sends, check=inner.check, shard_codec=shard_codec
    )


def _add(flat: Tensor, residual: Tensor, p: Tensor) -> None:
    """p = flat + residual, and flat = p as far as its dtype holds it."""
    if flat.is_cuda:
        torch.add(residual, flat, out=p)
        flat.copy_(p)
        return
    for g, e, out in zip(flat.split(_CHUNK), residual.split(_CHUNK), p.split(_CHUNK), strict=True):
        torch.add(e, g, out=out)
        g.copy_(out)


def _find_sent(bucket: Bucket, before: Tensor, after: Tensor, given: list[Tensor]) -> list[Tensor]:
    """What got through of a gradient and of what had been kept, until the next reduction."""
    lines = zip(given, bucket.views(before), bucket.views(after), strict=True)
    return [(old + x - new).to(x.dtype) for x, old, new in lines]
