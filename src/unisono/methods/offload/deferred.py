"""The step of most elements is put off; those that matter most are stepped on the device in every step.

ZenFlow (Lan et al., 2025, arXiv:2505.12242). A shard is divided into tiles of as many elements, and

  keep    tiles with the largest gradients have their state on the device and are stepped there, in every step
  defer   the gradients of the others add up on the device. Units are in as many groups as gradients add up; in every
          step one group's sums leave for the host, in turn, which steps them while the next step computes: once, as far
          as so many steps with the mean would have moved them
  take    in the next step the values that came of it are taken over
  settle  after some turns of all groups, and whenever the state is looked at: all that was put off is stepped and taken
          over, kept state goes back to the host, and the next step chooses anew which tiles to keep, by its gradients

The host's step is one of Adam with the mean of the gradients, decays to the power of their number and the sum of their
learning rates. The second moment grows by the mean of the gradients' squares, as it does elsewhere: in each tile, the
square of the mean times what the sum's squares are smaller than if all gradients had been the same. So moments mean the
same wherever a tile is stepped, and tiles change places with all that belongs to them.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from unisono.background import SerialQueue
from unisono.methods.offload.ahead import is_same
from unisono.methods.offload.blocks import Block, Run, Shard
from unisono.methods.offload.device import LINE_BYTES, DeviceChunk, Kernel, Ranges, Slab, copy_to
from unisono.methods.offload.fused import Rounding
from unisono.methods.offload.optimizers import FusedAdam, Settings, SeveralSteps, make_rule
from unisono.methods.offload.pipeline import CudaStreams, Mark, Queue, Streams
from unisono.methods.offload.plan import find_gaps
from unisono.methods.offload.stepper import Ratios, Stepper, StepSettings

TILE = 1 << 15  # elements: 16 rows of a matrix of 2,048; the host steps as many at a time in a core's cache
REFRESH = 64  # turns of all groups from one choice of tiles to the next
_SEED = 2
_SHARES = 64  # of steps, that the host reads together: it waits for the device
_CLOSE_S = 60.0


def check_deferrable(optimizer: torch.optim.Optimizer) -> None:
    """Refuse optimizers whose steps cannot be put off.

    >>> check_deferrable(torch.optim.AdamW([torch.zeros(1)]))
    """
    name = type(optimizer).__name__
    if type(make_rule(optimizer)) is not FusedAdam:
        raise ValueError(
            f"defer puts steps of torch's Adam and AdamW off, got {name}: use one of them, or leave it out"
        )
    for number, group in enumerate(optimizer.param_groups):
        if group["amsgrad"]:
            raise ValueError(
                f"group {number} of {name} has amsgrad=True, whose steps cannot be put off: leave defer out"
            )
        if group["weight_decay"] and not group.get("decoupled_weight_decay"):
            raise ValueError(
                f"group {number} of {name} adds weight_decay={group['weight_decay']} to its gradients, so that steps "
                "cannot be put off: use AdamW"
            )


@dataclass
class _Sum:
    """Gradients that have added up."""

    settings: StepSettings  # of the first
    absent: Mapping[int, Ranges]
    scale: float  # of the first: `lines` are to be multiplied by it
    rates: list[float]  # by group, the learning rates added up
    lines: dict[int, Tensor]
    squares: dict[int, Tensor] = field(default_factory=dict)  # by tile: norms squared, added up
    count: int = 1

    def add(
        self,
        gradients: Mapping[int, Tensor],
        squares: Mapping[int, Tensor],
        scale: float,
        settings: StepSettings,
    ) -> None:
        """Add a step's gradients."""
        if self.scale == 0.0:
            for line in (*self.lines.values(), *self.squares.values()):
                line.zero_()
            self.scale = 1.0
        ratio = scale / self.scale
        for u, line in self.lines.items():
            line.add_(gradients[u], alpha=ratio)
            self.squares[u] += squares[u] * ratio**2
        self.rates = [a + b for a, b in zip(self.rates, _find_rates(settings), strict=True)]
        self.count += 1

    def takes(self, units: Collection[int], absent: Mapping[int, Ranges], settings: StepSettings) -> bool:
        """Whether a step's gradients can be added: the same elements have one, and but for the learning rate the
        optimizer's settings are the same."""
        mine, other = (
            [{name: x for name, x in group.items() if name not in ("lr", "initial_lr")} for group in one.groups]
            for one in (self.settings, settings)
        )
        return set(units) == set(self.lines) and _within(absent, units) == self.absent and is_same(mine, other)


