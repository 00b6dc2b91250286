"""Exact selection by threshold, against a stable sort of the magnitudes."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from unisono.methods.kernels import select
from unisono.methods.kernels.select import Plan, Segment, count_kept, restore, select_top

# dtype of the gradient, dtype of the residual (None: there is none)
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
SEGMENTS = [Segment(0, 40_000, 400), Segment(40_000, 7, 1), Segment(40_032, 200_001, 2000), Segment(240_064, 5, 5)]
LENGTH = 240_128


def _mixed(n: int) -> Tensor:
    x = torch.randn(n)
    x[5::9001], x[7::7001], x[11::8001] = math.inf, -math.inf, math.nan
    return x


DATA: dict[str, Callable[[int], Tensor]] = {
    "random": torch.randn,
    "heavy tails": lambda n: torch.randn(n) / torch.rand(n),
    "tied": lambda n: torch.randint(-2, 3, (n,)).float(),
    "all equal": lambda n: torch.full((n,), -1.5),
    "all zero": torch.zeros,
    "signed zeros": lambda n: torch.where(torch.arange(n) % 2 == 0, 0.0, -0.0),
    "few not zero": lambda n: torch.randn(n) * (torch.arange(n) % 3000 == 8),
    "sorted": lambda n: torch.linspace(-1, 1, n),
    "in one place": lambda n: torch.where(torch.arange(n) < 1000, 5.0, 0.001) * torch.randn(n),
    "periodic": lambda n: torch.where(torch.arange(n) % 128 == 0, 10.0, 0.1) * torch.randn(n),
    "denormal": lambda n: torch.randn(n) * 1e-41,
    "not finite": _mixed,
}


def reference(p: Tensor, segments: list[Segment]) -> Tensor:
    """Places of the largest: NaN first, then by magnitude, then by place."""
    chosen = []
    for start, length, kept in segments:
        x = p[start : start + length].double().abs()
        x = torch.where(x.isnan(), math.inf, x)
        nan_first = p[start : start + length].isnan().int()
        order = torch.sort(x, descending=True, stable=True).indices
        order = order[torch.sort(nan_first[order], descending=True, stable=True).indices]
        chosen.append(order[:kept].sort().values + start)
    return torch.cat(chosen)


def selected(
    grad: Tensor, residual: Tensor | None, segments: list[Segment] = SEGMENTS
) -> tuple[Tensor, Tensor, Tensor]:
    plan = Plan(segments)
    out = grad if residual is None else torch.full_like(residual, 777.0)
    values, indices = torch.empty(plan.total, dtype=grad.dtype), torch.empty(plan.total, dtype=torch.int32)
    select_top(plan, grad, residual, out, values, indices)
    return out, values, indices


def inputs(data: str, grad_dtype: torch.dtype, residual_dtype: torch.dtype | None) -> tuple[Tensor, Tensor | None]:
    torch.manual_seed(0)
    grad = DATA[data](LENGTH).to(grad_dtype)
    if residual_dtype is None:
        return grad, None
    scale = 0.1 if data in ("random", "heavy tails", "not finite") else 0.0
    return grad, (torch.randn(LENGTH) * scale).to(residual_dtype)


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize(("grad_dtype", "residual_dtype"), KINDS, ids=str)
def test_the_largest_are_selected(data: str, grad_dtype: torch.dtype, residual_dtype: torch.dtype | None) -> None:
    grad, residual = inputs(data, grad_dtype, residual_dtype)
    p = grad.clone() if residual is None else residual + grad.to(residual.dtype)
    out, values, indices = selected(grad, residual)
    wanted = reference(p, SEGMENTS)
    assert torch.equal(indices.long(), wanted)
    assert torch.equal(values.nan_to_num(1, 2, 3), p[wanted].to(grad_dtype).nan_to_num(1, 2, 3))
    if residual is not None:
        p[wanted] = p[wanted] - values.to(p.dtype) if grad.dtype != p.dtype else 0.0
        for start, length, _ in SEGMENTS:
            part = slice(start, start + length)
            assert torch.equal(out[part].nan_to_num(1, 2, 3), p[part].nan_to_num(1, 2, 3))


@pytest.mark.parametrize("guess", [1, 2**20, 2**30, 2**31 - 1])
@pytest.mark.parametrize("data", ["random", "tied", "few not zero", "not finite"])
def test_the_guess_does_not_change_the_result(data: str, guess: int, monkeypatch: pytest.MonkeyPatch) -> None:
    grad, residual = inputs(data, torch.float32, torch.float32)
    out, values, indices = selected(grad, residual)
    monkeypatch.setattr(select, "_guess", lambda keys, target: guess)
    other = selected(grad, residual)
    assert torch.equal(other[2], indices)
    assert torch.equal(other[1].view(torch.int32), values.view(torch.int32))
    for start, length, _ in SEGMENTS:
        part = slice(start, start + length)
        assert torch.equal(other[0][part].view(torch.int32), out[part].view(torch.int32))


# The test above has all data with all kinds; here each is compared with what that found, in a third of the pairs.
@pytest.mark.parametrize(("data", "kind"), [(d, k) for i, d in enumerate(DATA) for k in range(i % 3, len(KINDS), 3)])
def test_sorting_for_devices_without_a_kernel_selects_the_same(data: str, kind: int) -> None:
    grad_dtype, residual_dtype = KINDS[kind]
    grad, residual = inputs(data, grad_dtype, residual_dtype)
    out = grad if residual is None else torch.empty_like(residual)
    part = slice(40_032, 240_033)
    chosen = select._select_by_sorting(grad[part], None if residual is None else residual[part], out[part], 2000)
    assert torch.equal(chosen, reference(out, [Segment(40_032, 200_001, 2000)]) - 40_032)


def test_finite_numbers_are_sent_as_finite_ones() -> None:
    grad = torch.tensor([60000.0, -60000.0, math.inf, 1.0], dtype=torch.float16)
    residual = torch.tensor([60000.0, -60000.0, 0.0, 0.0])
    out, values, _ = selected(grad, residual, [Segment(0, 4, 3)])
    assert values.tolist() == [65504.0, -65504.0, math.inf]
    assert out[:2].tolist() == [120000.0 - 65504.0, 65504.0 - 120000.0]


def test_restore_copies_if_the_flag_is_nan() -> None:
    line = torch.ones(5)
    restore(torch.tensor(0.0), torch.zeros(5), line)
    assert line.tolist() == [1.0] * 5
    restore(torch.tensor(math.nan), torch.zeros(5), line)
    assert line.tolist() == [0.0] * 5


def test_counts_are_at_least_one_and_at_most_all() -> None:
    assert [count_kept(0.01, n) for n in (1, 99, 100, 1000, 25_000_000)] == [1, 1, 1, 10, 250_000]
    assert [count_kept(1.0, n) for n in (1, 7)] == [1, 7]
    assert count_kept(0.29, 100) == 29  # 0.29 * 100 is a little less
