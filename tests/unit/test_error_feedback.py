"""error_feedback around reducers that forget: nothing is lost, whatever the inner one sends."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from method_cases import reduce_window
from unisono import World, run_threads
from unisono.methods.buckets import Bucket
from unisono.methods.reducer import Reduced, Reducer, Stages, State, staged
from unisono.methods.reducers.bf16 import bf16
from unisono.methods.reducers.dense import dense
from unisono.methods.reducers.error_feedback import error_feedback
from unisono.methods.spec import build

SHAPES = [(6, 5), (), (0,), (9,)]


def every_other(lazy: bool = False) -> Reducer:
    """Sends the even elements in even steps and the odd ones in odd steps."""

    def stages(bucket: Bucket, state: State, world: World) -> Stages:
        mask = torch.arange(bucket.flat.numel(), device=bucket.device) % 2 == state["step"] % 2
        bucket.flat.mul_(mask)
        sent = [x.clone() for x in bucket.tensors]
        handle = world.all_reduce(bucket.flat, "mean", tag=bucket.tag)
        yield
        handle.wait()
        return Reduced(bucket.tensors, (lambda _: sent) if lazy else sent), {"step": state["step"] + 1}

    return staged(lambda bucket: {"step": 0}, stages, sends=lambda bucket, size: 7)


def make(world: World, dtype: torch.dtype = torch.float64) -> Bucket:
    return Bucket(0, [(f"p{i}", torch.zeros(s, dtype=dtype)) for i, s in enumerate(SHAPES)], world.empty)


def gradients(rank: int, step: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in SHAPES]


def fill(bucket: Bucket, tensors: list[Tensor]) -> None:
    bucket.flat.zero_()
    for view, x in zip(bucket.tensors, tensors, strict=True):
        view.copy_(x)


def step(reducer: Reducer, bucket: Bucket, state: State, world: World, given: list[Tensor]) -> tuple[Reduced, State]:
    fill(bucket, given)
    return reduce_window(reducer, bucket, state, world)


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_sum_of_results_and_what_is_kept_is_the_sum_of_mean_gradients(size: int, lazy: bool) -> None:
    def work(world: World) -> tuple[list[Tensor], list[Tensor]]:
        reducer, bucket = error_feedback(every_other(lazy)), make(world)
        state, total = reducer.init(bucket), [torch.zeros_like(x) for x in bucket.tensors]
        for t in range(7):
            reduced, state = step(reducer, bucket, state, world, gradients(world.rank, t))
            for sum_, x in zip(total, reduced.mean, strict=True):
                sum_.add_(x)
        return total, bucket.views(state["residual"])

    results = run_threads(work, size)
    for i in range(len(SHAPES)):
        given = sum(gradients(r, t)[i] for r in range(size) for t in range(7)) / size
        kept = sum(residual[i] for _, residual in results) / size
        assert torch.allclose(results[0][0][i] + kept, given, rtol=0, atol=1e-14)


def test_it_equals_the_equations_written_out() -> None:
    world, inner = World(), every_other()
    reducer, bucket = error_feedback(inner), make(world)
    state, e = reducer.init(bucket), [torch.zeros_like(x) for x in bucket.tensors]
    plain, inner_state = make(world), inner.init(make(world))
    for t in range(4):
        p = [g + x for g, x in zip(gradients(0, t), e, strict=True)]
        expected, inner_state = step(inner, plain, inner_state, world, p)
        got, state = step(reducer, bucket, state, world, gradients(0, t))
        assert all(map(torch.equal, got.mean, expected.mean))
        sent = expected.sent_of(p)
        assert all(torch.allclose(a, b, atol=1e-14) for a, b in zip(got.sent_of(gradients(0, t)), sent, strict=True))
        e = [x - s for x, s in zip(p, sent, strict=True)]
        assert all(map(torch.equal, bucket.views(state["residual"]), e))


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_an_overflow_leaves_what_is_kept_as_it_was_on_every_rank(bad: float) -> None:
    def work(world: World) -> None:
        reducer, bucket = error_feedback(bf16()), make(world, torch.float32)
        state = reducer.init(bucket)
        for t in range(4):
            given = gradients(world.rank, t, torch.float32)
            if t == 2 and world.rank == 1:
                given[3][4] = bad
            before = state["residual"].clone()
            reduced, state = step(reducer, bucket, state, world, given)
            assert torch.isfinite(state["residual"]).all()
            assert torch.equal(before, state["residual"]) == (t == 2)
            assert all(bool(torch.isfinite(x).all()) for x in reduced.mean) == (t != 2)

    run_threads(work, 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_small_parts_of_16_bit_gradients_add_up_in_float32(dtype: torch.dtype) -> None:
    """The residual also holds what does not fit the gradient's dtype: 1 + 2^-12 would be lost each time."""
    world = World()
    bucket = Bucket(0, [("p", torch.zeros(3, dtype=dtype))], world.empty)
    reducer = error_feedback(every_other())
    state = reducer.init(bucket)
    assert state["residual"].dtype == torch.float32
    state["residual"][:3] = 2.0**-12
    total = torch.zeros(3)
    for _ in range(2):
        reduced, state = step(reducer, bucket, state, world, [torch.ones(3, dtype=dtype)])
        total += reduced.mean[0].float()
    assert torch.equal(total + state["residual"][:3], torch.full((3,), 2.0 + 2.0**-12))


def test_what_is_kept_is_scaled_when_the_learning_rate_changes() -> None:
    world = World()
    reducer, bucket = error_feedback(every_other()), make(world)
    bucket.lr = [0.1] * len(SHAPES)
    state = reducer.init(bucket)
    _, state = step(reducer, bucket, state, world, gradients(0, 0))
    kept = [x.clone() for x in bucket.views(state["residual"])]
    bucket.lr = [0.05, 0.1, 0.1, 0.2]
    zeros = [torch.zeros_like(x) for x in kept]
    reduced, state = step(reducer, bucket, state, world, zeros)
    whole = [a + b for a, b in zip(reduced.mean, bucket.views(state["residual"]), strict=True)]
    for got, old, scale in zip(whole, kept, [2.0, 1.0, 1.0, 0.5], strict=True):
        assert torch.allclose(got, old * scale)


def test_a_reducer_with_a_memory_comes_back_as_it_is() -> None:
    once = error_feedback(bf16())
    assert error_feedback(once) is once


def test_an_exact_reducer_leaves_nothing_to_keep() -> None:
    world = World()
    reducer, bucket = error_feedback(dense()), make(world)
    assert reducer.exact
    _, state = step(reducer, bucket, reducer.init(bucket), world, gradients(0, 0))
    assert not state["residual"].any()


def test_it_sends_what_the_inner_one_sends_and_refuses_what_is_no_reducer() -> None:
    reducer = error_feedback(every_other())
    assert reducer.sends is not None
    assert reducer.sends(make(World()), 2) == 7
    with pytest.raises(TypeError, match="inner must be a Reducer object"):
        error_feedback("bf16")  # type: ignore[arg-type]
    assert build("error_feedback(bf16)", kind="reducer").memory


@pytest.mark.parametrize(
    "inner",
    ["qsgd", "warmup(qsgd, steps=3)", "masked(qsgd)", "hierarchical(qsgd)", "accordion(dense, qsgd)"],
)
def test_noise_that_would_grow_is_refused_inside_others_too(inner: str) -> None:
    with pytest.raises(ValueError, match="grow without bound"):
        build(f"error_feedback({inner})", kind="reducer")