@dataclass
class _Update:
    """A sum on its way to the host, and what comes of it."""

    settings: StepSettings
    scale: float
    absent: Mapping[int, Ranges]
    each: int  # steps that it stands for
    arrived: dict[int, Mark] = field(default_factory=dict)
    ended: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None


class _Kept:
    """The tiles of a shard that are stepped on the device, one after the other in memory of their own."""

    def __init__(self, tiles: Sequence[int], shard: Shard, engine: Deferred) -> None:
        device, self._tile, self._tiles, self._engine = shard.compute.device, engine.tile, tiles, engine
        self._source = source = shard.blocks[0]
        self._at = torch.tensor(tiles)
        self.places = self._at.to(device)
        runs = [Run(a, b, r.group, r.scalars) for r in source.steps.now for a, b in self._find([(r.start, r.stop)])]
        self._block = block = Block(None, runs, "resident", len(tiles) * self._tile, source.dtype)
        block.prepare(source.index, source.rule, engine.optimizer.param_groups, engine.moments)
        for run in runs:
            block.steps.set_scalars(run.start, run.stop, run.scalars)
        memory = torch.zeros(block.lay_out(block.length, LINE_BYTES).numel, dtype=torch.uint8, device=device)
        block.chunks = [DeviceChunk(block, 0, memory, memory, lambda: None)]
        for name, line in self._lines():
            line.view(-1, self._tile).copy_(self._rows(source.chunks[0].open()[name])[self._at])
        self._target = torch.empty(block.length, dtype=shard.compute.dtype, device=device)
        self.nbytes = memory.numel() + self._target.nbytes + self.places.nbytes

    def _lines(self) -> Iterable[tuple[str, Tensor]]:
        return self._block.chunks[0].open().items()

    def _rows(self, line: Tensor) -> Tensor:
        return line[: line.numel() // self._tile * self._tile].view(-1, self._tile)

    def _find(self, ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Where elements of the shard are among mine; adjoining ranges are one."""
        found: list[tuple[int, int]] = []
        for low, high in ranges:
            for i, number in enumerate(self._tiles):
                shift = (i - number) * self._tile
                a, b = max(low, number * self._tile) + shift, min(high, (number + 1) * self._tile) + shift
                if a < b and found and found[-1][1] == a:
                    found[-1] = (found[-1][0], b)
                elif a < b:
                    found.append((a, b))
        return found

    def step(self, gradient: Tensor, scale: float, absent: Ranges, now: StepSettings, compute: Tensor) -> None:
        """Step my tiles with `scale` times the shard's gradient, and give their new values to `compute`."""
        mine = self._rows(gradient).index_select(0, self.places).view(-1)
        kernel = self._engine.kernel
        kernel(self._block, self._target, mine, scale=scale, absent=self._find(absent), now=now)
        self.put(compute)

    def put(self, compute: Tensor) -> None:
        """Write my values over those that the host has of the same tiles."""
        self._rows(compute).index_copy_(0, self.places, self._target.view(-1, self._tile))

    def lend(self, streams: Streams, queue: Queue) -> None:
        """What `put` reads is read in a queue."""
        for tensor in (self.places, self._target):
            streams.lend(tensor, queue)

    def give_back(self) -> None:
        """Bring the state back to the host, where as many steps have been counted meanwhile."""
        for name, line in self._lines():
            here = line.cpu().view(-1, self._tile)
            self._rows(self._source.chunks[0].open()[name]).index_copy_(0, self._at, here)


class Deferred:
    """Steps Adam over shards whose state is on the host, but for a part of them only every few steps; what `Pipeline`
    is for exact steps, and with its calls.

    defer: so many steps' gradients are stepped together by the host. keep: the share of the tiles that the device steps
    in every step. `step(delay=False)` puts nothing off. shares: of the squared norm of the gradients, what was kept, in
    each of the last steps that are known.

    >>> compute = torch.zeros(4)
    >>> optimizer = torch.optim.AdamW([torch.zeros(4)], lr=0.5, weight_decay=0.0)
    >>> shards = [Shard(compute, [Run(0, 4, 0)])]
    >>> engine = Deferred(optimizer, shards, device=torch.device("cpu"), defer=2, keep=0.5, tile=2)
    >>> for _ in range(2):
    ...     engine.offer(0, torch.tensor([1.0, 1.0, 3.0, 3.0]))
    ...     engine.step(delay=True)
    >>> [round(x, 5) for x in compute.tolist()]
    [-0.5, -0.5, -1.0, -1.0]
    >>> [round(x, 5) for x in engine.shard(0).read("master").tolist()]
    [-1.0, -1.0, -1.0, -1.0]
    >>> engine.close()
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        shards: Sequence[Shard],
        *,
        device: torch.device,
        defer: int,
        keep: float,
        moments: torch.dtype = torch.float32,
        gradients: torch.dtype | None = None,
        threads: int | None = None,
        tile: int = TILE,
        refresh: int = REFRESH,
        streams: Streams | None = None,
    ) -> None:
        check_deferrable(optimizer)
        cuda = device.type == "cuda"
        self.streams = streams or (CudaStreams(device) if cuda else Streams(device))
        self.optimizer, self.moments, self.tile, self.defer = optimizer, moments, tile, defer
        self._keep, self._refresh, self._shards = keep, refresh, list(shards)
        self.stepper = Stepper(optimizer, moments=moments, threads=threads or max(1, torch.get_num_threads() - cuda))
        self.kernel = Kernel(make_rule(optimizer), Rounding(_SEED, device), device)
        self.shares: deque[float] = deque(maxlen=1000)
        self._pending: list[Tensor] = []  # shares that the host does not know of yet
        self._down, self._up, self._lane = self.streams.queue(), self.streams.queue(), SerialQueue("unisono-offload")
        self._dtypes = [gradients or shard.compute.dtype for shard in shards]
        self._padding = [find_gaps(shard.runs, shard.length) for shard in shards]
        self._make_lines(pinned=cuda)
        for u, shard in enumerate(self._shards):
            values = (shard.compute if shard.master is None else shard.master).detach()
            master = copy_to(values, torch.device("cpu"), shard.master_dtype)
            shard.blocks.append(self.stepper.add(Block(master, shard.runs, unit=u)))
            shard.master = None
            del values
        self._offered: dict[int, tuple[Tensor, Mark]] = {}
        self._groups = _share_out([shard.length for shard in shards], defer)
        self._sums: dict[int, _Sum] = {}  # by group
        self._update: _Update | None = None
        self._kept: dict[int, _Kept] | None = None  # None: to be chosen
        self._taken: dict[int, Mark] = {}  # when a unit has the values that were taken over last
        self._turns = 0  # steps since tiles were chosen
        self.streams.now().wait()

    def _make_lines(self, *, pinned: bool) -> None:
        """Host memory in which sums come, and new values go: both may be on their way at once."""
        counts = [self._count_tiles(shard.length) for shard in self._shards]
        kinds = [
            ((s.length, dtype), (s.length, s.compute.dtype), (n, torch.float32))
            for s, dtype, n in zip(self._shards, self._dtypes, counts, strict=True)
        ]
        self._slab = Slab(sum(Slab.bytes_for(*kind) for each in kinds for kind in each), pinned=pinned)
        self._arrivals = [tuple(self._slab.take_line(*kind) for kind in each) for each in kinds]

    def _count_tiles(self, length: int) -> int:
        return -(-length // self.tile)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of host memory that are locked for the device."""
        return self._slab.nbytes

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory held between steps, beside the values that compute."""
        lines = [line for one in self._sums.values() for line in (*one.lines.values(), *one.squares.values())]
        kept = 0 if self._kept is None else sum(one.nbytes for one in self._kept.values())
        return sum(line.nbytes for line in lines) + kept + self.kernel.nbytes

    # Steps ------------------------------------------------------------------------------------------------

    def offer(self, u: int, gradient: Tensor, *, replace: bool = False) -> None:
        """Take the gradient of unit `u` for the next step; `replace`: instead of one that it may have. It is held until
        then, and must not be changed."""
        shard = self._shards[u]
        if gradient.shape != shard.compute.shape:
            raise ValueError(
                f"unit {u} has {shard.length} elements here, its gradient has the shape {tuple(gradient.shape)}"
            )
        if u in self._offered and not replace:
            raise RuntimeError(f"unit {u} has a gradient already: call step() before it gets the next one")
        self._offered[u] = (gradient.detach().to(self._dtypes[u]), self.streams.now())

    @torch.no_grad()
    def step(
        self, scale: float = 1.0, absent: Mapping[int, Ranges] | None = None, *, delay: bool | None = None
    ) -> None:
        """Step with `scale` times the gradients offered: what is kept at once, the rest later if `delay`.

        `absent`: ranges of elements without a gradient, by unit; they and their state stay as they are.
        """
        self._check()
        absent, scale, now = absent or {}, float(scale), self.stepper.begin()
        gradients = {u: self._offered[u][0] for u in sorted(self._offered)}
        groups: dict[int, dict[int, Tensor]] = {}
        for u, gradient in gradients.items():
            groups.setdefault(self._groups[u], {})[u] = gradient
        if not all(one.takes(groups.get(group, ()), absent, now) for group, one in self._sums.items()):
            self.settle()
        for u, (_, arrived) in self._offered.items():
            arrived.hold()
            self.wait(u)
        self._offered = {}
        if delay:
            self._keep_some(gradients, groups, scale, absent, now)
            return
        self.settle()
        self._sums = {0: _Sum(now, absent, scale, _find_rates(now), gradients)}
        self.settle()

    def _keep_some(
        self,
        gradients: Mapping[int, Tensor],
        groups: Mapping[int, dict[int, Tensor]],
        scale: float,
        absent: Mapping[int, Ranges],
        now: StepSettings,
    ) -> None:
        squares = {u: self._square(gradient) for u, gradient in gradients.items()}
        if self._kept is None:
            self._kept = self._choose(squares)
        kept = {u: one for u, one in self._kept.items() if u in gradients}
        for u, one in kept.items():
            one.step(gradients[u], scale, absent.get(u, ()), now, self._shards[u].compute.detach())
        self._take_over()
        self._note_share([squares[u][one.places] for u, one in kept.items()], list(squares.values()))
        for group, given in groups.items():
            mine = {u: squares[u] for u in given}
            if group in self._sums:
                self._sums[group].add(given, mine, scale, now)
            else:
                self._sums[group] = _Sum(now, _within(absent, given), scale, _find_rates(now), given, mine)
        turn, self._turns = self._turns, self._turns + 1
        if turn % self.defer in self._sums:
            self._send(self._sums.pop(turn % self.defer))
        if self._turns >= self._refresh * self.defer:
            self.settle()

    def _note_share(self, kept: Sequence[Tensor], every: Sequence[Tensor]) -> None:
        """Let the host know in time what part of the gradients' squared norm was kept."""
        total = torch.stack([found.sum() for found in every]).sum()
        mine = torch.stack([found.sum() for found in kept]).sum() if kept else torch.zeros_like(total)
        share = mine / total.clamp_min(torch.finfo(total.dtype).tiny)
        self._pending.append(share)
        if len(self._pending) == _SHARES:
            self._read_shares()

    def _read_shares(self) -> None:
        if self._pending:
            self.shares.extend(torch.stack(self._pending).tolist())
            self._pending = []

    def _square(self, line: Tensor) -> Tensor:
        """The squared norm of each tile."""
        border = line.numel() // self.tile * self.tile
        parts = [line[:border].view(-1, self.tile), line[border:].view(1, -1)]
        wide = torch.promote_types(line.dtype, torch.float32)
        norms = [torch.linalg.vector_norm(part, dim=1, dtype=wide) for part in parts if part.numel()]
        return torch.cat(norms).square_()

    def _choose(self, squares: Mapping[int, Tensor]) -> dict[int, _Kept]:
        """Take the state of those tiles to the device that have the largest gradients, of all units together."""
        whole = {u: found.cpu()[: self._shards[u].length // self.tile] for u, found in squares.items()}
        count = math.ceil(self._keep * sum(found.numel() for found in whole.values()))
        order = torch.cat([*whole.values(), torch.empty(0, dtype=torch.float32)]).argsort(descending=True, stable=True)
        first = torch.zeros(order.numel(), dtype=torch.bool).index_fill_(0, order[:count], True)
        found = dict(zip(whole, first.split([each.numel() for each in whole.values()]), strict=True))
        tiles = {u: mine.nonzero().flatten().tolist() for u, mine in found.items()}
        return {u: _Kept(mine, self._shards[u], self) for u, mine in tiles.items() if mine}

    def _send(self, given: _Sum) -> None:
        """Let a sum leave, to be stepped in the background."""
        now = self.streams.now()
        scale = given.scale / given.count
        self._update = update = _Update(_join_steps(given), scale, given.absent, given.count)
        for u, line in given.lines.items():
            after = [now, self._taken[u]] if u in self._taken else [now]  # then its memory for new values is free
            update.arrived[u] = self._copy_down(self._arrivals[u][0], line, after)
            if given.count > 1:
                ratios = (given.squares[u] * given.count / self._square(line)).clamp_(1.0, 4.0 * given.count)
                ratios = ratios.nan_to_num_(1.0).sqrt_()
                update.arrived[u] = self._copy_down(self._arrivals[u][2], ratios, [self.streams.now()])
        self._lane.submit(partial(self._step_host, update))

    def _copy_down(self, to: Tensor, line: Tensor, after: Iterable[Mark]) -> Mark:
        self.streams.lend(line, self._down)
        return self._down.run(lambda: to.copy_(line, non_blocking=True), after=after)

    def _step_host(self, update: _Update) -> None:
        """The background thread: the host steps its copy of all units, in order."""
        ends: list[Callable[[], None]] = []
        try:
            for u in sorted(update.arrived):
                line, values, ratios = self._arrivals[u]
                update.arrived[u].wait()
                ends.append(
                    self.stepper.start(
                        self._shards[u].blocks[0].index,
                        line,
                        values,
                        scale=update.scale,
                        absent=update.absent.get(u, ()),
                        settings=update.settings,
                        ratios=Ratios(ratios.tolist(), self.tile) if update.each > 1 else None,
                    )
                )
                if len(ends) > 1:
                    ends.pop(0)()
        except BaseException as error:  # the next call raises it
            update.error = error
        finally:
            try:
                for end in ends:
                    end()
                for u in update.arrived:
                    for low, high in self._padding[u]:
                        self._arrivals[u][1][low:high].zero_()
            except BaseException as error:
                update.error = update.error or error
            update.ended.set()

    def _take_over(self) -> None:
        """Give what the host has stepped to the units, once it is done."""
        update = self._update
        if update is None:
            return
        update.ended.wait()
        self._check()
        now = self.streams.now()
        for u in sorted(update.arrived):
            kept = (self._kept or {}).get(u)
            if kept is not None:
                kept.lend(self.streams, self._up)
            self._taken[u] = self._up.run(partial(self._put, u, kept), after=[now])
        self._update = None

    @torch.no_grad()
    def _put(self, u: int, kept: _Kept | None) -> None:
        compute = self._shards[u].compute.detach()
        compute.copy_(self._arrivals[u][1], non_blocking=True)
        if kept is not None:
            kept.put(compute)

    @torch.no_grad()
    def settle(self) -> None:
        """Step all that was put off and take it over; the state is on the host then, all of it."""
        self._take_over()
        for group in sorted(self._sums):
            self._send(self._sums.pop(group))
            self._take_over()
        for one in (self._kept or {}).values():
            one.give_back()
        self._kept, self._turns = None, 0
        self._read_shares()

    # Waiting ----------------------------------------------------------------------------------------------

    def wait(self, u: int) -> None:
        """Let the current stream wait until unit `u` has what was taken over last."""
        if u in self._taken:
            self._taken[u].hold()

    def finish(self) -> None:
        """Block until nothing is put off and every value is the latest; raises what went wrong."""
        self.settle()
        for mark in self._taken.values():
            mark.wait()
        self.streams.now().wait()

    def retry(self) -> None:
        """No-op: in memory nothing fails that would go well the next time."""

    def _check(self) -> None:
        if self._update is not None and self._update.ended.is_set() and self._update.error is not None:
            raise self._update.error

    def close(self) -> None:
        """Wait for what is under way, end the threads and give the memory back."""
        if self._update is not None:
            self._update.ended.wait(_CLOSE_S)
        for mark in self._taken.values():
            mark.wait()
        self._lane.close()
        self.stepper.close()
        self.streams.now().wait()
        self._slab.close()

    # State ------------------------------------------------------------------------------------------------

    def shard(self, u: int) -> Shard:
        """The state of unit `u`, to be read and set: nothing is put off."""
        self.finish()
        return self._shards[u]

    def values(self, u: int) -> Tensor:
        """The values of unit `u`, on the device that computes."""
        self.wait(u)
        return self._shards[u].compute

    @property
    def steps(self) -> int:
        """Steps so far; part of the state, as the rounding of 16-bit moments depends on it."""
        return self.stepper.steps

    @steps.setter
    def steps(self, count: int) -> None:
        self.stepper.steps = count


def _within(absent: Mapping[int, Ranges], units: Iterable[int]) -> dict[int, Ranges]:
    return {u: absent[u] for u in units if u in absent}


def _find_rates(settings: StepSettings) -> list[float]:
    return [float(group["lr"]) for group in settings.groups]


def _join_steps(given: _Sum) -> StepSettings:
    """The settings of one step that stands for those whose gradients have added up."""
    if given.count == 1:
        return given.settings
    groups: list[Settings] = [{**group, "lr": lr} for group, lr in zip(given.settings.groups, given.rates, strict=True)]
    return StepSettings(groups, given.settings.step, SeveralSteps(given.count))


def _share_out(lengths: Sequence[int], count: int) -> list[int]:
    """In which of `count` groups each unit is; about as much is in each.

    >>> _share_out([5, 4, 3, 2], 2)
    [0, 1, 1, 0]
    """
    sizes, groups = [0] * count, [0] * len(lengths)
    for u in sorted(range(len(lengths)), key=lambda u: -lengths[u]):
        groups[u] = sizes.index(min(sizes))
        sizes[groups[u]] += lengths[u]
    return groups
