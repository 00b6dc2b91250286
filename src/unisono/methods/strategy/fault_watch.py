"""When the faults of a fault script are due: at the steps of a replica, and inside them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from time import sleep
from typing import Any

import torch
from torch import nn

from unisono.launchers.runtime import faults
from unisono.launchers.runtime.faults import Armed, Fault
from unisono.methods.exchange.windows import if_alive
from unisono.methods.model_copies import add_hook
from unisono.world import World
from unisono.world.ledger import Ledger, Record


class FaultWatch:
    """Watches a replica's model and ledger, and fires what is due. Step n lasts until the ledger counts n steps."""

    def __init__(self, model: nn.Module, world: World, armed: Sequence[Armed]) -> None:
        self._armed = list(armed)
        self.enter(world)
        self._hooks: list[Any] = []
        if self._in_phase("forward"):
            self._hooks.append(add_hook(model.register_forward_pre_hook, self._on_forward))
        if self._in_phase("backward"):
            last = [p for p in model.parameters() if p.requires_grad][-1]  # the first that backward reaches
            ready = weakref.WeakMethod(self._on_gradient)
            self._hooks.append(last.register_post_accumulate_grad_hook(partial(if_alive, ready, "")))

    def enter(self, world: World) -> None:
        """Go on in a world: its ledger counts."""
        self._ledger = world.ledger
        faults.listen(partial(_note_event, weakref.ref(world.ledger)))
        if self._in_phase("exchange"):
            world.ledger.on_record = weakref.WeakMethod(self._on_record)

    @classmethod
    def find(cls, model: nn.Module, world: World) -> FaultWatch | None:
        """One for the faults of this worker; None where it has none."""
        armed = faults.find_armed()
        return cls(model, world, armed) if armed else None

    def _in_phase(self, phase: str) -> list[Armed]:
        return [one for one in self._armed if one.fault.phase == phase and not one.fired]

    # Steps -------------------------------------------------------------------------------------------------------

    def before_count(self, owner: object) -> None:
        """The step is about to be counted: make it longer, where it is to be slow."""
        step = self._ledger.step_count + 1
        for one in self._armed:
            if one.fault.kind == "slow" and one.fault.step <= step <= one.fault.last:
                row = self._ledger.measure(owner)
                if row is not None:
                    one.fire(step)
                    sleep((one.fault.factor - 1.0) * row.compute)

    def after_count(self) -> None:
        """The step has been counted."""
        for one in self._in_phase("step"):
            if one.fault.kind in ("kill", "stop") and one.is_due(self._ledger.step_count):
                one.fire(self._ledger.step_count)

    def in_update(self) -> None:
        """The optimizer steps."""
        for one in self._in_phase("update"):
            if one.is_due(self._ledger.step_count):
                one.fire(self._ledger.step_count)

    # Inside a step -----------------------------------------------------------------------------------------------

    def _on_forward(self, _module: nn.Module, _args: Any) -> None:
        if torch.is_grad_enabled():  # else the model is being evaluated
            self._fire_now("forward")

    def _on_gradient(self, _name: str, _param: torch.Tensor) -> None:
        self._fire_now("backward")

    def _fire_now(self, phase: str) -> None:
        for one in self._in_phase(phase):
            if one.is_due(self._ledger.step_count + 1):
                one.fire(self._ledger.step_count + 1)

    def _on_record(self, record: Record) -> None:
        """A collective has ended. Not every step has one: the first from that step on is the one that is meant."""
        for one in self._in_phase("exchange"):
            if record.op != "objects" and one.fault.step <= self._ledger.step_count + 1:
                one.fire(self._ledger.step_count + 1)

    def close(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def _note_event(ledger: weakref.ref[Ledger], fault: Fault, step: int) -> None:
    book = ledger()
    if book is not None:
        book.event("fault", fault=str(fault), at=step)
