"""Reducer: turns every worker's tensors into their (approximate) mean. Two pure functions and explicit state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from unisono.buckets import Bucket
from unisono.world import World

State = dict[str, Any]


class Reduced(NamedTuple):
    """What a reduction gave: `mean`, identical on every rank, and `sent`, the part of my input that got
    through (input - sent = what a residual keeps). None: all of it, so that no copy need be kept."""

    mean: list[Tensor]
    sent: list[Tensor] | None = None


class Reducer(NamedTuple):
    """A method that reduces buckets.

    `init(bucket)` makes the state for a bucket (plain values and tensors: it is saved in checkpoints);
    `reduce(bucket, state, world)` gives the result and the next state. `bucket.tensors` may be overwritten.
    `exact` says that the mean is the true mean to rounding. `spec` is the text it was built from.
    """

    init: Callable[[Bucket], State]
    reduce: Callable[[Bucket, State, World], tuple[Reduced, State]]
    exact: bool = False
    spec: str = ""
