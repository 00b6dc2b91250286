"""Random-k: the same few places on every rank, against plain references in one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from method_cases import reduce_window
from unisono.methods.buckets import Bucket
from unisono.methods.reducer import Reducer
from unisono.methods.reducers.randomk import randomk
from unisono.world import World
from unisono.world.virtual import run_threads

SHAPES: list[tuple[int, ...]] = [(20, 30), (7,), (), (0, 3), (5, 2, 4), (200, 150), (1, 1)]
MATRICES = [i for i, shape in enumerate(SHAPES) if len(shape) >= 2 and 0 not in shape]
Inputs = Callable[[int, int], list[Tensor]]
Row = tuple[list[Tensor], list[Tensor], list[Tensor], int]


def gradients(rank: int, step: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES]


def bucket_of(tensors: list[Tensor], names: list[str] | None = None) -> Bucket:
    named = [(names[i] if names else f"p{i}", torch.zeros_like(x)) for i, x in enumerate(tensors)]
    return Bucket(0, named, lambda n, dtype: torch.empty(n, dtype=dtype))


def run(make: Callable[[], Reducer], inputs: Inputs, size: int, steps: int) -> list[list[Row]]:
    """By rank and step: mean, sent, residual, bytes."""

    def work(world: World) -> list[Row]:
        reducer, found = make(), []
        bucket = bucket_of(inputs(world.rank, 0))
        state = reducer.init(bucket)
        for step in range(steps):
            for view, x in zip(bucket.tensors, inputs(world.rank, step), strict=True):
                view.copy_(x)
            before = sum(r.bytes_sent for r in world.ledger.records)
            reduced, state = reduce_window(reducer, bucket, state, world)
            assert callable(reduced.sent)
            kept = [x.clone() for x in bucket.views(state["residual"])] if "residual" in state else []
            after = sum(r.bytes_sent for r in world.ledger.records)
            found.append(([x.clone() for x in reduced.mean], reduced.sent_of([]), kept, after - before))
        return found

    return run_threads(work, size)


def places(sent: Tensor) -> list[int]:
    return torch.nonzero(sent.flatten()).flatten().tolist()


def drawn(length: int, k: float, step: int, *, seed: int = 0, name: str = "p0") -> list[int]:
    """The places that are sent of a tensor in a step."""
    reducer = randomk(k, seed=seed, feedback=False)
    bucket = bucket_of([torch.ones(1, length)], [name])
    bucket.tensors[0].fill_(1.0)
    reduced, _ = reducer.reduce(bucket, {"step": step}, World())
    return places(reduced.mean[0])


def test_every_rank_sends_the_same_places_and_the_mean_is_theirs() -> None:
    found = run(lambda: randomk(0.1), gradients, 3, 4)
    for step in range(4):
        for i in MATRICES:
            chosen = places(found[0][step][1][i])
            assert len(chosen) == max(1, round(0.1 * math.prod(SHAPES[i])))
            assert all(places(rows[step][1][i]) == chosen for rows in found)
            mean = torch.stack([rows[step][1][i] for rows in found]).mean(0)
            assert torch.allclose(found[0][step][0][i], mean, rtol=1e-14)
    assert places(found[0][0][1][0]) != places(found[0][1][1][0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_what_is_not_sent_is_kept(dtype: torch.dtype) -> None:
    found = run(lambda: randomk(0.1), lambda r, s: gradients(r, s, dtype), 2, 4)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for rank, rows in enumerate(found):
        residual = [torch.zeros(shape, dtype=wide) for shape in SHAPES]
        for step, (_, sent, kept, _) in enumerate(rows):
            for i in range(len(SHAPES)):
                p = residual[i] + gradients(rank, step, dtype)[i].to(wide)
                assert torch.equal(kept[i], p - sent[i].to(wide))
            residual = kept


def test_conservation_is_exact_in_fp64() -> None:
    """Whole numbers have no rounding: the sums are equal bit by bit."""
    steps, size = 20, 4

    def whole(rank: int, step: int) -> list[Tensor]:
        return [torch.round(x * 1000) for x in gradients(rank, step)]

    found = run(lambda: randomk(0.01), whole, size, steps)
    for i in range(len(SHAPES)):
        given = sum(whole(r, s)[i] for r in range(size) for s in range(steps)) / size
        kept = sum(found[r][-1][2][i] for r in range(size)) / size
        assert torch.equal(sum(found[0][s][0][i] for s in range(steps)) + kept, given)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_k_of_one_is_the_all_reduce(size: int) -> None:
    found = run(lambda: randomk(1.0), gradients, size, 2)
    wanted = run_threads(lambda world: world.all_reduce(gradients(world.rank, 1), "mean").wait(), size)
    assert all(map(torch.equal, found[0][1][0], wanted[0]))
    assert not any(x.any() for x in found[0][1][2])


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_bytes_are_those_of_the_numbers_alone(size: int, dtype: torch.dtype) -> None:
    found = run(lambda: randomk(0.1), lambda r, s: gradients(r, s, dtype), size, 1)
    numbers = 60 + 4 + 3000 + 1 + 7 + 1  # a tenth of each matrix, at least one; the vector and the scalar
    wanted = math.ceil(2 * (size - 1) * numbers * dtype.itemsize / size)
    assert {rows[0][3] for rows in found} == {wanted}
    sends = randomk(0.1).sends
    assert sends is not None
    assert sends(bucket_of(gradients(0, 0, dtype)), size) == wanted


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_what_another_method_kept_of_a_vector_is_sent(dtype: torch.dtype) -> None:
    reducer = randomk(0.1)
    named = [("w", torch.zeros(9, 9, dtype=dtype)), ("b", torch.zeros(5, dtype=dtype))]
    bucket = Bucket(0, named, lambda n, d: torch.empty(n, dtype=d))
    state = reducer.init(bucket)
    bucket.views(state["residual"])[1].fill_(3.0)
    bucket.tensors[1].fill_(4.0)
    reduced, state = reducer.reduce(bucket, state, World())
    assert reduced.mean[1].tolist() == [7.0] * 5
    assert not state["residual"].any()


# Places --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 3, 12, 30, 97, 210])
def test_places_are_distinct(length: int) -> None:
    for step in range(20):
        assert len(drawn(length, 0.5, step)) == max(1, round(0.5 * length))


@pytest.mark.parametrize("length", [30, 31])
def test_every_place_is_as_likely(length: int) -> None:
    trials, count = 1000, 3
    seen = torch.zeros(length)
    for step in range(trials):
        seen[drawn(length, count / length, step)] += 1
    share = count / length
    assert (seen - trials * share).abs().max() < 5 * math.sqrt(trials * share * (1 - share))


def test_places_follow_from_seed_step_and_name() -> None:
    assert drawn(1000, 0.01, 5) == drawn(1000, 0.01, 5)
    others = [drawn(1000, 0.01, 5, seed=1), drawn(1000, 0.01, 6), drawn(1000, 0.01, 5, name="q")]
    assert all(other != drawn(1000, 0.01, 5) for other in others)


def test_places_do_not_depend_on_the_layout_of_buckets() -> None:
    both, alone = bucket_of([torch.ones(9, 9), torch.ones(20, 20)]), bucket_of([torch.ones(20, 20)], ["p1"])
    found = []
    for bucket in (both, alone):
        bucket.tensors[-1].fill_(1.0)
        found.append(places(randomk(0.05).reduce(bucket, randomk(0.05).init(bucket), World())[0].mean[-1]))
    assert found[0] == found[1]


# Overflow ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("where", [5, 1], ids=["in a matrix", "in a vector"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_an_overflow_that_was_not_drawn_is_seen_by_all_and_kept_by_none(
    bad: float, where: int, dtype: torch.dtype
) -> None:
    def inputs(rank: int, step: int) -> list[Tensor]:
        made = gradients(rank, step, dtype)
        if step == 2 and rank == 1:
            made[where].view(-1)[3] = bad
        return made

    found = run(lambda: randomk(0.001), inputs, 3, 4)
    for rows in found:
        assert not all(x.isfinite().all() for x in rows[2][0])
        assert all(map(torch.equal, rows[1][2], rows[2][2]))
        assert not all(map(torch.equal, rows[2][2], rows[3][2]))
        assert all(x.isfinite().all() for x in rows[3][0])


def test_an_overflow_shows_without_feedback_too() -> None:
    def inputs(rank: int, step: int) -> list[Tensor]:
        return [torch.full((100, 100), math.inf if rank else 1.0)]

    assert not run(lambda: randomk(0.001, feedback=False), inputs, 2, 1)[0][0][0][0].isfinite().all()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"k": 0}, ValueError),
        ({"k": 2.0}, ValueError),
        ({"k": math.nan}, ValueError),
        ({"k": "all"}, TypeError),
        ({"k": False}, TypeError),
        ({"feedback": None}, TypeError),
        ({"seed": 1.5}, TypeError),
        ({"seed": True}, TypeError),
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(options))):
        randomk(**options)
