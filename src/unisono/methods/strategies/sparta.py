"""SPARTA: every worker trains alone, and a few parameters drawn at random are averaged behind each window.

EXO Labs 2025, "SPARTA: Sparse Parameter Averaging for Reduced-communication Training".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.background import Handle
from unisono.methods.checks import AtLeast, Range
from unisono.methods.facts import Convergence, Example, Facts
from unisono.methods.kernels.select import count_kept
from unisono.methods.reducers._random_places import draw_map
from unisono.methods.spec import build
from unisono.methods.strategies._graphs import ExchangedParameters
from unisono.methods.strategy import Accumulate, Change, Pattern, PeriodicReplica, Replica, Strategy
from unisono.world import World

FACTS = Facts(
    [Example("sparta(share=0.2)"), Example("sparta(share=0.5, every=2, seed=1)")],
    refuses={
        "share=0": "share",
        "share=5": "share=0.05",
        "every=0": "every",
        "seed=0.5": "seed",
        "accumulate=0": "accumulate",
    },
    own_gradients=True,
    convergence=Convergence("other", "models meet in a few parameters at a time; ranks drift apart in between"),
)


@dataclass(frozen=True)
class sparta(Strategy):
    """Train alone; in each window a share of the parameters, drawn anew and the same on every rank, is averaged:

        x_i[S] <- x_i[S] + (mean of x[S] - x_i[S]), with x as it was when the window began

    The numbers travel while the window computes, and what the optimizer does meanwhile stays. Each parameter is met
    about every `every / share` windows. Sends an all-reduce of the share's numbers, and no places.

    share: of each tensor, that is averaged at a time, at least one number (the paper has 0.0005 to 0.005).
    every: windows from one exchange to the next.
    seed: another seed draws other parameters.
    accumulate: backward passes a window.

    >>> sparta(share=0.001).every
    1
    """

    share: Annotated[float, Range("the share of parameters averaged at a time", above=0, at_most=1, percent=True)] = (
        0.005
    )
    every: Annotated[int, AtLeast(1, "windows from one exchange to the next")] = 1
    seed: int = 0
    accumulate: Accumulate = 1

    def pattern(self) -> Pattern:
        return Pattern("windows", build(f"randomk(k={self.share!r})", kind="reducer"), self.every)

    def make(self, model: nn.Module, optimizer: Optimizer, world: World) -> Replica:
        return SpartaReplica(model, optimizer, world, self, accumulate=self.accumulate)


class SpartaReplica(PeriodicReplica):
    """The worker's own model, and the numbers of it that are on their way."""

    strategy: sparta
    own_models = own_optimizer = True

    def start(self) -> None:
        self._exchanged = ExchangedParameters(self.model)
        self._channel = self.world.channel(inline=False) if self.world.size > 1 else None
        self._forget()

    def _forget(self) -> None:
        self._places: list[tuple[Tensor, ...]] = []  # of each parameter, by dimension
        self._mine: list[Tensor] = []  # my numbers there, when they were sent
        self._handle: Handle[Any] | None = None

    def stop(self, change: Change | None = None) -> None:
        self._forget()
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def begin(self) -> None:
        self._begin(self.met + 1)

    def _begin(self, window: int) -> None:
        """Let the numbers of this window travel, as they are now."""
        if self._channel is None or self._handle is not None or window % self.strategy.every:
            return
        self._exchanged.check()
        params = [p.detach() for p in self._exchanged.params]
        self._places = [self._draw(p, window, i) for i, p in enumerate(params)]
        self._mine = [p[places].clone() for p, places in zip(params, self._places, strict=True)]  # p[()] is a view
        self._handle = self._channel.all_reduce([x.clone() for x in self._mine], "mean", tag="sparta")

    def _draw(self, param: Tensor, window: int, index: int) -> tuple[Tensor, ...]:
        if not param.dim():
            return ()
        n = param.numel()
        a, b = draw_map(self.strategy.seed, window, str(index), n) if n else (0, 0)
        places = torch.arange(count_kept(self.strategy.share, n), device=param.device).mul_(a).add_(b)
        return torch.unravel_index(places.remainder_(max(1, n)), param.shape)

    def meet(self) -> None:
        self._begin(self.met)  # unless it began with the window
        if self._handle is None:
            return
        params, means = [p.detach() for p in self._exchanged.params], self._handle.wait()
        for param, places, mine, mean in zip(params, self._places, self._mine, means, strict=True):
            param.index_put_(places, mean - mine, accumulate=True) if places else param.add_(mean - mine)
        self._forget()

    def load_shared(self, shared: dict[str, Any]) -> None:
        super().load_shared(shared)
        if self._handle is not None:  # of the model that was there before
            self._handle.wait()
            self._forget()
