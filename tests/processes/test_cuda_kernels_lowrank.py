"""PowerSGD on CUDA: the Triton kernels against torch in fp64, whole steps against the CPU, and no waiting."""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from method_cases import reduce_window
from unisono.methods.buckets import Bucket
from unisono.methods.kernels import lowrank
from unisono.methods.reducer import State
from unisono.methods.reducers.powersgd import powersgd
from unisono.world import World

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
]

SHAPES = [(40, 300), (300, 40), (17, 33), (3, 90), (40, 300), (768, 1000), (7,), (0, 4), ()]
ranks = pytest.mark.parametrize("rank", [1, 2, 3, 4, 8, 16, 17])  # 17: more than the kernels hold, so torch


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def bucket_on(device: str, tensors: list[Tensor]) -> Bucket:
    named = [(f"p{i}", torch.zeros_like(x, device=device)) for i, x in enumerate(tensors)]
    return Bucket(0, named, lambda n, dtype: torch.empty(n, dtype=dtype, device=device))


def layout_of(rank: int) -> tuple[lowrank.Factors, int]:
    matrices, at = [], 0
    for n, m in [shape for shape in SHAPES if len(shape) == 2 and math.prod(shape)]:
        matrices.append(lowrank.Matrix(at, n, m, min(rank, n, m)))
        at += -(-n * m // 16) * 16
    return lowrank.Factors(matrices, [(at, 7), (at + 16, 5000)]), at + 5016


@contextmanager
def no_waiting() -> Iterator[None]:
    """An operation in which the host waits for the device raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@ranks
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kept", [True, False], ids=["feedback", "none"])
def test_each_kernel_against_fp64(rank: int, dtype: torch.dtype, kept: bool) -> None:
    layout, size = layout_of(rank)
    flat, residual = normal(size, seed=0, dtype=dtype), normal(size, seed=1) if kept else None
    q, mine = normal(layout.q_size, seed=2), normal(layout.q_size, seed=4)
    whole = flat.double() + (0 if residual is None else residual.double())
    on = [None if x is None else x.cuda() for x in (flat, residual, q, mine)]
    there, e, q_there, mine_there = on
    assert there is not None
    assert q_there is not None
    assert mine_there is not None
    p, out = torch.empty(layout.p_size, device="cuda"), torch.empty(layout.q_size, device="cuda")
    rest = torch.empty(5007, dtype=dtype, device="cuda")
    lowrank.multiply_left(layout, there, e, q_there, p, rest)
    moved = torch.cat(layout.view_rest(whole)).to(dtype)
    assert torch.allclose(rest.cpu(), moved, rtol=torch.finfo(dtype).eps)
    lowrank.multiply_right(layout, there, e, p, out)
    bad, good, last = torch.tensor(math.nan, device="cuda"), torch.tensor(0.0, device="cuda"), q_there.clone()
    after = None if e is None else torch.empty_like(e)
    before = None if e is None else e.clone()
    lowrank.finish(layout, there.clone(), e, after, p, mine_there, out, rest, last, bad)
    assert torch.equal(last, q_there)  # a void step does not change Q
    lowrank.finish(layout, there, e, after, p, mine_there, out, rest, last, good)
    assert before is None or torch.equal(e, before)  # an overflow in another bucket may need it yet
    assert torch.equal(last, out)
    assert torch.equal(torch.cat(layout.view_rest(there)), rest)
    assert after is None or torch.cat(layout.view_rest(after)).count_nonzero() == 0
    factors = zip(
        layout.matrices, layout.view_p(p), layout.view_q(out), layout.view_q(q), layout.view_q(mine), strict=True
    )
    for m, p_t, made, q_t, mine_t in factors:
        part = slice(m.start, m.start + m.rows * m.columns)
        matrix, left = whole[part].view(m.rows, -1), p_t.cpu().double().t()
        assert torch.allclose(left, matrix @ q_t.double().t(), rtol=1e-5, atol=2e-4)
        assert torch.allclose(made.cpu().double(), left.t() @ matrix, rtol=1e-5, atol=2e-2)
        mean = left @ made.cpu().double()
        eps = torch.finfo(dtype).eps
        assert torch.allclose(there[part].cpu().double(), mean.view(-1), rtol=2 * eps, atol=1e-6 * mean.abs().max())
        if after is not None:
            kept_there = (matrix - left @ mine_t.double()).view(-1)
            assert torch.allclose(after[part].cpu().double(), kept_there, rtol=1e-5, atol=1e-3)


@ranks
def test_orthonormal_columns_on_the_device(rank: int) -> None:
    layout, _ = layout_of(rank)
    p = normal(layout.p_size, seed=0)
    layout.view_p(p)[1].zero_()
    layout.view_p(p)[0][-1] = layout.view_p(p)[0][0]  # dependent
    layout.view_p(p)[2].mul_(1e-25)
    layout.view_p(p)[4].mul_(1e25)
    there = torch.empty(layout.p_size, device="cuda")
    lowrank.orthonormalise(layout, p.cuda(), there)
    made = there.cpu().double()
    assert torch.isfinite(made).all()
    for i, (m, rows, x) in enumerate(zip(layout.matrices, layout.view_p(made), layout.view_p(p), strict=True)):
        gram = rows @ rows.t()
        assert torch.linalg.eigvalsh(gram).max() <= 1 + 1e-6
        if i > 1:
            assert torch.allclose(gram, torch.eye(m.rank, dtype=torch.float64), atol=2e-6)
        x = x.double() / x.double().norm(dim=1, keepdim=True).clamp_min(1e-300)
        assert torch.allclose(x @ rows.t() @ rows, x, atol=1e-5)


@ranks
def test_a_basis_has_all_its_columns_even_of_zero(rank: int) -> None:
    layout, _ = layout_of(rank)
    q, noise = torch.zeros(layout.q_size), normal(layout.q_size, seed=1)
    layout.view_q(q)[0][0] = normal(300, seed=2)
    there = torch.empty(layout.q_size, device="cuda")
    lowrank.make_basis(layout, q.cuda(), noise.cuda(), there)
    made = there.cpu().double()
    for m, rows in zip(layout.matrices, layout.view_q(made), strict=True):
        assert torch.allclose(rows @ rows.t(), torch.eye(m.rank, dtype=torch.float64), atol=2e-6)
    first = layout.view_q(q)[0][0].double()
    assert torch.allclose(layout.view_q(made)[0][0], first / first.norm(), atol=1e-6)


@ranks
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
def test_steps_agree_with_the_cpu(rank: int, dtype: torch.dtype) -> None:
    reducer = powersgd(rank, min_saving=1)
    first = [normal(*shape, seed=i, dtype=dtype) for i, shape in enumerate(SHAPES)]
    buckets = {device: bucket_on(device, first) for device in ("cpu", "cuda")}
    states: dict[str, State] = {device: reducer.init(bucket) for device, bucket in buckets.items()}
    for a, b in zip(states["cpu"]["q"], states["cuda"]["q"], strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b.cpu())  # the same seeds, the same bits
    for step in range(3):
        means = {}
        for device, bucket in buckets.items():
            for view, x in zip(bucket.tensors, first, strict=True):
                view.copy_(x * (step + 1))
            reduced, states[device] = reducer.reduce(bucket, states[device], World())
            means[device] = [x.cpu().double() for x in reduced.mean]
        near = {torch.float16: 4e-3, torch.float32: 2e-3, torch.float64: 1e-9}[dtype]  # a power iteration amplifies
        for a, b in zip(means["cpu"], means["cuda"], strict=True):
            assert (a - b).norm() <= near * (1 + a.norm())


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("place", [5, 6], ids=["in a matrix", "in a vector"])
def test_an_overflow_leaves_the_state_as_it_was(place: int, bad: float) -> None:
    reducer = powersgd(2)
    values = [normal(*shape, seed=i) for i, shape in enumerate(SHAPES)]
    bucket = bucket_on("cuda", values)
    state = reducer.init(bucket)
    for overflow in (False, True):
        for view, x in zip(bucket.tensors, values, strict=True):
            view.copy_(x)
        before = state["residual"].clone(), [None if q is None else q.clone() for q in state["q"]]
        if overflow:
            bucket.tensors[place].view(-1)[5] = bad
        reduced, state = reduce_window(reducer, bucket, state, World())
        assert all(torch.isfinite(x).all() for x in reduced.mean) is not overflow
    assert torch.equal(state["residual"], before[0])
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(state["q"], before[1], strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("rank", [1, 4])
def test_the_host_never_waits_for_the_device(rank: int, dtype: torch.dtype) -> None:
    reducer = powersgd(rank)
    values = [normal(*shape, seed=i, dtype=dtype) for i, shape in enumerate(SHAPES)]
    bucket = bucket_on("cuda", values)
    state = reducer.init(bucket)
    _, state = reducer.reduce(bucket, state, World())  # compiles the kernels and lays their tables out
    with no_waiting():
        for _ in range(2):
            _, state = reducer.reduce(bucket, state, World())


def test_a_step_repeats_bit_by_bit() -> None:
    values = [normal(*shape, seed=i) for i, shape in enumerate(SHAPES)]
    found = []
    for _ in range(2):
        reducer, bucket = powersgd(4), bucket_on("cuda", values)
        state = reducer.init(bucket)
        for _ in range(3):
            for view, x in zip(bucket.tensors, values, strict=True):
                view.copy_(x)
            reduced, state = reducer.reduce(bucket, state, World())
        found.append([x.clone() for x in reduced.mean] + [state["residual"]])
    assert all(map(torch.equal, *found))
