"""accordion: decisions from norms, alike on every rank; what is kept survives a switch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from method_cases import reduce_window
from unisono import World, packing, run_threads
from unisono.methods.buckets import Bucket
from unisono.methods.reducer import Reduced, Reducer, Stages, State, staged
from unisono.methods.reducers.accordion import accordion, is_critical
from unisono.methods.reducers.bf16 import bf16
from unisono.methods.reducers.dense import dense
from unisono.methods.reducers.error_feedback import error_feedback

SHAPES = {"a": (4, 3), "b": (), "c": (2, 0), "d": (5,)}


def keeps(share: float, rank: int = 1, *, name: str = "residual") -> Reducer:
    """Sends a share of every number and keeps the rest; has a list as wide as `rank` for each matrix."""

    def init(bucket: Bucket) -> State:
        q = [torch.zeros(x.shape[-1], rank) if x.dim() == 2 and x.numel() else None for x in bucket.tensors]
        return {name: torch.zeros_like(bucket.flat), "q": q, "step": 0}

    def stages(bucket: Bucket, state: State, world: World) -> Stages:
        before = state[name].clone()
        p = bucket.flat + before
        bucket.flat.copy_(share * p)
        sent = [x.clone() for x in bucket.tensors]
        handle = world.all_reduce(bucket.flat, "mean", tag=bucket.tag)
        yield
        handle.wait()
        ok = torch.isfinite(torch.cat([x.reshape(-1) for x in bucket.tensors])).all()
        q = [None if x is None else torch.ones(x.shape[0], rank) * (x[0, 0] + 1) for x in state["q"]]
        after = torch.where(ok, p - share * p, before)
        return Reduced(bucket.tensors, lambda _: sent), {name: after, "q": q, "step": state["step"] + 1}

    return staged(init, stages, memory=True, sends=lambda bucket, n: math.ceil(2 * (n - 1) * bucket.nbytes / n))


def scaled(factor: float) -> Reducer:
    """A mean that shows who took it."""

    def stages(bucket: Bucket, state: State, world: World) -> Stages:
        handle = world.all_reduce(bucket.flat, "mean", tag=bucket.tag)
        yield
        handle.wait()
        bucket.flat.mul_(factor)
        return Reduced(bucket.tensors), state

    return staged(lambda bucket: {}, stages)


def make(world: World, shapes: dict[str, tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float64) -> Bucket:
    return Bucket(0, [(name, torch.zeros(shape, dtype=dtype)) for name, shape in shapes.items()], world.empty)


def gradients(rank: int, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in SHAPES.values()]


def fill(bucket: Bucket, tensors: list[Tensor]) -> None:
    bucket.flat.zero_()
    for view, x in zip(bucket.tensors, tensors, strict=True):
        view.copy_(x)


def levels(norms: list[float], *, every: int = 1, threshold: float = 0.5, decay: int = -1) -> str:
    """Which level each step of one tensor had, "L" or "H", where each period's gradients add up to these norms."""
    reducer, world, found = accordion(scaled(1.0), scaled(2.0), every=every, threshold=threshold), World(), ""
    bucket = make(world, {"w": (4,)})
    state = reducer.init(bucket)
    for step in range(len(norms) * every):
        norm = norms[step // every]
        fill(bucket, [torch.full((4,), norm / 2 / every, dtype=torch.float64)])
        bucket.decayed = step == decay
        reduced, state = reduce_window(reducer, bucket, state, world)
        ratio = float(reduced.mean[0][0]) / (norm / 2 / every) if norm else math.nan
        found += {1.0: "L", 2.0: "H"}.get(ratio, "?")
    return found


# Decisions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        (None, 1.0, True),
        (0.0, 1.0, True),
        (0.0, 0.0, True),
        (2.0, 1.0, True),  # just at the threshold
        (2.0, 1.001, False),
        (2.0, 3.0, True),
        (2.0, 2.999, False),
        (2.0, 0.0, True),
        (1.0, 1.0, False),
        (1.0, math.nan, True),
        (math.inf, 1.0, True),
    ],
)
def test_a_change_of_half_the_norm_is_critical(before: float | None, now: float, expected: bool) -> None:
    assert is_critical(before, now, 0.5) is expected


