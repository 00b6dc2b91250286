"""Quantisation on CUDA: the same bits as on the CPU, and the host never waits."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from method_cases import reduce_window
from unisono.methods.buckets import Bucket
from unisono.methods.kernels import bits as truth
from unisono.methods.kernels import quantise
from unisono.methods.kernels.noise import bits, noise
from unisono.methods.kernels.quantise import Levels
from unisono.methods.spec import build
from unisono.world import World

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
CASES = [  # each is compiled
    *((torch.float32, width, exponential, 8192) for width in (2, 4, 8) for exponential in (False, True)),
    *((dtype, 4, True, 8192) for dtype in DTYPES if dtype != torch.float32),
    *((torch.float32, 4, True, block) for block in (64, 16384)),
]
METHODS = ["qsgd", "nuqsgd", "nuqsgd(bits=2)", "bytegrad", "signsgd", "onebit"]


def numbers(n: int, dtype: torch.dtype, kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n, generator=generator, dtype=torch.float64)
    if kind == "spread":
        x *= torch.exp(torch.randn(n, generator=generator, dtype=torch.float64).clamp(-2, 2))
    if kind == "small":
        x *= 1e-40
    if kind == "sparse":
        x[::3] = 0
        x[: n // 2] = 0
    return x.to(dtype)


def same(cuda: Tensor, cpu: Tensor) -> bool:
    return torch.equal(cuda.cpu(), cpu)


@contextmanager
def without_waiting() -> Iterator[None]:
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # this mode calls itself a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_noise_has_the_same_bits() -> None:
    source = noise(1, 2, 3, 4).after(2**32 - 1000)
    assert same(bits(source, 100_000, "cuda"), bits(source, 100_000))


@pytest.mark.parametrize("kind", ["spread", "small", "sparse"])
@pytest.mark.parametrize(("dtype", "width", "exponential", "block"), CASES, ids=str)
def test_levels_have_the_same_bits(kind: str, dtype: torch.dtype, width: int, exponential: bool, block: int) -> None:
    for n in (1, 100_001):
        levels, source = Levels(width, block, exponential), noise(0, n).after(12345)
        x = numbers(n, dtype, kind)
        cpu, cuda = (torch.empty(levels.nbytes(n), dtype=torch.uint8, device=d) for d in ("cpu", "cuda"))
        quantise.encode(x, levels, source, cpu)
        quantise.encode(x.cuda(), levels, source, cuda)
        assert same(cuda, cpu), (n, block)
        for wide in (torch.float32, torch.float64):
            here, there = torch.empty(n, dtype=wide), torch.empty(n, dtype=wide, device="cuda")
            for add in (False, True):
                quantise.decode(cpu, levels, here, ranks=3, add=add)
                quantise.decode(cuda, levels, there, ranks=3, add=add)
                assert same(there, here), (n, block, wide, add)


@pytest.mark.parametrize("kind", ["spread", "small", "sparse"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_have_the_same_bits(kind: str, dtype: torch.dtype) -> None:
    for n, block in ((1, 64), (100_001, 2048)):
        x = numbers(n, dtype, kind)
        cpu, cuda = (torch.empty(quantise.bytes_nbytes(n, block), dtype=torch.uint8, device=d) for d in ("cpu", "cuda"))
        quantise.encode_bytes(x, block, cpu)
        quantise.encode_bytes(x.cuda(), block, cuda)
        assert same(cuda, cpu), (n, block)
        for wide in (torch.float32, torch.float64):
            here, there = torch.empty(n, dtype=wide), torch.empty(n, dtype=wide, device="cuda")
            for add in (False, True):
                quantise.decode_bytes(cpu, block, here, ranks=3, add=add)
                quantise.decode_bytes(cuda, block, there, ranks=3, add=add)
                assert same(there, here), (n, block, wide, add)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_block_that_is_not_finite_is_nan(bad: float) -> None:
    x = torch.randn(3 * 8192, device="cuda")
    x[10_000] = bad
    out = torch.empty_like(x)
    levels = Levels(4, 8192, True)
    code = torch.empty(levels.nbytes(len(x)), dtype=torch.uint8, device="cuda")
    quantise.encode(x, levels, noise(0, 0), code)
    quantise.decode(code, levels, out)
    assert out.isnan().view(3, -1).all(1).tolist() == [False, True, False]
    code = torch.empty(quantise.bytes_nbytes(len(x), 8192), dtype=torch.uint8, device="cuda")
    quantise.encode_bytes(x, 8192, code)
    quantise.decode_bytes(code, 8192, out)
    assert out.isnan().view(3, -1).all(1).tolist() == [False, True, False]


def test_truth_values_fill_bytes() -> None:
    values = torch.rand(8000) < 0.5
    assert same(truth.pack(values.cuda()), truth.pack(values))
    assert same(truth.unpack(truth.pack(values.cuda())), values)


def on(device: str, tensors: list[Tensor]) -> Bucket:
    given = [torch.zeros_like(x, device=device) for x in tensors]
    empty = World(device=torch.device(device)).empty
    return Bucket(0, [(str(i), x) for i, x in enumerate(given)], empty)


@pytest.mark.parametrize("spec", METHODS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_reducers_give_what_they_give_on_the_cpu_without_waiting(spec: str, dtype: torch.dtype) -> None:
    tensors = [
        numbers(n, dtype, kind) for n, kind in ((20_000, "spread"), (7, "spread"), (0, "spread"), (300, "sparse"))
    ]
    results = []
    for device in ("cpu", "cuda"):
        reducer, bucket, world = build(spec, kind="reducer"), on(device, tensors), World(device=torch.device(device))
        state = reducer.init(bucket)
        for step in range(4):
            bucket.flat.zero_()
            for view, x in zip(bucket.tensors, tensors, strict=True):
                view.copy_(x)
            if device == "cuda" and step > 0:  # the first compiles, and makes what a bucket keeps
                with without_waiting():
                    result, state = reducer.reduce(bucket, state, world)
            else:
                result, state = reducer.reduce(bucket, state, world)
        results.append([x.cpu() for x in result.mean])
        for line in [x.clone() for x in state.values() if isinstance(x, Tensor)]:
            torch._foreach_zero_(bucket.views(line))
            assert not line.any(), "a state's line is zero between the tensors"
    for a, b in zip(*results, strict=True):
        if spec == "onebit":  # sums of magnitudes, in another order
            assert torch.allclose(a.double(), b.double(), rtol=1e-2 if dtype == torch.float16 else 1e-4, atol=1e-5)
        else:
            assert torch.equal(a, b)


@pytest.mark.parametrize("spec", METHODS)
def test_an_overflow_keeps_the_residual_and_is_seen(spec: str) -> None:
    reducer, bucket = build(spec, kind="reducer"), on("cuda", [torch.zeros(5000)])
    state, world = reducer.init(bucket), World(device=torch.device("cuda"))
    bucket.tensors[0].copy_(torch.randn(5000))
    _, state = reducer.reduce(bucket, state, world)
    before = state["residual"].clone() if "residual" in state else None
    bucket.flat.zero_()
    bucket.tensors[0][77] = math.inf
    result, state = reduce_window(reducer, bucket, state, world)
    assert not result.mean[0].isfinite().all()
    assert before is None or torch.equal(state["residual"], before)
