"""The exchange of quantised lines: every rank gathers all messages, or each averages a share and sends it on.

Phases of the second form, which sends 2(N-1)/N messages instead of N-1:
1. scatter: share r of my line goes to rank r, quantised;
2. average: the shares I got are decoded, and their mean is quantised again;
3. gather: every rank's share goes to all.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Annotated, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from unisono.methods.buckets import Bucket
from unisono.methods.checks import Note, Satisfies
from unisono.methods.facts import Sizes
from unisono.methods.kernels import elias as gamma
from unisono.methods.kernels import quantise
from unisono.methods.kernels.noise import Noise, noise
from unisono.methods.kernels.quantise import Levels
from unisono.methods.reducer import Codec, Reduced, Reducer, Stages, State, staged
from unisono.world import World

Bits = Annotated[Literal[2, 4, 8], Note("a sign and a level: so they fill bytes")]
Block = Annotated[
    int,
    Satisfies(lambda n: 64 <= n <= 16384 and not n & (n - 1), "a power of two from 64 to 16384 (numbers a block)"),
]
Exchanged = Generator[None, None, Reduced]
_ALIGN = 64  # numbers: shares start at multiples


class Wire(NamedTuple):
    """How a line of numbers is written.

    nbytes: bytes of n numbers; where the code's length depends on the data (not `even`), of its fixed form.
    encode(x, noise): the code, uint8. decode(code, out, ranks, add): its numbers over `ranks` into `out`.
    """

    nbytes: Callable[[int], int]
    encode: Callable[[Tensor, Noise], Tensor]
    decode: Callable[[Tensor, Tensor, int, bool], None]
    even: bool = True


def make_wire(levels: Levels, elias: bool) -> Wire:
    """The wire of random rounding to levels: packed codes, or Elias's code of them."""

    def encode(x: Tensor, source: Noise) -> Tensor:
        code = torch.empty(levels.nbytes(x.numel()), dtype=torch.uint8, device=x.device)
        quantise.encode(x, levels, source, code)
        return code

    def decode(code: Tensor, out: Tensor, ranks: int, add: bool) -> None:
        quantise.decode(code, levels, out, ranks=ranks, add=add)

    def encode_short(x: Tensor, source: Noise) -> Tensor:
        n, code = x.numel(), encode(x, source)
        codes = gamma.encode(quantise.unpack(code, n, levels), levels.bits)
        return torch.cat([code[: 4 * -(-n // levels.block)], codes])

    def decode_short(short: Tensor, out: Tensor, ranks: int, add: bool) -> None:
        n, head = out.numel(), 4 * -(-out.numel() // levels.block)
        code = torch.empty(levels.nbytes(n), dtype=torch.uint8, device=out.device)
        code[:head] = short[:head]
        quantise.pack(gamma.decode(short[head:], n, levels.bits), levels, code)
        decode(code, out, ranks, add)

    return Wire(levels.nbytes, encode_short, decode_short, False) if elias else Wire(levels.nbytes, encode, decode)


def build_quantised(name: str, wire: Wire, seed: int = 0, noise_bound: float = 0.0) -> Reducer:
    """The reducer of this name, which sends lines over a wire, by the form of exchange that sends fewer bytes.

    In the second form the error of quantising a mean again counts, N times, as not sent by the rank that owns
    the share: the mean of what the ranks sent is what they got, as error feedback needs it.
    """

    def stages(bucket: Bucket, state: State, world: World) -> Stages:
        after = {"step": state["step"] + 1}
        if not bucket.flat.numel():
            return Reduced(bucket.tensors), after
        step = state["step"]
        streams = [noise(seed, step, world.rank, bucket.index, stream) for stream in (0, 1)]
        through = _average_shares if _shares_pay(wire.nbytes, bucket.flat.numel(), world.size) else _gather_all
        reduced = yield from through(wire, bucket, world, streams)
        return reduced, after

    stages.__module__ = f"unisono.methods.reducers.{name}"  # where its factory is found

    def sends(bucket: Bucket, size: int) -> int:
        n = bucket.flat.numel()
        if _shares_pay(wire.nbytes, n, size):
            return 2 * (size - 1) * wire.nbytes(share_length(n, size))
        return (size - 1) * wire.nbytes(n)

    def decode(code: Tensor, n: int) -> Tensor:
        out = torch.empty(n, dtype=torch.float32, device=code.device)
        wire.decode(code, out, 1, False)
        return out

    codec = Codec(wire.encode, decode, wire.nbytes if wire.even else None)
    return staged(
        lambda bucket: {"step": 0}, stages, sends=sends if wire.even else None, codec=codec, noise=noise_bound
    )


def count_bytes(message: Callable[[int], int]) -> Callable[[Sizes], int]:
    """For FACTS: a message to every other rank, or a share to each and the mean of a share to all, whichever is less.
    `message(n)` is the bytes of n numbers. Written apart from `sends`, so that one proves the other."""
    return lambda sizes: sizes.gather(min(message(sizes.numbers), 2 * message(sizes.share(sizes.numbers))))


def share_length(n: int, size: int) -> int:
    """Numbers in each of `size` shares of a line; the last ones may be shorter, or empty."""
    return -(-n // (size * _ALIGN)) * _ALIGN


def split_shares(line: Tensor, size: int) -> list[Tensor]:
    """A line's shares, one a rank."""
    each = share_length(line.numel(), size)
    return [line[r * each : (r + 1) * each] for r in range(size)]


def working_dtype(bucket: Bucket) -> torch.dtype:
    """The dtype of sums: float32, or the bucket's float64."""
    return torch.float64 if bucket.dtype == torch.float64 else torch.float32


def choose_line(bucket: Bucket) -> Tensor:
    """A line for the mean: the bucket's own, or one of float32 where it has 16 bits."""
    wide = working_dtype(bucket)
    return bucket.flat if bucket.dtype == wide else torch.empty_like(bucket.flat, dtype=wide)


def put(line: Tensor, bucket: Bucket) -> None:
    """The mean into the bucket; 16-bit numbers stop at their largest (NaN stays: it tells of an overflow)."""
    if line is not bucket.flat:
        top = torch.finfo(bucket.dtype).max
        bucket.flat.copy_(line.clamp_(-top, top))


def average(wire: Wire, codes: Sequence[Tensor], out: Tensor) -> Tensor:
    """The mean of the lines in some messages."""
    for i, code in enumerate(codes):
        wire.decode(code, out, len(codes), i > 0)
    return out


def _shares_pay(nbytes: Callable[[int], int], n: int, size: int) -> bool:
    return 2 * nbytes(share_length(n, size)) < nbytes(n)


def _gather_all(wire: Wire, bucket: Bucket, world: World, streams: list[Noise]) -> Exchanged:
    code = wire.encode(bucket.flat, streams[0])
    handle = world.all_gather(code, even=wire.even, tag=bucket.tag)
    yield
    line = average(wire, handle.wait(), choose_line(bucket))
    put(line, bucket)

    def sent(_: list[Tensor]) -> list[Tensor]:
        return bucket.views(average(wire, [code], torch.empty_like(bucket.flat, dtype=working_dtype(bucket))))

    return Reduced(bucket.tensors, sent)


def _average_shares(wire: Wire, bucket: Bucket, world: World, streams: list[Noise]) -> Exchanged:
    wide, rank, n = working_dtype(bucket), world.rank, bucket.flat.numel()
    each = share_length(n, world.size)
    # Every share as long as the others: who decodes a message of unknown length has to know how many numbers it holds.
    given = bucket.flat if wire.even else pad(bucket.flat, (0, world.size * each - n))
    shares = split_shares(given, world.size)
    codes = [_pad(wire, wire.encode(x, streams[0].after(r * each)), each) for r, x in enumerate(shares)]
    known = [torch.empty_like(codes[rank]) for _ in codes] if wire.even else None  # else lengths are sent ahead
    handle = world.all_to_all(codes, out=known, tag=bucket.tag)
    yield
    mine = average(wire, handle.wait(), torch.empty_like(shares[rank], dtype=wide))
    code = _pad(wire, wire.encode(mine, streams[1]), each)
    gathering = world.all_gather(code, even=wire.even, tag=bucket.tag)
    yield
    line = choose_line(bucket)
    whole = line if wire.even else torch.empty_like(given, dtype=wide)
    for x, message in zip(split_shares(whole, world.size), gathering.wait(), strict=True):
        average(wire, [message], x)
    put(line if wire.even else line.copy_(whole[:n]), bucket)

    def sent(_: list[Tensor]) -> list[Tensor]:
        through = torch.empty_like(given, dtype=wide)
        for x, message in zip(split_shares(through, world.size), codes, strict=True):
            average(wire, [message], x)
        lost = average(wire, [code], torch.empty_like(mine)).sub_(mine)
        split_shares(through, world.size)[rank].add_(lost, alpha=world.size)
        return bucket.views(through[:n])

    return Reduced(bucket.tensors, sent)


def _pad(wire: Wire, code: Tensor, each: int) -> Tensor:
    """Messages of one length, also for the shorter shares at the end."""
    missing = wire.nbytes(each) - len(code) if wire.even else 0
    return torch.cat([code, code.new_zeros(missing)]) if missing else code
