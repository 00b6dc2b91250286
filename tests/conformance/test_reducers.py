"""What every reducer in the catalog must do, in worlds of 1, 2 and 3 threads. A new file adds its own tests.

A reducer with parameters of its own gets an entry in SPECS; each has its closed form of bytes in BYTES.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from unisono import state as packing
from unisono.buckets import Bucket
from unisono.reducer import Reduced, Reducer, State
from unisono.spec import build, describe, names
from unisono.transports.threads import run_threads
from unisono.world import World

SPECS: dict[str, str] = {}  # name: a spec to test it with, where the bare name will not do
# name: bytes that one rank sends to reduce a bucket in a world of n
BYTES: dict[str, Callable[[Bucket, int], int]] = {
    "dense": lambda bucket, n: math.ceil(2 * (n - 1) * bucket.nbytes / n),
}
NOT_CONSERVING: set[str] = set()  # biased methods (a vote, say) whose output is not the mean of what was sent
SIZES = [1, 2, 3]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
STEPS = 4

reducers = pytest.mark.parametrize("name", names("reducer"))
sizes = pytest.mark.parametrize("size", SIZES)


def reducer_of(name: str) -> Reducer:
    built: Reducer = build(SPECS.get(name, name), kind="reducer")
    return built


def bucket_of(tensors: list[Tensor], world: World) -> Bucket:
    """A bucket that holds these values."""
    bucket = Bucket(0, [(f"p{i}", torch.zeros_like(x)) for i, x in enumerate(tensors)], world.empty)
    fill(bucket, tensors)
    return bucket


def fill(bucket: Bucket, tensors: list[Tensor]) -> None:
    for view, x in zip(bucket.tensors, tensors, strict=True):
        view.copy_(x)


def numbers(rank: int, step: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """A bucket's worth of one rank: matrices, vectors, and shapes that are easily forgotten."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    shapes: list[tuple[int, ...]] = [(6, 5), (7,), (), (0,), (2, 0), (3, 2, 4), *[(4, 4)] * 8, (40, 30)]
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [x.to(dtype) for x in [*made, torch.zeros(5, 3)]]


def reduced(
    name: str, size: int, inputs: Callable[[int, int], list[Tensor]], steps: int = 1
) -> list[list[tuple[list[Tensor], list[Tensor], list[Tensor] | None]]]:
    """Per rank and step: copies of mean, sent (None: all), and the residual that the state keeps."""

    def work(world: World) -> list[Any]:
        reducer, found = reducer_of(name), []
        bucket = bucket_of(inputs(world.rank, 0), world)
        state = reducer.init(bucket)
        for step in range(steps):
            given = inputs(world.rank, step)
            fill(bucket, given)
            result, state = reducer.reduce(bucket, state, world)
            found.append((copies(result.mean), copies(given if result.sent is None else result.sent), kept(state)))
        return found

    return run_threads(work, size)


def copies(tensors: list[Tensor]) -> list[Tensor]:
    return [x.detach().clone() for x in tensors]


def kept(state: State) -> list[Tensor] | None:
    """The residual of a reducer with error feedback: by convention, state["residual"]."""
    residual = state.get("residual")
    return None if residual is None else copies(list(residual))


def mean_of(rows: list[list[Tensor]]) -> list[Tensor]:
    """The mean over ranks in fp64."""
    return [torch.stack([x.double() for x in column]).mean(0) for column in zip(*rows, strict=True)]


def close(a: Tensor, b: Tensor, dtype: torch.dtype, *, ulps: float = 2.0) -> bool:
    eps = torch.finfo(dtype).eps
    return torch.allclose(a.double(), b.double(), rtol=ulps * eps, atol=ulps * eps)


# The mean ------------------------------------------------------------------------------------------------------


@reducers
@sizes
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_mean_has_the_same_bits_on_every_rank(name: str, size: int, dtype: torch.dtype) -> None:
    results = reduced(name, size, lambda rank, step: numbers(rank, step, dtype), STEPS)
    for step in range(STEPS):
        for other in results[1:]:
            assert all(map(torch.equal, other[step][0], results[0][step][0])), f"step {step}"
    for mean, like in zip(results[0][0][0], numbers(0, dtype=dtype), strict=True):
        assert (mean.dtype, mean.shape) == (like.dtype, like.shape)
        assert torch.isfinite(mean).all()


@reducers
@sizes
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exact_reducers_give_the_mean(name: str, size: int, dtype: torch.dtype) -> None:
    if not reducer_of(name).exact:
        pytest.skip("not exact")
    results = reduced(name, size, lambda rank, step: numbers(rank, step, dtype))
    expected = mean_of([numbers(rank, 0, dtype) for rank in range(size)])
    for mean, wanted in zip(results[0][0][0], expected, strict=True):
        assert close(mean, wanted, dtype)


@reducers
@sizes
def test_what_is_not_sent_is_kept(name: str, size: int) -> None:
    """input + residual before = sent + residual after, on every rank; without feedback, input - sent is lost."""
    results = reduced(name, size, lambda rank, step: numbers(rank, step, torch.float64), STEPS)
    for rank, rows in enumerate(results):
        before = [torch.zeros_like(x) for x in numbers(rank, 0, torch.float64)]
        for step, (_, sent, residual) in enumerate(rows):
            given = numbers(rank, step, torch.float64)
            after = residual or [torch.zeros_like(x) for x in given]
            if residual is None and not reducer_of(name).exact:
                continue  # lossy without memory: nothing to add up
            for x, e, s, r in zip(given, before, sent, after, strict=True):
                assert close(x + e, s + r, torch.float64, ulps=64), f"rank {rank} step {step}"
            before = after


