"""bf16 and fp16: what a cast may lose, what it may not, bytes, and memory that is given back."""

from __future__ import annotations

import gc
import math

import pytest
import torch
from torch import Tensor

from unisono import World, run_threads
from unisono.methods.buckets import Bucket
from unisono.methods.reducer import Reducer
from unisono.methods.reducers import _cast as cast
from unisono.methods.reducers.bf16 import bf16
from unisono.methods.reducers.fp16 import fp16
from unisono.methods.spec import build

CASTS = {"bf16": (bf16, torch.bfloat16), "fp16": (fp16, torch.float16)}
both = pytest.mark.parametrize("name", CASTS)


def bucket_of(tensors: list[Tensor], world: World) -> Bucket:
    bucket = Bucket(0, [(f"p{i}", torch.zeros_like(x)) for i, x in enumerate(tensors)], world.empty)
    for view, x in zip(bucket.tensors, tensors, strict=True):
        view.copy_(x)
    return bucket


def values(rank: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in ((30, 7), (5,), (), (0,))
    ]


def mean_of(name: str, size: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    def work(world: World) -> list[Tensor]:
        bucket = bucket_of(values(world.rank, dtype), world)
        reduced, _ = CASTS[name][0]().reduce(bucket, {}, world)
        return [x.clone() for x in reduced.mean]

    first, *others = run_threads(work, size)
    assert all(all(map(torch.equal, first, other)) for other in others)
    return first


@both
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_mean_is_that_of_rounded_numbers_rounded_once_more(name: str, size: int, dtype: torch.dtype) -> None:
    half = CASTS[name][1]
    rows = [[x.to(half).double() for x in values(rank, dtype)] for rank in range(size)]
    for got, column in zip(mean_of(name, size, dtype), zip(*rows, strict=True), strict=True):
        expected = torch.stack(column).mean(0)
        assert got.dtype == dtype
        error = (got.double() - expected).abs()
        assert (error <= expected.abs() * torch.finfo(half).eps / 2 + 1e-7).all()
        assert torch.equal(got, got.to(half).to(dtype))


@both
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_16_bits_go_as_they_are(name: str, dtype: torch.dtype) -> None:
    rows = [[x.double() for x in values(rank, dtype)] for rank in range(2)]
    for got, column in zip(mean_of(name, 2, dtype), zip(*rows, strict=True), strict=True):
        assert torch.equal(got, torch.stack(column).mean(0).to(dtype))


def test_large_numbers_do_not_overflow_in_the_sum_of_fp16() -> None:
    def work(world: World) -> Tensor:
        bucket = bucket_of([torch.full((3,), 60000.0)], world)
        return fp16().reduce(bucket, {}, world)[0].mean[0].clone()

    assert all((x == 60000.0).all() for x in run_threads(work, 4))


def test_numbers_that_fp16_cannot_hold_are_an_overflow_that_all_ranks_see() -> None:
    def work(world: World) -> Tensor:
        bucket = bucket_of([torch.full((3,), 1e6 if world.rank == 1 else 1.0)], world)
        return fp16().reduce(bucket, {}, world)[0].mean[0].clone()

    assert all(not torch.isfinite(x).any() for x in run_threads(work, 3))


@both
def test_what_was_sent_is_the_rounded_input(name: str) -> None:
    def work(world: World) -> None:
        reduced, _ = CASTS[name][0]().reduce(bucket_of(values(world.rank), world), {}, world)
        for sent, x in zip(reduced.sent_of(values(world.rank)), values(world.rank), strict=True):
            assert torch.equal(sent, x.to(CASTS[name][1]).float())

    run_threads(work, 2)


@both
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_two_bytes_a_number_are_sent(name: str, size: int, dtype: torch.dtype) -> None:
    def work(world: World) -> tuple[int, int, int]:
        reducer = CASTS[name][0]()
        bucket = bucket_of(values(world.rank, dtype), world)
        reducer.reduce(bucket, {}, world)
        assert reducer.sends is not None
        sent = sum(record.bytes_sent for record in world.ledger.records)
        return sent, reducer.sends(bucket, size), math.ceil(2 * (size - 1) * 2 * bucket.flat.numel() / size)

    for sent, told, expected in run_threads(work, size):
        assert sent == told == expected


@both
def test_the_codec_gives_back_rounded_numbers(name: str) -> None:
    reducer: Reducer = build(name, kind="reducer")
    assert reducer.codec is not None
    assert reducer.codec.nbytes is not None
    x = torch.randn(33)
    code = reducer.codec.encode(x, None)
    assert (code.dtype, code.numel()) == (torch.uint8, reducer.codec.nbytes(33))
    assert torch.equal(reducer.codec.decode(code, 33), x.to(CASTS[name][1]).float())


def test_memory_is_used_again_and_given_back_when_the_bucket_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()  # buckets of tests before this one
    world, released, made = World(), [], []
    monkeypatch.setattr(world, "release", lambda x: released.append(x.data_ptr()))
    empty = world.empty
    monkeypatch.setattr(world, "empty", lambda n, dtype: made.append(empty(n, dtype)) or made[-1])
    bucket = bucket_of([torch.ones(10)], World())
    for _ in range(3):
        bf16().reduce(bucket, {}, world)
    fp16().reduce(bucket, {}, world)
    assert [x.dtype for x in made] == [torch.bfloat16, torch.float16]
    before = len(cast._lines)
    del bucket
    gc.collect()
    assert sorted(released) == sorted(x.data_ptr() for x in made)
    assert len(cast._lines) == before - 1
