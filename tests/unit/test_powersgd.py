"""PowerSGD: exact on matrices of low rank, parity with a plain fp64 implementation, bounded residuals, bytes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from method_cases import reduce_window
from unisono.methods.buckets import Bucket
from unisono.methods.kernels import lowrank
from unisono.methods.reducer import Reducer, State
from unisono.methods.reducers.powersgd import powersgd
from unisono.world import World
from unisono.world.virtual import run_threads, simulate

SIZES = [1, 2, 3]
ranks = pytest.mark.parametrize("rank", [1, 2, 4])


def bucket_of(tensors: list[Tensor], world: World | None = None, *, index: int = 0) -> Bucket:
    world = world or World()
    bucket = Bucket(index, [(f"p{i}", torch.zeros_like(x)) for i, x in enumerate(tensors)], world.empty)
    return fill(bucket, tensors)


def fill(bucket: Bucket, tensors: list[Tensor]) -> Bucket:
    for view, x in zip(bucket.tensors, tensors, strict=True):
        view.copy_(x)
    return bucket


def step(reducer: Reducer, bucket: Bucket, state: State, world: World, given: list[Tensor]) -> tuple[Any, State]:
    """Copies of mean and what was sent, and the next state."""
    reduced, state = reduce_window(reducer, fill(bucket, given), state, world)
    mean = [x.clone() for x in reduced.mean]
    return (mean, reduced.sent_of(given)), state


def saved(state: State) -> dict[str, Any]:
    """A copy that later steps do not change."""
    return {
        key: value.clone()
        if isinstance(value, Tensor)
        else [x.clone() if isinstance(x, Tensor) else x for x in value]
        if isinstance(value, list)
        else value
        for key, value in state.items()
    }


def same(a: State, b: State) -> bool:
    def equal(x: Any, y: Any) -> bool:
        return torch.equal(x, y) if isinstance(x, Tensor) else x == y

    return a.keys() == b.keys() and all(
        all(map(equal, a[key], b[key])) if isinstance(a[key], list) else equal(a[key], b[key]) for key in a
    )


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def low_rank(n: int, m: int, rank: int, *, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return (normal(n, rank, seed=seed) @ normal(rank, m, seed=seed + 10_000)).to(dtype)


# The independent reference: N ranks in one process, fp64, by the equations ------------------------------------


class Reference:
    """PowerSGD of one matrix on N ranks. `local` chooses the residual: M - P P^T M, or M - out."""

    def __init__(self, q: Tensor, ranks: int, *, local: bool = True) -> None:
        self.q, self.local = q, local
        self.residuals = [torch.zeros((), dtype=torch.float64)] * ranks

    def step(self, grads: list[Tensor]) -> Tensor:
        whole = [g + e for g, e in zip(grads, self.residuals, strict=True)]
        p = torch.linalg.qr(torch.stack([m @ self.q for m in whole]).mean(0)).Q
        self.q = torch.stack([m.t() @ p for m in whole]).mean(0)
        out = p @ self.q.t()
        self.residuals = [m - (p @ p.t() @ m if self.local else out) for m in whole]
        return out


@pytest.mark.parametrize("size", SIZES)
@ranks
def test_parity_with_a_plain_implementation(rank: int, size: int) -> None:
    shapes = [(30, 20), (16, 3, 2, 4), (30, 20), (9, 40)]

    def grads(r: int, t: int) -> list[Tensor]:
        return [normal(*shape, seed=1000 * t + 10 * r + i) for i, shape in enumerate([*shapes, (7,)])]

    def work(world: World) -> list[Any]:
        reducer = powersgd(rank, min_saving=1.0)
        bucket = bucket_of(grads(world.rank, 0), world)
        state = reducer.init(bucket)
        found = [saved(state)["q"]]
        for t in range(6):
            (mean, _), state = step(reducer, bucket, state, world, grads(world.rank, t))
            found.append((mean, [x.clone() for x in bucket.views(state["residual"])]))
        return found

    found = run_threads(work, size)
    for i, shape in enumerate(shapes):
        reference = Reference(found[0][0][i].t(), size)
        for t in range(6):
            out = reference.step([grads(r, t)[i].flatten(1) for r in range(size)])
            for r in range(size):
                mean, residual = found[r][t + 1]
                assert torch.allclose(mean[i], out.view(shape), rtol=0, atol=1e-9)
                assert torch.allclose(residual[i], reference.residuals[r].view(shape), rtol=0, atol=1e-9)
    for t in range(6):
        exact = torch.stack([grads(r, t)[4] for r in range(size)]).mean(0)
        assert torch.allclose(found[0][t + 1][0][4], exact, rtol=0, atol=1e-15)


# Exactness -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-6)], ids=str)
@pytest.mark.parametrize("size", SIZES)
@ranks
def test_a_matrix_of_low_rank_is_recovered_exactly(rank: int, size: int, dtype: torch.dtype, tolerance: float) -> None:
    """The mean has rank r, each rank's own matrix need not."""
    wanted = low_rank(48, 32, rank, seed=1)
    noise = [normal(48, 32, seed=100 + r) for r in range(size)]
    noise[-1] = -torch.stack(noise[:-1]).sum(0) if size > 1 else torch.zeros_like(wanted)

    def work(world: World) -> Tensor:
        reducer, given = powersgd(rank), [(wanted + noise[world.rank]).to(dtype)]
        bucket = bucket_of(given, world)
        (mean, _), _ = step(reducer, bucket, reducer.init(bucket), world, given)
        return mean[0]

    for mean in run_threads(work, size):
        assert (mean.double() - wanted).norm() <= tolerance * size * wanted.norm()


