"""The replica that a program holds while the strategy below it changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unisono.methods.exchange.windows import StepHooks
from unisono.methods.strategy.replica import Replica, Strategy
from unisono.methods.strategy.switching import switch
from unisono.observe.runs import recording


class ChangingReplica(Replica):
    """Stands in front of `inner`, the replica at work. What this class does not define is inner's: the members of
    `Replica`, which the class gets below its definition, and whatever else the method at work has.

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
        recording.note_method(self.world, self.inner.not_measured, bytes_by_formula=self.inner.bytes_by_formula)

    def _follow_inner(self) -> None:
        """Be called after `inner`: in the order in which they came."""
        if self._hook is not None:
            self._hook.remove()
        self._hook = StepHooks.of(self.inner.optimizer).watch(None, self._between_steps)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # it is about to be made
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        mine = name in ("inner", "strategy") or name.startswith("_") or not hasattr(vars(self).get("inner"), name)
        if mine:
            super().__setattr__(name, value)
        else:
            setattr(self.inner, name, value)

    def state_dict(self) -> dict[str, Any]:
        return {**self.inner.state_dict(), "shared": self.shared_state()}

    def load_state_dict(self, state: dict[str, Any], *, same_world: bool = True) -> None:
        super().load_state_dict(state, same_world=same_world)  # by `load_shared`, which may put another to work
        self.forget_writes()

    def switch(self, strategy: str | Strategy) -> Replica:
        new = self.inner.switch(strategy)
        self.close()
        return new

    def close(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        self.inner.close()


def _of_inner(name: str) -> property:
    return property(
        lambda replica: getattr(replica.inner, name), lambda replica, value: setattr(replica.inner, name, value)
    )


for _name in vars(Replica):
    if not _name.startswith("__") and _name not in vars(ChangingReplica):
        setattr(ChangingReplica, _name, _of_inner(_name))
