"""Asynchronous DiLoCo: workers train alone and bring what they have moved to a server, each when it is ready.

Liu et al. 2024, "Asynchronous Local-SGD Training for Language Modeling" (arXiv:2401.09135): delayed Nesterov momentum
and steps by each worker's speed. Quorum, grace window and weights by tokens: "Decoupled DiLoCo" (arXiv:2604.21428).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import nn
from torch.optim import Optimizer

from unisono.methods.checks import AtLeast, Note, Range
from unisono.methods.facts import Convergence, Example, Facts
from unisono.methods.strategies.async_diloco.replica import AsyncDiLoCoReplica
from unisono.methods.strategy import Accumulate, Pattern, Replica, Strategy
from unisono.world import World

FACTS = Facts(
    [
        Example("async_diloco(every=2, quorum=4, pace=False)"),  # of four workers and fewer: all, in one order
        Example("async_diloco(every=3, spread=1.0)", varies=True),
    ],
    refuses={
        "every=0": "every",
        "outer_lr=0.0": "outer_lr",
        "outer_momentum=1.0": "outer_momentum",
        "spread=1.5": "spread",
        "staleness=0": "staleness",
        "quorum=0": "quorum",
        "grace_s=-1.0": "grace_s",
        "grace_s=1.0, quorum=1, staleness=None, accumulate=0": "accumulate",
    },
    own_gradients=True,
    convergence=Convergence("other", "each worker's steps are taken in when they come, some rounds old; tuned apart"),
    unpredicted="its server answers while workers compute, each in its own time",
)


@dataclass(frozen=True)
class async_diloco(Strategy):
    """Local steps; every so many windows a worker brings d = x0 - x to the server, and goes on from the x0 it gets.

    No worker waits for another. On each difference, weighed by the samples behind it, of N workers:

        D <- D + d;  with every N-th: m <- b m + D/N, D <- 0, x0 <- x0 - lr ((1 - s + s/N) b m + d/N)
                     else:            x0 <- x0 - lr ((s/N) b m + d/N)

    with b = `outer_momentum` and s = `spread`. All N at once, with s = 0, are one step of `diloco`.

    every: windows of the fastest worker between two visits.
    outer_lr, outer_momentum: of the outer optimizer, Nesterov's momentum, delayed.
    spread: how much of a momentum step is divided over all differences; 0: all of it goes with every N-th.
    staleness: a difference is dropped if more than so many rounds of N differences were taken in since its worker got
        x0, and the worker goes on from the present x0. None: each counts, however old.
    quorum: differences that are taken in together (all, where fewer workers are there); a worker waits for the others.
    grace_s: seconds that the server waits for further ones, when a quorum is there.
    pace: slower workers make fewer windows, by their measured speed, so that all come about as often.
    accumulate: backward passes a window.

    >>> async_diloco(every=50).staleness
    4
    """

    every: Annotated[int, AtLeast(1, "windows of the fastest worker between two visits")] = 100
    outer_lr: Annotated[float, Range(above=0)] = 0.7
    outer_momentum: Annotated[float, Range(at_least=0, below=1)] = 0.9
    spread: Annotated[float, Range("the share of momentum in every difference", at_least=0, at_most=1)] = 0.0
    staleness: Annotated[int | None, AtLeast(1, "rounds that a difference may be old"), Note("None: any")] = 4
    quorum: Annotated[int, AtLeast(1, "differences that are taken in together")] = 1
    grace_s: Annotated[float, Range("seconds to wait for more than a quorum", at_least=0)] = 0.0
    pace: bool = True
    accumulate: Accumulate = 1

    def check(self, model: nn.Module, optimizer: Optimizer, world: World) -> None:
        if self.grace_s and self.quorum == 1:
            raise ValueError(
                f"grace_s={self.grace_s:g} with quorum=1: it is unknown how many differences to wait for; "
                "give quorum=2 or more, or grace_s=0"
            )

    def pattern(self) -> Pattern:
        return Pattern("servers", every=self.every, staleness=None, in_every_window={"every": 1})

    def make(self, model: nn.Module, optimizer: Optimizer, world: World) -> Replica:
        return AsyncDiLoCoReplica(model, optimizer, world, self)
