"""masked: each tensor by the reducer its name and size give it; states in the whole bucket's layout."""

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
from unisono.methods.reducers._subsets import find_runs, narrow, widen
from unisono.methods.reducers.bf16 import bf16
from unisono.methods.reducers.dense import dense
from unisono.methods.reducers.error_feedback import error_feedback
from unisono.methods.reducers.masked import masked
from unisono.methods.spec import build, describe

SHAPES = {
    "body.0.weight": (6, 5),
    "body.0.bias": (6,),
    "body.1.weight": (7, 3),
    "body.1.bias": (),
    "head.weight": (40,),
}


def halves() -> Reducer:
    """Sends half of every number and keeps the other; counts calls, and remembers each tensor's size."""

    def stages(bucket: Bucket, state: State, world: World) -> Stages:
        assert state["sizes"] == [x.numel() for x in bucket.tensors]
        assert state["residual"].shape == bucket.flat.shape
        before = state["residual"].clone()
        p = bucket.flat + before
        bucket.flat.copy_(p / 2)
        given = [x.clone() for x in bucket.tensors]
        handle = world.all_reduce(bucket.flat, "mean", tag=bucket.tag)
        yield
        handle.wait()
        ok = torch.isfinite(torch.cat([x.reshape(-1) for x in bucket.tensors])).all()
        after = torch.where(ok, p / 2, before)
        return Reduced(bucket.tensors, lambda _: given), {**state, "residual": after, "step": state["step"] + 1}

    def init(bucket: Bucket) -> State:
        return {"residual": torch.zeros_like(bucket.flat), "sizes": [x.numel() for x in bucket.tensors], "step": 0}

    return staged(init, stages, memory=True, sends=lambda bucket, n: math.ceil(2 * (n - 1) * bucket.nbytes / n))


def make(world: World, dtype: torch.dtype = torch.float64) -> Bucket:
    return Bucket(0, [(name, torch.zeros(shape, dtype=dtype)) for name, shape in SHAPES.items()], world.empty)


def gradients(rank: int, step: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in SHAPES.values()]


def fill(bucket: Bucket, tensors: list[Tensor]) -> None:
    bucket.flat.zero_()
    for view, x in zip(bucket.tensors, tensors, strict=True):
        view.copy_(x)


def halved(reducer: Reducer) -> list[str]:
    """Names of the tensors that `halves` reduced: their mean is half of the gradient."""
    bucket = make(World())
    fill(bucket, gradients(0, 0))
    reduced, _ = reducer.reduce(bucket, reducer.init(bucket), World())
    found = []
    for name, mean, given in zip(bucket.names, reduced.mean, gradients(0, 0), strict=True):
        assert torch.equal(mean, given) or torch.equal(mean, given / 2)
        if torch.equal(mean, given / 2):
            found.append(name)
    return found


# Which -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, list(SHAPES)),
        ({"only": "*.weight"}, ["body.0.weight", "body.1.weight", "head.weight"]),
        ({"only": "body.*", "skip": "*.bias"}, ["body.0.weight", "body.1.weight"]),
        ({"only": "body.0.*, head.*"}, ["body.0.weight", "body.0.bias", "head.weight"]),
        ({"only": ["body.0.*", "head.*"], "skip": ["*.bias"]}, ["body.0.weight", "head.weight"]),
        ({"min_size": 21}, ["body.0.weight", "body.1.weight", "head.weight"]),
        ({"min_size": 22}, ["body.0.weight", "head.weight"]),
        ({"only": "BODY.*"}, []),
        ({"only": "nothing"}, []),
        ({"skip": "*"}, []),
    ],
)
def test_tensors_are_chosen_by_name_and_size(options: dict[str, Any], expected: list[str]) -> None:
    assert halved(masked(halves(), **options)) == expected


def test_the_rest_goes_to_another_reducer() -> None:
    assert halved(masked(dense(), only="*.bias", rest=halves())) == ["body.0.weight", "body.1.weight", "head.weight"]


def test_what_both_cannot_read_is_refused() -> None:
    for bad in (-1, 2.5, True, None):
        with pytest.raises(ValueError, match="min_size"):
            masked(bf16(), min_size=bad)  # type: ignore[arg-type]
    for bad in (3, ["a", 1], None):
        with pytest.raises(TypeError, match="patterns of names"):
            masked(bf16(), only=bad)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="rest must be a Reducer object or None, got 'dense'"):
        masked(bf16(), rest="dense")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="inner must be a Reducer object, got None"):
        masked(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["masked(bf16, only=['a.*', 'b'], skip='c', min_size=3, rest=fp16)", "masked(bf16)"])
def test_its_spec_builds_it_again(text: str) -> None:
    reducer = build(text, kind="reducer")
    assert build(describe(reducer), kind="reducer") == reducer


