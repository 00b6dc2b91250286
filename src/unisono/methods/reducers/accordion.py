"""Accordion: low compression while a layer's gradients change quickly, high compression otherwise.

Agarwal et al., "Accordion: Adaptive Gradient Communication via Critical Learning Regime Identification" (2021).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from unisono.methods.buckets import Bucket
from unisono.methods.checks import AtLeast, Range, validate
from unisono.methods.facts import Example, Facts
from unisono.methods.kernels.select import restore
from unisono.methods.reducer import Reduced, Reducer, SpareLines, Stages, State, residual_like, staged
from unisono.methods.reducers._subsets import Subset, reduce_subsets
from unisono.world import World

FACTS = Facts(
    [
        Example("accordion(low=powersgd(rank=2), high=powersgd(rank=1), every=2)"),
        Example("accordion(low=dense, high=topk(k=0.1), every=1)"),
    ],
    refuses={"dense, bf16, every=0": "every", "dense, bf16, threshold=0": "threshold", "dense, 5": "high"},
    trains_as=[
        "allreduce(reducer=accordion(low=powersgd(rank=2), high=powersgd(rank=1), every=2))",
        "allreduce(reducer=accordion(low=dense, high=topk(k=0.1), every=1))",
    ],
    plans=[],
)


@validate
def accordion(
    low: Reducer,
    high: Reducer,
    *,
    every: Annotated[int, AtLeast(1, "steps a period")] = 1000,
    threshold: Annotated[float, Range("a share of a norm", above=0)] = 0.5,
) -> Reducer:
    """Two levels of compression, chosen anew for each tensor at the end of every period of `every` steps.

    With D the sum of a tensor's gradients over a period, in the root mean square over the ranks, it is in a critical
    regime if | |D_before| - |D_now| | / |D_before| >= threshold, if |D_before| is zero, or if there is none yet: then
    `low` reduces it in the next period, else `high`. When a learning rate falls, all go to `low` until the next
    decision. The first two periods are `low`.

    low: little compression, for critical regimes: powersgd(rank=2), topk(k=0.99), dense.
    high: much compression: powersgd(rank=1), topk(k=0.1).
    every: steps a period; the paper has 10 epochs, which on its CIFAR runs (4 x 128 samples a step) is about 1,000
        steps, and 5 epochs for recurrent networks.
    threshold: how much of a norm counts as change.

    What both keep under one name (a residual, PowerSGD's Q, a step count) goes over from one to the other. A residual
    for which the other has no place is added to the next gradient. Steps that overflow count for no sum. Decisions are
    events named "accordion" in the ledger. Sends what the two send, and 8 bytes a tensor at the end of a period;
    keeps one number a parameter more than they do. On a GPU it waits for the device once a period.

    >>> from unisono.spec import build
    >>> build("accordion(dense, bf16, every=100)", kind="reducer").spec
    'accordion(low=dense, high=bf16, every=100)'
    """
    spare = SpareLines()

    def init(bucket: Bucket) -> State:
        tensors = len(bucket.names)
        both, only_low, only_high = _split_states(low.init(bucket), high.init(bucket))
        return {
            "step": 0,
            "delta": residual_like(bucket),
            "norm": [None] * tensors,  # of the period before
            "low": [True] * tensors,
            "flush": [False] * tensors,  # what the other level kept is still to be added
            "both": both,
            "levels": {"low": only_low, "high": only_high},
        }

    def stages(bucket: Bucket, state: State, world: World) -> Stages:
        if bucket.decayed and not all(state["low"]):
            _set_levels(state, [True] * len(bucket.names))
            _record_decision(bucket, state, world, "a learning rate fell", {})
        grown = spare.beside(bucket, state["delta"], "delta")
        torch.add(state["delta"], bucket.flat, alpha=1 / bucket.scale, out=grown)
        flushed = _flush(bucket, state, spare)
        reduced = yield from _reduce_by_level(bucket, state, (low, high), spare, world)
        restore(reduced.find_overflow(), state["delta"], grown)
        state["delta"] = grown
        state["step"] += 1
        if state["step"] % every == 0:
            yield from _decide(bucket, state, threshold, world)
        return _add_flushed(reduced, flushed, bucket), state

    def check(optimizer: Optimizer, world: World) -> None:
        for reducer in (low, high):
            if reducer.check is not None:
                reducer.check(optimizer, world)

    return staged(
        init,
        stages,
        exact=low.exact and high.exact,
        memory=low.memory or high.memory,
        check=check,
        noise=max(low.noise, high.noise),
    )


# Decisions -------------------------------------------------------------------------------------------------------


def is_critical(before: float | None, now: float, threshold: float) -> bool:
    """Whether a tensor's gradients changed much between two periods, by their norms.

    >>> [is_critical(before, 1.0, 0.5) for before in (None, 0.0, 2.0, 1.9, 0.6)]
    [True, True, True, False, True]
    """
    return before is None or before == 0 or not abs(before - now) / before < threshold


def _decide(bucket: Bucket, state: State, threshold: float, world: World) -> Any:
    """The end of a period: every rank has the same norms, so every rank decides alike."""
    lines = [state["delta"][start : start + p.numel()] for start, p in zip(bucket.starts, bucket.params, strict=True)]
    norms = torch.stack([torch.linalg.vector_norm(line, dtype=torch.float64) for line in lines])
    handle = world.all_reduce(norms.square_(), "mean", tag="accordion")
    yield
    handle.wait()
    now: list[float] = norms.sqrt_().tolist()
    if bucket.flat.is_cuda:  # where nobody looks whether something is left, which takes an overflow: it had a period
        state["flush"] = [False] * len(now)
    _set_levels(state, [is_critical(a, b, threshold) for a, b in zip(state["norm"], now, strict=True)])
    state["norm"] = now
    state["delta"].zero_()
    _record_decision(bucket, state, world, "the end of a period", dict(zip(bucket.names, now, strict=True)))


def _set_levels(state: State, lows: list[bool]) -> None:
    """Change levels; what the former one kept alone is to be flushed."""
    state["flush"] = [f or a != b for f, a, b in zip(state["flush"], state["low"], lows, strict=True)]
    state["low"] = lows


def _record_decision(bucket: Bucket, state: State, world: World, why: str, norms: dict[str, float]) -> None:
    levels = {name: "low" if low else "high" for name, low in zip(bucket.names, state["low"], strict=True)}
    world.ledger.event("accordion", step=state["step"], why=why, levels=levels, norms=norms)


# Two levels, one memory ------------------------------------------------------------------------------------------


def _reduce_by_level(bucket: Bucket, state: State, reducers: Sequence[Reducer], spare: SpareLines, world: World) -> Any:
    """Reduce each tensor by its level; gives the result."""
    subsets = []
    for reducer, level in zip(reducers, ("low", "high"), strict=True):
        which = [i for i, low in enumerate(state["low"]) if low == (level == "low")]
        subsets.append(Subset(which, reducer, _join_state(state["both"], state["levels"][level])))
    reduced, after = yield from reduce_subsets(bucket, subsets, spare, world)
    for subset, level, new in zip(subsets, ("low", "high"), after, strict=True):
        if subset.which:
            _write_back(new, state["both"], state["levels"][level])
    return reduced


def _split_states(low: State, high: State) -> tuple[State, State, State]:
    """What both keep under one name, and what each keeps alone. Of two the first is taken, where there is one."""
    both: State = {}
    alone: tuple[State, State] = ({}, {})
    for key in dict.fromkeys([*low, *high]):
        a, b = low.get(key), high.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            both[key], *rest = _split_states(a, b)
            for own, inside in zip(alone, rest, strict=True):
                own[key] = inside
        elif key in low and key in high and type(a) is type(b) and getattr(a, "dtype", 0) == getattr(b, "dtype", 0):
            both[key] = _merge_entries(a, b)
        else:
            for own, state in zip(alone, (low, high), strict=True):
                if key in state:
                    own[key] = state[key]
    return both, *alone


def _merge_entries(a: Any, b: Any) -> Any:
    return [x if x is not None else y for x, y in zip(a, b, strict=True)] if isinstance(a, list) else a


def _join_state(both: State, own: State) -> State:
    """One level's state: the same lines and lists, in new dicts."""
    found = dict(own)
    for key, value in both.items():
        found[key] = _join_state(value, own.get(key, {})) if isinstance(value, dict) else value
    return found


def _write_back(new: State, both: State, own: State) -> None:
    """The opposite: a level's new state goes where each entry is kept."""
    for key, value in new.items():
        if isinstance(value, dict) and isinstance(both.get(key), dict):
            _write_back(value, both[key], own.setdefault(key, {}))
            continue
        home = both if key in both else own
        if isinstance(value, list) and isinstance(home.get(key), list):
            value = [old if new is None else new for old, new in zip(home[key], value, strict=True)]
        home[key] = value


Flushed = list[tuple[slice, Tensor]]  # where a tensor lies in the line, and what was added to it


def _flush(bucket: Bucket, state: State, spare: SpareLines) -> Flushed:
    """Add to the gradients what is kept for them under the level that does not reduce them now, as large as it
    counts at today's learning rate: it is kept there no more."""
    flushed: Flushed = []
    for level in ("low", "high"):
        which = [i for i, waits in enumerate(state["flush"]) if waits and state["low"][i] != (level == "low")]
        places = {i: slice(bucket.starts[i], bucket.starts[i] + bucket.params[i].numel()) for i in which}
        for path, inside in _find_residuals(state["levels"][level]):
            line, rates = inside["residual"], inside.get("lr", [])
            full = [(i, there) for i, there in places.items() if line.is_cuda or line[there].any()]
            if full:
                inside["residual"] = spare.beside(bucket, line, f"{level}/{path}").copy_(line)
            for i, there in full:
                old, new = rates[i] if rates else None, bucket.lr[i]
                kept = line[there] * (old / new if old is not None and old > 0 and new > 0 else 1.0)
                bucket.flat[there].add_(kept)
                inside["residual"][there].zero_()
                flushed.append((there, kept))
    return flushed


def _find_residuals(state: State, path: str = "") -> list[tuple[str, State]]:
    """The states that keep something: this one, and those inside it."""
    found = [
        pair
        for key, inside in state.items()
        if isinstance(inside, dict)
        for pair in _find_residuals(inside, f"{path}{key}/")
    ]
    return [*found, (path, state)] if "residual" in state else found


def _add_flushed(reduced: Reduced, flushed: Flushed, bucket: Bucket) -> Reduced:
    """Count what was flushed as sent."""
    if not flushed:
        return reduced

    def sent(given: list[Tensor]) -> list[Tensor]:
        line = torch.zeros_like(bucket.flat)
        for view, x in zip(bucket.views(line), given, strict=True):
            view.copy_(x)
        for there, kept in flushed:
            line[there].add_(kept)
        return reduced.sent_of(bucket.views(line))

    return Reduced(reduced.mean, sent, reduced.overflow)
