"""The update beside the computation on a GPU: streams that really run late, pinned memory, the budget."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from unisono.methods.offload.device import Slab
from unisono.methods.offload.pipeline import CudaStreams, Pipeline, Run, Shard
from unisono.methods.offload.plan import resident_units

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

LENGTHS = [1_500_000, 2_500_096, 1000, 2_000_000]
STEPS = 4
PLACES: dict[str, dict[str, Any]] = {
    "host": {"gpu_share": False},
    "staged": {"gpu_share": 1.0},
    "both": {"gpu_share": 0.5},
    "default": {},
    "some resident": {"gpu_share": 0.5, "resident": frozenset({0, 2})},
    "all resident": {"resident": frozenset(range(4))},
}


def start() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n, generator=generator) for n in LENGTHS]


def gradient(step: int, u: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + u)
    return torch.randn(LENGTHS[u], generator=generator).bfloat16()


@functools.cache
def trajectory() -> list[list[Tensor]]:
    """torch's AdamW in double precision on the CPU: the values before the first step and after each."""
    params = [torch.nn.Parameter(line.double()) for line in start()]
    optimizer = torch.optim.AdamW(params, lr=0.01)
    found = [[param.detach().clone() for param in params]]
    for step in range(STEPS):
        for u, param in enumerate(params):
            param.grad = gradient(step, u).double() * 0.5
        optimizer.step()
        found.append([param.detach().clone() for param in params])
    return found


def reference(steps: int) -> list[Tensor]:
    return trajectory()[steps]


def built(**options: Any) -> tuple[Pipeline, list[Tensor]]:
    lines = [Shard(line.bfloat16().cuda(), [Run(0, line.numel(), 0)], line) for line in start()]
    optimizer = torch.optim.AdamW([torch.zeros(1)], lr=0.01)
    options.setdefault("block", 1 << 19)
    return Pipeline(optimizer, lines, device=torch.device("cuda"), **options), [line.compute for line in lines]


def busy() -> None:
    """Keep the current stream busy for some milliseconds, so that the host runs ahead of it."""
    x = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        x = x @ x
        x = x / x.norm()


def train(pipeline: Pipeline, compute: list[Tensor], *, scale: Any = 0.5, **settings: Any) -> Iterator[list[Tensor]]:
    """After each step, what the forward of it saw."""
    for step in range(STEPS):
        seen = []
        for u, line in enumerate(compute):
            pipeline.wait(u)
            seen.append(line.clone())
        busy()
        for u in reversed(range(len(LENGTHS))):
            given = gradient(step, u).cuda()
            mark = pipeline.offer(u, given)
            mark.hold()
            given.fill_(torch.nan)  # it was copied away
        pipeline.step(scale, **settings)
        yield seen


def assert_near(found: list[Tensor], expected: list[Tensor]) -> None:
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.cpu().double(), y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("place", PLACES)
def test_every_placement_equals_adamw_and_forward_sees_each_step(place: str) -> None:
    pipeline, compute = built(**PLACES[place])
    for step, seen in enumerate(train(pipeline, compute)):
        for line, expected in zip(seen, reference(step), strict=True):
            torch.testing.assert_close(line.cpu().double(), expected, rtol=1e-2, atol=1e-4)  # bfloat16
    pipeline.finish()
    masters = [pipeline.shard(u).read("master") for u in range(len(LENGTHS))]
    assert_near(masters, reference(STEPS))
    for line, master in zip(compute, masters, strict=True):
        assert torch.equal(line.cpu(), master.bfloat16())
    pipeline.close()


def test_a_run_repeats_itself_bit_for_bit() -> None:
    found = []
    for _ in range(2):
        pipeline, compute = built(gpu_share=0.5, buffers=2)
        for _ in train(pipeline, compute):
            pass
        found.append([pipeline.shard(u).read("master") for u in range(len(LENGTHS))])
        pipeline.close()
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


