"""QSGD, NUQSGD and ByteGrad between ranks: what is exchanged, what it costs, and what comes of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from unisono.methods.buckets import Bucket
from unisono.methods.reducers.bytegrad import bytegrad
from unisono.methods.reducers.nuqsgd import nuqsgd
from unisono.methods.reducers.qsgd import qsgd
from unisono.methods.spec import build
from unisono.world import World
from unisono.world.virtual import run_threads, simulate

SPECS = ["qsgd", "nuqsgd", "nuqsgd(bits=8)", "nuqsgd(elias=True)", "bytegrad"]
each_method = pytest.mark.parametrize("spec", SPECS)


def bucket_of(numbers: Tensor, world: World, index: int = 0) -> Bucket:
    bucket = Bucket(index, [("x", torch.zeros_like(numbers))], world.empty)
    bucket.tensors[0].copy_(numbers)
    return bucket


def line(rank: int, n: int = 10_000, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)


def reduced(spec: str, size: int, inputs: Callable[[int], Tensor], steps: int = 1) -> list[list[tuple[Tensor, Tensor]]]:
    """By rank and step: the result, and what the rank sent."""

    def work(world: World) -> list[Any]:
        reducer, found = build(spec, kind="reducer"), []
        bucket = bucket_of(inputs(world.rank), world)
        state = reducer.init(bucket)
        for _ in range(steps):
            bucket.flat.zero_()
            bucket.tensors[0].copy_(inputs(world.rank))
            result, state = reducer.reduce(bucket, state, world)
            found.append((result.mean[0].clone(), result.sent_of([])[0].clone()))
        return found

    return run_threads(work, size)


# What is sent ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("method", [qsgd, nuqsgd])
def test_two_ranks_send_one_message_of_packed_bits_each(method: Any, bits: int) -> None:
    reducer, bucket = method(bits), bucket_of(torch.zeros(1 << 20), World())
    d = 1 << 20
    assert reducer.sends(bucket, 1) == 0
    assert reducer.sends(bucket, 2) == bits * d // 8 + 4 * math.ceil(d / 8192)


@pytest.mark.parametrize("size", [3, 4, 7, 16])
def test_more_ranks_scatter_parts_and_gather_means(size: int) -> None:
    d = 1 << 20
    bucket, each = bucket_of(torch.zeros(d), World()), math.ceil(d / size / 64) * 64
    message = each // 2 + 4 * math.ceil(each / 8192)
    assert nuqsgd().sends(bucket, size) == 2 * (size - 1) * message
    assert nuqsgd().sends(bucket, size) < (size - 1) * (d // 2 + 4 * 128)
    assert nuqsgd().sends(bucket, size) / (2 * (size - 1) / size * 4 * d) == pytest.approx(1 / 8, rel=0.01)
    assert bytegrad().sends(bucket, size) / (2 * (size - 1) / size * 4 * d) == pytest.approx(1 / 4, rel=0.01)


@pytest.mark.parametrize("n", [1, 70, 130, 9000, 100_000])
@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("spec", ["qsgd(bits=2)", "nuqsgd", "bytegrad(block=64)"])
def test_the_form_with_fewer_bytes_is_taken_and_counted(spec: str, n: int, size: int) -> None:
    world, reducer = simulate(size, rank=size - 1), build(spec, kind="reducer")
    bucket = bucket_of(torch.randn(n), world)
    reducer.reduce(bucket, reducer.init(bucket), world)
    sent = sum(record.bytes_sent for record in world.ledger.records)
    length, each = bucket.flat.numel(), math.ceil(bucket.flat.numel() / size / 64) * 64
    nbytes = reducer.codec.nbytes
    assert sent == reducer.sends(bucket, size) == (size - 1) * min(nbytes(length), 2 * nbytes(each))


def test_elias_sends_what_its_code_takes() -> None:
    """Fewer bytes than packed bits; none are promised."""
    assert qsgd(elias=True).sends is None
    assert qsgd(elias=True).codec.nbytes is None

    def work(world: World) -> int:
        reducer = qsgd(elias=True)
        bucket = bucket_of(line(world.rank), world)
        reducer.reduce(bucket, reducer.init(bucket), world)
        return sum(record.bytes_sent for record in world.ledger.records)

    for sent in run_threads(work, 2):
        assert 0 < sent < 0.25 * qsgd().codec.nbytes(10_000)


def test_elias_changes_no_number() -> None:
    for size in (1, 2, 4):
        plain, short = reduced("nuqsgd", size, line), reduced("nuqsgd(elias=True)", size, line)
        assert torch.equal(plain[0][0][0], short[0][0][0])


# What comes of it ------------------------------------------------------------------------------------------------


@each_method
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_the_mean_of_what_is_sent_is_what_comes(spec: str, size: int) -> None:
    """Also where means are rounded again: error feedback around it conserves."""
    found = reduced(spec, size, lambda rank: line(rank, dtype=torch.float64), 2)
    for step in range(2):
        sent = torch.stack([rows[step][1] for rows in found]).mean(0)
        assert torch.allclose(found[0][step][0], sent, rtol=1e-14, atol=1e-13)
        assert all(torch.equal(rows[step][0], found[0][step][0]) for rows in found)


@pytest.mark.parametrize("spec", ["qsgd(bits=8, block=64)", "nuqsgd"])
@pytest.mark.parametrize("size", [2, 4])
def test_the_mean_is_unbiased(spec: str, size: int) -> None:
    """Rounded once or twice: over many steps, the error of the mean goes down as one over their number."""
    steps, n = 150, 3000
    found = reduced(spec, size, lambda rank: line(rank, n), steps)
    wanted = torch.stack([line(rank, n).double() for rank in range(size)]).mean(0)
    errors = torch.stack([mean.double() - wanted for mean, _ in found[0]])
    assert 0.8 < (errors.sum(0) ** 2).sum() / (errors**2).sum() < 1.2


def test_ranks_round_differently_and_again_at_every_step() -> None:
    """Equal inputs: independent roundings average out."""
    (one,), (four,) = (
        reduced("nuqsgd(bits=2)", 1, lambda _: line(0)),
        reduced("nuqsgd(bits=2)", 2, lambda _: line(0))[:1],
    )
    error = [float((rows[0][0] - line(0)).norm()) for rows in (one, four)]
    assert error[1] == pytest.approx(error[0] / math.sqrt(2), rel=0.1)
    first, second = reduced("nuqsgd", 1, lambda _: line(0), 2)[0]
    assert not torch.equal(first[0], second[0])


def test_the_seed_changes_the_rounding_and_buckets_have_their_own() -> None:
    world = World()
    outputs = []
    for seed, index in ((0, 0), (1, 0), (0, 1), (0, 0)):
        reducer, bucket = nuqsgd(seed=seed), bucket_of(line(0), world, index)
        outputs.append(reducer.reduce(bucket, reducer.init(bucket), world)[0].mean[0].clone())
    assert torch.equal(outputs[0], outputs[3])
    assert not torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


@each_method
def test_sixteen_bits_stop_at_their_largest_number(spec: str) -> None:
    """Rounding up is no overflow."""
    found = reduced(spec, 1, lambda _: torch.full((40,), 65504.0).half(), 5)
    assert all(mean.isfinite().all() for mean, _ in found[0])


@each_method
@pytest.mark.parametrize("size", [2, 4])
def test_an_overflow_reaches_every_rank_also_through_parts(spec: str, size: int) -> None:
    def inputs(rank: int) -> Tensor:
        x = line(rank)
        x[-1] = math.inf if rank == 1 else x[-1]
        return x

    for rows in reduced(spec, size, inputs):
        assert not rows[0][0].isfinite().all()
        assert rows[0][0][:1000].isfinite().all()


def test_bytegrad_is_near_and_leaves_unused_parameters_alone() -> None:
    def inputs(rank: int) -> Tensor:
        x = line(rank)
        x[3000:5000] = 0
        return x

    for size in (1, 2, 4):
        mean = reduced("bytegrad", size, inputs)[0][0][0]
        wanted = torch.stack([inputs(rank) for rank in range(size)]).mean(0)
        assert (mean - wanted).norm() < 0.02 * wanted.norm()
        assert torch.equal(mean[3000:5000], torch.zeros(2000))


@each_method
def test_its_codec_writes_and_reads_a_line(spec: str) -> None:
    from unisono.methods.kernels.noise import noise

    codec, x = build(spec, kind="reducer").codec, line(0, 5001)
    code = codec.encode(x, noise(0, 0))
    assert code.dtype == torch.uint8
    assert codec.nbytes is None or len(code) == codec.nbytes(5001)
    assert (codec.decode(code, 5001) - x).norm() < 4 * x.norm()


# Settings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [qsgd, nuqsgd])
@pytest.mark.parametrize("bits", [0, 1, 3, 16, -4, True, 4.0, "4", math.nan, None])
def test_other_bits_are_refused_with_the_reason(method: Any, bits: Any) -> None:
    with pytest.raises(ValueError, match=r"bits must be 2, 4 or 8 \(a sign and a level: so they fill bytes\), got"):
        method(bits)


@pytest.mark.parametrize("method", [qsgd, nuqsgd, bytegrad])
@pytest.mark.parametrize("block", [0, 32, 100, 32768, -64, True, 8192.0, "8192", math.nan])
def test_other_blocks_are_refused(method: Any, block: Any) -> None:
    with pytest.raises(ValueError, match="power of two from 64 to 16384"):
        method(block=block)


@pytest.mark.parametrize("method", [qsgd, nuqsgd])
def test_other_settings_are_refused(method: Any) -> None:
    with pytest.raises(TypeError, match="seed must be a whole number"):
        method(seed=1.5)
    with pytest.raises(TypeError, match="elias must be True"):
        method(elias=1)
