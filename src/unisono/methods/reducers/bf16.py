"""The mean in bfloat16: half the bytes of float32, its range, 8 bits of precision."""

from __future__ import annotations

import torch

from unisono.methods.facts import Convergence, Example, Facts
from unisono.methods.reducer import Reducer
from unisono.methods.reducers._cast import build_cast

FACTS = Facts(
    [Example("bf16", memory=False, bytes=lambda sizes: sizes.all_reduce(2 * sizes.numbers))],
    convergence=Convergence("rounded", "gradients to 8 bits of precision"),
)


def bf16() -> Reducer:
    """Cast to bfloat16, take the mean, cast back: g = (1/N) sum of all bf16(g_i).

    Each number is rounded twice, to a relative 2^-9: once before it is sent, and once as the mean. What rounding
    takes away is lost, without bias; `error_feedback(bf16)` keeps what the first one takes. The sum is taken in
    float32 on CPUs, so that it rounds once, and by NCCL in bfloat16 on GPUs. Buckets of 16 bits go as they are.

    Sends 2(N-1)/N of 2 bytes a number.

    >>> from unisono.spec import build
    >>> build("bf16", kind="reducer").exact
    False
    """
    return build_cast(torch.bfloat16)
