"""warmup: the exact mean first, then the inner reducer, from the same step on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from unisono import World, packing, run_threads
from unisono.methods.buckets import Bucket
from unisono.methods.reducer import Reduced, Reducer, State
from unisono.methods.reducers.bf16 import bf16
from unisono.methods.reducers.error_feedback import error_feedback
from unisono.methods.reducers.warmup import warmup


def zero() -> Reducer:
    """Sends nothing: easy to tell from the mean."""

    def reduce(bucket: Bucket, state: State, world: World) -> tuple[Reduced, State]:
        bucket.flat.zero_()
        return Reduced(bucket.tensors, [torch.zeros_like(x) for x in bucket.tensors]), {"calls": state["calls"] + 1}

    return Reducer(lambda bucket: {"calls": 0}, reduce)


def run(reducer: Reducer, world: World, steps: int, state: State | None = None) -> tuple[list[Tensor], State]:
    bucket = Bucket(0, [("p", torch.zeros(3))], world.empty)
    state = reducer.init(bucket) if state is None else state
    means = []
    for _ in range(steps):
        bucket.tensors[0].fill_(world.rank + 1.0)
        reduced, state = reducer.reduce(bucket, state, world)
        means.append(reduced.mean[0].clone())
    return means, state


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_the_mean_is_exact_for_so_many_steps(steps: int) -> None:
    for means, state in run_threads(lambda world: run(warmup(zero(), steps), world, 5), 2):
        assert [float(x[0]) for x in means] == [1.5] * steps + [0.0] * (5 - steps)
        assert state == {"step": 5, "inner": {"calls": 5 - steps}}


def test_a_loaded_state_goes_on_counting() -> None:
    _, state = run(warmup(zero(), 4), World(), 3)
    means, _ = run(warmup(zero(), 4), World(), 3, packing.from_bytes(packing.to_bytes(state)))
    assert [float(x[0]) for x in means] == [1.0, 0.0, 0.0]


def test_it_has_the_memory_of_the_inner_one() -> None:
    assert warmup(error_feedback(bf16()), 2).memory
    assert not warmup(bf16(), 2).memory


@pytest.mark.parametrize("steps", [-1, 1.5, True, "3", None])
def test_other_counts_are_refused(steps: Any) -> None:
    with pytest.raises(ValueError, match="whole number"):
        warmup(bf16(), steps)


def test_what_is_no_reducer_is_refused() -> None:
    with pytest.raises(TypeError, match="inner must be a Reducer object"):
        warmup("bf16", 1)  # type: ignore[arg-type]
