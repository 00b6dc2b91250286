"""The mean in float16: half the bytes of float32, 11 bits of precision, up to 65504."""

from __future__ import annotations

import torch

from unisono.methods.facts import Convergence, Example, Facts
from unisono.methods.reducer import Reducer
from unisono.methods.reducers._cast import build_cast

FACTS = Facts(
    [Example("fp16", memory=False, bytes=lambda sizes: sizes.all_reduce(2 * sizes.numbers))],
    convergence=Convergence("rounded", "gradients to 11 bits of precision; beyond 65504 they overflow"),
)


def fp16() -> Reducer:
    """Cast to float16, take the mean, cast back: g = (1/N) sum of all fp16(g_i).

    Each number is rounded twice, to a relative 2^-12: once before it is sent, and once as the mean. Numbers below
    6e-8 become zero, and those beyond 65504 infinite: that is an overflow, which every rank sees in its gradients as
    with AMP (`bf16` has float32's range). The sum itself does not overflow: CPUs take it in float32, and NCCL divides
    by N before it adds. Buckets of 16 bits go as they are.

    Sends 2(N-1)/N of 2 bytes a number.

    >>> from unisono.spec import build
    >>> build("fp16", kind="reducer").exact
    False
    """
    return build_cast(torch.float16)
