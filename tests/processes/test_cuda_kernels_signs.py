"""Signs in Triton against plain PyTorch: signs bit by bit, sizes as far as a sum's order goes; and nothing waits."""

from __future__ import annotations

import importlib.util
import math

import pytest
import torch
from torch import Tensor

from method_cases import reduce_window
from unisono.methods.buckets import Bucket
from unisono.methods.reducers.onebit import onebit
from unisono.methods.reducers.signsgd import signsgd
from unisono.world import World

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
]
SHAPES = [(300, 400), (17,), (), (0, 3), (64, 3, 3, 3), (1, 1), (70_001,)]
STEPS = 6  # the second is recorded as a graph, the others replay it


def bucket_of(dtype: torch.dtype, device: str) -> Bucket:
    named = [(f"p{i}", torch.zeros(shape, dtype=dtype, device=device)) for i, shape in enumerate(SHAPES)]
    return Bucket(0, named, lambda n, d: torch.empty(n, dtype=d, device=device))


def gradients(step: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [(torch.randn(shape, generator=generator) * 0.01).to(dtype) for shape in SHAPES]


@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_onebit_is_the_mean_magnitude_with_signs(dtype: torch.dtype, feedback: bool) -> None:
    bucket, reducer, world = bucket_of(dtype, "cuda"), onebit(feedback=feedback), World(device=torch.device("cuda"))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    state, kept = reducer.init(bucket), [torch.zeros(shape, dtype=wide) for shape in SHAPES]
    for step in range(STEPS):
        given = gradients(step, dtype)
        torch._foreach_copy_(bucket.tensors, given)
        if step == 3:
            bucket.tensors[0][1, 1] = math.inf
        reduced, state = reduce_window(reducer, bucket, state, world)
        if step == 3:  # NaN in that tensor, and what was kept stays
            assert reduced.mean[0].isnan().all()
            continue
        for i, (x, mean) in enumerate(zip(given, reduced.mean, strict=True)):
            if not x.numel():
                continue
            p = x.to(wide) + kept[i]
            sent = torch.where(p < 0, -1.0, 1.0) * p.abs().double().mean().to(wide)
            # Near zero a sign may differ, where the kept part was rounded otherwise: none of these numbers is so near.
            torch.testing.assert_close(mean.cpu().to(wide), sent.to(dtype).to(wide), rtol=1e-5, atol=1e-7)
            if feedback:
                kept[i] = p - sent
    if feedback:
        for mine, line in zip(kept, bucket.views(state["residual"]), strict=True):
            torch.testing.assert_close(line.cpu(), mine, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_votes_are_those_of_the_cpu(dtype: torch.dtype) -> None:
    found: dict[str, list[Tensor]] = {}
    for device in ("cpu", "cuda"):
        bucket, reducer, world = bucket_of(dtype, device), signsgd(), World(device=torch.device(device))
        state, means = reducer.init(bucket), []
        for step in range(STEPS):
            torch._foreach_copy_(bucket.tensors, gradients(step, dtype))
            bucket.tensors[0][:, ::3] = 0.0  # zeros vote at random
            if step == 3:
                bucket.tensors[4].zero_()  # abstains
                bucket.tensors[6][5] = math.nan
            reduced, state = reduce_window(reducer, bucket, state, world)
            means += [x.cpu().clone() for x in reduced.mean]
        found[device] = means
    for a, b in zip(found["cpu"], found["cuda"], strict=True):
        assert torch.equal(a.isnan(), b.isnan())
        assert torch.equal(a.nan_to_num(7), b.nan_to_num(7))


def test_messages_of_several_ranks_are_added_in_their_order() -> None:
    from unisono.methods.reducers._signs import SignsOnCuda, messages_of

    bucket, on_cpu = bucket_of(torch.float32, "cuda"), bucket_of(torch.float32, "cpu")
    fast = SignsOnCuda(bucket, messages_of(bucket))
    every = fast.find_messages(3)
    for rank in range(3):
        torch._foreach_copy_(bucket.tensors, gradients(rank, torch.float32))
        fast.kernels.measure(fast.tables, bucket.flat, None, fast.mine, vote=False)
        fast.kernels.encode(fast.tables, bucket.flat, fast.mine)
        every[rank].copy_(fast.mine)
        messages_of(on_cpu).decode(fast.mine.cpu(), on_cpu.flat, over=3, add=rank > 0)
    fast.kernels.add_up(fast.tables, every, bucket.flat, vote=False)
    for expected, view in zip(on_cpu.tensors, bucket.tensors, strict=True):
        assert torch.equal(expected, view.cpu())
