"""SignSGD with majority vote: every rank votes with the signs of its gradient.

Bernstein et al. 2018, arXiv:1802.04434."""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor

from unisono.methods.buckets import Bucket
from unisono.methods.checks import validate
from unisono.methods.facts import Convergence, Example, Facts, Sizes
from unisono.methods.kernels.bits import pack, unpack
from unisono.methods.kernels.noise import Noise, bits, noise
from unisono.methods.reducer import Reduced, Reducer, Stages, State, staged
from unisono.methods.reducers._quantised import choose_line, put, share_length, split_shares
from unisono.methods.reducers._signs import Signs, SignsOnCuda, messages_of, on_cuda
from unisono.world import World


def _count_bytes(sizes: Sizes) -> int:
    """A bit a number and four bytes a tensor; by shares, two bits a number more for the outcome."""
    floats, share = 4 * len(sizes.shapes), sizes.share(sizes.numbers)
    return sizes.gather(floats + min(sizes.numbers // 8, share // 8 + share // 4))


FACTS = Facts(
    [Example("signsgd", memory=False, bytes=_count_bytes)],
    refuses={"seed=0.5": "seed"},
    convergence=Convergence("other", "a vote on signs: no mean, and a learning rate of its own"),
)


@validate
def signsgd(*, seed: int = 0) -> Reducer:
    """Send signs, and return the majority's: -1, +1, or 0 where the vote is tied.

        out_i = sign(sum over ranks of sign(g_i))

    The result is a direction, not a mean: it takes a learning rate of its own (an Adam's, say, rather than an
    SGD's), and error feedback has nothing to add; for scaled signs with feedback see `onebit`.

    A message of d numbers in T tensors takes d/8 + 4 T bytes. Every rank sends N - 1 of them; where it is less,
    an N-th of the bits to each rank, which counts them and sends the outcome on with 2 bits a number.

    A tensor that is all zero on a rank abstains there. A zero among other numbers votes one way in a step and the
    other way in the next, ranks of even and odd number against each other: in a world of even size, what is zero
    everywhere stays zero; in one of odd size it goes to and fro, and does not drift. A tensor that
    holds an inf or NaN on some rank is NaN everywhere.

    seed: of the zeros' first votes.

    >>> from unisono.spec import build
    >>> build("signsgd", kind="reducer").exact
    False
    """

    def stages(bucket: Bucket, state: State, world: World) -> Stages:
        after, line = {"step": state["step"] + 1}, bucket.flat
        if not line.numel():
            return Reduced(bucket.tensors), after
        signs, size, source = messages_of(bucket), world.size, noise(seed, 0, 0, bucket.index)
        flipped = (world.rank + state["step"]) % 2 == 1
        fast = on_cuda(bucket) if not _shares_pay(signs, line.numel(), size) else None
        if fast is not None:
            yield from _vote_on_cuda(fast, bucket, source, flipped, world)
            return _scale(bucket), after
        means = signs.average_magnitudes(line)
        weights = torch.where(torch.isfinite(means), (means != 0).float(), torch.nan)
        tally = choose_line(bucket)
        if not _shares_pay(signs, line.numel(), size):
            handle = world.all_gather(_encode_votes(signs, line, weights, source, flipped), even=True, tag=bucket.tag)
            yield
            _count_votes(signs, handle.wait(), tally)
        else:
            each = share_length(line.numel(), size)
            votes = [
                _encode_votes(signs, x, weights, source.after(r * each), flipped, each)
                for r, x in enumerate(split_shares(line, size))
            ]
            scattering = world.all_to_all(votes, out=[torch.empty_like(vote) for vote in votes], tag=bucket.tag)
            yield
            mine = torch.zeros_like(split_shares(line, size)[world.rank], dtype=torch.float32)
            _count_votes(signs, scattering.wait(), mine, world.rank * each)
            gathering = world.all_gather(_pack_outcome(mine, each), even=True, tag=bucket.tag)
            yield
            for x, outcome in zip(split_shares(tally, size), gathering.wait(), strict=True):
                x.copy_(_unpack_outcome(outcome)[: x.numel()])
        put(tally, bucket)
        return _scale(bucket), after

    def sends(bucket: Bucket, size: int) -> int:
        signs, n = messages_of(bucket), bucket.flat.numel()
        each = share_length(n, size)
        if not n:
            return 0
        return (size - 1) * (signs.nbytes(each) + each // 4 if _shares_pay(signs, n, size) else signs.nbytes(n))

    return staged(lambda bucket: {"step": 0}, stages, sends=sends)


def _vote_on_cuda(
    fast: SignsOnCuda, bucket: Bucket, source: Noise, flipped: bool, world: World
) -> Generator[None, None, None]:
    """What `stages` does, with one kernel launch in each phase for all tensors."""
    every, tables = fast.find_messages(world.size), fast.tables
    lasting = [bucket.flat, every]

    def encode() -> None:
        fast.kernels.measure(tables, bucket.flat, None, fast.mine, vote=True)
        fast.kernels.encode(tables, bucket.flat, fast.mine, source, flipped=flipped)

    fast.graphs.run(("encode", flipped), lasting, encode)
    handle = world.all_gather(fast.mine, even=True, out=list(every), tag=bucket.tag) if world.size > 1 else None
    yield
    if handle is not None:
        handle.wait()

    def decode() -> None:
        line = fast.find_line(bucket)
        fast.kernels.add_up(tables, every, line, vote=True)
        put(line, bucket)

    fast.graphs.run("decode", lasting, decode)


def _scale(bucket: Bucket) -> Reduced:
    """The outcome, multiplied by AMP's loss scale: a GradScaler divides by it."""
    if bucket.scale != 1:
        bucket.flat.mul_(bucket.scale)
    return Reduced(bucket.tensors)


def _shares_pay(signs: Signs, n: int, size: int) -> bool:
    each = share_length(n, size)
    return signs.nbytes(each) + each // 4 < signs.nbytes(n)


def _encode_votes(signs: Signs, line: Tensor, weights: Tensor, source: Noise, flipped: bool, room: int = 0) -> Tensor:
    """My signs; zeros vote as the noise says, or the other way."""

    def zeros(a: int, b: int) -> Tensor:
        drawn = bits(source.after(a), b - a, line.device) < 0
        return ~drawn if flipped else drawn

    return signs.encode(line, weights, zeros, room)


def _count_votes(signs: Signs, votes: list[Tensor], out: Tensor, lo: int = 0) -> None:
    """The majority of some votes: -1, 0, 1, or NaN."""
    for i, vote in enumerate(votes):
        signs.decode(vote, out, lo, add=i > 0)
    out.clamp_(-1, 1)


def _pack_outcome(outcome: Tensor, n: int) -> Tensor:
    """An outcome with 2 bits a number: a line of "not above 0", then one of "not below 0"; NaN is neither."""
    padded = torch.zeros(2, n, dtype=torch.bool, device=outcome.device)
    torch.le(outcome, 0, out=padded[0, : outcome.numel()])
    torch.ge(outcome, 0, out=padded[1, : outcome.numel()])
    return pack(padded.view(-1))


def _unpack_outcome(written: Tensor) -> Tensor:
    low, high = unpack(written).view(2, -1)
    signs = high.float() - low.float()
    return torch.where(low | high, signs, torch.nan)
