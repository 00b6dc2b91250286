"""Gradients of units, reduced to one shard a rank while backward goes on.

Three phases, in one backward:
1. waiting: a unit is complete when every parameter of it has its gradient;
2. reducing: its gradients are copied into one line, which is reduced; each rank keeps its part, and the rest of the
   gradients is let go. Units are reduced from the last to the first, on every rank alike;
3. finishing: at the end of backward what is missing counts as zero. At the end of a window the ranks agree on which
   parameters had a gradient at all, and every `p.grad` is a `ShardedGradient`.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.utils.checkpoint import CheckpointFunction

from unisono.background import Handle, SerialQueue
from unisono.exchange.overlap import scale_gradient
from unisono.exchange.windows import Windows, if_alive
from unisono.strategies.zero.keeping import Keeping
from unisono.strategies.zero.sharded_gradient import ShardedGradient
from unisono.strategies.zero.units import Unit
from unisono.world import World

LINES_IN_FLIGHT = 3  # in flight, where reducing overlaps with backward


class Backward(Windows, Keeping):
    """Watches the backward passes of the trainable units.

    stage: 1 keeps the gradients of a window's passes whole and reduces with the last one, 2 and 3 reduce with every
        pass and add up shards.
    arrived(unit, slot): a parameter has its gradient.
    complete(unit): all gradients of a unit have been taken; its values are not needed any more in this pass.
    reduced(unit, fresh): the gradient of my shard is that of the whole window; `fresh`, if gradients were cleared
        before it.
    finished(world): all units are; with the world to talk in.
    check(): a pass begins; raises what must not be.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        world: World,
        *,
        stage: int,
        accumulate: int,
        overlap: bool,
        advance: Callable[[], None],
        arrived: Callable[[Unit, int], None],
        complete: Callable[[Unit], None],
        reduced: Callable[[Unit, bool], None],
        finished: Callable[[World], None],
        check: Callable[[], None],
    ) -> None:
        super().__init__(accumulate, advance)
        self.units, self.world, self.stage = list(units), world, stage
        self.channel = world.channel(inline=True)
        self._arrived = arrived
        self._complete, self._reduced, self._finished, self._check = complete, reduced, finished, check
        on_cpu = units[0].params[0].device.type == "cpu"  # on a GPU, work is in the background anyway
        self._lane = SerialQueue("unisono reduce") if overlap and world.size > 1 and on_cpu else None
        self._lines = [self._line() for _ in range(LINES_IN_FLIGHT if self._lane else 1)]
        self._running: deque[tuple[Handle[None], Tensor]] = deque()
        self._position = {unit: i for i, unit in enumerate(self.units)}
        self._places = [(unit, slot) for unit in self.units for slot in range(len(unit.params))]
        self._first = {unit: number for number, (unit, slot) in reversed(list(enumerate(self._places))) if slot == 0}
        self._wrapped = [self._wrapper(number) for number in range(len(self._places))]
        ready = weakref.WeakMethod(self._ready)
        self._hooks = [
            unit.params[slot].register_post_accumulate_grad_hook(partial(if_alive, ready, number))
            for number, (unit, slot) in enumerate(self._places)
        ]
        self._weighting: list[Any] = []
        self.stand_in: Tensor | None = None  # what the optimizer holds where no element is mine: a scaler looks at it
        self._task = -1
        self._reducing = False
        self._opened()
        self._reset()
        world.on_weight(self)
        self.weight_changed(world.weight)

    def _line(self) -> Tensor:
        nbytes = max(unit.numel * unit.dtype.itemsize for unit in self.units)
        on = self.units[0].params[0].device
        return self.channel.empty(nbytes, torch.uint8) if on.type == "cpu" else torch.empty(
            nbytes, dtype=torch.uint8, device=on
        )  # fmt: skip

    def _wrapper(self, number: int) -> ShardedGradient:
        unit, slot = self._places[number]
        return ShardedGradient(unit.shapes[slot], unit.dtype, unit.params[slot].device, self, number)

    def _opened(self) -> None:
        """A new window."""
        self._used = [False] * len(self._places)
        self._passes_reduced = 0
        self._stale = False  # this window has ended
        self._forget_norms()

    def _reset(self) -> None:
        """A new pass."""
        self._missing = {unit: len(unit.params) for unit in self.units}
        self._next = len(self.units) - 1
        self._fired: set[int] = set()

    # During backward -------------------------------------------------------------------------------------

    def _ready(self, number: int, _param: Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._begin(task)
        if not self._reducing:
            return
        unit, slot = self._places[number]
        self._arrived(unit, slot)
        if number in self._fired:
            if self._position[unit] > self._next:
                raise RuntimeError(
                    f"the gradient of {unit.names[slot]!r} was accumulated twice in one backward pass, after it was "
                    "reduced (re-entrant checkpointing of a shared parameter does this): use torch.utils.checkpoint "
                    "with use_reentrant=False"
                )
            return
        self._fired.add(number)
        self._missing[unit] -= 1
        while self._next >= 0 and not self._missing[self.units[self._next]]:
            self._launch()

    def _begin(self, task: int) -> None:
        self._check()
        if self.stage > 1 and _in_checkpoint():
            raise RuntimeError(
                "re-entrant activation checkpointing runs a backward inside a backward, and stages 2 and 3 reduce "
                "gradients as they come: use torch.utils.checkpoint with use_reentrant=False, or zero(stage=1)"
            )
        if self._stale:
            self._opened()
        self._ended = False
        self._norms = {}
        self._reset()
        self._task = task
        self._last = not self._local and self._passes + 1 >= self.accumulate
        self._reducing = self.stage > 1 or self._last
        Variable._execution_engine.queue_callback(self._end)

    def _launch(self) -> None:
        """Phase 2 of the next unit."""
        unit, last = self.units[self._next], self._last
        self._next -= 1
        line = self._free()
        flat = line[: unit.nbytes].view(unit.dtype)
        try:
            fresh = self._fill(unit, flat)
        except TypeError:
            self._lines.append(line)
            raise
        self._complete(unit)

        def job() -> None:
            self._reduce(unit, flat, fresh)
            if last:
                self._is_reduced(unit, all(fresh) or self._passes_reduced > 0)

        if self._lane is None:
            try:
                job()
            finally:
                self._lines.append(line)
        else:
            self._running.append((self._lane.submit(job), line))

    def _is_reduced(self, unit: Unit, fresh: bool) -> None:
        if not unit.steps_here and unit.held:  # it leaves: its norms are needed if gradients are to be clipped
            views = [unit.gradient[part.at : part.at + part.length] for part in unit.held]  # type: ignore[index]
            self._squares[unit] = [x.to(_wide(x)).square() for x in torch._foreach_norm(views)]
        self._reduced(unit, fresh)

    def _free(self) -> Tensor:
        if not self._lines:
            self._end_of_oldest()
        return self._lines.pop()

    def _end_of_oldest(self) -> None:
        handle, line = self._running.popleft()
        self._lines.append(line)
        handle.wait()

    def _fill(self, unit: Unit, flat: Tensor) -> list[bool]:
        """Take the gradients of this pass; says which parameters had none from before (or had been cleared)."""
        fresh, targets, grads = [], [], []
        first = self._first[unit]
        for slot, (param, view) in enumerate(zip(unit.params, unit.views(flat), strict=True)):
            wrapped, grad = self._wrapped[first + slot], param.grad
            fresh.append(grad is not wrapped or wrapped.cleared or self._cleared(unit, slot))
            wrapped.cleared = False
            local = wrapped.local if grad is wrapped else grad
            wrapped.local = None
            if local is None:
                view.zero_()
            else:
                if local.is_sparse:
                    raise TypeError(
                        f"the gradient of {unit.names[slot]!r} is sparse, which zero cannot split: make its module "
                        "with sparse=False, or use the allreduce strategy"
                    )
                targets.append(view)
                grads.append(local.detach())
            self._used[first + slot] |= local is not None or (not fresh[-1] and not self._passes_reduced)
            param.grad = wrapped  # also within a backward in a backward, it is not cleared
        if targets:
            torch._foreach_copy_(targets, grads)
        unit.zero_gaps(flat)
        return fresh

    def _cleared(self, unit: Unit, slot: int) -> bool:
        """Whether `optimizer.zero_grad()` let go of my part of a gradient."""
        mine = [leaf for part, leaf in zip(unit.held, unit.leaves, strict=True) if part.slot == slot]
        return not mine or mine[0].grad is None or getattr(mine[0].grad, "cleared", False)

    def _show(self, unit: Unit, used: Sequence[Any]) -> None:
        """Let the optimizer see the gradients of my parts."""
        for part, leaf in zip(unit.held, unit.leaves, strict=True):
            if not used[part.slot]:
                leaf.grad = None
            elif not unit.steps_here:  # a sign that it is there, which zero_grad() takes away
                leaf.grad = ShardedGradient(leaf.shape, leaf.dtype, leaf.device, self, self._first[unit] + part.slot)
            elif unit.gradient is not None:
                leaf.grad = unit.gradient[part.at : part.at + part.length]

    @torch.no_grad()
    def _reduce(self, unit: Unit, flat: Tensor, fresh: list[bool]) -> None:
        old = unit.gradient
        first = old is None or all(fresh)
        direct = first and old is not None and old.dtype == unit.dtype
        mean = old if direct and old is not None else torch.empty(unit.each, dtype=unit.dtype, device=flat.device)
        self.channel.reduce_scatter(flat, "mean", out=mean, tag=unit.tag).wait()
        if first:
            kept = unit.master_dtype if unit.steps_here else unit.dtype  # what leaves may leave as it is
            unit.gradient = mean.to(kept) if old is None or direct else old.copy_(mean)
            return
        assert old is not None
        unit.gradient = old = old.to(unit.master_dtype)
        for part in unit.held:
            if fresh[part.slot]:
                old[part.at : part.at + part.length].zero_()
        old.add_(mean)

    def _end(self) -> None:
        self._task = -1
        if self._reducing:
            self._launch_all()
            self._passes_reduced += 1
        if self._local:
            return
        self._passes += 1
        if self._passes >= self.accumulate:
            self._finish()

    def _launch_all(self) -> None:
        while self._next >= 0:
            self._launch()
        start = self.world.ledger.clock()
        while self._running:
            self._end_of_oldest()
        self.world.ledger.close_span("blocked", start, self.world.ledger.clock())
        for number, (unit, slot) in enumerate(self._places):  # also where only others had one: their part is here
            unit.params[slot].grad = self._wrapped[number]
        for unit in self.units:
            self._show(unit, [True] * len(unit.params))

    @torch.no_grad()
    def _finish(self) -> None:
        """Phase 3: who used what; every rank hears of a value that is not finite, so that AMP skips everywhere."""
        odd = self.world.size > 1 and self._has_odd()
        saw = odd
        flags = torch.tensor([*self._used, odd], dtype=torch.uint8)
        self.channel.all_reduce(flags, "max", tag="used").wait()
        *found, odd = flags.tolist()
        for number, used in enumerate(found):
            unit, slot = self._places[number]
            unit.params[slot].grad = self._wrapped[number] if used else None
            self._used[number] = bool(used)
        if odd and not saw:  # one element will do
            self._spoil()
        for unit in self.units:
            first = self._first[unit]
            self._show(unit, found[first : first + len(unit.params)])
        if self.stand_in is not None:
            self.stand_in.grad = torch.full_like(self.stand_in, math.inf if odd else 0.0)
        self._finished(self.channel)
        self._passes, self._ended, self._stale = 0, True, True
        self._advance()

    def _has_odd(self) -> bool:
        """Whether my shards hold a value that is not finite."""
        shards = [u.gradient for u in self.units if u.gradient is not None and u.each]
        found = [torch.linalg.vector_norm(x, math.inf) for x in shards]
        return bool(found) and not math.isfinite(torch.stack([x.double() for x in found]).sum().item())

    def _spoil(self) -> None:
        for unit in self.units:
            if unit.gradient is not None and unit.held:
                unit.gradient[unit.held[0].at] = math.inf
                return

    # Outside backward ------------------------------------------------------------------------------------

    def before_step(self) -> None:
        """Close the window: a rank whose backward touched nothing, or a last short window, still takes part."""
        if self._ended or self._local:
            self._drop_cleared()
            return
        if self._stale:
            self._opened()
        if self.stage == 1 or not self._passes_reduced:
            self._reset()
            self._last = True
            self._launch_all()
        else:
            for unit in reversed(self.units):
                self._is_reduced(unit, True)
        self._finish()

    def _drop_cleared(self) -> None:
        """A parameter whose `p.grad` was taken away after backward is not stepped."""
        for number, (unit, slot) in enumerate(self._places):
            grad = unit.params[slot].grad
            if not self._used[number] or grad is self._wrapped[number]:
                continue
            if grad is not None:
                raise ValueError(
                    f"the gradient of {unit.names[slot]!r} was replaced after backward, and the optimizer holds parts "
                    "of the former one: change it in place (clipping, mul_), or clear it"
                )
            self._used[number] = False
            for part, leaf in zip(unit.held, unit.leaves, strict=True):
                if part.slot == slot:
                    leaf.grad = None

    def mark(self) -> None:
        """Let what was stepped elsewhere look as if its gradient were still there, until it is cleared."""
        for unit in self.units:
            first = self._first[unit]
            self._show(unit, self._used[first : first + len(unit.params)])

    def absent(self, unit: Unit) -> list[tuple[int, int]]:
        """The elements of my shard whose parameters had no gradient in this window, on any rank."""
        first = self._first[unit]
        return [(p.at, p.at + p.length) for p in unit.held if not self._used[first + p.slot]]

    def weight_changed(self, weight: float) -> None:
        """Scale the gradients of the batch now at work (uneven ends; see `World.weight`)."""
        for hook in self._weighting:
            hook.remove()
        self._weighting = []
        if weight != 1.0:
            self._weighting = [
                unit.params[slot].register_hook(partial(scale_gradient, weight)) for unit, slot in self._places
            ]

    def close(self) -> None:
        """Take the hooks off."""
        self.world.off_weight(self)
        for hook in (*self._hooks, *self._weighting):
            hook.remove()
        for unit, slot in self._places:
            unit.params[slot].grad = None
        if self._lane is not None:
            self._lane.close()
        self.channel.close()


def _in_checkpoint() -> bool:
    """Whether this backward pass was started by re-entrant activation checkpointing, inside another."""
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code is CheckpointFunction.backward.__code__:
            return True
        frame = frame.f_back
    return False


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
