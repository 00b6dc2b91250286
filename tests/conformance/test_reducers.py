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

from unisono import packing
from unisono.buckets import Bucket
from unisono.reducer import Reduced, Reducer, State
from unisono.spec import build, describe, names
from unisono.world import World
from unisono.world.virtual import run_threads

Form = Callable[[list[Tensor], int, int], int]

# name: specs to test it with, where the bare name will not do
SPECS: dict[str, list[str]] = {
    "topk": ["topk(k=0.1)", "topk(k=0.1, feedback=False)", "topk(k=0.1, momentum=0.9, clip=1.0, ramp=3)"],
    "randomk": ["randomk(k=0.1)", "randomk(k=0.1, feedback=False)"],
    "powersgd": ["powersgd(rank=1)", "powersgd(rank=2)", "powersgd(rank=2, feedback=False)"],
    "qsgd": ["qsgd", "qsgd(bits=8, block=64)", "qsgd(elias=True)"],
    "nuqsgd": ["nuqsgd", "nuqsgd(bits=8, block=64)", "nuqsgd(elias=True)"],
    "onebit": ["onebit", "onebit(feedback=False)"],
    "error_feedback": ["error_feedback(bf16)", "error_feedback(nuqsgd)", "error_feedback(topk(k=0.1, feedback=False))"],
    "warmup": ["warmup(topk(k=0.1), steps=2)"],
    "masked": ["masked(topk(k=0.1), skip='p6')", "masked(powersgd(rank=1), only='p1*', rest=dense)"],
    "hierarchical": ["hierarchical(topk(k=0.1))"],
    "accordion": [
        "accordion(low=powersgd(rank=2), high=powersgd(rank=1), every=2)",
        "accordion(low=dense, high=topk(k=0.1), every=1)",
    ],
}
MEMORYLESS = {"bf16", "fp16", "qsgd", "nuqsgd", "bytegrad", "signsgd"}  # unbiased, or nearly exact, or a vote
NOT_CONSERVING = {"topk(k=0.1, momentum=0.9, clip=1.0, ramp=3)"}  # adds momentum of its own
ROUNDED = {"error_feedback(bf16)"}  # the mean itself is rounded, on all ranks alike: that part is no rank's to keep
SIZES = [1, 2, 3]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
STEPS = 5


def all_reduced(nbytes: int, n: int) -> int:
    return math.ceil(2 * (n - 1) * nbytes / n)


def padded(tensors: list[Tensor]) -> int:
    """Bytes of a bucket: every tensor starts on a cache line."""
    return sum(64 * math.ceil(x.numel() * x.element_size() / 64) for x in tensors)


def largest(k: float, tensors: list[Tensor]) -> int:
    """How many numbers a fraction of each matrix is, at least one."""
    return sum(min(x.numel(), max(1, round(k * x.numel()))) for x in tensors if x.dim() >= 2 and x.numel())


def vectors(tensors: list[Tensor]) -> int:
    return sum(x.numel() for x in tensors if x.dim() < 2)


def top(k: float) -> Form:
    """A value and a place for each that is sent, to every other rank; vectors in full."""
    return lambda tensors, n, step: (n - 1) * largest(k, tensors) * 8 + all_reduced(4 * vectors(tensors), n)


def random(k: float) -> Form:
    return lambda tensors, n, step: all_reduced(4 * (largest(k, tensors) + vectors(tensors)), n)


def low_rank(r: int) -> Form:
    """Two factors of each matrix that they make at least twice smaller, the rest with the first of them."""

    def form(tensors: list[Tensor], n: int, step: int) -> int:
        left = right = rest = 0
        for x in tensors:
            rows = x.shape[0] if x.dim() >= 2 and x.numel() else 0
            columns = x.numel() // rows if rows else 0
            small = min(r, rows, columns)
            if rows and x.numel() >= 2 * small * (rows + columns):
                left, right = left + small * rows, right + small * columns
            else:
                rest += x.numel()
        return all_reduced(4 * (left + rest), n) + all_reduced(4 * right, n)

    return form


def messages(nbytes: Callable[[int], int]) -> Form:
    """To every other rank, or a part to each and the mean of a part to all: whichever is less."""

    def form(tensors: list[Tensor], n: int, step: int) -> int:
        d = padded(tensors) // 4
        part = 64 * math.ceil(d / n / 64)
        return (n - 1) * min(nbytes(d), 2 * nbytes(part))

    return form