@pytest.mark.parametrize(
    ("norms", "expected"),
    [
        ([8, 8, 8, 8], "LLHH"),  # the first two periods have nothing to compare with
        ([8, 7, 6, 5, 4.9], "LLHHH"),
        ([8, 8, 4, 4, 4], "LLHLH"),  # what a period's norm decides counts for the next
        ([8, 8, 8, 12, 12, 12], "LLHHLH"),
        ([8, 3.9, 1.9, 0.9, 0.9, 0.9], "LLLLLH"),
        ([8, 8, 0, 0, 8, 8, 8], "LL??LLH"),  # after a period of zeros there is nothing to compare with
    ],
)
@pytest.mark.parametrize("every", [1, 3])
def test_sequences_of_norms_give_these_levels(norms: list[float], expected: str, every: int) -> None:
    assert levels(norms, every=every) == "".join(level * every for level in expected)


def test_the_threshold_is_a_setting() -> None:
    assert levels([10, 9, 8.9, 8.9], threshold=0.1) == "LLLH"
    assert levels([10, 9, 8.9, 8.9], threshold=0.2) == "LLHH"


def test_a_learning_rate_that_falls_forces_low_until_the_next_decision() -> None:
    assert levels([4] * 5, every=3, decay=10) == "LLLLLLHHHHLLHHH"
    assert levels([4] * 4, every=3, decay=1) == "LLLLLLHHHHHH"


def test_opposite_gradients_of_a_window_cancel() -> None:
    """It is the norm of the sum that counts, not the sum of norms."""
    reducer, world = accordion(scaled(1.0), scaled(2.0), every=2), World()
    bucket = make(world, {"w": (4,)})
    state = reducer.init(bucket)
    for sign in (1.0, 1.0, 1.0, -1.0):
        fill(bucket, [torch.full((4,), sign, dtype=torch.float64)])
        _, state = reduce_window(reducer, bucket, state, world)
    assert (state["norm"], state["low"]) == ([0.0], [True])


