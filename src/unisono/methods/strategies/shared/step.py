"""The step of a model that all ranks of a host share: every rank steps its part, tile by tile in the cache.

1. Plan: parameters of one group with the same history are stepped alike; what the program has put into the optimizer
   since goes into the host's memory.
2. Meet: all ranks have called `optimizer.step()`. Nobody reads parameters any more, and all gradients are there.
3. Step: of each tile of its part, a rank takes the mean into a small buffer and steps it.
4. Meet: all parts have been stepped. Nothing has to be gathered.

In the host's memory each rank notes how far it is in 3. Where workers come and go it also keeps the tile at work as it
was: if a rank is lost in its step, another goes on from there, since all gradients are still in place.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from unisono.methods.offload.optimizers import GroupStep, Settings, read_settings
from unisono.methods.strategies._crossing import Piece
from unisono.methods.strategies._host_memory import HostMemory, describe_settings
from unisono.methods.strategies.shared.gradients import Mean, Place, do_changes
from unisono.methods.strategies.shared.lines import HostState, Line, ParameterState, StepCount, cut_tiles
from unisono.world.transports.arithmetic import combine

TILE_BYTES = 512 << 10  # of parameters, at a time: with gradient and state it stays in the cache
OWN_TILE_BYTES = 4 << 20  # where the optimizer's own code steps it: a call costs more
# What a rank notes: the step it began, the tiles it has done, the one at work (from 1), the step it ended.
_STEP, _DONE, _AT_WORK, _ENDED = range(4)
_TO_END_S = 2.0  # that ranks which are still there have for their parts, before others say what is torn


@dataclass(eq=False)
class Cohort:
    """Parameters of one line and one param group that have been stepped equally often, and this step of theirs."""

    step: GroupStep
    count: StepCount
    members: list[ParameterState] = field(default_factory=list)


@dataclass
class Plan:
    """A step: for every line the cohort of each parameter, and how the mean of its gradient is found."""

    number: int
    cohorts: list[Cohort]
    by_slot: list[dict[int, Cohort]]  # by line
    means: list[dict[int, Mean]]
    scale: list[tuple[str, Any]]  # what a GradScaler leaves to the optimizer
    has_begun: bool  # another of several optimizers has stepped with the same gradients: this step cannot be left out


class HostStep:
    """Steps this rank's part of the parameters, tile by tile."""

    def __init__(
        self,
        lines: Sequence[Line],
        state: HostState,
        memory: HostMemory,
        find_pieces: Callable[[int, Sequence[Container[int]]], list[list[Piece]]],
        *,
        keeps_tile: bool,
        in_the_middle: Callable[[], None] | None,
    ) -> None:
        """`find_pieces(rank, slots)`: the part of a rank of my host, by line, where these parameters of each line are
        stepped; `keeps_tile`: as it was, while it is stepped;
        `in_the_middle` is called when half of my part has been stepped, and half of a tile (a fault on purpose)."""
        self.lines, self.state, self.memory = list(lines), state, memory
        self._find_pieces = find_pieces
        self._marks = [line.numpy() for line in memory.lines(8, torch.int64)]
        self._buffers = [torch.empty(OWN_TILE_BYTES // line.dtype.itemsize, dtype=line.dtype) for line in lines]
        self._kept: list[list[Tensor]] | None = None  # by line and rank: the tile at work
        self._most = 0
        self._keeps_tile, self._in_the_middle = keeps_tile, in_the_middle
        self._places: dict[int, Place] = {}  # by the parameter's id: a tensor's hash is slow
        self.number = 0
        self.plan: Plan | None = None
        self._former: Plan | None = None  # that of another of several optimizers, with the same gradients

    # 1 ------------------------------------------------------------------------------------------------------------

    def prepare(self, places: Sequence[Place], optimizer: Optimizer, *, has_begun: bool) -> None:
        """Plan the step of the optimizer, or of one of several: which parameters are stepped alike, and how the mean of
        each gradient is found. `has_begun`: another has stepped with the same gradients."""
        self.state.adopt()
        if not self._places:
            self._places = {id(place.param): place for place in places}
        by_slot: dict[Line, dict[int, Cohort]] = {line: {} for line in self.lines}
        means: dict[Line, dict[int, Mean]] = {line: {} for line in self.lines}
        found: dict[Any, Cohort] = {}
        for i, (member, group, some) in enumerate(self.state.groups()):
            settings: Settings | None = None
            if member is not optimizer:
                continue
            for one in some:
                place = self._places[id(one.param)]
                place.take_over()
                if not place.used or one.param.grad is None:
                    continue
                settings = read_settings(group) if settings is None else settings
                key = (i, one.line, one.count)
                cohort = found.get(key)
                if cohort is None:
                    step = GroupStep(self.state.rule(member, settings, one.line), settings, one.count.scalars)
                    cohort = found[key] = Cohort(step, one.count)
                cohort.members.append(one)
                by_slot[one.line][one.slot] = cohort
                means[one.line][one.slot] = place.describe()
        if any(not self.state.has_room(line, cohort.step.lines) for (_, line, _), cohort in found.items()):
            self.state.allocate()
        if self._keeps_tile:
            self._make_room(self.state.count_lines())
        scale = getattr(optimizer, "grad_scale", None)  # a GradScaler's, where the optimizer says fused=True
        divisor = [] if scale is None else [("div", scale.detach().clone())]
        self._former = self.plan if has_begun else None
        self.plan = Plan(
            self.number + 1, list(found.values()), list(by_slot.values()), list(means.values()), divisor, has_begun
        )

    def describe(self) -> list[str]:
        """What must be alike on all ranks of a host for them to step one model, in words."""
        assert self.plan is not None
        found = []
        for cohort in self.plan.cohorts:
            step = (cohort.count.scalars or {}).get("step", 0)
            count = step.item() if isinstance(step, Tensor) and step.numel() == 1 else step
            taken = f"{len(cohort.members)} parameters to step that have taken {count} steps"
            found += [*describe_settings(cohort.step.settings), taken]
        return found

    def is_skipped(self, optimizer: Optimizer) -> bool:
        """Whether a GradScaler found a value that is not finite, and left it to the optimizer to do nothing."""
        found = getattr(optimizer, "found_inf", None)
        return found is not None and bool(found)

    def _make_room(self, lines: int) -> None:
        if self._kept is None or lines > self._most:
            self._most = lines
            self._kept = [
                self.memory.lines((1 + lines) * OWN_TILE_BYTES // line.dtype.itemsize, line.dtype)
                for line in self.lines
            ]

    # 3 ------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def run(self) -> None:
        """Step this rank's part by the plan."""
        plan = self.plan
        assert plan is not None
        self.number = plan.number
        self._step_part(plan, self.memory.rank, 0, self._in_the_middle)
        for cohort in plan.cohorts:
            self._end_cohort(cohort)

    def _step_part(self, plan: Plan, rank: int, begin: int, in_the_middle: Callable[[], None] | None = None) -> None:
        """The tiles of a rank's part, from the one with the number `begin` on."""
        mark, tiles = self._marks[rank], self._tiles(plan, rank)
        mark[_DONE], mark[_AT_WORK] = begin, 0
        mark[_STEP] = plan.number
        if self._kept is None and in_the_middle is None:
            for i, cohort, some in self._batches(plan, tiles):
                self._step_tiles(plan, i, cohort, some)
            begin = len(tiles)
        for number, (i, tile) in enumerate(tiles[begin:], begin):
            cohort = plan.by_slot[i][tile.slot]
            if self._kept is not None:
                for kept, x in self._kept_tiles(i, cohort, tile, rank):
                    kept.copy_(x)
                mark[_AT_WORK] = number + 1
            if in_the_middle is not None and number == len(tiles) // 2:
                tile = self._step_half(plan, i, cohort, tile)
                in_the_middle()
            self._step_tiles(plan, i, cohort, [tile])
            mark[_DONE] = number + 1
        mark[_DONE], mark[_AT_WORK] = len(tiles), 0
        mark[_ENDED] = plan.number

    def _batches(self, plan: Plan, tiles: Sequence[tuple[int, Piece]]) -> Iterator[tuple[int, Cohort, list[Piece]]]:
        """Tiles that one call steps: of parameters that are stepped alike and lie close to each other. Where tensors
        are small, calls take longer than what they do."""
        some: list[Piece] = []
        for number, (i, tile) in enumerate(tiles):
            cohort = plan.by_slot[i][tile.slot]
            some.append(tile)
            after = tiles[number + 1] if number + 1 < len(tiles) else None
            room = TILE_BYTES // self.lines[i].dtype.itemsize
            if (
                after is None
                or cohort.step.kernel is None
                or plan.by_slot[after[0]].get(after[1].slot) is not cohort
                or after[1].stop - some[0].start > room
            ):
                yield i, cohort, some
                some = []

    def _step_tiles(self, plan: Plan, i: int, cohort: Cohort, tiles: Sequence[Piece]) -> None:
        """Step tiles of line `i` that lie close to each other, in one call."""
        line, step, first, last = self.lines[i], cohort.step, tiles[0].start, tiles[-1].stop
        if len(tiles) > 1 and not plan.scale and all(plan.means[i][tile.slot].is_untouched for tile in tiles):
            mean = self._buffers[i][: last - first]
            combine([ranks[first:last] for ranks in line.gradients], "mean", mean)
            gradients = [mean[start - first : stop - first] for _, start, stop in tiles]
        else:
            gradients = [self._take_mean(plan, i, tile, tile.start - first) for tile in tiles]
        values = [line.values[start:stop] for _, start, stop in tiles]
        states = [self.state.tiles(line, step.lines, start, stop) for _, start, stop in tiles]
        step.step(values, gradients, [list(lines) for lines in zip(*states, strict=True)])

    def _step_half(self, plan: Plan, i: int, cohort: Cohort, tile: Piece) -> Piece:
        """Step the first half of a tile; returns the second half."""
        middle = tile.start + (tile.stop - tile.start) // 32 * 16
        if middle > tile.start:
            self._step_tiles(plan, i, cohort, [tile._replace(stop=middle)])
        return tile._replace(start=middle)

    def _tiles(self, plan: Plan, rank: int) -> list[tuple[int, Piece]]:
        """The tiles that a rank steps, each with the number of its line."""
        found = []
        for i, pieces in enumerate(self._find_pieces(rank, plan.by_slot)):
            small = all(cohort.step.kernel is not None for cohort in plan.by_slot[i].values())
            nbytes = TILE_BYTES if small else OWN_TILE_BYTES
            tiles = cut_tiles(pieces, nbytes // self.lines[i].dtype.itemsize)
            found += [(i, tile) for tile in tiles]
        return found

    def _take_mean(self, plan: Plan, i: int, tile: Piece, at: int) -> Tensor:
        """The gradient that a tile is stepped with; in the buffer from `at` on, unless it lies ready."""
        line, (slot, start, stop) = self.lines[i], tile
        mean, buffer = plan.means[i][slot], self._buffers[i][at : at + stop - start]
        if mean.lies_ready and not plan.scale:
            return line.gradients[0][start:stop]
        if mean.own is not None:
            first = line.bounds(slot)[0]
            buffer.copy_(mean.own[start - first : stop - first])
        else:
            mean.take(buffer, [ranks[start:stop] for ranks in line.gradients])
        do_changes(buffer, plan.scale)
        return buffer

    def _end_cohort(self, cohort: Cohort) -> None:
        step = cohort.step
        if step.kernel is None and step.after is step.scalars:  # none of its tiles is mine: its scalars change alike
            one = torch.zeros(1, dtype=cohort.members[0].line.dtype)
            step.step([one], [torch.ones_like(one)], [[torch.zeros_like(one)] for _ in step.lines])
        if step.lines or step.after:
            self.state.advance(cohort.members, step)

    # A rank that is lost in its step ------------------------------------------------------------------------------

    def _kept_tiles(self, i: int, cohort: Cohort, tile: Piece, rank: int) -> list[tuple[Tensor, Tensor]]:
        """Pairs of spare memory and what is copied there before a tile is stepped: its values and its state."""
        assert self._kept is not None
        _, start, stop = tile
        parts = [self.lines[i].values[start:stop], *self.state.tiles(self.lines[i], cohort.step.lines, start, stop)]
        room = OWN_TILE_BYTES // self.lines[i].dtype.itemsize
        memory = self._kept[i][rank]
        return [(memory[k * room : k * room + stop - start], x) for k, x in enumerate(parts)]

    def find_torn(self) -> list[int]:
        """The ranks of my host that have not ended the last step that any of them began, or has to begin."""
        return list(dict.fromkeys(rank for plan in self._find_plans() for rank in self._find_behind(plan)))

    def _find_plans(self) -> list[Plan]:
        """Steps that some rank has begun, or has to begin because another of several optimizers has stepped."""
        last = max(int(mark[_STEP]) for mark in self._marks)
        plans = [plan for plan in (self._former, self.plan) if plan is not None]
        return [plan for plan in plans if plan.number == last or (plan.has_begun and plan.number == last + 1)]

    def _find_behind(self, plan: Plan) -> list[int]:
        return [rank for rank, mark in enumerate(self._marks) if int(mark[_ENDED]) < plan.number]

    def await_torn(self) -> list[int]:
        """The same, once those that are still at their part have ended it; one at least is lost."""
        until = time.monotonic() + _TO_END_S
        while len(torn := self.find_torn()) > 1 and time.monotonic() < until:
            time.sleep(0.01)
        return torn

    @torch.no_grad()
    def finish(self) -> None:
        """End the step of ranks that are lost: all gradients are in place, and so is the tile that was at work."""
        for plan in self._find_plans():
            for rank in self._find_behind(plan):
                self._finish_part(plan, rank)
            if self.number < plan.number:  # it was never begun here
                self.number = plan.number
                for cohort in plan.cohorts:
                    self._end_cohort(cohort)

    def _finish_part(self, plan: Plan, rank: int) -> None:
        mark = self._marks[rank]
        begun = int(mark[_STEP]) == plan.number
        done, at_work = (int(mark[_DONE]), int(mark[_AT_WORK])) if begun else (0, 0)
        if at_work > done:
            i, tile = self._tiles(plan, rank)[at_work - 1]
            for kept, x in self._kept_tiles(i, plan.by_slot[i][tile.slot], tile, rank):
                x.copy_(kept)
        self._step_part(plan, rank, done)