@reducers
@sizes
def test_nothing_is_lost_over_time(name: str, size: int) -> None:
    """Sum of outputs + mean residual = sum of mean inputs."""
    results = reduced(name, size, lambda rank, step: numbers(rank, step, torch.float64), STEPS)
    if name in NOT_CONSERVING or (results[0][-1][2] is None and not reducer_of(name).exact):
        pytest.skip("no error feedback")
    zeros = [torch.zeros_like(x) for x in numbers(0, 0, torch.float64)]
    residuals = mean_of([rows[-1][2] or zeros for rows in results])
    inputs = [mean_of([numbers(rank, step, torch.float64) for rank in range(size)]) for step in range(STEPS)]
    for i in range(len(zeros)):
        given = torch.stack([row[i] for row in inputs]).sum(0)
        out = torch.stack([row[0][i] for row in results[0]]).sum(0)
        assert close(out + residuals[i], given, torch.float64, ulps=64)


@reducers
@sizes
def test_zeros_give_zeros(name: str, size: int) -> None:
    shapes = [(4, 4), (3,), (), (0,)]
    results = reduced(name, size, lambda rank, step: [torch.zeros(shape) for shape in shapes], 3)
    for mean, _, _ in results[0]:
        assert all(torch.equal(x, torch.zeros_like(x)) for x in mean)


@reducers
@sizes
def test_a_bucket_with_nothing_in_it(name: str, size: int) -> None:
    results = reduced(name, size, lambda rank, step: [torch.zeros(0, 3)], 2)
    assert all(rows[-1][0][0].shape == (0, 3) for rows in results)


@reducers
@sizes
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_an_overflow_on_one_rank_is_seen_by_all(name: str, size: int, bad: float) -> None:
    """AMP decides from the gradients whether to skip a step: every rank must see the same."""

    def inputs(rank: int, step: int) -> list[Tensor]:
        values = numbers(rank, step)
        if rank == size - 1 and step == 1:
            values[0][1, 1] = bad
        return values

    results = reduced(name, size, inputs, 2)
    for rows in results:
        assert all(torch.isfinite(x).all() for x in rows[0][0])
        assert not all(torch.isfinite(x).all() for x in rows[1][0])


@reducers
def test_fp16_does_not_overflow_in_the_sum(name: str) -> None:
    results = reduced(name, 3, lambda rank, step: [torch.full((4, 4), 60000.0, dtype=torch.float16)])
    assert torch.isfinite(results[0][0][0][0]).all()


# Bytes, state, spec --------------------------------------------------------------------------------------------


@reducers
@sizes
def test_bytes_sent_match_the_closed_form(name: str, size: int) -> None:
    assert name in BYTES, f"add the closed form of the bytes that {name} sends to BYTES in {__file__}"

    def work(world: World) -> tuple[int, int]:
        reducer = reducer_of(name)
        bucket = bucket_of(numbers(world.rank), world)
        state = reducer.init(bucket)
        before = sum(record.bytes_sent for record in world.ledger.records)
        reducer.reduce(bucket, state, world)
        after = sum(record.bytes_sent for record in world.ledger.records)
        return after - before, BYTES[name](bucket, size)

    for sent, expected in run_threads(work, size):
        assert sent == expected


def test_padding_in_a_bucket_is_less_than_a_cache_line_a_tensor() -> None:
    tensors = numbers(0)
    bucket = bucket_of(tensors, World())
    assert 0 <= bucket.nbytes - sum(x.numel() * x.element_size() for x in tensors) < 64 * len(tensors)


@reducers
@sizes
def test_a_saved_state_goes_on_bit_by_bit(name: str, size: int) -> None:
    def work(world: World) -> None:
        reducer = reducer_of(name)
        bucket = bucket_of(numbers(world.rank), world)
        state = reducer.init(bucket)
        for step in range(2):
            fill(bucket, numbers(world.rank, step))
            _, state = reducer.reduce(bucket, state, world)
        saved = packing.to_bytes(state)
        continued = []
        for begin in (state, packing.from_bytes(saved)):
            outputs: list[Reduced] = []
            for step in range(2, 5):
                fill(bucket, numbers(world.rank, step))
                result, begin = reducer.reduce(bucket, begin, world)
                outputs.append(Reduced(copies(result.mean), result.sent and copies(result.sent)))
            continued.append((outputs, packing.to_bytes(begin)))
        (first, first_state), (second, second_state) = continued
        for a, b in zip(first, second, strict=True):
            assert all(map(torch.equal, a.mean, b.mean))
            assert (a.sent is None) == (b.sent is None)
            assert all(map(torch.equal, a.sent or [], b.sent or []))
        assert first_state == second_state

    run_threads(work, size)


@reducers
def test_its_spec_builds_it_again(name: str) -> None:
    reducer = reducer_of(name)
    assert build(describe(reducer), kind="reducer") == reducer
