"""1-bit SGD: signs and one size a tensor, with error feedback.

Seide et al. 2014; the size as in Karimireddy et al. 2019, arXiv:1901.09847."""

from __future__ import annotations

import torch
from torch import Tensor

from unisono.buckets import Bucket
from unisono.checks import validate
from unisono.facts import Convergence, Example, Facts, Sizes
from unisono.reducer import Reduced, Reducer, Stages, State, rescale, residual_like, staged
from unisono.reducers._quantised import choose_line, put, working_dtype
from unisono.reducers._signs import Signs, messages_of
from unisono.world import World


def _count_bytes(sizes: Sizes) -> int:
    return sizes.gather(sizes.numbers // 8 + 4 * len(sizes.shapes))


FACTS = Facts(
    [Example("onebit", bytes=_count_bytes), Example("onebit(feedback=False)", memory=False, bytes=_count_bytes)],
    refuses={"feedback=1": "feedback"},
    convergence=Convergence("other", "signs only; what is left out is made up for later: learns less from each sample"),
)


@validate
def onebit(*, feedback: bool = True) -> Reducer:
    """Send the signs of p = g + e, and for each tensor the mean of |p|; keep what that leaves out in e.

        sent = mean(|p|) sign(p),  out = mean over ranks of sent,  e <- p - sent

    A message of d numbers in T tensors takes d/8 + 4 T bytes, and every rank sends N - 1 of them: N/64 of what dense
    float32 sends, so it pays less the more ranks there are. (Averaging parts and writing the mean with signs again
    would send 1/32 whatever N, but the error of that second rounding is as large as the mean: with 16 ranks the
    outputs grow to several times the gradient.) When a learning rate changes, e is scaled by lr_old/lr_new. A tensor
    that holds an inf or NaN on some rank is NaN everywhere, and then every e stays as it was.

    feedback: keep e. Without it, what signs leave out is lost, and the result is biased.

    >>> from unisono.spec import build
    >>> build("onebit", kind="reducer").memory
    True
    """

    def init(bucket: Bucket) -> State:
        if not feedback:
            return {}
        return {"residual": residual_like(bucket), "lr": list(bucket.lr)}

    def stages(bucket: Bucket, state: State, world: World) -> Stages:
        if not bucket.flat.numel():
            return Reduced(bucket.tensors), state
        given = bucket.flat if bucket.dtype == working_dtype(bucket) else bucket.flat.float()
        if feedback:
            rescale(bucket, state)
            given.add_(state["residual"])
        signs = messages_of(bucket)
        code = signs.encode(given, signs.average_magnitudes(given))
        handle = world.all_gather(code, even=True, tag=bucket.tag)
        yield
        codes = handle.wait()
        if feedback:
            signs.decode(code, given, over=-1, add=True)  # p - sent
            signs.zero_gaps(given)
            _keep(state["residual"], given, _all_finite(signs, codes))
        line = choose_line(bucket)
        for i, message in enumerate(codes):
            signs.decode(message, line, over=world.size, add=i > 0)
        put(line, bucket)

        def sent(_: list[Tensor]) -> list[Tensor]:
            mine = torch.zeros_like(line)
            signs.decode(code, mine)
            return bucket.views(mine)

        return Reduced(bucket.tensors, sent), state

    def sends(bucket: Bucket, size: int) -> int:
        n = bucket.flat.numel()
        return (size - 1) * messages_of(bucket).nbytes(n) if n else 0

    return staged(init, stages, memory=feedback, sends=sends)


def _all_finite(signs: Signs, codes: list[Tensor]) -> Tensor:
    """Whether every rank's sizes are finite: every rank has all of them."""
    return torch.isfinite(torch.stack([signs.read_floats(code) for code in codes])).all()


def _keep(residual: Tensor, new: Tensor, finite: Tensor) -> None:
    """The new residual, or the old one after an overflow: without waiting for a device."""
    if residual.is_cuda:
        residual.copy_(torch.where(finite, new, residual))
    elif finite:
        residual.copy_(new)
