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
from unisono.methods.reducers._quantised import choose_line, put, share_length, split_shares, working_dtype
from unisono.methods.reducers._signs import Signs, SignsOnCuda, messages_of, on_cuda
from unisono.world import World


def _count_bytes(sizes: Sizes) -> int:
    return sizes.gather(sizes.numbers // 8 + 4 * len(sizes.shapes))


def _count_bytes_of_shares(sizes: Sizes) -> int:
    return 2 * sizes.gather(sizes.share(sizes.numbers) // 8 + 4 * len(sizes.shapes))


FACTS = Facts(
    [
        Example("onebit", bytes=_count_bytes),
        Example("onebit(feedback=False)", memory=False, bytes=_count_bytes),
        Example("onebit(shares=True)", bytes=_count_bytes_of_shares),
    ],
    refuses={"feedback=1": "feedback", "shares=True, feedback=False": "feedback"},
    convergence=Convergence("other", "signs only; what is left out is made up for later: learns less from each sample"),
)


@validate
def onebit(*, feedback: bool = True, shares: bool = False) -> Reducer:
    """Send the signs of p = g + e, and for each tensor the mean of |p|; keep what that leaves out in e.

        sent = mean(|p|) sign(p),  out = mean over ranks of sent,  e <- p - sent

    A message of d numbers in T tensors takes d/8 + 4 T bytes, and every rank sends N - 1 of them: N/64 of what dense
    float32 sends, so it pays less the more ranks there are. When a learning rate changes, e is scaled by lr_old/lr_new.
    A tensor that holds an inf or NaN on some rank is NaN everywhere, and then every e stays as it was, of all tensors.

    feedback: keep e. Without it, what signs leave out is lost, and the result is biased.
    shares: every rank averages a share of the numbers and sends its mean on as signs again, with an e of its own for
        what that leaves out: 1/32 of dense whatever N. The error of that second rounding is as large as the mean: for
        momenta, which change slowly (1-bit Adam and 0/1 Adam send them so), not for gradients.

    >>> from unisono.spec import build
    >>> build("onebit", kind="reducer").memory
    True
    """

    spare = SpareLines()
    if shares and not feedback:
        raise ValueError("shares=True rounds twice, and needs what that leaves out: leave feedback=True")

    def init(bucket: Bucket) -> State:
        if not feedback:
            return {}
        kept = {"residual": residual_like(bucket), "lr": list(bucket.lr)}
        return {**kept, "server": {"residual": residual_like(bucket), "lr": list(bucket.lr)}} if shares else kept

    def stages(bucket: Bucket, state: State, world: World) -> Stages:
        if not bucket.flat.numel():
            return Reduced(bucket.tensors), state
        if feedback:
            rescale(bucket, state)
        if shares:
            return (yield from _average_shares(bucket, state, world, spare))
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
        n, signs = bucket.flat.numel(), messages_of(bucket)
        if not n:
            return 0
        return (size - 1) * (2 * signs.nbytes(share_length(n, size)) if shares else signs.nbytes(n))

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


def _average_shares(bucket: Bucket, state: State, world: World, spare: SpareLines) -> Stages:
    """Signs of every share to the rank that averages it, and signs of its mean to all. That rank keeps what the second
    rounding leaves out: in the mean over the ranks of all that is kept, it counts as it would in the result."""
    left, server = state["residual"], state["server"]["residual"]
    rescale(bucket, state["server"])
    signs, size, rank = messages_of(bucket), world.size, world.rank
    each = share_length(bucket.flat.numel(), size)
    given = bucket.flat if bucket.dtype == working_dtype(bucket) else bucket.flat.float()
    given.add_(left)
    for r, (x, other) in enumerate(zip(split_shares(given, size), split_shares(server, size), strict=True)):
        if r != rank:  # zero, unless the shares were others before
            x.add_(other)
    sizes = signs.average_magnitudes(given)
    codes = [signs.encode(x, sizes, room=each) for x in split_shares(given, size)]
    scattering = world.all_to_all(codes, out=[torch.empty_like(code) for code in codes], tag=bucket.tag)
    yield
    mine = split_shares(server, size)[rank] / size
    for message in scattering.wait():
        signs.decode(message, mine, rank * each, over=size, add=True)
    outcome = signs.encode(mine, signs.average_magnitudes(mine, rank * each), room=each)
    gathering = world.all_gather(outcome, even=True, tag=bucket.tag)
    yield
    for r, (x, code) in enumerate(zip(split_shares(given, size), codes, strict=True)):
        signs.decode(code, x, r * each, over=-1, add=True)  # p - sent
    signs.decode(outcome, mine, rank * each, over=-1, add=True)
    kept = [spare.beside(bucket, left).copy_(given), spare.beside(bucket, server, "server").zero_()]
    split_shares(kept[1], size)[rank].copy_(mine.mul_(size))
    for line in kept:
        signs.zero_gaps(line)
    outcomes, line = gathering.wait(), choose_line(bucket)
    for r, (x, message) in enumerate(zip(split_shares(line, size), outcomes, strict=True)):
        signs.decode(message, x, r * each)
    put(line, bucket)

    def sent(given: list[Tensor]) -> list[Tensor]:
        lines = zip(given, *(bucket.views(line) for line in (left, server, *kept)), strict=True)
        return [(x + e + s - new - mean).to(x.dtype) for x, e, s, new, mean in lines]

    after = {**state, "residual": kept[0], "server": {**state["server"], "residual": kept[1]}}
    return Reduced(bucket.tensors, sent, _find_overflow(signs, outcomes)), after


def _read_sent(signs: Signs, code: Tensor, bucket: Bucket, _: list[Tensor]) -> list[Tensor]:
    """My part of the mean, as tensors."""
    mine = torch.zeros_like(bucket.flat, dtype=working_dtype(bucket))
    signs.decode(code, mine)
    return bucket.views(mine)


def _find_overflow(signs: Signs, codes: Sequence[Tensor]) -> Tensor:
    """NaN unless every rank's sizes are finite: every rank has all of them."""
    return torch.stack([signs.read_floats(code) for code in codes]).mul_(0).sum()
