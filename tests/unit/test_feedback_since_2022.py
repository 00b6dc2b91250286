"""EF21-SGDM, LoCo and fp8 against plain references in fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from method_cases import reduce_window
from unisono.methods.buckets import Bucket
from unisono.methods.exchange.reduction import Reduction
from unisono.methods.reducer import Reducer
from unisono.methods.spec import build
from unisono.world import World
from unisono.world.virtual import run_threads

SHAPE = (16, 24)  # 384 numbers: no gap between cache lines, and shares of whole blocks


def gradient(rank: int, step: int) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


def bucket_of() -> Bucket:
    named = [("w", torch.zeros(SHAPE, dtype=torch.float64))]
    return Bucket(0, named, lambda n, dtype: torch.empty(n, dtype=dtype))


def run(spec: str, size: int, steps: int, scale: Callable[[int], float] = lambda step: 1.0) -> list[list[Any]]:
    """By rank and step: the mean and the state."""

    def work(world: World) -> list[Any]:
        reducer: Reducer = build(spec, kind="reducer")
        bucket, found = bucket_of(), []
        state = reducer.init(bucket)
        for step in range(steps):
            bucket.scale = scale(step)
            bucket.tensors[0].copy_(gradient(world.rank, step) * bucket.scale)
            reduced, state = reduce_window(reducer, bucket, state, world)
            found.append((reduced.mean[0].clone(), {k: v.clone() for k, v in _lines(state).items()}))
        return found

    return run_threads(work, size)


def _lines(state: dict[str, Any], prefix: str = "") -> dict[str, Tensor]:
    found = {}
    for key, value in state.items():
        if isinstance(value, dict):
            found |= _lines(value, f"{prefix}{key}/")
        elif isinstance(value, Tensor):
            found[prefix + key] = value
    return found


# EF21-SGDM -------------------------------------------------------------------------------------------------------


def top(x: Tensor, k: float) -> Tensor:
    chosen = x.abs().flatten().argsort(descending=True)[: round(k * x.numel())]
    return torch.zeros_like(x).flatten().index_copy(0, chosen, x.flatten()[chosen]).view(x.shape)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("scale", [lambda step: 1.0, lambda step: 2.0**step], ids=["plain", "AMP"])
def test_ef21_is_the_plain_reference(size: int, scale: Callable[[int], float]) -> None:
    eta, k = 0.3, 0.1
    found = run(f"ef21(topk(k={k}, feedback=False), momentum={eta})", size, 5, scale)
    v = [gradient(rank, 0) for rank in range(size)]
    own = [x.clone() for x in v]
    for step in range(5):
        if step:
            for rank in range(size):
                v[rank] = (1 - eta) * v[rank] + eta * gradient(rank, step)
                own[rank] = own[rank] + top(v[rank] - own[rank], k)
        mean = torch.stack(own).mean(0)
        for rank in range(size):
            torch.testing.assert_close(found[rank][step][0], mean * scale(step), rtol=1e-12, atol=1e-12)


def test_ef21_begins_with_the_first_window_that_does_not_overflow() -> None:
    """As AMP's first windows do, until the loss scale has fallen."""

    def work(world: World) -> list[Tensor]:
        reducer: Reducer = build("ef21(topk(k=0.1, feedback=False), momentum=0.1)", kind="reducer")
        bucket, found = bucket_of(), []
        state = reducer.init(bucket)
        for step in range(4):
            bad = step < 2 and world.rank == 1
            bucket.tensors[0].copy_(gradient(world.rank, step) * (float("inf") if bad else 1.0))
            reduced, state = reduce_window(reducer, bucket, state, world)
            found.append(reduced.mean[0].clone())
        return found

    v = [gradient(rank, 2) for rank in range(2)]
    first = torch.stack(v).mean(0)
    second = torch.stack([x + top(0.1 * (gradient(r, 3) - x), 0.1) for r, x in enumerate(v)]).mean(0)
    for found in run_threads(work, 2):
        torch.testing.assert_close(found[2], first, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found[3], second, rtol=1e-12, atol=1e-12)


def test_ef21_begins_again_where_another_rank_came_although_their_number_is_the_same() -> None:
    """A newcomer has no estimate of its own: without another exact exchange the mean would be off for ever."""

    def work(world: World) -> bool:
        reducer: Reducer = build("ef21(topk(k=0.1, feedback=False), momentum=0.5)", kind="reducer")
        weight = torch.nn.Parameter(torch.zeros(SHAPE, dtype=torch.float64))
        optimizer = torch.optim.SGD([weight], lr=0.1)

        def started() -> tuple[Reduction, Bucket]:
            reduction, bucket = Reduction(reducer, optimizer, lambda world: None, "gradients"), bucket_of()
            reduction.set_buckets([bucket])
            return reduction, bucket

        def step(number: int) -> None:
            bucket.tensors[0].copy_(gradient(world.rank, number))
            reduction.begin(bucket, world)
            reduction.drain()
            reduction.end_window()

        reduction, bucket = started()
        step(0)
        step(1)
        shared = world.gather_objects(reduction.state_dict()["shared"])[0]
        if world.rank == 1:
            reduction, bucket = started()
        reduction.move(shared, keep=world.rank == 0, factor=1.0)
        step(2)
        exact = (gradient(0, 2) + gradient(1, 2)) / 2
        return torch.allclose(bucket.tensors[0], exact, rtol=1e-12)

    assert run_threads(work, 2) == [True, True]


