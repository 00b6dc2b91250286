"""A reducer is `aggregate(list) -> list`: every worker's tensors to their mean, exact or approximate.

It is two pure functions with an explicit state. docs/writing-a-reducer.md builds one from nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from unisono.methods.buckets import Bucket, find_wide_dtype
from unisono.predict.costs import all_reduce_bytes as all_reduce_bytes
from unisono.world import World

State = dict[str, Any]
"""What a reducer keeps for a bucket. Each kind of value has one meaning, so that a state can be saved by
parameter, laid out anew, and carried to a world of another size:

- a tensor: a line as long as `bucket.flat`, in its layout; this rank's own (a residual, a velocity). A reducer puts a
  new line in the place of one that it was given (`SpareLines` has the memory), and leaves that as it is: if a number of
  the window is not finite, in whatever bucket, "residual" and "velocity" become what they were;
- a list: one entry for each of the bucket's tensors; the same on every rank (PowerSGD's Q);
- a dict: a state inside, by the same rules;
- a plain value: about the bucket as a whole; the same on every rank (a step count).
"""


class Reduced(NamedTuple):
    """The result of a reduction: `mean`, the same bits on every rank, and `sent`, the part of my input that got
    through (input - sent is what a residual keeps). `sent` may be a function that works it out from the input, for
    those who ask before the next reduction; None: all of it. `overflow`: one number that is NaN if a number of the mean
    is not finite, where the reducer knows that from less than the mean itself."""

    mean: list[Tensor]
    sent: list[Tensor] | Callable[[list[Tensor]], list[Tensor]] | None = None
    overflow: Tensor | None = None

    def sent_of(self, given: list[Tensor]) -> list[Tensor]:
        """The part of my input that got through, as tensors; `given` was the input."""
        if self.sent is None:
            return given
        return self.sent if isinstance(self.sent, list) else self.sent(given)

    def find_overflow(self) -> Tensor:
        """One number: NaN if a number of the mean is not finite, else 0."""
        return find_overflow(self.mean) if self.overflow is None else self.overflow


Stages = Generator[None, None, tuple[Reduced, State]]


class Codec(NamedTuple):
    """A line of numbers as bytes and back; `nbytes(n)` is how many bytes n numbers take.

    `encode(x, noise)` gives a line of uint8; `decode(code, n)` gives n numbers in float32. `noise` says where
    its randomness comes from (see `kernels.noise`).
    """

    encode: Callable[[Tensor, Any], Tensor]
    decode: Callable[[Tensor, int], Tensor]
    nbytes: Callable[[int], int] | None


class Reducer(NamedTuple):
    """A method that reduces buckets.

    `init(bucket)` makes the state for a bucket (see `State`: it is saved in checkpoints); `reduce(bucket, state,
    world)` gives the result and the next state. `bucket.tensors` may be overwritten. The rest is optional:

    exact: the mean is the true mean to rounding.
    spec: the text it was built from.
    stages: the same as `reduce`, as a generator that yields where its collectives are under way, so that other
        buckets can be worked on meanwhile. `staged` makes `reduce` from it.
    memory: it keeps what it did not send, in `state["residual"]`.
    sends: the bytes one rank sends for a bucket in a world of a size.
    check: refuses an optimizer or a world that it cannot work with.
    codec: how it writes numbers as bytes, where it does so alone (for pushes to a server).
    noise: an unbiased method's bound on E|sent - input|^2 / |input|^2; from 1 on, feedback around it may grow.
    apart: it reduces `bucket.lines`, so that large tensors may have memory of their own.
    shard_codec: how it writes a part of a line by itself, for `zero` (None: as `codec` does). If it has a memory, who
        calls keeps what that leaves out.
    """

    init: Callable[[Bucket], State]
    reduce: Callable[[Bucket, State, World], tuple[Reduced, State]]
    exact: bool = False
    spec: str = ""
    stages: Callable[[Bucket, State, World], Stages] | None = None
    memory: bool = False
    sends: Callable[[Bucket, int], int] | None = None
    check: Callable[[Optimizer, World], None] | None = None
    codec: Codec | None = None
    noise: float = 0.0
    apart: bool = False
    shard_codec: Codec | None = None


def staged(
    init: Callable[[Bucket], State],
    stages: Callable[[Bucket, State, World], Stages],
    **fields: Any,
) -> Reducer:
    """A reducer from its stages; `fields` are those of `Reducer`.

    >>> def stages(bucket, state, world):
    ...     handle = world.all_reduce(bucket.flat, "mean")
    ...     yield
    ...     handle.wait()
    ...     return Reduced(bucket.tensors), state
    >>> staged(lambda bucket: {}, stages, exact=True).exact
    True
    """

    def reduce(bucket: Bucket, state: State, world: World) -> tuple[Reduced, State]:
        return finish(stages(bucket, state, world))

    reduce.__module__ = stages.__module__  # where its factory is found
    return Reducer(init, reduce, stages=stages, **fields)


def stages_of(reducer: Reducer, bucket: Bucket, state: State, world: World) -> Stages:
    """Any reducer in stages: for `yield from` in reducers around others."""
    if reducer.stages is not None:
        return (yield from reducer.stages(bucket, state, world))
    return reducer.reduce(bucket, state, world)


def finish(stages: Stages) -> tuple[Reduced, State]:
    """Run stages to their end."""
    while True:
        try:
            next(stages)
        except StopIteration as end:  # noqa: PERF203 - a handful of stages
            result: tuple[Reduced, State] = end.value
            return result


def dense_bytes(bucket: Bucket, size: int) -> int:
    """What a bucket costs without a reducer."""
    return all_reduce_bytes(bucket.nbytes, size)


def kept_bytes(reducer: Reducer, bucket: Bucket) -> int:
    """What a reducer keeps for a bucket from one window to the next, which may be on the meta device: its state as
    `init` makes it, and a spare for each line in that (see `SpareLines`)."""

    def count(value: Any) -> int:
        if isinstance(value, Tensor):
            return 2 * value.nbytes
        if isinstance(value, dict):
            return sum(map(count, value.values()))
        return sum(x.nbytes for x in value if isinstance(x, Tensor)) if isinstance(value, list) else 0

    return count(reducer.init(bucket))


def residual_like(bucket: Bucket) -> Tensor:
    """An empty residual: float32 for 16-bit buckets, so that small parts add up."""
    return torch.zeros(bucket.flat.numel(), dtype=find_wide_dtype(bucket.dtype), device=bucket.device)


class SpareLines:
    """Memory for the next lines of a reducer's states, beside the present ones: two lines change places for ever."""

    def __init__(self) -> None:
        self._lines: WeakKeyDictionary[Bucket, dict[str, Tensor]] = WeakKeyDictionary()

    def beside(self, bucket: Bucket, line: Tensor, name: str = "residual") -> Tensor:
        """Memory like `line`, for what comes after it under this name."""
        lines = self._lines.setdefault(bucket, {})
        spare, lines[name] = lines.get(name), line
        if spare is None or spare.data_ptr() == line.data_ptr() or spare.dtype != line.dtype:
            return torch.zeros_like(line)
        return spare