# Conservation, bytes, state ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("only", ["*.weight", "body.*", "*", "none"])
def test_nothing_is_lost_over_time(size: int, only: str) -> None:
    def work(world: World) -> tuple[list[Tensor], list[Tensor] | None]:
        reducer, bucket = masked(halves(), only=only), make(world)
        state, total = reducer.init(bucket), [torch.zeros_like(x) for x in bucket.tensors]
        for t in range(5):
            fill(bucket, gradients(world.rank, t))
            before = state["inner"].get("residual", torch.zeros_like(bucket.flat)).clone()
            reduced, state = reduce_window(reducer, bucket, state, world)
            after = state["inner"].get("residual", torch.zeros_like(bucket.flat))
            sent = reduced.sent_of(gradients(world.rank, t))
            for g, e, s, r in zip(
                gradients(world.rank, t), bucket.views(before), sent, bucket.views(after), strict=True
            ):
                assert torch.allclose(g + e, s + r, atol=1e-14)
            for sum_, x in zip(total, reduced.mean, strict=True):
                sum_.add_(x)
        return total, bucket.views(state["inner"]["residual"]) if state["inner"] else None

    results = run_threads(work, size)
    for i in range(len(SHAPES)):
        given = sum(gradients(r, t)[i] for r in range(size) for t in range(5)) / size
        kept = sum(residual[i] for _, residual in results if residual is not None) / size
        assert torch.allclose(results[0][0][i] + kept, given, rtol=0, atol=1e-13)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("rest", [None, bf16()])
def test_bytes_are_those_of_both(size: int, rest: Reducer | None) -> None:
    def work(world: World) -> tuple[int, int]:
        reducer, bucket = masked(halves(), only="*.weight", rest=rest), make(world, torch.float32)
        reducer.reduce(bucket, reducer.init(bucket), world)
        assert reducer.sends is not None
        return sum(record.bytes_sent for record in world.ledger.records), reducer.sends(bucket, size)

    # lines of 16 numbers: 32 + 32 + 48 for the weights, 16 + 16 for the others
    each = [112 * 4, 32 * (4 if rest is None else 2)]
    expected = sum(math.ceil(2 * (size - 1) * nbytes / size) for nbytes in each)
    assert run_threads(work, size) == [(expected, expected)] * size


def test_an_overflow_in_the_rest_changes_no_memory_of_the_others() -> None:
    def work(world: World) -> None:
        reducer, bucket = masked(halves(), only="*.weight"), make(world)
        state = reducer.init(bucket)
        for t in range(3):
            given = gradients(world.rank, t)
            if t == 1 and world.rank == 1:
                given[1][2] = math.inf
            fill(bucket, given)
            before = state["inner"]["residual"].clone()
            _, state = reduce_window(reducer, bucket, state, world)
            assert torch.equal(before, state["inner"]["residual"]) == (t == 1)

    run_threads(work, 2)


def test_a_saved_state_goes_on_bit_by_bit() -> None:
    world, reducer = World(), masked(error_feedback(bf16()), only="body.*", rest=halves())
    first, second = make(world), make(world)
    state = reducer.init(first)
    for t in range(2):
        fill(first, gradients(0, t))
        _, state = reducer.reduce(first, state, world)
    loaded = packing.from_bytes(packing.to_bytes(state))
    for t in range(2, 5):
        for bucket in (first, second):
            fill(bucket, gradients(0, t))
        a, state = reducer.reduce(first, state, world)
        b, loaded = reducer.reduce(second, loaded, world)
        assert all(map(torch.equal, a.mean, b.mean))
    assert packing.to_bytes(state) == packing.to_bytes(loaded)


@pytest.mark.parametrize("which", [[0], [4], [1, 2], [0, 2, 3], [0, 1, 2, 3, 4], [0, 2, 4]])
def test_a_state_made_narrow_and_wide_again_is_the_same(which: list[int]) -> None:
    bucket = make(World())
    part = Bucket(0, [(bucket.names[i], bucket.params[i]) for i in which], World().empty)
    line = torch.arange(bucket.flat.numel(), dtype=torch.float64)
    state: State = {"a": line.clone(), "b": list("vwxyz"), "n": 3, "c": {"a": -line}}
    small = narrow(bucket, which, part, state, {})
    for i, view in zip(which, part.views(small["a"]), strict=True):
        assert torch.equal(view, bucket.views(line)[i])
    assert (small["b"], small["n"]) == (["vwxyz"[i] for i in which], 3)
    assert sum(here.stop - here.start for _, here in find_runs(bucket, which)) == part.flat.numel()
    small["a"] += 1000
    small["b"] = [letter.upper() for letter in small["b"]]
    widen(bucket, which, part, state, small)
    for i, (view, old) in enumerate(zip(bucket.views(state["a"]), bucket.views(line), strict=True)):
        assert torch.equal(view, old + 1000 if i in which else old)
        assert state["b"][i] == ("VWXYZ" if i in which else "vwxyz")[i]
    assert torch.equal(state["c"]["a"], -line)