# LoCo ------------------------------------------------------------------------------------------------------------


def levels(x: Tensor, bits: int, block: int) -> Tensor:
    """Signs and levels from zero to an end that fits best, block by block."""
    out, most = torch.empty_like(x), 2 ** (bits - 1) - 1
    for a in range(0, len(x), block):
        part = x[a : a + block]
        step = part.abs().max() / most
        steps = (part.abs() / step).round()
        end = float((steps * part.abs()).sum() / steps.square().sum() * most)
        end = float(torch.tensor(end, dtype=torch.float64).to(torch.bfloat16))
        out[a : a + block] = part.sign() * steps / most * end
    return out


def test_loco_alone_is_the_plain_reference() -> None:
    """One worker: Q(h) is the result; e follows what it leaves out, and is forgotten every third step."""
    average, reset = 0.25, 3
    found = run(f"loco(bits=4, block=64, average={average}, reset={reset})", 1, 7)
    e = torch.zeros(384, dtype=torch.float64)
    for step in range(7):
        h = gradient(0, step).flatten() + e
        sent = levels(h, 4, 64)
        e = (1 - average) * e + average * (h - sent)
        e = torch.zeros_like(e) if (step + 1) % reset == 0 else e.to(torch.bfloat16).double()
        torch.testing.assert_close(found[0][step][0].flatten(), sent, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(found[0][step][1]["residual"].double(), e, rtol=2**-7, atol=1e-5)


def test_loco_loses_next_to_nothing_over_time() -> None:
    """A constant gradient, whose rounding always errs to one side: its mean arrives, which rounding alone loses."""
    g = torch.linspace(-1, 1, 384, dtype=torch.float64).pow(3).view(SHAPE)

    def arrived(spec: str) -> Tensor:
        reducer: Reducer = build(spec, kind="reducer")
        bucket = bucket_of()
        state, total = reducer.init(bucket), torch.zeros(SHAPE, dtype=torch.float64)
        for _ in range(200):
            bucket.tensors[0].copy_(g)
            reduced, state = reducer.reduce(bucket, state, World())
            total += reduced.mean[0]
        return (total / 200 - g).abs().max()

    assert arrived("loco(bits=4, block=512)") < 0.01
    assert arrived("loco(bits=4, block=512, reset=1)") > 0.05


# fp8 -------------------------------------------------------------------------------------------------------------


def e4m3(x: Tensor) -> Tensor:
    """Rounded to 3 bits behind the first, with exponents from -6 on."""
    exponents = torch.floor(torch.log2(x.abs().clamp(min=1e-300))).clamp(min=-6)
    unit = torch.exp2(exponents - 3)
    return (x / unit).round() * unit


@pytest.mark.parametrize("size", [1, 2, 4])
def test_fp8_rounds_to_e4m3_with_a_scale_a_row_and_sums_in_full(size: int) -> None:
    def work(world: World) -> Tensor:
        reducer: Reducer = build("fp8(row=64)", kind="reducer")
        bucket = Bucket(0, [("w", torch.zeros(8, 64))], lambda n, dtype: torch.empty(n, dtype=dtype))
        bucket.tensors[0].copy_(rows(world.rank))
        reduced, _ = reducer.reduce(bucket, reducer.init(bucket), world)
        return reduced.mean[0].clone()

    def rows(rank: int) -> Tensor:
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(rank))
        return x * torch.logspace(-12, 9, 8)[:, None]  # each row of another size

    def rounded(x: Tensor) -> Tensor:
        scale = (x.abs().amax(1, keepdim=True) / 448).float().double()
        return e4m3(x.double() / scale) * scale

    mean = torch.stack([rounded(rows(rank)) for rank in range(size)]).mean(0)
    again = rounded(mean) if size == 4 else mean  # with 4 ranks shares pay: the mean is rounded once more
    for found in run_threads(work, size):
        unit = mean.abs().amax(1, keepdim=True) * 2**-9
        assert ((found.double() - again).abs() <= mean.abs() * 2**-3 + unit).all()
        off = ((found.double() - again).abs() > mean.abs() * 1e-5 + unit * 1e-3).double().mean()
        assert off < (0.02 if size == 4 else 1e-9)  # a last bit of float32 may tip the second rounding


@pytest.mark.parametrize("spec", ["ef21(bytegrad)", "loco", "fp8"])
def test_a_constant_of_all_ranks_comes_back(spec: str) -> None:
    def work(world: World) -> float:
        reducer: Reducer = build(spec, kind="reducer")
        bucket = bucket_of()
        bucket.tensors[0].fill_(0.5)
        reduced, _ = reducer.reduce(bucket, reducer.init(bucket), world)
        return float((reduced.mean[0] - 0.5).abs().max())

    assert max(run_threads(work, 3)) <= 2**-8
