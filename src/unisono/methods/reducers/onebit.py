"""1-bit SGD: signs and one size a tensor, with error feedback.

Seide et al. 2014; the size as in Karimireddy et al. 2019, arXiv:1901.09847."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import partial

import torch
from torch import Tensor

from unisono.methods.buckets import Bucket
from unisono.methods.checks import validate
from unisono.methods.facts import Convergence, Example, Facts, Sizes
from unisono.methods.reducer import Reduced, Reducer, SpareLines, Stages, State, rescale, residual_like, staged
from unisono.methods.reducers._quantised import choose_line, put, working_dtype
from unisono.methods.reducers._signs import Signs, SignsOnCuda, messages_of, on_cuda
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
    that holds an inf or NaN on some rank is NaN everywhere, and then every e stays as it was, of all tensors.

    feedback: keep e. Without it, what signs leave out is lost, and the result is biased.

    >>> from unisono.spec import build
    >>> build("onebit", kind="reducer").memory
    True
    """

    spare = SpareLines()

    def init(bucket: Bucket) -> State:
        if not feedback:
            return {}
        return {"residual": residual_like(bucket), "lr": list(bucket.lr)}

    def stages(bucket: Bucket, state: State, world: World) -> Stages:
        if not bucket.flat.numel():
            return Reduced(bucket.tensors), state
        if feedback:
            rescale(bucket, state)
        signs, fast = messages_of(bucket), on_cuda(bucket)
        if fast is not None:
            codes = list(fast.find_messages(world.size))
            kept = spare.beside(bucket, state["residual"]) if feedback else None
            yield from _reduce_on_cuda(fast, bucket, state.get("residual"), kept, world)
            if kept is not None:
                state["residual"] = kept
            sent = partial(_read_sent, signs, fast.mine, bucket)
            return Reduced(bucket.tensors, sent, _find_overflow(signs, codes)), state
        given = bucket.flat if bucket.dtype == working_dtype(bucket) else bucket.flat.float()
        if feedback:
            given.add_(state["residual"])
        code = signs.encode(given, signs.average_magnitudes(given))
        handle = world.all_gather(code, even=True, tag=bucket.tag)
        yield
        codes = handle.wait()
        if feedback:
            signs.decode(code, given, over=-1, add=True)  # p - sent
            signs.zero_gaps(given)
            state["residual"] = spare.beside(bucket, state["residual"]).copy_(given)
        line = choose_line(bucket)
        for i, message in enumerate(codes):
            signs.decode(message, line, over=world.size, add=i > 0)
        put(line, bucket)
        sent = partial(_read_sent, signs, code, bucket)
        return Reduced(bucket.tensors, sent, _find_overflow(signs, codes)), state

    def sends(bucket: Bucket, size: int) -> int:
        n = bucket.flat.numel()
        return (size - 1) * messages_of(bucket).nbytes(n) if n else 0

    return staged(init, stages, memory=feedback, sends=sends)


def _reduce_on_cuda(
    fast: SignsOnCuda, bucket: Bucket, residual: Tensor | None, kept: Tensor | None, world: World
) -> Generator[None, None, None]:
    """The same as in `stages`, a launch a phase for all tensors; the new residual is `kept`."""
    every, tables, line = fast.find_messages(world.size), fast.tables, fast.find_line(bucket)
    lasting = [bucket.flat, residual, kept, every]

    def encode() -> None:
        if line is not bucket.flat:
            line.copy_(bucket.flat)
        fast.kernels.measure(tables, line, residual, fast.mine, vote=False)
        fast.kernels.encode(tables, line, fast.mine)

    fast.graphs.run("encode", lasting, encode)
    handle = world.all_gather(fast.mine, even=True, out=list(every), tag=bucket.tag) if world.size > 1 else None
    yield
    if handle is not None:
        handle.wait()

    def decode() -> None:
        if kept is None:
            fast.kernels.add_up(tables, every, line, vote=False)
        else:
            fast.kernels.add_up_and_keep(tables, every, fast.mine, line, kept)
        put(line, bucket)

    fast.graphs.run("decode", lasting, decode)


def _read_sent(signs: Signs, code: Tensor, bucket: Bucket, _: list[Tensor]) -> list[Tensor]:
    """My part of the mean, as tensors."""
    mine = torch.zeros_like(bucket.flat, dtype=working_dtype(bucket))
    signs.decode(code, mine)
    return bucket.views(mine)


def _find_overflow(signs: Signs, codes: Sequence[Tensor]) -> Tensor:
    """NaN unless every rank's sizes are finite: every rank has all of them."""
    return torch.stack([signs.read_floats(code) for code in codes]).mul_(0).sum()
