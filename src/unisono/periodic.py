"""Replicas that train alone and meet the others between windows: what the model-exchanging strategies share."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.buckets import Counter
from unisono.strategy import Replica, Strategy
from unisono.world import World


class PeriodicReplica(Replica):
    """Counts windows of backward passes; after each, `meet()` may exchange parameters.

    A window is followed by the optimizer's step, and `meet()` by that. But AMP skips steps, on one rank alone where
    gradients are local: then `meet()` comes before the next forward pass, or when the model is asked for. So that
    other ranks need not wait for that, tell the replica of the scaler: `replica.watch(scaler)`.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, world: World, strategy: Strategy, *, accumulate: int
    ) -> None:
        super().__init__(model, optimizer, world, strategy)
        last = [p for p in model.parameters() if p.requires_grad][-1]  # the first that backward reaches
        self._counter = Counter(last, accumulate=accumulate, advance=self.advance)
        self._ended = False  # a window has ended, and the ranks have not met since
        self._forward = model.register_forward_pre_hook(partial(_meet_if_due, weakref.ref(self)))
        self._zeroing: list[Any] = []
        world.on_weight(self)
        self.weight_changed(world.weight)

    def meet(self) -> None:
        """Between two windows: exchange what is due. Every rank comes here after every window."""
        raise NotImplementedError

    def advance(self) -> None:
        super().advance()
        self._ended = True

    def before_step(self) -> None:
        self._counter.before_step()

    def after_step(self) -> None:
        self._counter.after_step()
        self.meet_if_due()

    def meet_if_due(self) -> None:
        """Meet, if a window has ended since."""
        if self._ended:
            self._ended = False
            with torch.no_grad():
                self.meet()

    def watch(self, scaler: torch.amp.GradScaler) -> None:
        """Meet after `scaler.update()` where the step was skipped."""
        update = scaler.update

        def update_and_meet(*args: Any, **kwargs: Any) -> None:
            update(*args, **kwargs)
            self.meet_if_due()

        scaler.update = update_and_meet  # type: ignore[method-assign]

    def no_sync(self) -> AbstractContextManager[None]:
        return self._counter.no_sync()

    def consolidate(self) -> nn.Module:
        self.meet_if_due()
        return self.model

    def weight_changed(self, weight: float) -> None:
        """A batch of weight zero stands in for one that is missing (see `World.weight`): its gradient is zero."""
        for hook in self._zeroing:
            hook.remove()
        params = [p for p in self.model.parameters() if p.requires_grad]
        self._zeroing = [] if weight != 0.0 else [p.register_hook(torch.zeros_like) for p in params]

    def close(self) -> None:
        super().close()
        self._counter.close()
        self._forward.remove()
        for hook in self._zeroing:
            hook.remove()


def _meet_if_due(replica: weakref.ref[PeriodicReplica], *_: Any) -> None:
    alive = replica()
    if alive is not None:
        alive.meet_if_due()
