"""Gradients of units, reduced to one shard a rank while backward goes on.

Three phases, in one backward:
1. waiting: a unit is complete when every parameter of it has its gradient;
2. reducing: its gradients are copied into one line, or read where they are; each rank keeps the mean of its part, and
   the gradients are let go. Units are reduced from the last to the first, on every rank alike;
3. finishing: at the end of backward what is missing counts as zero. At the end of a window the ranks agree on which
   parameters had a gradient at all, and every `p.grad` is a `ShardedGradient`.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from unisono.background import Handle, SerialQueue
from unisono.methods.exchange.noise_scale import NoiseScale
from unisono.methods.exchange.windows import BackwardWatcher, Window
from unisono.methods.strategies.zero.gradients import ShardedGradients
from unisono.methods.strategies.zero.groups import Across, Groups
from unisono.methods.strategies.zero.scatter import Scatter
from unisono.methods.strategies.zero.units import Unit
from unisono.methods.strategies.zero.values import Values
from unisono.methods.strategy.mistakes import SameData, sample
from unisono.world import World

LINES_IN_FLIGHT = 3  # units of gradients that are being reduced, where that overlaps with backward


class Backward(BackwardWatcher):
    """Reduces the gradients of the trainable units; the reduced ones are in `gradients`.

    stage: 1 keeps the gradients of a window's passes whole and reduces with the last one, 2 and 3 reduce with every
        pass and add up shards.
    values: the values of the units; they are released as their gradients arrive.
    on_reduced(unit, fresh): the gradient of my shard is that of the whole window; `fresh`, if gradients were cleared
        before it.
    on_window(world): all units are reduced; with the world to talk in.
    on_pass(): a pass begins; raises what must not be.
    across: the mean between groups of ranks, if each group has all shards.
    scatter: reduces through a reducer; None: exactly.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        groups: Groups,
        *,
        stage: int,
        accumulate: int,
        overlap: bool,
        advance: Callable[[], None],
        values: Values,
        on_reduced: Callable[[Unit, bool], None],
        on_window: Callable[[World], None],
        on_pass: Callable[[], None],
        across: Across | None = None,
        scatter: Scatter | None = None,
    ) -> None:
        world, inside = groups.world, groups.inside
        super().__init__(world, accumulate=accumulate, advance=advance)
        self.units, self.stage, self._across, self._scatter = list(units), stage, across, scatter
        self._reductions = [] if across is None else across.reductions
        self._reductions += [] if scatter is None else [scatter.reduction]
        self.channel = inside.channel(inline=True)  # of the ranks that have one shard each
        self._every = self.channel if inside is world else world.channel(inline=True)
        self.gradients = ShardedGradients(self.units, world, inside)
        self._values = values
        self._on_reduced, self._on_window, self._on_pass = on_reduced, on_window, on_pass
        on_cpu = units[0].params[0].device.type == "cpu"  # on a GPU, work is in the background anyway
        self._lane = SerialQueue("unisono reduce") if overlap and world.size > 1 and on_cpu else None
        # Gradients are reduced where they are, not copied to a line.
        self._joins = on_cpu and inside.reads_peers and scatter is None
        self._lines = [self._make_line() for _ in range(LINES_IN_FLIGHT if self._lane else 1)]
        self._running: deque[tuple[Handle[None], Tensor]] = deque()
        self._position = {unit: i for i, unit in enumerate(self.units)}
        self._same_data = SameData(inside)
        # Of gradients that are exchanged as they are: a group's mean is not that of all.
        is_exact = world.size > 1 and across is None and scatter is None
        self.noise: NoiseScale | None = NoiseScale(world) if is_exact else None
        self._open_window()
        self._open_pass()
        self.watch([(number, unit.params[slot]) for number, (unit, slot) in enumerate(self.gradients.places)])

    def _make_line(self) -> Tensor:
        nbytes, on = max(unit.nbytes for unit in self.units), self.units[0].params[0].device
        if self._joins:
            return torch.empty(0, dtype=torch.uint8)
        if on.type == "cpu":
            return self.channel.empty(nbytes, torch.uint8)
        return torch.empty(nbytes, dtype=torch.uint8, device=on)

    def _open_window(self) -> None:
        self.gradients.open_window()
        self._passes_reduced = 0
        self._kept: set[Unit] = set()  # those whose gradients of the window before have not been cleared
        self.window = Window.OPEN

    def _open_pass(self) -> None:
        self._missing = {unit: len(unit.params) for unit in self.units}
        self._next = len(self.units) - 1
        self._fired: set[int] = set()

    # During backward -------------------------------------------------------------------------------------

    @property
    def _is_reducing(self) -> bool:
        """Whether the pass under way is reduced."""
        return self.stage > 1 or self._is_last

    def take(self, number: int) -> None:
        if self._is_reducing:
            self.world.run_tolerating_loss(lambda: self._take_in(number))

    def _take_in(self, number: int) -> None:
        unit, slot = self.gradients.places[number]
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

    def begin_pass(self, number: int) -> None:
        self._on_pass()
        failed = self._task != -1 and not _in_checkpoint()  # the pass before this one did not end
        if failed and self.gradients.holds_any_of(self._task, self._fired - {number}):
            raise RuntimeError(
                "the backward pass before this one failed half-way, and what it had added is still in the gradients of "
                "the model: call optimizer.zero_grad() before the next, on every rank"
            )
        if self.stage > 1 and _in_checkpoint():
            raise RuntimeError(
                "re-entrant activation checkpointing runs a backward inside a backward, and stages 2 and 3 reduce "
                "gradients as they come: use torch.utils.checkpoint with use_reentrant=False, or zero(stage=1)"
            )
        if self.window is not Window.OPEN:
            self._open_window()
        self.gradients.forget_norms()
        self._open_pass()

    def _launch(self) -> None:
        """Begin phase 2 for the next unit."""
        unit, last = self.units[self._next], self._is_last
        self._next -= 1
        line = self._take_line()
        try:
            lines, fresh = self._collect(unit) if self._joins else self._fill(unit, line[: unit.nbytes])
        except TypeError:
            self._lines.append(line)
            raise
        self._values.end_use(unit)
        self.gradients.hidden.add(unit)
        if not self._passes_reduced:
            (self._kept.discard if all(fresh) else self._kept.add)(unit)

        noise = self.noise if last and not self._passes_reduced else None  # else of several passes, each reduced alone

        def job() -> None:
            self._reduce(unit, lines, fresh, noise)
            lines.clear()
            if last:
                self._end_unit(unit)

        if self._lane is None:
            try:
                job()
            finally:
                self._lines.append(line)
        else:
            self._running.append((self._lane.submit(job), line))

    def _end_unit(self, unit: Unit) -> None:
        if self._across is not None:
            self._across.exchange(unit)
        self.gradients.keep_norms(unit)
        self._on_reduced(unit, unit not in self._kept)

    def _take_line(self) -> Tensor:
        if not self._lines:
            self._end_oldest()
        return self._lines.pop()

    def _end_oldest(self) -> None:
        handle, line = self._running.popleft()
        self._lines.append(line)
        handle.wait()

    def _take_gradients(self, unit: Unit) -> tuple[list[Tensor | None], list[bool]]:
        """The gradients of this pass; and which parameters had none from before (or cleared)."""
        every, every_fresh = [], []
        gradients = self.gradients
        for number in range(gradients.first[unit], gradients.first[unit] + len(unit.params)):
            gradients.used[number] |= gradients.is_zeroed(number)
            local, fresh = gradients.take_local(number)
            every.append(None if local is None else local.detach())
            every_fresh.append(fresh)
            gradients.used[number] |= local is not None or (not fresh and not self._passes_reduced)
            gradients.show(number)  # also within a backward in a backward, it is not cleared
        return every, every_fresh

    def _collect(self, unit: Unit) -> tuple[list[Tensor], list[bool]]:
        """The gradients of this pass as lines that stand for one."""
        every, fresh = self._take_gradients(unit)
        shapes = unit.shapes
        whole = [torch.zeros(shapes[i], dtype=unit.dtype) if g is None else g for i, g in enumerate(every)]
        return unit.lines(whole), fresh

    def _fill(self, unit: Unit, memory: Tensor) -> tuple[list[Tensor], list[bool]]:
        """The gradients of this pass, copied into one line."""
        flat = memory.view(unit.dtype)
        every, fresh = self._take_gradients(unit)
        targets, grads = [], []
        for view, grad in zip(unit.views(flat), every, strict=True):
            if grad is None:
                view.zero_()
            else:
                targets.append(view)
                grads.append(grad)
        if targets:
            torch._foreach_copy_(targets, grads)
        unit.zero_gaps(flat)
        return [flat], fresh

    @torch.no_grad()
    def _reduce(self, unit: Unit, lines: list[Tensor], fresh: list[bool], noise: NoiseScale | None) -> None:
        old = unit.gradient
        first = old is None or all(fresh)
        direct = first and old is not None and old.dtype == unit.dtype and old.device == lines[0].device
        mean = old if direct else None
        if mean is None:
            mean = torch.empty(unit.shard_length, dtype=unit.dtype, device=lines[0].device)
        scatter = self._scatter if unit.owners is None else None
        looks = self._same_data.is_looking and unit is self.units[-1] and scatter is None
        mine = sample(unit.my_shard(torch.cat(lines))) if looks else None
        if noise is not None and noise.is_due:
            noise.add_own([unit.my_shard(torch.cat(lines))])
        if noise is not None and noise.keeps_norm:
            noise.add_whole(lines)
        if scatter is not None and self.channel.size > 1:
            scatter.reduce(unit, lines[0], mean, self.channel)
        elif self._joins or unit.owners is not None:
            self.channel.reduce_joined(lines, "mean", counts=unit.lengths, out=mean, tag=unit.tag).wait()
        else:
            self.channel.reduce_scatter(lines[0], "mean", out=mean, tag=unit.tag).wait()
        if mine is not None:
            self._same_data.compare(mine, sample(mean))
        if noise is not None and noise.is_due:
            noise.add_mean([mean])
        if first:
            dtype = unit.master_dtype if unit.steps_here else unit.dtype  # what leaves may leave as it is
            on = unit.master.device if unit.owners is not None else mean.device
            unit.gradient = mean.to(on, dtype) if old is None or direct else old.copy_(mean)
            return
        assert old is not None
        unit.gradient = old = old.to(unit.master_dtype)
        for part in unit.parts:
            if fresh[part.slot]:
                old[part.at : part.at + part.length].zero_()
        old.add_(mean.to(old.device))

    def end_pass(self) -> None:
        if self._is_reducing:
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
            self._end_oldest()
        self.world.ledger.close_span("blocked", start, self.world.ledger.clock())
        for number in range(len(self.gradients.places)):  # also where only others had one: their part is here
            self.gradients.show(number)
        for unit in self.units:
            self.gradients.show_to_optimizer(unit, [True] * len(unit.params))

    @torch.no_grad()
    def _finish(self) -> None:
        """Phase 3: agree on which parameters were used, and on whether AMP is to skip: some value is not finite."""
        gradients = self.gradients
        reductions = self._reductions
        if any(reduction.keeps for reduction in reductions):
            gradients.use_late()
        mine = gradients.find_nonfinite() if self.world.size > 1 else set()
        members = range(1 + max(unit.member for unit in self.units))
        overflows = [any(unit.member == member for unit in mine) for member in members]
        fell = max([reduction.learning_rate_fell() for reduction in reductions], default=False)  # each is to look
        flags = torch.tensor([*gradients.used, *overflows, fell], dtype=torch.uint8)
        self._every.all_reduce(flags, "max", tag="used").wait()
        *found, decayed = flags.tolist()
        used, overflow = found[: len(gradients.used)], found[len(gradients.used) :]
        for reduction in reductions:
            reduction.set_decayed(bool(decayed))
            reduction.end_window(void=any(overflow))
        for number, found in enumerate(used):
            gradients.show(number, bool(found))
            gradients.used[number] = bool(found)
        gradients.overflow = {unit for unit in self.units if overflow[unit.member]}
        for unit in self.units:
            first = gradients.first[unit]
            gradients.show_to_optimizer(unit, gradients.used[first : first + len(unit.params)])
        self._on_window(self._every)
        if self.noise is not None:
            self.noise.end_window()
        self._passes, self.window = 0, Window.ENDED
        self._advance()

    # Outside backward ------------------------------------------------------------------------------------

    def count_pass(self) -> None:
        if self.window is not Window.OPEN:  # the pass reached no parameter of this rank
            self._open_window()
        super().count_pass()

    def before_step(self) -> None:
        """Close the window: a rank whose backward touched nothing, or a last short window, still takes part."""
        if self.window in (Window.ENDED, Window.STEPPING) or self._local:
            self.gradients.drop_cleared()
            return
        self.weigh_given()
        if self.window is not Window.OPEN:
            self._open_window()
        if self.stage == 1 or not self._passes_reduced:
            self._open_pass()
            self._is_last = True
            self._launch_all()
        else:
            for unit in reversed(self.units):
                self._end_unit(unit)
        self._finish()

    def check_ended(self) -> None:
        """Refuse a step inside a window: its gradients have not gone to the ranks that keep copies of my shards."""
        if self.window not in (Window.ENDED, Window.STEPPING):
            raise RuntimeError(
                "optimizer.step() inside replica.no_sync(), and with spare=True or within=... a step needs the "
                "gradients of a whole window: run the last backward pass before the step, or the step itself, outside "
                "the block"
            )

    def close(self) -> None:
        """Take the hooks off."""
        super().close()
        for unit, slot in self.gradients.places:
            unit.params[slot].grad = None
        if self._lane is not None:
            self._lane.close()
        for channel in dict.fromkeys((self._every, self.channel)):
            channel.close()


def _in_checkpoint() -> bool:
    """Whether this backward pass was started by re-entrant activation checkpointing, inside another."""
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code is CheckpointFunction.backward.__code__:
            return True
        frame = frame.f_back
    return False
