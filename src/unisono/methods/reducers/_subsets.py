"""Subsets of a bucket's tensors, each reduced in its own way, side by side; states stay in the whole bucket's layout.

A state in the whole bucket's layout is saved, laid out anew and carried to another world like any other (see
`reducer.State`). A reducer that works on some of the tensors sees a narrow copy of it; what it leaves is written
back. So it does not matter which tensors a subset had when the state was made.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from unisono.methods.buckets import Bucket
from unisono.methods.reducer import Reduced, Reducer, SpareLines, Stages, State, rescale_inside, stages_of
from unisono.world import World

__all__ = [
    "Subset",
    "Vectors",
    "average_in_place",
    "check_contracts",
    "find_lines",
    "find_runs",
    "narrow",
    "reduce_subsets",
    "run_together",
    "widen",
]

Slices = list[tuple[slice, slice]]
_KEPT = 8  # subsets of a bucket that are remembered: those of methods that choose anew come and go
_cuts: WeakKeyDictionary[Bucket, dict[tuple[int, ...], _Cut]] = WeakKeyDictionary()
_lines: WeakKeyDictionary[Bucket, State] = WeakKeyDictionary()  # by subset: its last state, memory for the next


class Vectors:
    """The tensors of a bucket that have fewer than two dimensions: methods that send few numbers send these in full.

    lengths: how many numbers each has.
    """

    def __init__(self, bucket: Bucket) -> None:
        pairs = zip(bucket.starts, bucket.tensors, strict=True)
        places = [slice(at, at + x.numel()) for at, x in pairs if x.dim() < 2 and x.numel()]
        self.lengths = [there.stop - there.start for there in places]
        self._stretches = _Stretches(places, bucket.flat.numel())

    def views(self, line: Tensor) -> list[Tensor]:
        """Views of them in a line of the bucket's layout."""
        return self._stretches.of(line)

    def take(self, line: Tensor) -> Tensor:
        """Their numbers, one tensor after the other."""
        return torch.cat([line[:0], *self.views(line)])

    def put(self, line: Tensor, numbers: Tensor) -> None:
        """Write such numbers to where they belong in a line."""
        if self.lengths:
            torch._foreach_copy_(self.views(line), numbers.split(self.lengths))


class Subset(NamedTuple):
    """Some of a bucket's tensors, who reduces them (None: their exact mean), and its state in the whole layout."""

    which: Sequence[int]
    reducer: Reducer | None
    state: State


def reduce_subsets(
    bucket: Bucket, subsets: Sequence[Subset], spare: SpareLines, world: World
) -> Generator[None, None, tuple[Reduced, list[State]]]:
    """Reduce every subset by its own reducer, with their collectives under way together; each one's next state, with
    lines in memory of `spare`.

    The subsets hold every tensor once.
    """
    live = [i for i, subset in enumerate(subsets) if subset.which]
    states = [subset.state for subset in subsets]
    if len(live) == 1:
        only = subsets[live[0]]
        reduced, states[live[0]] = yield from _begin(bucket, bucket, only, only.state, world)
        return reduced, states
    buckets = [bucket.part(subsets[i].which) if subsets[i].reducer is not None else bucket for i in live]
    works = [
        _begin(b, bucket, subsets[i], _narrow_state(b, bucket, subsets[i]), world)
        for i, b in zip(live, buckets, strict=True)
    ]
    results = yield from run_together(works)
    mean: list[Any] = [None] * len(bucket.names)
    for i, (reduced, _) in zip(live, results, strict=True):
        for k, x in zip(subsets[i].which, reduced.mean, strict=True):
            mean[k] = x
    lines: dict[Tensor, Tensor] = {}  # a line that subsets have in common gets one that follows it
    for i, b, (_, after) in zip(live, buckets, results, strict=True):
        if subsets[i].reducer is not None:
            _follow_lines(bucket, subsets[i].which, subsets[i].state, after, lines, spare, f"{i}/")
            widen(bucket, subsets[i].which, b, subsets[i].state, after)
            _lines[b] = after

    def sent(given: list[Tensor]) -> list[Tensor]:
        found = list(given)
        for i, (reduced, _) in zip(live, results, strict=True):
            mine = reduced.sent_of([given[k] for k in subsets[i].which])
            for k, x in zip(subsets[i].which, mine, strict=True):
                found[k] = x
        return found

    all_of_it = all(reduced.sent is None for reduced, _ in results)
    return Reduced(mean) if all_of_it else Reduced(mean, sent), states


def _begin(part: Bucket, whole: Bucket, subset: Subset, state: State, world: World) -> Stages:
    if subset.reducer is None:
        return average_in_place(whole, subset.which, world)
    return stages_of(subset.reducer, part, state, world)


def _narrow_state(part: Bucket, whole: Bucket, subset: Subset) -> State:
    if subset.reducer is None:
        return {}
    rescale_inside(whole, subset.state, subset.which)  # what a subset does with its lines may be dropped
    return narrow(whole, subset.which, part, subset.state, _lines.get(part, {}))


def average_in_place(bucket: Bucket, which: Sequence[int], world: World) -> Stages:
    """The exact mean of some of a bucket's tensors, where they lie."""
    lines = _cut(bucket, which).whole.of(bucket.flat)
    handle = world.all_reduce(lines, "mean", tag=bucket.tag)
    yield
    handle.wait()
    return Reduced([bucket.tensors[i] for i in which]), {}