@ranks
def test_eight_matrices_of_one_shape_are_each_recovered_exactly(rank: int) -> None:
    """Public code normalises such a batch by one norm: here their scales differ by eight orders of magnitude."""
    given = [low_rank(40, 40, rank, seed=i, dtype=torch.float32) * 10.0 ** (i - 4) for i in range(8)]
    reducer, bucket = powersgd(rank), bucket_of(given)
    (mean, _), state = step(reducer, bucket, reducer.init(bucket), World(), given)
    for out, x in zip(mean, given, strict=True):
        assert (out - x).norm() <= 2e-6 * x.norm()
    (mean, _), _ = step(reducer, bucket, state, World(), given)  # from the warm start
    for out, x in zip(mean, given, strict=True):
        assert (out - x).norm() <= 4e-6 * x.norm()


@ranks
def test_mean_plus_residual_equals_the_input_of_one_worker(rank: int) -> None:
    given = [normal(24, 36, seed=0), normal(5, seed=1), normal(8, 4, 3, 3, seed=2)]
    reducer, bucket = powersgd(rank, min_saving=1), bucket_of(given)
    state = reducer.init(bucket)
    for _ in range(4):
        before = [x.clone() for x in bucket.views(state["residual"])]
        (mean, sent), state = step(reducer, bucket, state, World(), given)
        after = bucket.views(state["residual"])
        for x, e, out, s, kept in zip(given, before, mean, sent, after, strict=True):
            assert torch.allclose(out + kept, x + e, rtol=0, atol=1e-14)
            assert torch.equal(out, s)


def test_the_approximation_converges_to_the_best_one() -> None:
    """The warm start makes steps on one matrix a power iteration."""
    x = normal(40, 30, seed=3)
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    s = s * 0.5 ** torch.arange(30)
    x = u * s @ v
    reducer, bucket = powersgd(2, feedback=False), bucket_of([x])
    state = reducer.init(bucket)
    for _ in range(12):
        (mean, _), state = step(reducer, bucket, state, World(), [x])
    best = u[:, :2] * s[:2] @ v[:2]
    assert (mean[0] - best).norm() <= 1e-6 * best.norm()
    assert "residual" not in state


# Residuals -----------------------------------------------------------------------------------------------------


