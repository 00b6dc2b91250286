"""Selection in Triton against selection on the CPU: the same bits, and nothing waits for the device."""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from method_cases import reduce_window
from unisono.methods.buckets import Bucket
from unisono.methods.kernels.select import Plan, Segment, restore, select_top
from unisono.methods.reducer import Reducer
from unisono.methods.reducers.randomk import randomk
from unisono.methods.reducers.topk import topk
from unisono.world import World

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
]

KINDS = [
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.float32),
    (torch.float64, torch.float64),
    (torch.float16, None),
    (torch.bfloat16, None),
    (torch.float32, None),
    (torch.float64, None),
]
SEGMENTS = [
    Segment(0, 2_000_003, 20_000),
    Segment(2_000_032, 7, 1),
    Segment(2_000_064, 300_000, 60_000),
    Segment(2_300_064, 16, 16),
    Segment(2_300_096, 50_000, 1),
]
LENGTH = 2_350_112


def _mixed(n: int) -> Tensor:
    x = torch.randn(n)
    x[5::9001], x[7::7001], x[11::8001] = math.inf, -math.inf, math.nan
    return x


DATA: dict[str, Callable[[int], Tensor]] = {
    "random": torch.randn,
    "tied": lambda n: torch.randint(-2, 3, (n,)).float(),
    "all zero": torch.zeros,
    "few not zero": lambda n: torch.randn(n) * (torch.arange(n) % 3000 == 8),
    "in one place": lambda n: torch.where(torch.arange(n) < 30_000, 5.0, 0.001) * torch.randn(n),
    "denormal": lambda n: torch.randn(n) * 1e-41,
    "not finite": _mixed,
}


def selected(plan: Plan, grad: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    out = grad if residual is None else torch.zeros_like(residual)
    values = torch.empty(plan.total, dtype=grad.dtype, device=grad.device)
    indices = torch.empty(plan.total, dtype=torch.int32, device=grad.device)
    select_top(plan, grad, residual, out, values, indices)
    return out, values, indices


def same(a: Tensor, b: Tensor) -> bool:
    """Bit by bit; NaN as NaN."""
    a, b = a.cpu(), b.cpu()
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(7).view(bits), b.nan_to_num(7).view(bits))


@contextmanager
def no_waiting() -> Iterator[None]:
    """An error where the host would wait for the device."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls this mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize(("grad_dtype", "residual_dtype"), KINDS, ids=str)
def test_the_same_bits_as_on_the_cpu(data: str, grad_dtype: torch.dtype, residual_dtype: torch.dtype | None) -> None:
    torch.manual_seed(0)
    grad = DATA[data](LENGTH).to(grad_dtype)
    residual = None if residual_dtype is None else (torch.randn(LENGTH) * 0.1).to(residual_dtype)
    if residual is not None and data not in ("random", "not finite"):
        residual.zero_()
    plan = Plan(SEGMENTS)
    on_cpu = selected(plan, grad.clone(), residual)
    on_gpu = selected(plan, grad.cuda(), None if residual is None else residual.cuda())
    assert torch.equal(on_gpu[2].cpu(), on_cpu[2])
    assert same(on_gpu[1], on_cpu[1])
    for start, length, _ in SEGMENTS:
        assert same(on_gpu[0][start : start + length], on_cpu[0][start : start + length])


def test_a_sample_that_misleads_does_not_change_the_result() -> None:
    """Large where the sample looks, small elsewhere: fewer numbers than wanted reach the guess."""
    n = 1_000_000
    j, width = torch.arange(8192), n // 8192
    torch.manual_seed(0)
    grad = torch.randn(n)
    grad[j * width + (j * (n % 8192)) // 8192 + ((((j * 40503) & 0xFFF) * width) >> 12)] += 100
    plan = Plan([Segment(0, n, 100_000)])
    residual = torch.zeros(n)
    on_cpu, on_gpu = selected(plan, grad, residual), selected(plan, grad.cuda(), residual.cuda())
    assert all(same(a.float(), b.float()) for a, b in zip(on_cpu, on_gpu, strict=True))


def test_restore_copies_if_the_flag_is_nan() -> None:
    line, before = torch.ones(100_001, device="cuda"), torch.randn(100_001, device="cuda")
    with no_waiting():
        restore(torch.zeros((), device="cuda"), before, line)
    assert (line == 1).all()
    flag = torch.full((), math.nan, device="cuda")
    with no_waiting():
        restore(flag, before, line)
    assert torch.equal(line, before)


REDUCERS: dict[str, Callable[[], Reducer]] = {
    "topk": topk,
    "topk without feedback": lambda: topk(0.1, feedback=False),
    "topk with momentum": lambda: topk(0.02, momentum=0.9, ramp=3),
    "randomk": randomk,
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", REDUCERS)
def test_reducers_give_the_same_bits_as_on_the_cpu_and_never_wait(name: str, dtype: torch.dtype) -> None:
    shapes = [(300, 400), (17,), (), (0, 3), (64, 3, 3, 3), (1, 1)]
    found: dict[str, list[Tensor]] = {}
    for device in ("cpu", "cuda"):
        reducer, world = REDUCERS[name](), World(device=torch.device(device))
        named = [(f"p{i}", torch.zeros(shape, dtype=dtype, device=device)) for i, shape in enumerate(shapes)]
        bucket = Bucket(0, named, lambda n, d, at=device: torch.empty(n, dtype=d, device=at))  # type: ignore[misc]
        state, kept = reducer.init(bucket), []
        for step in range(6):
            generator = torch.Generator().manual_seed(step)
            for view in bucket.tensors:
                view.copy_(torch.randn(view.shape, generator=generator).to(dtype))
            if step == 3:
                bucket.tensors[0][1, 1] = math.nan
            with no_waiting() if device == "cuda" and step not in (0, 3) else _nothing():
                reduced, state = reduce_window(reducer, bucket, state, world)
            kept += [x.cpu().clone() for x in reduced.mean]
            kept += [v.cpu().clone() for x in state.values() if isinstance(x, Tensor) for v in bucket.views(x)]
        found[device] = kept
    assert all(same(a, b) for a, b in zip(found["cpu"], found["cuda"], strict=True))


@contextmanager
def _nothing() -> Iterator[None]:
    yield