def coded(bits: int, block: int) -> Form:
    """So many bits a number and a norm a block."""
    return messages(lambda d: math.ceil(bits * d / 8) + 4 * math.ceil(d / block))


def signs(tensors: list[Tensor], n: int, step: int) -> int:
    """A bit a number and four bytes a tensor; in parts, two bits a number for the outcome."""
    d, t = padded(tensors) // 4, len(tensors)
    part = 64 * math.ceil(d / n / 64)
    return (n - 1) * min(4 * t + d // 8, 4 * t + part // 8 + part // 4)


def either(first: Form, then: Form, steps: int) -> Form:
    return lambda tensors, n, step: (first if step < steps else then)(tensors, n, step)


def some(names: Callable[[str], bool], inside: Form, outside: Form) -> Form:
    """The tensors p0, p1, ... in two parts."""

    def form(tensors: list[Tensor], n: int, step: int) -> int:
        chosen = [x for i, x in enumerate(tensors) if names(f"p{i}")]
        others = [x for i, x in enumerate(tensors) if not names(f"p{i}")]
        return inside(chosen, n, step) + outside(others, n, step)

    return form


def dense(tensors: list[Tensor], n: int, step: int) -> int:
    return all_reduced(padded(tensors), n)


def half(tensors: list[Tensor], n: int, step: int) -> int:
    return all_reduced(padded(tensors) // 2, n)


# spec: bytes that one rank sends to reduce these float32 tensors in a world of n, at a step; None: the data decide
BYTES: dict[str, Form | None] = {
    "dense": dense,
    "bf16": half,
    "fp16": half,
    "topk(k=0.1)": top(0.1),
    "topk(k=0.1, feedback=False)": top(0.1),
    "topk(k=0.1, momentum=0.9, clip=1.0, ramp=3)": either(top(0.25), top(0.1), 3),
    "randomk(k=0.1)": random(0.1),
    "randomk(k=0.1, feedback=False)": random(0.1),
    "powersgd(rank=1)": low_rank(1),
    "powersgd(rank=2)": low_rank(2),
    "powersgd(rank=2, feedback=False)": low_rank(2),
    "qsgd": coded(4, 8192),
    "qsgd(bits=8, block=64)": coded(8, 64),
    "qsgd(elias=True)": None,
    "nuqsgd": coded(4, 8192),
    "nuqsgd(bits=8, block=64)": coded(8, 64),
    "nuqsgd(elias=True)": None,
    "bytegrad": messages(lambda d: d + 8 * math.ceil(d / 2048)),
    "signsgd": signs,
    "onebit": lambda tensors, n, step: (n - 1) * (padded(tensors) // 32 + 4 * len(tensors)),
    "onebit(feedback=False)": lambda tensors, n, step: (n - 1) * (padded(tensors) // 32 + 4 * len(tensors)),
    "error_feedback(bf16)": half,
    "error_feedback(nuqsgd)": coded(4, 8192),
    "error_feedback(topk(k=0.1, feedback=False))": top(0.1),
    "warmup(topk(k=0.1), steps=2)": either(dense, top(0.1), 2),
    "masked(topk(k=0.1), skip='p6')": some(lambda name: name != "p6", top(0.1), dense),
    "masked(powersgd(rank=1), only='p1*', rest=dense)": some(lambda name: name[:2] == "p1", low_rank(1), dense),
    "hierarchical(topk(k=0.1))": dense,  # all ranks on one host
    "accordion(low=powersgd(rank=2), high=powersgd(rank=1), every=2)": None,
    "accordion(low=dense, high=topk(k=0.1), every=1)": None,
}

CASES = [spec for name in names("reducer") for spec in SPECS.get(name, [name])]
reducers = pytest.mark.parametrize("name", CASES)
sizes = pytest.mark.parametrize("size", SIZES)


def reducer_of(name: str) -> Reducer:
    built: Reducer = build(name, kind="reducer")
    return built


def bucket_of(tensors: list[Tensor], world: World) -> Bucket:
    """A bucket that holds these values."""
    bucket = Bucket(0, [(f"p{i}", torch.zeros_like(x)) for i, x in enumerate(tensors)], world.empty)
    fill(bucket, tensors)
    return bucket


def fill(bucket: Bucket, tensors: list[Tensor]) -> None:
    bucket.flat.zero_()
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
    """Per rank and step: copies of mean, sent, and the residual that the state keeps."""

    def work(world: World) -> list[Any]:
        reducer, found = reducer_of(name), []
        bucket = bucket_of(inputs(world.rank, 0), world)
        state = reducer.init(bucket)
        for step in range(steps):
            given = inputs(world.rank, step)
            fill(bucket, given)
            result, state = reducer.reduce(bucket, state, world)
            found.append((copies(result.mean), copies(result.sent_of(given)), kept(bucket, state)))
        return found

    return run_threads(work, size)


def copies(tensors: list[Tensor]) -> list[Tensor]:
    return [x.detach().clone() for x in tensors]


def kept(bucket: Bucket, state: State) -> list[Tensor] | None:
    """The residual of a reducer with error feedback, wherever reducers inside keep theirs."""
    lines = [line for path, line in tensors_in(state) if path.endswith("residual")]
    return copies(bucket.views(torch.stack(lines).sum(0))) if lines else None


def tensors_in(state: State, prefix: str = "") -> list[tuple[str, Tensor]]:
    """What is a rank's own: the tensors that are not in lists."""
    found = []
    for key, value in state.items():
        if isinstance(value, dict):
            found += tensors_in(value, f"{prefix}{key}/")
        elif isinstance(value, Tensor):
            found.append((prefix + key, value))
    return found


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
    if name in NOT_CONSERVING:
        pytest.skip("its residual is of another quantity")
    results = reduced(name, size, lambda rank, step: numbers(rank, step, torch.float64), STEPS)
    assert (results[0][0][2] is not None) == reducer_of(name).memory
    for rank, rows in enumerate(results):
        before = [torch.zeros_like(x) for x in numbers(rank, 0, torch.float64)]
        for step, (_, sent, residual) in enumerate(rows):
            given = numbers(rank, step, torch.float64)
            if residual is None and not reducer_of(name).exact:
                continue  # lossy without memory: nothing to add up
            after = residual or [torch.zeros_like(x) for x in given]
            for x, e, s, r in zip(given, before, sent, after, strict=True):
                assert close(x + e, s + r, torch.float64, ulps=256), f"rank {rank} step {step}"
            before = after


@reducers
@sizes
def test_nothing_is_lost_over_time(name: str, size: int) -> None:
    """Sum of outputs + mean residual = sum of mean inputs."""
    results = reduced(name, size, lambda rank, step: numbers(rank, step, torch.float64), STEPS)
    if name in NOT_CONSERVING | ROUNDED or not (reducer_of(name).memory or reducer_of(name).exact):
        pytest.skip("no error feedback, or not of all")
    zeros = [torch.zeros_like(x) for x in numbers(0, 0, torch.float64)]
    residuals = mean_of([rows[-1][2] or zeros for rows in results])
    inputs = [mean_of([numbers(rank, step, torch.float64) for rank in range(size)]) for step in range(STEPS)]
    for i in range(len(zeros)):
        given = torch.stack([row[i] for row in inputs]).sum(0)
        out = torch.stack([row[0][i] for row in results[0]]).sum(0)
        assert close(out + residuals[i], given, torch.float64, ulps=1024)


def test_a_method_without_memory_is_known_as_one() -> None:
    """So that a reducer that loses what it does not send is one on purpose."""
    for name in CASES:
        reducer, plain = reducer_of(name), name.partition("(")[0]
        assert reducer.memory or reducer.exact or plain in MEMORYLESS or "feedback=False" in name, name


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
@pytest.mark.parametrize("bad", [-math.inf, math.nan])
@pytest.mark.parametrize("where", [0, 2, 14], ids=["matrix", "scalar", "large matrix"])
def test_an_overflow_on_one_rank_is_seen_by_all_and_changes_no_memory(
    name: str, size: int, bad: float, where: int
) -> None:
    """AMP decides from the gradients whether to skip a step: every rank must see the same. What was kept stays."""

    def work(world: World) -> list[bool]:
        reducer, finite = reducer_of(name), []
        bucket = bucket_of(numbers(world.rank), world)
        state = reducer.init(bucket)
        for step in range(5):
            given = numbers(world.rank, step)
            overflow = step == 3
            if overflow and world.rank == size - 1:
                given[where].view(-1)[-1] = bad
            fill(bucket, given)
            before = [(path, line.clone()) for path, line in tensors_in(state)]
            result, state = reducer.reduce(bucket, state, world)
            finite.append(all(bool(torch.isfinite(x).all()) for x in result.mean))
            for (path, old), (_, new) in zip(before, tensors_in(state), strict=True):
                if overflow and path.endswith(("residual", "velocity")):
                    assert torch.equal(old, new), path
                assert torch.isfinite(new).all(), path
        return finite

    assert run_threads(work, size) == [[True, True, True, False, True]] * size


@reducers
@sizes
def test_an_overflow_while_rates_change_leaves_what_is_kept_at_its_weight(name: str, size: int) -> None:
    """AMP halves its scale after each overflow, and the next step may overflow again."""

    def weights(bucket: Bucket, state: State) -> list[Tensor]:
        """All that is kept, times the learning rate that it is kept at."""
        found = [x for inside in state.values() if isinstance(inside, dict) for x in weights(bucket, inside)]
        if "lr" in state and "residual" in state:
            pairs = zip(bucket.views(state["residual"]), state["lr"], strict=True)
            found += [view * (1.0 if lr is None else lr) for view, lr in pairs]
        return found

    def work(world: World) -> None:
        reducer, bucket = reducer_of(name), bucket_of(numbers(world.rank), world)
        state = reducer.init(bucket)
        for step, lr in enumerate((0.5, 0.5, 0.5, 1.0)):
            given = numbers(world.rank, step)
            if step == 3 and world.rank == size - 1:
                given[6][0, 0] = math.inf
            fill(bucket, given)
            bucket.lr = [lr] * len(given)
            before = weights(bucket, state)
            _, state = reducer.reduce(bucket, state, world)
        assert all(map(torch.equal, before, weights(bucket, state)))

    run_threads(work, size)


@reducers
def test_fp16_does_not_overflow_in_the_sum(name: str) -> None:
    results = reduced(name, 3, lambda rank, step: [torch.full((4, 4), 60000.0, dtype=torch.float16)])
    assert torch.isfinite(results[0][0][0][0]).all()


# Bytes, state, spec --------------------------------------------------------------------------------------------


@reducers
@sizes
def test_bytes_sent_match_the_closed_form(name: str, size: int) -> None:
    """The one written here, and the one that the reducer itself gives (for warnings and plans)."""
    assert name in BYTES, f"add the closed form of the bytes that {name} sends to BYTES in {__file__}"
    form, dtype = BYTES[name], torch.float32

    def work(world: World) -> list[tuple[int, int | None]]:
        reducer, found = reducer_of(name), []
        bucket = bucket_of(numbers(world.rank, 0, dtype), world)
        state = reducer.init(bucket)
        for step in range(STEPS):
            fill(bucket, numbers(world.rank, step, dtype))
            before = sum(record.bytes_sent for record in world.ledger.records)
            _, state = reducer.reduce(bucket, state, world)
            after = sum(record.bytes_sent for record in world.ledger.records)
            found.append((after - before, reducer.sends(bucket, size) if reducer.sends else None))
        return found

    for rows in run_threads(work, size):
        for step, (sent, _) in enumerate(rows):
            if form is not None:
                assert sent == form(numbers(0), size, step), f"step {step}"
        assert rows[-1][1] is None or rows[-1][0] == rows[-1][1]


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
                outputs.append(Reduced(copies(result.mean), copies(result.sent_of(numbers(world.rank, step)))))
            continued.append((outputs, packing.to_bytes(begin)))
        (first, first_state), (second, second_state) = continued
        for a, b in zip(first, second, strict=True):
            assert all(map(torch.equal, a.mean, b.mean))
            assert all(map(torch.equal, a.sent_of([]), b.sent_of([])))
        assert first_state == second_state

    run_threads(work, size)


@reducers
def test_its_spec_builds_it_again(name: str) -> None:
    reducer = reducer_of(name)
    assert build(describe(reducer), kind="reducer") == reducer