def test_every_rank_switches_at_the_same_step_by_the_norms_of_all() -> None:
    """Rank 0's own norms never change; the others' do."""

    def work(world: World) -> list[tuple[list[bool], list[float]]]:
        reducer, found = accordion(scaled(1.0), scaled(2.0), every=2), []
        bucket = make(world, {"w": (4,), "v": (4,)})
        state = reducer.init(bucket)
        for step in range(10):
            own = 1.0 if world.rank == 0 else [1.0, 1.0, 9.0, 9.0, 9.0][step // 2]
            fill(bucket, [torch.full((4,), own, dtype=torch.float64), torch.full((4,), 1.0, dtype=torch.float64)])
            _, state = reduce_window(reducer, bucket, state, world)
            found.append((state["low"], state["norm"]))
        return found

    first, *others = run_threads(work, 3)
    assert all(other == first for other in others)
    low = [[True, True], [False, False], [True, False], [False, False], [False, False]]  # after each period
    assert [row[0] for row in first[1::2]] == low
    assert first[5][1][0] == pytest.approx(math.sqrt((4**2 + 36**2 + 36**2) / 3))


def test_decisions_are_events_in_the_ledger() -> None:
    world = World()
    reducer, bucket = accordion(scaled(1.0), scaled(2.0), every=2), make(world, {"w": (4,), "v": ()})
    state = reducer.init(bucket)
    for step in range(5):
        fill(bucket, [torch.ones(4, dtype=torch.float64), torch.tensor(float(step), dtype=torch.float64)])
        bucket.decayed = step == 4
        _, state = reduce_window(reducer, bucket, state, world)
    events = [event.values for event in world.ledger.events if event.kind == "accordion"]
    assert [(e["step"], e["levels"]) for e in events] == [
        (2, {"w": "low", "v": "low"}),
        (4, {"w": "high", "v": "low"}),
        (4, {"w": "low", "v": "low"}),
    ]
    assert events[1]["norms"] == {"w": 4.0, "v": 5.0}
    assert [e["why"] for e in events] == ["the end of a period"] * 2 + ["a learning rate fell"]
    assert "accordion" in world.ledger.format_events()


# What is kept ------------------------------------------------------------------------------------------------


PAIRS = {
    "one memory": (keeps(0.5, 2), keeps(0.25, 1)),
    "low has none": (dense(), keeps(0.25)),
    "high has none": (keeps(0.25), dense()),
    "memories apart": (keeps(0.5), error_feedback(bf16())),
    "other names": (keeps(0.5), keeps(0.25, name="velocity")),
}


def residuals(bucket: Bucket, state: State) -> Tensor:
    """All that is kept for a bucket, wherever."""
    found = torch.zeros_like(bucket.flat)
    for inside in (state["both"], *state["levels"].values()):
        for key in ("residual", "velocity"):
            if key in inside:
                found = found + inside[key]
    return found


@pytest.mark.parametrize("pair", [PAIRS[name] for name in PAIRS if name != "memories apart"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_nothing_is_lost_over_switches(pair: tuple[Reducer, Reducer], size: int) -> None:
    steps = 12

    def given(rank: int, step: int) -> list[Tensor]:
        """Tensors go critical at different times."""
        scale = [1.0, [1, 1, 1, 9, 9, 9][step // 2], 1.0, [1, 1, 1, 1, 9, 9][step // 2]]
        return [x.abs() * s for x, s in zip(gradients(rank, step % 2), scale, strict=True)]

    def work(world: World) -> tuple[list[Tensor], list[Tensor], list[list[bool]]]:
        reducer, bucket = accordion(*pair, every=2), make(world)
        state, total, lows = reducer.init(bucket), [torch.zeros(s, dtype=torch.float64) for s in SHAPES.values()], []
        for t in range(steps):
            fill(bucket, given(world.rank, t))
            lows.append(state["low"])
            before = residuals(bucket, state).clone()
            reduced, state = reduce_window(reducer, bucket, state, world)
            after = residuals(bucket, state)
            sent = reduced.sent_of(given(world.rank, t))
            for g, e, s, r in zip(given(world.rank, t), bucket.views(before), sent, bucket.views(after), strict=True):
                assert torch.allclose(g + e, s + r, rtol=0, atol=1e-13), f"step {t}"
            for sum_, x in zip(total, reduced.mean, strict=True):
                sum_.add_(x)
        return total, bucket.views(residuals(bucket, state)), lows

    results = run_threads(work, size)
    assert results[0][2][4] == [False, False, True, False]  # the empty one has no norm
    assert results[0][2][8] == [False, True, True, False]  # two parts
    assert results[0][2][10] == [False, False, True, True]
    for i in range(len(SHAPES)):
        expected = sum(given(r, t)[i] for r in range(size) for t in range(steps)) / size
        kept = sum(residual[i] for _, residual, _ in results) / size
        assert torch.allclose(results[0][0][i] + kept, expected, rtol=0, atol=1e-12)


def test_what_both_keep_goes_over() -> None:
    """A residual, a step count and each tensor's own entry, to a reducer of another rank and back."""
    world = World()
    reducer, bucket = accordion(keeps(0.5, 2), keeps(0.25, 1), every=2), make(world)
    state = reducer.init(bucket)
    for step in range(6):
        fill(bucket, [torch.ones(s, dtype=torch.float64) for s in SHAPES.values()])
        _, state = reduce_window(reducer, bucket, state, world)
        assert state["both"]["step"] == step + 1
        q = state["both"]["q"]
        assert [x is None for x in q] == [False, True, True, True]
        assert q[0].shape == (3, 2 if step < 4 else 1)
        assert float(q[0][0, 0]) == step + 1
    assert state["levels"] == {"low": {}, "high": {}}
    # 1/2 of all for four steps, then 1/4: e <- (1 + e) / 2, then e <- 3 (1 + e) / 4
    e = 0.0
    for share in (0.5, 0.5, 0.5, 0.5, 0.25, 0.25):
        e = (1 + e) * (1 - share)
    assert float(bucket.views(state["both"]["residual"])[1]) == pytest.approx(e, abs=1e-15)


def test_an_entry_that_one_level_does_not_use_is_there_for_the_other() -> None:
    """Where rank 2 leaves a tensor alone (None), what rank 1 had for it comes back."""
    bare = keeps(0.5)

    def init(bucket: Bucket) -> State:
        return {**bare.init(bucket), "q": [None] * len(bucket.names)}

    reducer, world = accordion(bare._replace(init=init), keeps(0.25, 1), every=1), World()
    bucket = make(world)
    state = reducer.init(bucket)
    for _ in range(4):
        fill(bucket, [torch.ones(s, dtype=torch.float64) for s in SHAPES.values()])
        _, state = reduce_window(reducer, bucket, state, world)
    assert state["low"][0] is False
    assert state["both"]["q"][0].shape == (3, 1)


def test_a_residual_without_a_place_is_added_once_and_waits_for_an_overflow() -> None:
    def work(world: World) -> None:
        reducer, bucket = accordion(dense(), keeps(0.25), every=1), make(world, {"w": (4,)})
        state, norms = reducer.init(bucket), [1.0, 1.0, 1.0, 9.0, math.inf, 9.0, 9.0]
        expected = [1.0, 1.0, 0.25, 2.4375, math.inf, 9 + 7.3125, 9.0]
        lows = [True, True, False, False, True, True, True]
        for norm, mean, low in zip(norms, expected, lows, strict=True):
            assert state["low"] == [low]
            fill(bucket, [torch.full((4,), norm if world.rank else min(norm, 9.0), dtype=torch.float64)])
            before = residuals(bucket, state).clone()
            reduced, state = reduce_window(reducer, bucket, state, world)
            if norm == math.inf:
                assert not torch.isfinite(reduced.mean[0]).any()
                assert torch.equal(before, residuals(bucket, state))
            else:
                assert torch.allclose(reduced.mean[0], torch.full((4,), mean, dtype=torch.float64))

    run_threads(work, 2)


def test_what_is_added_counts_at_the_learning_rate_it_was_kept_at() -> None:
    """A rate that falls to a tenth forces `low`, and what was kept before is ten times as much then."""
    world, bucket = World(), make(World(), {"w": (4,)}, torch.float32)
    reducer = accordion(dense(), error_feedback(tenth()), every=1)
    state = reducer.init(bucket)
    for lr, expected in [(0.5, 1.0), (0.5, 1.0), (0.5, 0.1), (0.05, 1 + 10 * 0.9)]:
        bucket.lr, bucket.decayed = [lr], lr < 0.5
        fill(bucket, [torch.ones(4)])
        reduced, state = reduce_window(reducer, bucket, state, world)
        assert torch.allclose(reduced.mean[0], torch.full((4,), expected))


def tenth() -> Reducer:
    def reduce(bucket: Bucket, state: State, world: World) -> tuple[Reduced, State]:
        bucket.flat.mul_(0.1)
        world.all_reduce(bucket.flat, "mean", tag=bucket.tag).wait()
        return Reduced(bucket.tensors, [x.clone() for x in bucket.tensors]), state

    return Reducer(lambda bucket: {}, reduce)


def test_steps_that_overflow_count_for_no_sum() -> None:
    world = World()
    reducer, bucket = accordion(scaled(1.0), scaled(2.0), every=4), make(world, {"w": (4,)})
    state = reducer.init(bucket)
    for value in (1.0, math.nan, 1.0):
        fill(bucket, [torch.full((4,), value, dtype=torch.float64)])
        before = state["delta"].clone()
        _, state = reduce_window(reducer, bucket, state, world)
        assert torch.equal(state["delta"], before) == math.isnan(value)
    assert torch.equal(state["delta"][:4], torch.full((4,), 2.0, dtype=torch.float64))


def test_amps_loss_scale_is_no_change_of_the_gradients() -> None:
    world = World()
    reducer, bucket = accordion(scaled(1.0), scaled(2.0), every=1), make(world, {"w": (4,)})
    state = reducer.init(bucket)
    for scale in (64.0, 128.0, 32.0):
        bucket.scale = scale
        fill(bucket, [torch.full((4,), scale, dtype=torch.float64)])
        _, state = reduce_window(reducer, bucket, state, world)
        assert state["norm"] == [2.0]
    assert state["low"] == [False]


# Bytes, state, settings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
def test_bytes_are_those_of_the_levels_and_of_the_norms(size: int) -> None:
    def work(world: World) -> list[int]:
        reducer, bucket = accordion(bf16(), dense(), every=2), make(world, {"w": (8,), "v": (8,)})
        state, sent = reducer.init(bucket), []
        for step in range(8):
            before = sum(r.bytes_sent for r in world.ledger.records)
            scale = [1.0, 1.0, 9.0, 9.0][step // 2]
            fill(bucket, [torch.full((8,), scale, dtype=torch.float64), torch.ones(8, dtype=torch.float64)])
            _, state = reduce_window(reducer, bucket, state, world)
            sent.append(sum(r.bytes_sent for r in world.ledger.records) - before)
        return sent

    def ring(nbytes: int) -> int:
        return math.ceil(2 * (size - 1) * nbytes / size)

    low, high, norms = ring(16 * 2), ring(16 * 8), ring(2 * 8)
    mixed = ring(8 * 2) + ring(8 * 8)
    expected = [low, low + norms, low, low + norms, high, high + norms, mixed, mixed + norms]
    assert run_threads(work, size) == [expected] * size


def test_a_saved_state_goes_on_bit_by_bit() -> None:
    world, reducer = World(), accordion(error_feedback(bf16()), keeps(0.25), every=2)
    first, second = make(world), make(world)
    state = reducer.init(first)
    for t in range(5):
        fill(first, gradients(0, t))
        _, state = reducer.reduce(first, state, world)
    loaded = packing.from_bytes(packing.to_bytes(state))
    for t in range(5, 12):
        for bucket in (first, second):
            fill(bucket, gradients(0, t))
        a, state = reducer.reduce(first, state, world)
        b, loaded = reducer.reduce(second, loaded, world)
        assert all(map(torch.equal, a.mean, b.mean))
    assert packing.to_bytes(state) == packing.to_bytes(loaded)


def test_two_levels_are_under_way_together() -> None:
    """A bucket in two parts has no more stages than one in a single part."""
    world, reducer = World(), accordion(scaled(1.0), scaled(2.0), every=100)
    bucket = make(world)
    state = reducer.init(bucket)
    state["low"] = [True, False, True, False]
    fill(bucket, gradients(0, 0))
    assert reducer.stages is not None
    work = reducer.stages(bucket, state, world)
    assert sum(1 for _ in work) == 1
    bucket.flat.zero_()
    fill(bucket, gradients(0, 0))
    reduced, _ = reduce_window(reducer, bucket, state, world)
    for mean, given, factor in zip(reduced.mean, gradients(0, 0), [1, 2, 1, 2], strict=True):
        assert torch.equal(mean, given * factor)


@pytest.mark.parametrize("every", [0, -1, 2.0, True, "1", None])
def test_other_windows_are_refused(every: Any) -> None:
    with pytest.raises(ValueError, match="every counts steps"):
        accordion(dense(), bf16(), every=every)


@pytest.mark.parametrize("threshold", [0, -0.5, math.nan, math.inf, True, "0.5", None])
def test_other_thresholds_are_refused(threshold: Any) -> None:
    with pytest.raises(ValueError, match="threshold is a share"):
        accordion(dense(), bf16(), threshold=threshold)


def test_what_is_no_reducer_is_refused() -> None:
    with pytest.raises(TypeError, match="low must be a Reducer object"):
        accordion("dense", bf16())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="high must be a Reducer object"):
        accordion(dense(), None)  # type: ignore[arg-type]