def test_the_residual_stays_bounded_where_the_other_choice_grows() -> None:
    """M - P P^T M with my own M stays flat over 800 steps; M - out grows like the root of the time."""
    steps, size, marks = 800, 2, (50, 200, 800)

    def grad(r: int, t: int) -> Tensor:
        return normal(16, 16, seed=2 * t + r)

    def work(world: World) -> tuple[Tensor, list[float]]:
        reducer = powersgd(2, min_saving=1)
        bucket = bucket_of([grad(world.rank, 0)], world)
        state, norms = reducer.init(bucket), []
        first = state["q"][0].clone()
        for t in range(1, steps + 1):
            bucket.tensors[0].copy_(grad(world.rank, t))
            _, state = reduce_window(reducer, bucket, state, world)
            if t in marks:
                norms.append(state["residual"].norm().item())
        return first, norms

    found = run_threads(work, size)
    right, wrong = (Reference(found[0][0].t(), size, local=local) for local in (True, False))
    expected: dict[bool, list[float]] = {True: [], False: []}
    for t in range(1, steps + 1):
        grads = [grad(r, t) for r in range(size)]
        for reference in (right, wrong):
            reference.step(grads)
            if t in marks:
                expected[reference.local].append(reference.residuals[0].norm().item())
    assert max(found[0][1]) < 1.5 * min(found[0][1])
    assert found[0][1] == pytest.approx(expected[True], rel=0.25)  # chaos: rounding grows, norms stay alike
    assert expected[False][2] > 2.5 * expected[False][0]  # (800 / 50) ** 0.5 = 4, with a constant beside it
    assert expected[False][2] > 3 * found[0][1][2]


