"""A second copy of every shard, on the next rank: what a lost rank held is still there.

Rank r keeps the shards of rank r - 1: what the optimizer steps, and its state. They begin as the same part of
one whole model, so nothing is sent then. From there on both take the same steps:

1. gradients: a reduced shard also goes to the next rank, while backward goes on. What is done to one gradient later
   (clipping, AMP's unscaling) is done to both;
2. agreement: before it steps, a rank waits until all have the gradients of both, as they will be stepped;
3. the step: the optimizer steps both.

Where there are groups of ranks, each of which has all shards (see `groups`), the copies are in the other groups, and
phase 1 sends nothing.

If a rank is lost, the others may be one step apart. One that has stepped has passed 2, so all had come to 2 and hold
what the step needs: those that are behind take it then. One that broke off inside 3 counts as lost.

Of several optimizers, all that step with one window make one step here: 2 is for all of them, and those that are left
end it by themselves. If the program changes gradients between their steps, 2 comes again; a loss there is one of state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from unisono.methods.strategies.zero.units import Unit
from unisono.world import World


class ShardState(Enum):
    """What a rank's own shards and the copies that it keeps are good for."""

    STEPPED = auto()  # both have taken `steps` steps
    READY = auto()  # and their gradients are here: both can take one more, whoever is lost
    CHANGING = auto()  # being written: of no use to others if that breaks off
    TORN = auto()  # it has broken off
    CATCHING_UP = auto()  # they take a step that other ranks have taken


class Spare:
    """The copies that one rank keeps, and how far they and its own shards got.

    steps: how many both have taken.
    """

    def __init__(self, units: Sequence[Unit], world: World) -> None:
        self._units = list(units)
        self._channel = world.channel(inline=True)
        self._before, self._next = (world.rank - 1) % world.size, (world.rank + 1) % world.size
        self._state = ShardState.STEPPED
        self._ready: list[tuple[Parameter, Tensor | None, int]] | None = None  # what the step needs, and its version
        self._window = 0  # that the step belongs to
        self._optimizer: Optimizer | None = None  # whose step it is
        self.stepped: list[Optimizer] = []  # who has stepped with that window
        self.steps = 0

    @property
    def is_catching_up(self) -> bool:
        """Whether the optimizer takes a step that other ranks have taken."""
        return self._state is ShardState.CATCHING_UP

    # A step ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def send(self, unit: Unit) -> None:
        """Send the gradient of my shard to the next rank, and take that of the rank before me: every rank calls it."""
        mine, spare = unit.gradient, unit.spare
        assert mine is not None
        assert spare is not None
        if spare.gradient is None or spare.gradient.dtype != mine.dtype:
            spare.gradient = mine.new_empty(spare.shard_length)
        parts, outs = [mine[:0]] * unit.size, [mine[:0]] * unit.size
        parts[self._next], outs[self._before] = mine, spare.gradient
        self._channel.all_to_all(parts, out=outs, tag=f"spare/{unit.index}").wait()

    def agree(self, window: int, optimizer: Optimizer, changed: set[int], number: int) -> None:
        """The optimizer, or the one of several with that number, is about to step with the gradients of a window: wait
        until all ranks have what it takes. `changed`: the numbers of those whose gradients are not what they were when
        this was last agreed on, which is set back."""
        is_torn = self._state in (ShardState.CHANGING, ShardState.TORN)
        if self._state is ShardState.CHANGING and window == self._window and optimizer is self._optimizer:
            return  # the step of a class around another's, whose hooks are called too
        again = bool(self.stepped) and window == self._window and not any(optimizer is one for one in self.stepped)
        if again and number not in changed and not is_torn:
            self._state, self._optimizer = ShardState.CHANGING, optimizer
            return
        changed.clear()
        if not again:
            self.stepped = []
        self._window, self._optimizer = window, optimizer
        leaves = [leaf for unit in self._units for one in unit.held for leaf in one.leaves]
        self._ready = [(leaf, leaf.grad, 0 if leaf.grad is None else leaf.grad._version) for leaf in leaves]
        on = self._units[0].params[0].device
        if on.type == "cuda":  # what has been asked for must be here, also on those that fail in the next call
            torch.cuda.current_stream(on).synchronize()
        self._state = ShardState.TORN if is_torn or again else ShardState.READY
        self._channel.barrier(tag="spare")
        self._state = ShardState.TORN if is_torn else ShardState.CHANGING

    def end_step(self, optimizer: Optimizer) -> None:
        """Called after the step: this rank's shards and the spare copies have been stepped."""
        if self._ready is not None and not self.stepped:
            self.steps += 1
        self._ready = None
        self.stepped = [*(one for one in self.stepped if one is not optimizer), optimizer]
        if self._state is ShardState.CHANGING:
            self._state = ShardState.STEPPED

    @contextmanager
    def changing(self) -> Iterator[None]:
        """While the block writes new values to all shards, they are of no use to others."""
        self._state = ShardState.CHANGING
        yield
        self._state = ShardState.STEPPED  # not if it breaks off

    # After a loss ----------------------------------------------------------------------------------------

    def progress(self) -> dict[str, Any]:
        """How many steps the shards here have taken, and can take by themselves; None if they are of no use."""
        ready = self._ready is not None and all(g is None or g._version == version for _, g, version in self._ready)
        useful = self._state in (ShardState.STEPPED, ShardState.READY)
        return {"steps": self.steps if useful else None, "reach": self.steps + ready}

    def catch_up(self, steps: int, optimizers: Sequence[Optimizer]) -> None:
        """Take the step that others have taken, with these optimizers."""
        if self.steps < steps:
            assert self._ready is not None
            for leaf, grad, _ in self._ready:
                leaf.grad = grad
            self._state = ShardState.CATCHING_UP
            try:
                for optimizer in optimizers:
                    optimizer.step()
            finally:
                self._state = ShardState.STEPPED

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()


def find_holders(
    size: int, candidates: Sequence[tuple[int, int, Any]], *, copies: bool
) -> tuple[int, dict[int, tuple[int, int]]]:
    """How many steps to go on from, and by shard who holds it then: the rank in the new world, and 0 for its own or 1
    for a copy.

    size: how many shards there were. candidates: of each rank that stayed, which of these it had, its rank in the new
    world and its `Spare.progress()`. copies: it kept a copy of the one before its own, too.
    """
    usable = [(shard, r, found) for shard, r, found in candidates if found["steps"] is not None]
    steps = max((found["steps"] for _, _, found in usable), default=0)
    there: dict[int, int] = {}
    for shard, r, found in usable:
        if found["reach"] >= steps:
            there.setdefault(shard, r)
    holders = {}
    for shard in range(size):
        after = (shard + 1) % size
        if shard in there:
            holders[shard] = (there[shard], 0)
        elif copies and after in there:
            holders[shard] = (there[after], 1)
    return steps, holders
