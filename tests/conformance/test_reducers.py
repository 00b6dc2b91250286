"""What every reducer must do, in worlds of 1, 2 and 3 threads. A new file adds its own tests: see conftest.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from method_cases import Case, count_bytes, reduce_window
from unisono import packing
from unisono.methods.buckets import Bucket
from unisono.methods.facts import Sizes
from unisono.methods.reducer import Reduced, Reducer, State
from unisono.methods.spec import build, describe
from unisono.world import World
from unisono.world.virtual import run_threads

KIND = "reducer"
SIZES = [1, 2, 3]
STEPS = 5
sizes = pytest.mark.parametrize("size", SIZES)
# Every size and every dtype with every method, not every size with every dtype: nothing of ours depends on both.
sizes_and_dtypes = pytest.mark.parametrize(
    ("size", "dtype"),
    [(1, torch.float32), (2, torch.float16), (2, torch.float64), (3, torch.bfloat16), (3, torch.float32)],
    ids=str,
)


def reducer_of(case: Case) -> Reducer:
    built: Reducer = build(case.spec, kind="reducer")
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
    case: Case, size: int, inputs: Callable[[int, int], list[Tensor]], steps: int = 1
) -> list[list[tuple[list[Tensor], list[Tensor], list[Tensor] | None]]]:
    """Per rank and step: copies of mean, sent, and the residual that the state keeps."""

    def work(world: World) -> list[Any]:
        reducer, found = reducer_of(case), []
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


@sizes_and_dtypes
def test_the_mean_has_the_same_bits_on_every_rank(case: Case, size: int, dtype: torch.dtype) -> None:
    results = reduced(case, size, lambda rank, step: numbers(rank, step, dtype), STEPS)
    for step in range(STEPS):
        for other in results[1:]:
            assert all(map(torch.equal, other[step][0], results[0][step][0])), f"step {step}: the ranks' means differ"
    for mean, like in zip(results[0][0][0], numbers(0, dtype=dtype), strict=True):
        assert (mean.dtype, mean.shape) == (like.dtype, like.shape), "the mean is not like the bucket's tensor"
        assert torch.isfinite(mean).all()


@sizes_and_dtypes
def test_exact_reducers_give_the_mean(case: Case, size: int, dtype: torch.dtype) -> None:
    if not reducer_of(case).exact:
        pytest.skip("not exact")
    results = reduced(case, size, lambda rank, step: numbers(rank, step, dtype))
    expected = mean_of([numbers(rank, 0, dtype) for rank in range(size)])
    for mean, wanted in zip(results[0][0][0], expected, strict=True):
        assert close(mean, wanted, dtype), "it says that it is exact, and this is not the mean"


@sizes
def test_what_is_not_sent_is_kept(case: Case, size: int) -> None:
    """input + residual before = sent + residual after, on every rank; without feedback, input - sent is lost."""
    if not case.example.conserves:
        pytest.skip("its residual is of another quantity")
    results = reduced(case, size, lambda rank, step: numbers(rank, step, torch.float64), STEPS)
    keeps = results[0][0][2] is not None
    assert keeps == reducer_of(case).memory, "memory=True goes with state['residual'], and only with it"
    for rank, rows in enumerate(results):
        before = [torch.zeros_like(x) for x in numbers(rank, 0, torch.float64)]
        for step, (_, sent, residual) in enumerate(rows):
            given = numbers(rank, step, torch.float64)
            if residual is None and not reducer_of(case).exact:
                continue  # lossy without memory: nothing to add up
            after = residual or [torch.zeros_like(x) for x in given]
            for x, e, s, r in zip(given, before, sent, after, strict=True):
                adds_up = close(x + e, s + r, torch.float64, ulps=256)
                assert adds_up, f"rank {rank} step {step}: input + residual before is not sent + residual after"
            before = after


@sizes
def test_nothing_is_lost_over_time(case: Case, size: int) -> None:
    """Sum of outputs + mean residual = sum of mean inputs."""
    results = reduced(case, size, lambda rank, step: numbers(rank, step, torch.float64), STEPS)
    lossless = reducer_of(case).memory or reducer_of(case).exact
    if not case.example.conserves or case.example.rounds_mean or not lossless:
        pytest.skip("no error feedback, or not of all")
    zeros = [torch.zeros_like(x) for x in numbers(0, 0, torch.float64)]
    residuals = mean_of([rows[-1][2] or zeros for rows in results])
    inputs = [mean_of([numbers(rank, step, torch.float64) for rank in range(size)]) for step in range(STEPS)]
    for i in range(len(zeros)):
        given = torch.stack([row[i] for row in inputs]).sum(0)
        out = torch.stack([row[0][i] for row in results[0]]).sum(0)
        adds_up = close(out + residuals[i], given, torch.float64, ulps=1024)
        wide = "torch.promote_types(bucket.dtype, torch.float32)"
        assert adds_up, f"what is sent and kept does not add up to the input (fp64 here): decode and add in {wide}"


def test_it_is_what_its_facts_say(case: Case) -> None:
    """So that a reducer that loses what it does not send, or that is not exact, is one on purpose."""
    reducer = reducer_of(case)
    assert reducer.memory == case.example.memory, "Example(memory=...) is true by default"
    assert reducer.exact == case.example.exact, "Example(exact=...) is false by default"
    assert case.spec.partition("(")[0] == case.name


@sizes
def test_zeros_give_zeros(case: Case, size: int) -> None:
    shapes = [(4, 4), (3,), (), (0,)]
    results = reduced(case, size, lambda rank, step: [torch.zeros(shape) for shape in shapes], 3)
    for mean, _, _ in results[0]:
        assert all(torch.equal(x, torch.zeros_like(x)) for x in mean), "the mean of zeros is not zero"


@sizes
def test_a_bucket_with_nothing_in_it(case: Case, size: int) -> None:
    results = reduced(case, size, lambda rank, step: [torch.zeros(0, 3)], 2)
    assert all(rows[-1][0][0].shape == (0, 3) for rows in results)


@pytest.mark.parametrize(
    ("size", "bad", "where"),  # every pair of the three; at 0 is a matrix, at 2 a scalar, at 14 a large matrix
    [
        *[(1, -math.inf, 0), (1, math.nan, 2), (1, -math.inf, 14)],
        *[(2, math.nan, 0), (2, -math.inf, 2), (2, math.nan, 14)],
        *[(3, -math.inf, 0), (3, math.nan, 2), (3, math.nan, 14)],
    ],
)
def test_an_overflow_on_one_rank_is_seen_by_all_and_changes_no_memory(
    case: Case, size: int, bad: float, where: int
) -> None:
    """AMP decides from the gradients whether to skip a step: every rank must see the same. What was kept stays."""

    def work(world: World) -> list[bool]:
        reducer, finite = reducer_of(case), []
        bucket = bucket_of(numbers(world.rank), world)
        state = reducer.init(bucket)
        for step in range(5):
            given = numbers(world.rank, step)
            overflow = step == 3
            if overflow and world.rank == size - 1:
                given[where].view(-1)[-1] = bad
            fill(bucket, given)
            lines = tensors_in(state)
            before = [(path, line.clone()) for path, line in lines]
            result, state = reduce_window(reducer, bucket, state, world)
            for path, line in lines:  # they count on if another bucket overflows
                if path.endswith(("residual", "velocity")):
                    assert torch.equal(line, dict(before)[path]), f"{path} was written in place: return a new tensor"
            finite.append(all(bool(torch.isfinite(x).all()) for x in result.mean))
            for (path, old), (_, new) in zip(before, tensors_in(state), strict=True):
                if overflow and path.endswith(("residual", "velocity")):
                    assert torch.equal(old, new), f"{path} changed in a step that overflowed"
                assert torch.isfinite(new).all(), f"{path} is not finite after an overflow"
        return finite

    found = run_threads(work, size)
    assert found == [[True, True, True, False, True]] * size, "not every rank has a mean that shows the overflow"


@sizes
def test_an_overflow_while_rates_change_leaves_what_is_kept_at_its_weight(case: Case, size: int) -> None:
    """AMP halves its scale after each overflow, and the next step may overflow again."""

    def weights(bucket: Bucket, state: State) -> list[Tensor]:
        """All that is kept, times the learning rate that it is kept at."""
        found = [x for inside in state.values() if isinstance(inside, dict) for x in weights(bucket, inside)]
        if "lr" in state and "residual" in state:
            pairs = zip(bucket.views(state["residual"]), state["lr"], strict=True)
            found += [view * (1.0 if lr is None else lr) for view, lr in pairs]
        return found

    def work(world: World) -> None:
        reducer, bucket = reducer_of(case), bucket_of(numbers(world.rank), world)
        state = reducer.init(bucket)
        for step, lr in enumerate((0.5, 0.5, 0.5, 1.0)):
            given = numbers(world.rank, step)
            if step == 3 and world.rank == size - 1:
                given[6][0, 0] = math.inf
            fill(bucket, given)
            bucket.lr = [lr] * len(given)
            before = weights(bucket, state)
            _, state = reduce_window(reducer, bucket, state, world)
        assert all(map(torch.equal, before, weights(bucket, state)))

    run_threads(work, size)


def test_fp16_does_not_overflow_in_the_sum(case: Case) -> None:
    results = reduced(case, 3, lambda rank, step: [torch.full((4, 4), 60000.0, dtype=torch.float16)])
    assert torch.isfinite(results[0][0][0][0]).all(), "16 bits overflow in the sum: add in fp32 or wider"


# Bytes, state, spec --------------------------------------------------------------------------------------------


@sizes
def test_bytes_sent_match_the_closed_form(case: Case, size: int) -> None:
    """The one among its facts, and the one that the reducer itself gives (for warnings and plans)."""
    form, dtype, shapes = case.example.bytes, torch.float32, [tuple(x.shape) for x in numbers(0)]
    told = "it has `sends`, so the data do not decide: Example(bytes=...) is to give the same, from `Sizes`"
    assert form is not None or reducer_of(case).sends is None, told

    def work(world: World) -> list[tuple[int, int | None]]:
        reducer, found = reducer_of(case), []
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
                assert sent == form(Sizes(shapes, size, step, count_bytes)), f"step {step}: not what `bytes` says"
        assert rows[-1][1] is None or rows[-1][0] == rows[-1][1], "not what `sends` says"


def test_padding_in_a_bucket_is_less_than_a_cache_line_a_tensor() -> None:
    tensors = numbers(0)
    bucket = bucket_of(tensors, World())
    assert 0 <= bucket.nbytes - sum(x.numel() * x.element_size() for x in tensors) < 64 * len(tensors)


@sizes
def test_a_saved_state_goes_on_bit_by_bit(case: Case, size: int) -> None:
    def work(world: World) -> None:
        reducer = reducer_of(case)
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
            assert all(map(torch.equal, a.mean, b.mean)), "another mean after a state was saved and loaded"
            assert all(map(torch.equal, a.sent_of([]), b.sent_of([]))), "`sent` differs after a save"
        assert first_state == second_state, "the state differs after a save"

    run_threads(work, size)


def test_its_spec_builds_it_again(case: Case) -> None:
    reducer = reducer_of(case)
    assert build(describe(reducer), kind="reducer") == reducer, "use @validate, and settings that a spec can have"


# Settings ------------------------------------------------------------------------------------------------------


def test_bad_settings_are_refused_with_the_reason(refusal: tuple[Case, str]) -> None:
    case, setting = refusal
    with pytest.raises((ValueError, TypeError), match=case.facts.refuses[setting]):
        build(f"{case.name}({setting})", kind="reducer")
