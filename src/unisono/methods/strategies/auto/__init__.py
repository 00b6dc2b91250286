"""The fastest of several methods, found by measuring while training goes on, and again when times change."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from typing import Annotated, Any

from torch import nn
from torch.optim import Optimizer

from unisono.methods.checks import AtLeast, check_settings
from unisono.methods.exchange.reduction import overlap_pays
from unisono.methods.facts import Example, Facts
from unisono.methods.spec import build, describe
from unisono.methods.strategies.auto.replica import AutoReplica
from unisono.methods.strategy import Accumulate, Buffers, Replica, Strategy
from unisono.world import World

FACTS = Facts(
    [
        Example("auto", varies=True, by_clock=True),
        Example(
            "auto(among=[allreduce, allreduce(overlap=False, bucket_bytes=256)], check_every=1, trial_steps=1)",
            exact=True,
            varies=True,
            by_clock=True,
        ),
        Example(
            "auto(among=[topk(k=0.1), randomk(k=0.2)], check_every=1, trial_steps=1)",
            varies=True,
            by_clock=True,
        ),
    ],
    refuses={
        "check_every=0": "check_every",
        "trial_steps=0": "trial_steps",
        "accumulate=0": "accumulate",
        "buffers=sometimes": "buffers",
        "among=[auto]": "auto itself",
        "among=[allreduce, allreduce]": "twice",
        "among=[allreduce(accumulate=2)]": "accumulate",
    },
)


@dataclass(frozen=True)
class auto(Strategy):
    """Train with the candidate whose steps take least time; go on to another when that has changed.

    1. Predict each candidate's step from the bytes it sends, the measured speed of the network and of its compression;
       begin with the best.
    2. Try those that may be faster, for a few steps of the training each; settle on the fastest.
    3. Watch: every few steps the ranks compare times with those before. When communication, compute or the network has
       drifted, and stays so, candidates that are predicted to be faster now are tried.

    All ranks change after the same step, as `replica.switch` does: what a method had still to send goes over.

    among: the candidates; those named first are preferred. None: all-reduce with several layouts of buckets, and the
        reducers that train like it.
    check_every: steps from one check to the next.
    trial_steps: steps of a trial that are measured.
    accumulate: backward passes a window, under every candidate.
    buffers: as in `allreduce`, under every candidate that has it.

    >>> auto(among=["allreduce", "powersgd(rank=4)"]).check_every
    20
    """

    among: tuple[Strategy, ...] = ()
    check_every: Annotated[int, AtLeast(1, "steps from one check to the next")] = 20
    trial_steps: Annotated[int, AtLeast(1, "measured steps of a trial")] = 5
    accumulate: Accumulate = 1
    buffers: Buffers = "broadcast"

    def __post_init__(self) -> None:
        if isinstance(self.among, list | tuple):  # what is none of these is refused with the other settings
            object.__setattr__(self, "among", tuple(build(one, kind="strategy") for one in self.among))

    def check(self, model: nn.Module, optimizer: Optimizer, world: World) -> None:
        for one in self.among:
            check_settings(one)
            if isinstance(one, auto):
                raise ValueError("among names auto itself: name the methods that it is to choose from")
            if getattr(one, "accumulate", 1) != 1:
                raise ValueError(
                    f"{describe(one)} has an accumulate of its own: windows must be alike under every candidate; "
                    "write auto(accumulate=...)"
                )
        twice = [spec for spec, count in Counter(map(describe, self.among)).items() if count > 1]
        if twice:
            raise ValueError(f"among names {twice[0]} twice")
        for one in self.find_candidates(model, world):
            one.check(model, optimizer, world)

    def find_candidates(self, model: nn.Module, world: World) -> list[Strategy]:
        """The candidates to choose from in a world."""
        return [self.complete(one) for one in self.among or list_candidates(model, world)]

    def complete(self, one: Strategy) -> Strategy:
        """A candidate with the settings that all have."""
        changed = {name: getattr(self, name) for name in ("accumulate", "buffers") if not self._is_default(name)}
        return with_settings(one, **changed)

    def _is_default(self, name: str) -> bool:
        return any(f.name == name and f.default == getattr(self, name) for f in dataclasses.fields(self))

    def why_torch_optimizer(self) -> str:
        return next(filter(None, (one.why_torch_optimizer() for one in self.among)), "")

    def make(self, model: nn.Module, optimizer: Optimizer, world: World) -> Replica:
        return AutoReplica(model, optimizer, world, self)


_SMALL_BUCKET, _LARGE_BUCKET = 4 << 20, 100 << 20
_COMPRESSING = ["bf16", "bytegrad", "powersgd(rank=4)"]  # those that lost no accuracy on our tasks as they are
_OVER_HOSTS = ["bf16", "hierarchical(bytegrad)", "powersgd(rank=4)", "hierarchical(powersgd(rank=4))"]


def list_candidates(model: nn.Module, world: World) -> list[Strategy]:
    """Exact ones first: of those about as fast, the first one named is taken."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    nbytes = sum(p.numel() * p.element_size() for p in trainable)
    specs = ["allreduce(order=ready)"]
    if overlap_pays(world):
        if nbytes > 2 * _SMALL_BUCKET:
            specs.append(f"allreduce(order=ready, bucket_bytes={_SMALL_BUCKET})")
        specs.append(f"allreduce(overlap=False, bucket_bytes={_LARGE_BUCKET})")
    if not any(p.is_complex() for p in trainable):
        specs += _OVER_HOSTS if 1 < len(set(world.hosts)) < world.size else _COMPRESSING
    return [build(spec, kind="strategy") for spec in specs]


def with_settings(strategy: Strategy, **settings: Any) -> Strategy:
    """The strategy with these settings, as far as it has them."""
    known: list[str] = [f.name for f in dataclasses.fields(strategy)] if dataclasses.is_dataclass(strategy) else []
    given = {name: value for name, value in settings.items() if name in known}
    changed: Strategy = dataclasses.replace(strategy, **given) if given else strategy  # type: ignore[type-var]
    return changed