def test_delayed_values_come_one_step_later() -> None:
    pipeline, compute = built(delayed=True, gpu_share=0.5, resident=frozenset({1}))
    for step, seen in enumerate(train(pipeline, compute)):
        for line, expected in zip(seen, reference(max(0, step - 1)), strict=True):
            torch.testing.assert_close(line.cpu().double(), expected, rtol=1e-2, atol=1e-4)
    pipeline.finish()
    assert_near([pipeline.shard(u).read("master") for u in range(len(LENGTHS))], reference(STEPS))
    pipeline.close()


def test_a_scale_on_the_device_is_used_by_all_lanes() -> None:
    pipeline, compute = built(gpu_share=0.5, resident=frozenset({0}))
    for _ in train(pipeline, compute, scale=torch.tensor(0.5, device="cuda")):
        pass
    assert_near([pipeline.shard(u).read("master") for u in range(len(LENGTHS))], reference(STEPS))
    pipeline.close()


@pytest.mark.parametrize("place", ["host", "both", "some resident"])
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_steps_taken_ahead_are_bit_by_bit_those_that_are_not(place: str, moments: torch.dtype) -> None:
    """Every other step is scaled: those are stepped again."""
    found = []
    for ahead in (False, True):
        pipeline, compute = built(ahead=ahead, moments=moments, **PLACES[place])
        for step in range(8):
            for u, line in enumerate(compute):
                pipeline.wait(u)
                line.clone()
            busy()
            for u in reversed(range(len(LENGTHS))):
                given = gradient(step, u).cuda()
                pipeline.offer(u, given).hold()
                given.fill_(torch.nan)
            pipeline.step(0.5 if step % 2 else 1.0)
        pipeline.finish()
        if pipeline.ahead is not None:
            assert min(pipeline.ahead.claimed, pipeline.ahead.missed) > 0
        shards = [pipeline.shard(u) for u in range(len(LENGTHS))]
        found.append([shard.read(name) for shard in shards for name in shard.names()])
        found[-1] += [line.clone() for line in compute]
        pipeline.close()
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


def test_sixteen_bit_moments_stay_near_full_ones() -> None:
    pipeline, compute = built(gpu_share=0.5, resident=frozenset({0}), moments=torch.bfloat16)
    for _ in train(pipeline, compute):
        pass
    for u, (expected, first) in enumerate(zip(reference(STEPS), start(), strict=True)):
        error = (pipeline.shard(u).read("master").double() - expected).norm()
        assert error < 0.02 * (expected - first).norm()
    pipeline.close()


def test_memory_on_the_device_is_what_was_planned() -> None:
    lengths = [4 << 20] * 6
    lines = [Shard(torch.zeros(n, device="cuda", dtype=torch.bfloat16), [Run(0, n, 0)]) for n in lengths]
    optimizer = torch.optim.AdamW([torch.zeros(1)])
    budget = 220 << 20
    resident = resident_units(lengths, budget, share=0.5, buffers=4, block=1 << 20)
    assert 0 < len(resident) < 6
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    options: dict[str, Any] = {"resident": resident, "gpu_share": 0.5, "buffers": 4, "block": 1 << 20}
    pipeline = Pipeline(optimizer, lines, device=torch.device("cuda"), **options)
    taken = torch.cuda.memory_allocated() - before
    assert taken <= 1.02 * budget
    assert taken == pytest.approx(pipeline.device_bytes, rel=0.05)
    pipeline.close()


def test_a_slab_is_pinned_and_copies_do_not_wait() -> None:
    slab = Slab(64 << 20, pinned=True)
    line = slab.take_line(16 << 20, torch.float32)
    assert line.is_pinned()
    x = torch.randn(16 << 20, device="cuda")
    streams = CudaStreams(torch.device("cuda"))
    mark = streams.queue().run(lambda: line.copy_(x, non_blocking=True), after=[streams.now()])
    mark.wait()
    assert torch.equal(line, x.cpu())
    slab.close()
    assert not line.is_pinned()