def run_together(works: Sequence[Stages]) -> Generator[None, None, list[tuple[Reduced, State]]]:
    """Several stages in turn: in one order on every rank, as long as each one's own collectives are."""
    results: list[Any] = [None] * len(works)
    left = dict(enumerate(works))
    while left:
        for i, work in list(left.items()):
            try:
                next(work)
            except StopIteration as end:  # noqa: PERF203 - a handful of stages
                results[i] = end.value
                del left[i]
        if left:
            yield
    return results


def check_contracts(inner: Reducer) -> None:
    """Refuse a method around which what is fed back may grow."""
    if inner.noise >= 1:
        raise ValueError(
            f"{inner.spec or 'this reducer'} rounds at random, without bias, with an error of up to {inner.noise:.3g} "
            "times what it is given: fed back, that can grow without bound. Use it without error_feedback, or with "
            "more bits, or with smaller blocks"
        )


# States ----------------------------------------------------------------------------------------------------------


def find_runs(bucket: Bucket, which: Sequence[int]) -> Slices:
    """Where some tensors lie in the bucket's line, and in the line of a bucket that holds only them.

    Neighbours are one stretch: what lies between them is the same in both.
    """
    bounds = [*bucket.starts, bucket.flat.numel()]
    found, at = [], 0
    for _, group in itertools.groupby(enumerate(which), lambda pair: pair[1] - pair[0]):
        members = [i for _, i in group]
        start, stop = bounds[members[0]], bounds[members[-1] + 1]
        found.append((slice(start, stop), slice(at, at + stop - start)))
        at += stop - start
    return found


class _Stretches:
    """Some stretches of a line, in order, as views: in one call, whatever their number."""

    def __init__(self, places: Sequence[slice], numel: int) -> None:
        ends = [0, *(end for there in places for end in (there.start, there.stop)), numel]
        self._lengths = [b - a for a, b in itertools.pairwise(ends)]  # between them and of them, in turn

    def of(self, line: Tensor) -> list[Tensor]:
        """These stretches."""
        return list(line.split(self._lengths)[1::2])

    def rest(self, line: Tensor) -> list[Tensor]:
        """What lies around them."""
        return [x for x in line.split(self._lengths)[::2] if x.numel()]


class _Cut(NamedTuple):
    """Where some tensors lie: in the bucket's line, and in that of a bucket that holds only them."""

    whole: _Stretches
    part: _Stretches


def _cut(bucket: Bucket, which: Sequence[int]) -> _Cut:
    known, key = _cuts.setdefault(bucket, {}), tuple(which)
    if key not in known:
        if len(known) == _KEPT:
            known.clear()
        there, here = zip(*find_runs(bucket, which), strict=True) if which else ((), ())
        known[key] = _Cut(_Stretches(there, bucket.flat.numel()), _Stretches(here, here[-1].stop if here else 0))
    return known[key]


def narrow(bucket: Bucket, which: Sequence[int], part: Bucket, state: State, memory: State) -> State:
    """The state of some tensors, for a bucket that holds only them. Lines are copied, into `memory` where it fits."""
    found: State = {}
    cut = _cut(bucket, which)
    for key, value in state.items():
        old = memory.get(key)
        if isinstance(value, dict):
            found[key] = narrow(bucket, which, part, value, old if isinstance(old, dict) else {})
        elif isinstance(value, Tensor):
            if not isinstance(old, Tensor) or old.dtype != value.dtype or old.shape != part.flat.shape:
                old = value.new_empty(part.flat.numel())
            torch._foreach_copy_(cut.part.of(old), cut.whole.of(value))
            found[key] = old
        else:
            found[key] = [value[i] for i in which] if isinstance(value, list) else value
    return found


def _follow_lines(
    bucket: Bucket,
    which: Sequence[int],
    state: State,
    after: State,
    lines: dict[Tensor, Tensor],
    spare: SpareLines,
    path: str,
) -> None:
    """Put a copy in the place of every line, but for what `widen` is about to write there."""
    for key, value in state.items():
        inside = after.get(key)
        if isinstance(value, dict):
            _follow_lines(bucket, which, value, inside if inside is not None else {}, lines, spare, f"{path}{key}/")
        elif isinstance(value, Tensor):
            if value not in lines:
                lines[value] = spare.beside(bucket, value, path + key)
                whole = _cut(bucket, which).whole
                new, old = ([x] if inside is None else whole.rest(x) for x in (lines[value], value))
                if new:
                    torch._foreach_copy_(new, old)
            state[key] = lines[value]


def widen(bucket: Bucket, which: Sequence[int], part: Bucket, state: State, after: State) -> State:
    """Write what a subset's reducer left into the whole bucket's state. An entry of a list that is None says nothing
    new."""
    cut = _cut(bucket, which)
    for key, value in after.items():
        if isinstance(value, dict):
            widen(bucket, which, part, state.setdefault(key, {}), value)
        elif isinstance(value, Tensor):
            if key not in state:
                state[key] = value.new_zeros(bucket.flat.numel())
            torch._foreach_copy_(cut.whole.of(state[key]), cut.part.of(value))
        elif isinstance(value, list):
            entries = state.setdefault(key, [None] * len(bucket.names))
            for i, entry in zip(which, value, strict=True):
                entries[i] = entries[i] if entry is None else entry
        else:
            state[key] = value
    return state


def find_lines(state: State, name: str = "") -> list[Tensor]:
    """The lines in a state and in those inside it: all, or those of a name."""
    found: list[Tensor] = []
    for key in sorted(state):
        if isinstance(state[key], dict):
            found += find_lines(state[key], name)
        elif isinstance(state[key], Tensor) and name in ("", key):
            found.append(state[key])
    return found
