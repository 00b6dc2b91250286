"""The replica that a program holds while the strategy below it changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from unisono.checkpoint import ModelPart
from unisono.exchange.windows import StepHooks, Windows
from unisono.strategy.replica import Replica, Residual, Strategy
from unisono.strategy.switching import switch
from unisono.world import World

if TYPE_CHECKING:
    from unisono.strategy.healing import Healing


class ChangingReplica(Replica):
    """Stands in front of `inner`, the replica at work, and passes everything on to it.

    `between_steps` is called after each step of the optimizer, once `inner` has done its part: there, and nowhere
    else, the strategy may change, by `change` or `replace`.
    """

    is_trial = False  # nothing of it is to be kept: `un.save` writes nothing

    def __init__(self, inner: Replica, strategy: Strategy, between_steps: Callable[[], None]) -> None:
        # Replica's own would watch the optimizer and the model a second time.
        self.inner, self.strategy = inner, strategy
        self._between_steps = between_steps
        self._hook: Any = None
        self._follow_inner()

    def change(self, strategy: str | Strategy) -> None:
        """Go on with another strategy: see `Replica.switch`. Every rank calls it at the same step."""
        self.replace(lambda: switch(self.inner, strategy))

    def replace(self, make: Callable[[], Replica]) -> None:
        """Put what `make` gives in the place of `inner`, which `make` has closed."""
        healing = self.inner.healing
        self.inner = make()
        self.inner.healing = healing
        self._follow_inner()

    def _follow_inner(self) -> None:
        """Be called after `inner`: in the order in which they came."""
        if self._hook is not None:
            self._hook.remove()
        self._hook = StepHooks.of(self.inner.optimizer).watch(None, self._between_steps)

    # What it has is inner's -------------------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:  # type: ignore[override]
        """The program's model."""
        return self.inner.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:  # type: ignore[override]
        """The program's optimizer."""
        return self.inner.optimizer

    @property
    def world(self) -> World:
        """The world that `inner` is in."""
        return self.inner.world

    @world.setter
    def world(self, world: World) -> None:
        self.inner.world = world

    @property
    def scaler(self) -> torch.amp.GradScaler | None:  # type: ignore[override]
        """The one that it was told to watch."""
        return self.inner.scaler

    @property
    def step(self) -> int:
        """Windows of backward passes so far, under all strategies."""
        return self.inner.step

    @step.setter
    def step(self, step: int) -> None:
        self.inner.step = step

    @property
    def healing(self) -> Healing | None:
        """Where ranks come and go."""
        return self.inner.healing

    @healing.setter
    def healing(self, healing: Healing | None) -> None:
        self.inner.healing = healing

    @property
    def own_gradients(self) -> bool:  # type: ignore[override]
        """Whether ranks' gradients differ now."""
        return self.inner.own_gradients

    @property
    def is_closed(self) -> bool:  # type: ignore[override]
        """Whether nothing is watched any more."""
        return self.inner.is_closed

    # What it does is inner's ------------------------------------------------------------------------------------

    def before_step(self) -> None:
        self.inner.before_step()

    def after_step(self) -> None:
        self.inner.after_step()

    def forget_writes(self) -> None:
        self.inner.forget_writes()

    def find_windows(self) -> Windows | None:
        return self.inner.find_windows()

    def no_sync(self) -> AbstractContextManager[None]:
        return self.inner.no_sync()

    def watch(self, scaler: torch.amp.GradScaler) -> None:
        self.inner.watch(scaler)

    def consolidate(self) -> nn.Module:
        return self.inner.consolidate()

    def restore(self) -> None:
        self.inner.restore()

    def split_again(self) -> None:
        self.inner.split_again()

    def close(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        self.inner.close()

    def shared_state(self) -> dict[str, Any]:
        return self.inner.shared_state()

    def local_state(self) -> dict[str, Any]:
        return self.inner.local_state()

    def load_shared(self, shared: dict[str, Any]) -> None:
        self.inner.load_shared(shared)

    def load_local(self, shared: dict[str, Any], locals_: Sequence[dict[str, Any]], *, same_world: bool) -> None:
        self.inner.load_local(shared, locals_, same_world=same_world)

    def model_part(self) -> ModelPart:
        return self.inner.model_part()

    def present_ranks(self) -> list[int]:
        return self.inner.present_ranks()

    def gather_present(self, obj: Any) -> dict[int, Any]:
        return self.inner.gather_present(obj)

    def sharded_state(self) -> dict[str, Any] | None:
        return self.inner.sharded_state()

    def load_sharded_state(self, whole: dict[str, Any], *, same_world: bool) -> None:
        self.inner.load_sharded_state(whole, same_world=same_world)

    def switch(self, strategy: str | Strategy) -> Replica:
        new = self.inner.switch(strategy)
        self.close()
        return new

    def unsent(self) -> Residual | None:
        return self.inner.unsent()

    def take_unsent(self, unsent: Residual) -> None:
        self.inner.take_unsent(unsent)

    def rebind(self, world: World, *, source: int = 0) -> str:
        return self.inner.rebind(world, source=source)
