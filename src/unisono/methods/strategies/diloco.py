"""DiLoCo: local training, and an outer optimizer on what the workers have moved; at once or streamed in fragments.

DiLoCo: Douillard et al., 2023 (arXiv:2311.08105). Streaming DiLoCo: Douillard et al., 2025 (arXiv:2501.18512).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.methods.buckets import BUCKET_BYTES
from unisono.methods.checks import AtLeast, Range
from unisono.methods.facts import Convergence, Example, Facts
from unisono.methods.reducer import Reducer
from unisono.methods.strategies._anchored import AnchoredReplica, Every, Rounds
from unisono.methods.strategies._fragments import Fragment
from unisono.methods.strategy import Accumulate, BucketBytes, Buffers, Pattern, Replica, Strategy
from unisono.world import World

FACTS = Facts(
    [
        Example("diloco(every=3)"),
        Example("diloco(every=4, fragments=2, delay=1)"),
        Example("diloco(every=4, fragments=3, delay=3, reducer=powersgd(rank=1, min_saving=1.0))"),
    ],
    refuses={
        "every=0": "every",
        "outer_lr=0.0": "outer_lr",
        "outer_momentum=1.0": "outer_momentum",
        "fragments=0": "fragments",
        "fragments=4, every=3": "at most",
        "delay=-1": "delay",
        "delay=5, every=5": "below",
        "mix=1.0": "mix",
    },
    own_gradients=True,
    convergence=Convergence("other", "models meet every `every` steps through an outer optimizer; tuned apart"),
)


@dataclass(frozen=True)
class diloco(Strategy):
    """Local steps; every H windows an outer SGD step on the last agreed model x0: its gradient is mean(x0 - x_i).

    In the mean each worker counts by the samples that it saw since the fragment's last exchange.
    Then x_i <- mix * x_i + (1 - mix) * x0. With fragments, each has its own place in the H windows, so that less
    travels at a time; with a delay, the exchange runs behind the next windows and is applied after them.

    every: windows from one exchange of a parameter to the next (H).
    outer_lr, outer_momentum, nesterov: of the outer optimizer (nesterov counts where there is momentum).
    fragments: parts of about equal bytes that the parameters are divided into.
    delay: windows from the begin of an exchange to its use; less than `every`.
    mix: how much of the worker's own parameters stays. None: 0 without a delay, else 0.5.
    reducer: how the mean of the differences x0 - x_i is taken (None: exactly).
    buffers: with every exchange of the first fragment, "average" them, "broadcast" rank 0's, or leave them "local".
    accumulate: backward passes a window.
    bucket_bytes: how much travels together.

    >>> diloco(every=50, fragments=4, delay=2).outer_lr
    0.7
    """

    every: Every = 100
    outer_lr: Annotated[float, Range(above=0)] = 0.7
    outer_momentum: Annotated[float, Range(at_least=0, below=1)] = 0.9
    nesterov: bool = True
    fragments: Annotated[int, AtLeast(1, "parts of the model")] = 1
    delay: Annotated[int, AtLeast(0, "windows until an exchange is used")] = 0
    mix: Annotated[float | None, Range("the share that stays local", at_least=0, below=1)] = None
    reducer: Reducer | None = None
    buffers: Buffers = "average"
    accumulate: Accumulate = 1
    bucket_bytes: BucketBytes = BUCKET_BYTES

    def check(self, model: nn.Module, optimizer: Optimizer, world: World) -> None:
        if self.fragments > self.every:
            raise ValueError(
                f"fragments={self.fragments} in every={self.every} windows: each fragment has a window of its own, so "
                "give at most `every` fragments"
            )
        if self.delay >= self.every:
            raise ValueError(
                f"delay={self.delay} with every={self.every}: an exchange must be used before the next one of its "
                "fragment begins; give a delay below `every`"
            )

    def pattern(self) -> Pattern:
        return Pattern(
            "windows",
            self.reducer,
            self.every,
            self.delay,
            overlap=self.delay > 0,
            in_every_window={"every": 1, "delay": 0, "fragments": 1},
        )

    def make(self, model: nn.Module, optimizer: Optimizer, world: World) -> Replica:
        # always: the outer optimizer has its effect on one worker too
        rounds, behind = DiLoCo(self), self.delay > 0
        return AnchoredReplica(model, optimizer, world, self, rounds, count=self.fragments, behind=behind, always=True)


class DiLoCo(Rounds):
    """Fragments, each begun and applied at windows that all ranks count alike."""

    def __init__(self, strategy: diloco) -> None:
        self._strategy = strategy
        self._mix = (0.5 if strategy.delay else 0.0) if strategy.mix is None else strategy.mix
        self._outer: torch.optim.SGD | None = None

    def meet(self, replica: AnchoredReplica) -> None:
        """1. begin: the fragments whose window this is; 2. apply: those whose delay is over."""
        every, count = self._strategy.every, len(replica.fragments)
        for f, fragment in enumerate(replica.fragments):
            if (replica.met - (f + 1) * every // count) % every == 0:
                replica.exchange(fragment, delay=self._strategy.delay)
        for fragment in replica.fragments:
            pending = replica.pending.get(fragment.index)
            if pending is not None and replica.met >= pending.due:
                self._apply(replica, fragment)

    def _apply(self, replica: AnchoredReplica, fragment: Fragment) -> None:
        means, _ = replica.finish(fragment)
        outer = self._outer_optimizer(fragment)
        for name in replica.loaded:  # the momentum was that of another model
            outer.state.pop(fragment.anchors[name], None)
        for name, mean in means.items():
            fragment.anchors[name].grad = mean
        outer.step()
        for name in means:
            fragment.anchors[name].grad = None
        fragment.return_to_anchors(self._mix)

    def _outer_optimizer(self, fragment: Fragment) -> torch.optim.SGD:
        """One for all fragments: it steps where there is a gradient."""
        strategy, anchors = self._strategy, list(fragment.anchors.values())
        if self._outer is None:
            nesterov = strategy.nesterov and strategy.outer_momentum > 0
            self._outer = torch.optim.SGD(
                anchors, lr=strategy.outer_lr, momentum=strategy.outer_momentum, nesterov=nesterov
            )
        [group] = self._outer.param_groups
        known = set(group["params"])
        group["params"] += [anchor for anchor in anchors if anchor not in known]
        return self._outer

    def shared_state(self, replica: AnchoredReplica) -> dict[str, Any]:
        states = self._outer.state if self._outer is not None else {}
        anchors = {name: a for fragment in replica.fragments for name, a in fragment.anchors.items()}
        momenta = {n: states[a].get("momentum_buffer") for n, a in anchors.items() if a in states}
        return {"outer": momenta}

    def load_shared(self, replica: AnchoredReplica, shared: dict[str, Any]) -> None:
        for fragment in replica.fragments:
            states = self._outer_optimizer(fragment).state
            for name, anchor in fragment.anchors.items():
                states.pop(anchor, None)
                momentum = shared.get("outer", {}).get(name)
                if momentum is not None:
                    states[anchor] = {"momentum_buffer": torch.empty_like(anchor).copy_(momentum)}
