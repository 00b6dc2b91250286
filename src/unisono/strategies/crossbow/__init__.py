"""Crossbow: many small-batch learners, each pulled towards a central model that they move together.

Koliousis, Watcharapichat, Weidlich, Mai, Costa, Pietzuch, 2019 (arXiv:1901.02244): synchronous model averaging.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.buckets import BUCKET_BYTES
from unisono.facts import Example, Facts
from unisono.strategies.crossbow.learners import Batches
from unisono.strategies.crossbow.replica import CenteredReplica
from unisono.strategies.crossbow.tuning import Tuning
from unisono.strategy import Replica, Strategy, check_count
from unisono.sync_batch_norm import SyncBatchNorm
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

    learners: int | Literal["auto"] = 1
    every: int | Literal["auto"] = 1
    alpha: float | None = None
    momentum: float = 0.9
    drop: float = 0.9
    tune_every: int = 100
    accumulate: int = 1
    bucket_bytes: int = BUCKET_BYTES

    def bind(self, model: nn.Module, optimizer: Optimizer, world: World) -> Replica:
        for name, meaning in (("learners", "learners on a worker"), ("every", "windows between synchronisations")):
            if getattr(self, name) != "auto":
                check_count(name, getattr(self, name), f"{meaning} (or is 'auto')")
        check_count("tune_every", self.tune_every, "windows between decisions")
        check_count("accumulate", self.accumulate, "backward passes a window")
        check_count("bucket_bytes", self.bucket_bytes, "bytes a bucket")
        if self.alpha is not None:
            _check_within("alpha", self.alpha, "more than 0 and at most 1, or None for 1 / learners in all", 0.0, 1.0)
        _check_within(
            "momentum", self.momentum, "at least 0 and less than 1", math.nextafter(0, -1), math.nextafter(1, 0)
        )
        _check_within("drop", self.drop, "more than 0 and at most 1", 0.0, 1.0)
        self._check_rest(world.size * (self.learners if self.learners != "auto" else 1))
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


class CrossbowReplica(CenteredReplica):
    """Learners in turn or side by side, their number and how often they meet as the tuners say."""

    strategy: crossbow

    def __init__(self, model: nn.Module, optimizer: Optimizer, world: World, strategy: crossbow) -> None:
        self.tuning = Tuning(strategy.learners, strategy.every, strategy.tune_every)
        self._side_by_side = False
        super().__init__(
            model,
            optimizer,
            world,
            strategy,
            learners=self.tuning.learners,
            every=self.tuning.every,
            alpha=strategy.alpha,
            momentum=strategy.momentum,
            drop=strategy.drop,
            accumulate=strategy.accumulate,
            bucket_bytes=strategy.bucket_bytes,
        )

    # Tuning ------------------------------------------------------------------------------------------------------

    def after_round(self) -> None:
        """Between rounds: at intervals, change the number of learners, or how often they meet."""
        observed = self.tuning.observed(self.met, self.world.ledger)
        if observed is None:
            return
        sums = torch.tensor([*observed, self._side_by_side], dtype=torch.float64)
        self.start_job(lambda channel: channel.all_reduce(sums, "sum", tag="tuning").wait()).wait()
        throughput, communication, compute, users = sums.tolist()
        why = self.tuning.decide(throughput, communication, compute, side_by_side=users == self.world.size)
        self._side_by_side = False
        if why:
            self.every = self.tuning.every
            self.resize(self.tuning.learners)
            told = {"learners": self.tuning.learners, "every": self.tuning.every, "throughput": throughput}
            self.world.ledger.event("crossbow", **told, why=why)

    def shared_state(self) -> dict[str, Any]:
        return {**super().shared_state(), "tuning": self.tuning.state_dict()}

    def take_shared(self, shared: dict[str, Any]) -> None:
        super().take_shared(shared)
        self.tuning.load_state_dict(shared["tuning"])
        self.wanted, self.every = self.tuning.learners, self.tuning.every

    # Side by side ------------------------------------------------------------------------------------------------

    def batches(self, loader: Iterable[Any]) -> Iterator[Batches]:
        """The loader's batches, so many at a time as `learn` runs side by side."""
        return self.learners.batches(loader, self.strategy.accumulate, self.world)

    def learn(
        self,
        loss_of: Callable[[nn.Module, Any], Tensor],
        batches: Sequence[Any],
        *,
        adjust: Callable[[], object] | None = None,
    ) -> list[Tensor]:
        """Run the learners side by side, in threads (streams on CUDA): `accumulate` batches each, and a step each.

        `loss_of(model, batch)` computes the loss with the model it is given; enter autocast inside it. `adjust()` is
        called before each learner's step, with its gradients in `replica.model`: to clip them, say. The loop has no
        backward and no step of its own. The arithmetic is that of the plain loop. Returns the losses.

        for batches in replica.batches(loader):
            replica.learn(lambda model, batch: loss_fn(model(batch[0]), batch[1]), batches)
        """
        if self.learners.count > 1 and any(isinstance(m, SyncBatchNorm) for m in self.model.modules()):
            raise ValueError(
                "SyncBatchNorm cannot run in several learners at a time, as their collectives would mix: use "
                "BatchNorm, or the plain loop, in which learners take turns"
            )
        losses, self._side_by_side = [], True
        self.meet_if_due()
        for shares in self.learners.shares(batches, self.strategy.accumulate, self.world):
            self.begin()
            found, grads = self.learners.gradients(loss_of, shares)
            losses += found
            for each in grads:
                self.learners.put(each)
                if adjust is not None:
                    adjust()
                self.optimizer.step()  # ends the window, and with it this learner's turn
                self.model.zero_grad()
        return losses


def _check_within(name: str, value: object, wanted: str, above: float, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not above < value <= most:
        raise ValueError(f"{name} must be {wanted}, got {value!r}")
