"""A second copy of every shard, on the next rank: what a lost rank held is still there.

Rank r keeps the shards of rank r - 1: what the optimizer steps, and its state. They begin as the same part of
one whole model, so nothing is sent then. From there on both take the same steps:

1. gradients: a reduced shard also goes to the next rank, while backward goes on. What is done to one gradient later
   (clipping, AMP's unscaling) is done to both;
2. agreement: before it steps, a rank waits until all have the gradients of both, as they will be stepped;
3. the step: the optimizer steps both.

If a rank is lost, the others may be one step apart. One that has stepped has passed 2, so all had come to 2 and hold
what the step needs: those that are behind take it then. One that broke off inside 3 counts as lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
            spare.gradient = torch.empty_like(mine)
        parts, outs = [mine[:0]] * unit.size, [mine[:0]] * unit.size
        parts[self._next], outs[self._before] = mine, spare.gradient
        self._channel.all_to_all(parts, out=outs, tag=f"spare/{unit.index}").wait()

    def agree(self, window: int) -> None:
        """The optimizer is about to step with the gradients of a window: wait until all ranks have what it takes."""
        is_torn = self._state in (ShardState.CHANGING, ShardState.TORN)
        if self._state is ShardState.CHANGING and window == self._window:
            return  # the step of a class around another's, whose hooks are called too
        self._window = window
        leaves = [leaf for unit in self._units for one in unit.held for leaf in one.leaves]
        self._ready = [(leaf, leaf.grad, 0 if leaf.grad is None else leaf.grad._version) for leaf in leaves]
        on = self._units[0].params[0].device
        if on.type == "cuda":  # what has been asked for must be here, also on those that fail in the next call
            torch.cuda.current_stream(on).synchronize()
        self._state = ShardState.TORN if is_torn else ShardState.READY
        self._channel.barrier(tag="spare")
        self._state = ShardState.TORN if is_torn else ShardState.CHANGING

    def end_step(self) -> None:
        """Called after the step: this rank's shards and the spare copies have been stepped."""
        if self._ready is None:
            return
        self.steps += 1
        self._ready = None
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

    def catch_up(self, steps: int, optimizer: Optimizer) -> None:
        """Take the step that others have taken."""
        if self.steps < steps:
            assert self._ready is not None
            for leaf, grad, _ in self._ready:
                leaf.grad = grad
            self._state = ShardState.CATCHING_UP
            try:
                optimizer.step()
            finally:
                self._state = ShardState.STEPPED

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()


def find_holders(former_size: int, candidates: Mapping[int, tuple[int, Any]]) -> tuple[int, dict[int, tuple[int, int]]]:
    """How many steps to go on from, and by former rank who holds its shards then: the rank in the new world, and 0 for
    its own or 1 for a copy.

    candidates: by former rank, the rank in the new world and its `Spare.progress()`.
    """
    usable = {former: (r, found) for former, (r, found) in candidates.items() if found["steps"] is not None}
    steps = max((found["steps"] for _, found in usable.values()), default=0)
    there = {former: r for former, (r, found) in usable.items() if found["reach"] >= steps}
    holders = {}
    for former in range(former_size):
        after = (former + 1) % former_size
        if former in there:
            holders[former] = (there[former], 0)
        elif after in there:
            holders[former] = (there[after], 1)
    return steps, holders