def find_overflow(tensors: Sequence[Tensor]) -> Tensor:
    """One number: NaN if there is an inf or a NaN, else 0; on a device the answer stays there, so that nobody waits."""
    full = [x for x in tensors if x.numel()]
    if full and full[0].is_cuda:
        return torch.stack(torch._foreach_norm(full, math.inf)).mul_(0).sum(dtype=torch.float32)
    ends = [end for x in full for end in torch.aminmax(x)]  # of all ways the quickest: a nan comes through
    return torch.stack(ends).mul_(0).sum(dtype=torch.float32) if ends else torch.zeros((), dtype=torch.float32)


def rescale(bucket: Bucket, state: State, which: Sequence[int] | None = None) -> None:
    """Scale residuals when learning rates changed, so that what was kept counts at the rate it was met with:
    e <- e * lr_old / lr_new. `state["lr"]` remembers the rates. `which`: of these tensors only."""
    rates: list[float | None] = state["lr"]
    if rates == bucket.lr:
        return
    factors = {}
    for i in range(len(rates)) if which is None else which:
        old, new = rates[i], bucket.lr[i]
        if new > 0:
            factors[i] = old / new if old is not None and old > 0 else 1.0
            rates[i] = new
    if any(factor != 1.0 for factor in factors.values()):
        views = bucket.views(state["residual"])
        for i, factor in factors.items():
            views[i].mul_(factor)


def rescale_inside(bucket: Bucket, state: State, which: Sequence[int] | None = None) -> None:
    """`rescale` for a state and those inside it, ahead of the reducers they belong to: for those around them who hand
    copies of the lines on, which an overflow would otherwise bring back as they were at other rates."""
    for inside in state.values():
        if isinstance(inside, dict):
            rescale_inside(bucket, inside, which)
    if "residual" in state and "lr" in state:
        rescale(bucket, state, which)