def test_a_residual_is_rescaled_when_the_learning_rate_changes() -> None:
    given = [normal(20, 20, seed=0), normal(20, 20, seed=1)]
    reducer, bucket = powersgd(1), bucket_of(given)
    bucket.lr = [0.1, 0.1]
    _, state = step(reducer, bucket, reducer.init(bucket), World(), given)
    before = [x.clone() for x in bucket.views(state["residual"])]
    bucket.lr = [0.1, 0.05]
    (mean, _), state = step(reducer, bucket, state, World(), given)
    after = bucket.views(state["residual"])
    assert torch.allclose(mean[0] + after[0], given[0] + before[0], atol=1e-14)
    assert torch.allclose(mean[1] + after[1], given[1] + 2 * before[1], atol=1e-14)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 1], ids=["in a matrix", "in a vector"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_an_overflow_on_one_rank_leaves_every_state_as_it_was(
    size: int, dtype: torch.dtype, place: int, bad: float
) -> None:
    def given(r: int, t: int) -> list[Tensor]:
        return [normal(24, 30, seed=10 * t + r, dtype=dtype), normal(6, seed=t + r, dtype=dtype)]

    def work(world: World) -> None:
        reducer = powersgd(2)
        bucket = bucket_of(given(world.rank, 0), world)
        state = reducer.init(bucket)
        for t in range(2):
            _, state = step(reducer, bucket, state, world, given(world.rank, t))
        before = saved(state)
        values = given(world.rank, 2)
        if world.rank == size - 1:
            values[place].view(-1)[3] = bad
        (mean, _), state = step(reducer, bucket, state, world, values)
        assert not all(torch.isfinite(x).all() for x in mean)
        assert same(state, before)
        (mean, _), state = step(reducer, bucket, state, world, given(world.rank, 3))
        assert all(torch.isfinite(x).all() for x in mean)

    run_threads(work, size)


# Zeros, scales, dtypes, shapes ---------------------------------------------------------------------------------


@ranks
def test_a_zero_gradient_gives_zeros_and_the_next_one_is_seen(rank: int) -> None:
    """Q is zero after it: without a fresh direction it would stay zero for ever."""
    shapes = [(32, 24), (32, 24), (20, 40)]
    reducer, bucket = powersgd(rank), bucket_of([torch.zeros(shape) for shape in shapes])
    state = reducer.init(bucket)
    for _ in range(2):
        (mean, _), state = step(reducer, bucket, state, World(), [torch.zeros(shape) for shape in shapes])
        assert all(torch.equal(x, torch.zeros_like(x)) for x in mean)
        assert all(torch.isfinite(q).all() for q in state["q"])
    given = [low_rank(*shape, rank, seed=i, dtype=torch.float32) for i, shape in enumerate(shapes)]
    (mean, _), state = step(reducer, bucket, state, World(), given)
    for out, x in zip(mean, given, strict=True):
        assert (out - x).norm() <= 4e-6 * x.norm()


def test_a_matrix_that_had_too_low_a_rank_gets_all_columns_back() -> None:
    reducer, first, second = powersgd(4), low_rank(32, 32, 1, seed=0), low_rank(32, 32, 4, seed=1)
    bucket = bucket_of([first])
    state = reducer.init(bucket)
    for _ in range(3):
        _, state = step(reducer, bucket, state, World(), [first])
    state["residual"].zero_()
    (mean, _), _ = step(reducer, bucket, state, World(), [second])
    assert (mean[0] - second).norm() <= 1e-9 * second.norm()


@pytest.mark.parametrize("scale", [1e-30, 1e-18, 1.0, 1e15, 1e30])
@ranks
def test_gradients_of_any_scale(rank: int, scale: float) -> None:
    """P is of the scale of M, not of its square: Q is orthonormal when it is used."""
    x = low_rank(32, 32, rank, seed=0, dtype=torch.float32) * scale
    reducer, bucket = powersgd(rank), bucket_of([x])
    state = reducer.init(bucket)
    for _ in range(3):
        (mean, _), state = step(reducer, bucket, state, World(), [x])
        state["residual"].zero_()
        assert (mean[0] / scale - x / scale).norm() <= 1e-5 * (x / scale).norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_computes_and_keeps_in_float32(dtype: torch.dtype) -> None:
    x = low_rank(32, 32, 2, seed=0).to(dtype)
    reducer, bucket = powersgd(2, min_saving=1), bucket_of([x, normal(5, seed=1, dtype=dtype)])
    state = reducer.init(bucket)
    assert state["residual"].dtype == state["q"][0].dtype == torch.float32
    (mean, sent), state = step(reducer, bucket, state, World(), [x, normal(5, seed=1, dtype=dtype)])
    assert mean[0].dtype == sent[0].dtype == dtype
    assert (mean[0].double() - x.double()).norm() <= 2 * torch.finfo(dtype).eps * x.double().norm()
    kept = bucket.views(state["residual"])[0]
    assert kept.norm() > 0  # the rounding of x itself has full rank
    exact = Reference(reducer.init(bucket)["q"][0].t().double(), 1)
    exact.step([x.double()])
    assert torch.allclose(kept.double(), exact.residuals[0], rtol=0, atol=1e-5)


def test_memory_order_does_not_matter() -> None:
    x = low_rank(16, 8 * 9, 2, seed=0).view(16, 8, 3, 3)
    given = [x.to(memory_format=torch.channels_last), low_rank(40, 24, 2, seed=1).t(), x]
    reducer, bucket = powersgd(2), bucket_of(given)
    assert bucket.tensors[0].is_contiguous(memory_format=torch.channels_last)
    assert not bucket.tensors[1].is_contiguous()
    (mean, sent), state = step(reducer, bucket, reducer.init(bucket), World(), given)
    assert [q.shape for q in state["q"]] == [(2, 72), (2, 24), (2, 72)]
    for out, through, wanted in zip(mean, sent, given, strict=True):
        assert torch.allclose(out, wanted, atol=1e-12)
        assert torch.allclose(through, wanted, atol=1e-12)


def test_the_rank_is_limited_by_a_matrix_own() -> None:
    given = [normal(3, 200, seed=0), normal(200, 2, seed=1)]
    reducer, bucket = powersgd(8, min_saving=1.0), bucket_of([*given, normal(3, 3, seed=2)])
    state = reducer.init(bucket)
    assert [q is None for q in state["q"]] == [True, True, True]  # at full rank, factors save nothing
    narrow = powersgd(2, min_saving=1.0)
    assert [q is None for q in narrow.init(bucket)["q"]] == [False, True, True]


@pytest.mark.parametrize("scales", [[1.0, 1.0, 1.0, 1.0], [1e-20, 1e20, 1.0, 1e-3]])
@pytest.mark.parametrize("kind", ["full", "repeated", "zero columns", "nearly dependent", "all zero"])
def test_orthonormal_columns_whatever_they_were(kind: str, scales: list[float]) -> None:
    """P^T P = I on what P spans, and P P^T never stretches: or else a residual would grow."""
    x = normal(4, 300, seed=0, dtype=torch.float32)
    if kind == "repeated":
        x[2], x[3] = x[1], 2 * x[0]
    elif kind == "zero columns":
        x[1:3] = 0
    elif kind == "nearly dependent":
        x[3] = x[0] + 1e-6 * x[3]
    elif kind == "all zero":
        x.zero_()
    x *= torch.tensor(scales)[:, None]
    layout = lowrank.Factors([lowrank.Matrix(0, 300, 1, 4)])
    line = torch.empty(4 * 300)
    lowrank.orthonormalise(layout, x.view(-1), line)
    made = line.view(4, 300).double()
    gram = made @ made.t()
    assert torch.isfinite(made).all()
    assert torch.linalg.eigvalsh(gram).max() <= 1 + 1e-6
    if kind in ("full", "nearly dependent"):
        assert torch.allclose(gram, torch.eye(4, dtype=torch.float64), atol=1e-6)
    spanned = x.double() / x.double().norm(dim=1, keepdim=True).clamp_min(1e-300)
    assert torch.allclose(spanned @ made.t() @ made, spanned, atol=3e-6)


# Bytes and collectives -----------------------------------------------------------------------------------------


def resnet18_shapes() -> list[tuple[int, ...]]:
    """The CIFAR form: 11,173,962 parameters."""
    shapes: list[tuple[int, ...]] = [(64, 3, 3, 3), (64,), (64,)]
    before = 64
    for width in (64, 128, 256, 512):
        for _ in range(2):
            shapes += [(width, before, 3, 3), (width,), (width,), (width, width, 3, 3), (width,), (width,)]
            if before != width:
                shapes += [(width, before, 1, 1), (width,), (width,)]
            before = width
    return [*shapes, (10, 512), (10,)]


@pytest.mark.parametrize(("rank", "ratio"), [(1, 243.3), (2, 135.8), (4, 72.1)])
def test_compression_of_a_resnet18(rank: int, ratio: float) -> None:
    shapes = resnet18_shapes()
    count = sum(math.prod(shape) for shape in shapes)
    assert count == 11_173_962
    sent = sum(
        min(rank, n) * (n + m) if m > 1 else n for n, m in ((shape[0], math.prod(shape[1:])) for shape in shapes)
    )
    assert count / sent == pytest.approx(ratio, abs=0.05)
    reducer, size = powersgd(rank), 4
    world = simulate(size)
    bucket = Bucket(
        0, [(f"p{i}", torch.zeros(s)) for i, s in enumerate(shapes)], lambda n, dtype: torch.empty(n, dtype=dtype)
    )
    reducer.reduce(bucket, reducer.init(bucket), world)
    records = list(world.ledger.records)
    assert [r.op for r in records] == ["all_reduce", "all_reduce"]
    assert reducer.sends is not None
    assert sum(r.bytes_sent for r in records) == reducer.sends(bucket, size) == 2 * (size - 1) * 4 * sent / size
    dense = 2 * (size - 1) * 4 * count / size
    assert dense / reducer.sends(bucket, size) == pytest.approx(ratio, abs=0.05)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_bytes_match_the_closed_form(size: int, dtype: torch.dtype) -> None:
    shapes = [(60, 44), (7,), (), (0,), (5, 5), (60, 44), (0, 3), (33, 9, 3)]

    def work(world: World) -> tuple[int, int, int]:
        reducer = powersgd(2)
        bucket = bucket_of([normal(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)], world)
        reducer.reduce(bucket, reducer.init(bucket), world)
        assert reducer.sends is not None
        records = list(world.ledger.records)
        return sum(r.bytes_sent for r in records), reducer.sends(bucket, size), len(records)

    wide = 8 if dtype == torch.float64 else 4
    first = 2 * (60 + 60 + 33) * wide + (7 + 1 + 25) * dtype.itemsize
    second = 2 * (44 + 44 + 27) * wide
    expected = math.ceil(2 * (size - 1) * first / size) + math.ceil(2 * (size - 1) * second / size)
    for sent, closed, collectives in run_threads(work, size):
        assert sent == closed == expected
        assert collectives == (2 if size > 1 else 0)


def test_a_matrix_is_compressed_only_where_it_saves_enough() -> None:
    """(20, 20) at rank 4: 160 numbers instead of 400."""
    x = [torch.zeros(20, 20)]
    assert powersgd(4, min_saving=2.5).init(bucket_of(x))["q"][0] is not None
    assert powersgd(4, min_saving=2.6).init(bucket_of(x))["q"][0] is None
    assert powersgd(4, min_saving=2.5).init(bucket_of([x[0].half()]))["q"][0] is None  # factors are float32


# State ---------------------------------------------------------------------------------------------------------


def test_the_first_q_depends_on_seed_and_name_only() -> None:
    x = [torch.zeros(32, 24), torch.zeros(32, 24)]
    alone = Bucket(5, [("p1", x[1])], World().empty)
    together = powersgd(2).init(bucket_of(x))["q"]
    assert torch.equal(powersgd(2).init(alone)["q"][0], together[1])
    assert not torch.equal(together[0], together[1])
    assert not torch.equal(powersgd(2, seed=1).init(alone)["q"][0], together[1])


@pytest.mark.parametrize(("before", "after"), [(1, 2), (4, 2), (2, 4)])
def test_another_rank_keeps_the_residual_and_pads_or_cuts_q(before: int, after: int) -> None:
    given = [normal(32, 24, seed=0), normal(6, seed=1)]
    bucket = bucket_of(given)
    low, high = powersgd(before), powersgd(after)
    _, state = step(low, bucket, low.init(bucket), World(), given)
    kept, q = state["residual"].clone(), state["q"][0].clone()
    (mean, _), state = step(high, bucket, state, World(), given)
    assert state["q"][0].shape == (after, 24)
    whole = given[0] + bucket.views(kept)[0]
    assert torch.allclose(mean[0] + bucket.views(state["residual"])[0], whole, atol=1e-13)
    padded = torch.cat([q, high.init(bucket)["q"][0][before:]])[:after]
    reference = Reference(padded.t(), 1)
    assert torch.allclose(mean[0], reference.step([whole]), atol=1e-9)


def test_a_residual_of_a_tensor_no_longer_compressed_is_sent() -> None:
    """(20, 20) saves enough at rank 1, not at rank 8."""
    given = [normal(20, 20, seed=0), normal(100, 100, seed=1)]
    bucket = bucket_of(given)
    low, high = powersgd(1), powersgd(8)
    _, state = step(low, bucket, low.init(bucket), World(), given)
    kept = bucket.views(state["residual"].clone())[0]
    (mean, sent), state = step(high, bucket, state, World(), given)
    assert state["q"][0] is None
    assert torch.allclose(mean[0], given[0] + kept, atol=1e-15)
    assert torch.equal(sent[0], mean[0])
    assert bucket.views(state["residual"])[0].count_nonzero() == 0


def test_states_taken_in_turn_do_not_mix() -> None:
    given = [normal(32, 24, seed=0)]
    reducer, bucket = powersgd(2), bucket_of(given)
    _, state = step(reducer, bucket, reducer.init(bucket), World(), given)
    copy = saved(state)
    results = []
    for begin in (state, copy):
        for t in range(3):
            (mean, _), begin = step(reducer, bucket, begin, World(), [normal(32, 24, seed=t)])
        results.append((mean[0], saved(begin)))
    assert torch.equal(results[0][0], results[1][0])
    assert same(results[0][1], results[1][1])


# Settings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: powersgd(0), ValueError, "at least 1"),
        (lambda: powersgd(-3), ValueError, "got -3"),
        (lambda: powersgd(True), TypeError, "whole number"),
        (lambda: powersgd(2.0), TypeError, "2.0"),  # type: ignore[arg-type]
        (lambda: powersgd("2"), TypeError, "'2'"),  # type: ignore[arg-type]
        (lambda: powersgd(seed=1.5), TypeError, "seed"),  # type: ignore[arg-type]
        (lambda: powersgd(feedback=1), TypeError, "True or False"),  # type: ignore[arg-type]
        (lambda: powersgd(min_saving=0.5), ValueError, "at least 1"),
        (lambda: powersgd(min_saving=math.nan), ValueError, "nan"),
        (lambda: powersgd(min_saving=math.inf), ValueError, "inf"),
        (lambda: powersgd(min_saving="2"), TypeError, "number"),  # type: ignore[arg-type]
    ],
)
def test_bad_settings_are_refused(make: Callable[[], Reducer], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        make()
