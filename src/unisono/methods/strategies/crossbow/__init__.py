"""Crossbow: many small-batch learners, each pulled towards a central model that they move together.

Koliousis, Watcharapichat, Weidlich, Mai, Costa, Pietzuch, 2019 (arXiv:1901.02244): synchronous model averaging.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from torch import nn
from torch.optim import Optimizer

from unisono.methods.buckets import BUCKET_BYTES
from unisono.methods.checks import AtLeast, Note, Range
from unisono.methods.facts import Convergence, Example, Facts
from unisono.methods.strategies.crossbow.replica import CrossbowReplica
from unisono.methods.strategy import Accumulate, BucketBytes, Pattern, Replica, Strategy
from unisono.methods.strategy.mistakes import refuse_common_memory
from unisono.world import World

FACTS = Facts(
    [
        Example("crossbow"),
        Example("crossbow(learners=2, every=2)"),
        Example("crossbow(learners=auto, every=auto, tune_every=2)", by_clock=True),
    ],
    refuses={
        "learners=0": "learners",
        "every=0": "every",
        "alpha=2.0": "alpha",
        "alpha=0.0": "alpha",
        "momentum=1.0": "momentum",
        "drop=0.0": "drop",
        "tune_every=0": "tune_every",
        "accumulate=0": "accumulate",
        "bucket_bytes=0": "bucket_bytes",
    },
    own_gradients=True,
    convergence=Convergence("other", "a central model, and learners that are pulled towards it"),
    unpredicted="its learners take turns inside a worker",
)


@dataclass(frozen=True)
class crossbow(Strategy):
    """k learners w_j and a central model z. In a window in which they synchronise, with w_j before its step:

    c_j = alpha (w_j - z);  w_j <- w_j - lr g_j - c_j;  z <- z + sum of all c_j + momentum (z - z before)

    z is what `consolidate()` gives. When a learning rate has dropped: w_j <- z, and z comes to rest (z before <- z).

    learners: on each worker, so k is that times the workers. In a plain loop the learners of a worker take turns,
        window by window; `replica.learn` runs them side by side. "auto": side by side, as many as raise the
        throughput; else 1.
    every: windows of each learner from one synchronisation to the next; "auto": by the measured ratio of
        communication to compute.
    alpha: the part of its difference to z that a learner gives up (None: 1 / k).
    momentum: that of the central model.
    drop: a learning rate has dropped when it is at most this part of its highest since the last drop.
    tune_every: windows from one decision of a tuner to the next.
    accumulate: backward passes a window.
    bucket_bytes: how much travels together.

    >>> crossbow(learners=2, every=4).momentum
    0.9
    """

    learners: Annotated[int, AtLeast(1, "learners on a worker")] | Literal["auto"] = 1
    every: Annotated[int, AtLeast(1, "windows between synchronisations")] | Literal["auto"] = 1
    alpha: Annotated[float | None, Range(above=0, at_most=1), Note("None: 1 / learners in all")] = None
    momentum: Annotated[float, Range(at_least=0, below=1)] = 0.9
    drop: Annotated[float, Range(above=0, at_most=1)] = 0.9
    tune_every: Annotated[int, AtLeast(1, "windows between decisions")] = 100
    accumulate: Accumulate = 1
    bucket_bytes: BucketBytes = BUCKET_BYTES

    def check(self, model: nn.Module, optimizer: Optimizer, world: World) -> None:
        refuse_common_memory(model, "crossbow")
        self._check_rest(world.size * (self.learners if self.learners != "auto" else 1))

    def why_torch_optimizer(self) -> str:
        return "each of its learners has an optimizer's state of its own"

    def pattern(self) -> Pattern:
        return Pattern("windows", every=self.every if self.every != "auto" else 1, overlap=False)

    def make(self, model: nn.Module, optimizer: Optimizer, world: World) -> Replica:
        return CrossbowReplica(model, optimizer, world, self)

    def _check_rest(self, k: int) -> None:
        """Without gradients, e = mean(w) - z and v = z - z_before go e' = (1 - alpha (1 + k)) e - momentum v,
        v' = alpha k e + momentum v: they shrink where alpha < 2 (1 + momentum) / (1 + k + momentum)."""
        most = 2 * (1 + self.momentum) / (1 + k + self.momentum)
        if self.alpha is not None and self.alpha > most:
            raise ValueError(
                f"alpha={self.alpha} with {k} learners in all would make them swing about the central model ever "
                f"further: give at most {most:.3g}, or None for 1 / {k}"
            )
