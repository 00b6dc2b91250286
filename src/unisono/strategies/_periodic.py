"""Replicas that train alone and meet the others between windows: what the model-exchanging strategies share."""

from __future__ import annotations

import copy
import weakref
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.exchange.windows import Counter
from unisono.strategy import Replica, Strategy
from unisono.world import World


class PeriodicReplica(Replica):
    """Counts windows of backward passes; after each, `meet()` may exchange parameters.

    A window is followed by the optimizer's step, and `meet()` by that. But AMP skips steps, on one rank alone where
    gradients are local: then `meet()` comes before the next forward pass, or when the model or its state is asked
    for. So that other ranks need not wait for that, tell the replica of the scaler: `replica.watch(scaler)`.
    `meet()` is called once for every window, if late then twice in a row: so ranks stay in step whatever one skips.
    A step with a closure (LBFGS) is one window, however often it calls the closure.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, world: World, strategy: Strategy, *, accumulate: int
    ) -> None:
        super().__init__(model, optimizer, world, strategy)
        self._counter = self._new_counter(accumulate)
        self._ended = 0  # windows that have ended, and after which the ranks have not met
        self._closure: AbstractContextManager[None] | None = None  # a step with a closure is under way
        self._forward = model.register_forward_pre_hook(partial(_meet_if_due, weakref.ref(self)))
        self._zeroing: list[Any] = []
        world.on_weight(self)
        self.weight_changed(world.weight)

    def _new_counter(self, accumulate: int) -> Counter:
        *others, last = [p for p in self.model.parameters() if p.requires_grad]  # the last: backward reaches it first
        return Counter(last, accumulate=accumulate, advance=self.advance, others=others)

    @property
    def met(self) -> int:
        """The number of the window that `meet()` is about: windows so far, less those that are still to be met."""
        return self.step - self._ended

    def meet(self) -> None:
        """Between two windows: exchange what is due. Every rank comes here after every window."""
        raise NotImplementedError

    def advance(self) -> None:
        super().advance()
        self._ended += 1

    def _about_to_step(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        if self._closure is not None:  # the step before this one failed
            self._closure.__exit__(None, None, None)
            self._closure = None
        changed = super()._about_to_step(optimizer, args, kwargs)
        if changed is not None:  # ranks may call their closures more or less often
            self._closure = self._counter.no_sync()
            self._closure.__enter__()
        return changed

    def before_step(self) -> None:
        self._counter.before_step()

    def after_step(self) -> None:
        if self._closure is not None:
            self._closure.__exit__(None, None, None)
            self._closure = None
            self._counter.before_step()
        self._counter.after_step()
        self.meet_if_due()

    def meet_if_due(self) -> None:
        """Meet, if a window has ended since."""
        self._counter.catch_up()
        while self._ended:
            self._ended -= 1
            with torch.no_grad():
                self.meet()

    def watch(self, scaler: torch.amp.GradScaler) -> None:
        """Meet after `scaler.update()` where the step was skipped."""
        super().watch(scaler)
        update, me = scaler.update, weakref.ref(self)

        def update_and_meet(*args: Any, **kwargs: Any) -> None:
            update(*args, **kwargs)
            _meet_if_due(me)

        scaler.update = update_and_meet  # type: ignore[method-assign]

    def no_sync(self) -> AbstractContextManager[None]:
        return self._counter.no_sync()

    def state_dict(self) -> dict[str, Any]:
        self.meet_if_due()  # ranks that did not skip their step have met, or wait for this one
        return super().state_dict()

    def load_state_dict(self, state: dict[str, Any], *, same_world: bool = True) -> None:
        super().load_state_dict(state, same_world=same_world)
        self._ended = 0

    def consolidate(self) -> nn.Module:
        self.meet_if_due()
        return self.model

    def copied(self) -> nn.Module:
        """A copy of the model that belongs to no replica."""
        made = copy.deepcopy(self.model)
        made._forward_pre_hooks.pop(self._forward.id, None)
        return made

    def move_to(self, world: World) -> None:
        """The first part of a rebind: windows are those of another world, and gradients not yet stepped are gone."""
        self.world.off_weight(self)
        self.world = world
        self._ended = 0
        self._counter.close()
        self._counter = self._new_counter(self._counter.accumulate)
        self.model.zero_grad()
        world.on_weight(self)
        self.weight_changed(world.weight)

    def weight_changed(self, weight: float) -> None:
        """A batch of weight zero stands in for one that is missing (see `World.weight`): its gradient is zero."""
        for hook in self._zeroing:
            hook.remove()
        params = [p for p in self.model.parameters() if p.requires_grad]
        self._zeroing = [] if weight != 0.0 else [p.register_hook(torch.zeros_like) for p in params]

    def close(self) -> None:
        super().close()
        self.world.off_weight(self)
        self._counter.close()
        self._forward.remove()
        self._ended = 0
        for hook in self._zeroing:
            hook.remove()


def _meet_if_due(replica: weakref.ref[PeriodicReplica], *_: Any) -> None:
    alive = replica()
    if alive is not None:
        alive.meet_if_due()
