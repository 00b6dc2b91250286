"""LoCo: 4 bits a number, and the moving average of what they leave out in 8.

Xie, Lin, Toh and Zhou 2024, "LoCo: Low-Bit Communication Adaptor for Large-scale Model Training" (arXiv:2407.04480).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Annotated

import torch
from torch import Tensor

from unisono.methods.buckets import Bucket, widen
from unisono.methods.checks import AtLeast, Range, validate
from unisono.methods.facts import Convergence, Example, Facts
from unisono.methods.kernels.noise import Noise
from unisono.methods.kernels.sets import SparseSets, cut
from unisono.methods.reducer import Reduced, Reducer, SpareLines, Stages, State, rescale, staged, stages_of
from unisono.methods.reducers._quantised import Bits, Block, Wire, build_quantised, count_bytes
from unisono.world import World

FACTS = Facts(
    [
        Example("loco", conserves=False, bytes=count_bytes(lambda n: n // 2 + 4 * math.ceil(n / 512))),
        Example(
            "loco(bits=2, block=64, average=1.0, reset=2)",
            conserves=False,
            bytes=count_bytes(lambda n: n // 4 + 4 * math.ceil(n / 64)),
        ),
    ],
    refuses={"bits=3": "bits", "block=100": "power of two", "average=0": "average", "reset=0": "reset"},
    convergence=Convergence("compressed", "gradients to 4 bits; what these leave out is made up for later"),
)


@validate
def loco(
    bits: Bits = 4,
    *,
    block: Block = 512,
    average: Annotated[float, Range("the share of the newest error", above=0, at_most=1)] = 0.2,
    reset: Annotated[int, AtLeast(1, "steps until the error is forgotten")] = 512,
) -> Reducer:
    """Send h = g + e in 4 bits, and let e follow what they leave out, slowly:

        out = mean of Q(h_i),  e <- (1 - average) e + average (h - sent);  every `reset` steps e <- 0

    The average is calmer than the last error, and forgetting keeps stale errors from adding up. e is kept in bfloat16:
    8 bits of precision at any size of gradients, where the paper has 8 bits and a fixed scale. Each block has signs and
    levels from zero to the end that fits it best. Every rank averages a share and sends it on, rounded again; where
    that is less, all to all. A message of d numbers takes bits d/8 + 4 ceil(d/block) bytes. When a learning rate
    changes, e is scaled by old / new.

    bits: 2, 4 or 8 for each number.
    block: numbers that share the ends of their levels: a power of two from 64 to 16384.
    average: how fast e follows the error; 1.0: it is the last error, as in `error_feedback`.
    reset: steps after which e begins again at zero.

    >>> from unisono.spec import build
    >>> build("loco", kind="reducer").memory
    True
    """
    inner = build_quantised("loco", _make_wire(bits, block))
    spare = SpareLines()

    def init(bucket: Bucket) -> State:
        line = torch.zeros(bucket.flat.numel(), dtype=torch.bfloat16, device=bucket.device)
        return {"residual": line, "lr": [None] * len(bucket.names), "inner": inner.init(bucket)}

    def stages(bucket: Bucket, state: State, world: World) -> Stages:
        rescale(bucket, state)
        before, step = state["residual"], state["inner"]["step"]
        given = widen(bucket.flat).add_(before)
        bucket.flat.copy_(given)
        reduced, after = yield from stages_of(inner, bucket, state["inner"], world)
        sent = reduced.sent_of(bucket.tensors)
        for view, mine in zip(bucket.views(given), sent, strict=True):
            view.sub_(mine)
        kept = spare.beside(bucket, before)
        if (step + 1) % reset == 0:
            kept.zero_()
        else:
            kept.copy_(torch.lerp(before.to(given.dtype), given, average))
        return Reduced(reduced.mean, sent), {**state, "residual": kept, "inner": after}

    return staged(init, stages, memory=True, sends=inner.sends)


def _make_wire(bits: int, block: int) -> Wire:
    """Signs and levels of every number, by blocks."""

    @lru_cache(maxsize=64)
    def sets_of(n: int, device: torch.device) -> SparseSets:
        return SparseSets(cut(0, n, block, block), block, bits, device, zero=True)

    def encode(x: Tensor, source: Noise) -> Tensor:
        line = widen(x)
        return sets_of(len(x), x.device).encode(line, line.dtype)[0]

    def decode(code: Tensor, out: Tensor, ranks: int, add: bool) -> None:
        places, values = sets_of(len(out), out.device).decode(code, out.dtype, out.dtype)
        if not add:
            out.zero_()
        out.index_add_(0, places, values, alpha=1 / ranks)

    return Wire(lambda n: sets_of(n, torch.device("cpu")).nbytes(4), encode, decode)
