"""Backward passes of a model whose gradients lie in memory of the host.

1. Filling: a gradient is copied into this rank's line as soon as it is there, while it is in the cache.
2. At the end of a window the ranks meet, and learn which parameters any of them used. From here on all gradients can be
   read by all, and `p.grad` is a `MeanGradient`.
3. The means are taken by the optimizer's step, tile by tile. Where the program read gradients in the window before
   (clipping, a GradScaler), or ranks are on several hosts, they are taken here: each rank takes those of its part.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter

from unisono.methods.exchange.noise_scale import NoiseScale
from unisono.methods.exchange.overlap import layout_of, mean_of_sparse, sparse_values
from unisono.methods.exchange.windows import BackwardWatcher, TrainableParameters, Window
from unisono.methods.strategies._crossing import Crossing, Piece
from unisono.methods.strategies._host_memory import HostMemory
from unisono.methods.strategies.shared.gradients import Place
from unisono.methods.strategies.shared.lines import Line, cut_tiles
from unisono.world import World
from unisono.world.transports.arithmetic import combine

_TILE_BYTES = 1 << 20  # of a mean, at a time: large enough for Python, small enough for the cache
Named = Sequence[tuple[str, Parameter]]


class Backward(BackwardWatcher):
    """Gradients on their way into the lines of the host, and from there into means."""

    def __init__(
        self,
        lines: Sequence[Line],
        sparse: Named,
        memory: HostMemory,
        world: World,
        *,
        accumulate: int,
        advance: Callable[[], None],
        share_buffers: Callable[[World], None],
        crossing: Crossing | None,
    ) -> None:
        named = [(name, param) for line in lines for name, param in zip(line.names, line.params, strict=True)]
        super().__init__(world, accumulate=accumulate, advance=advance)
        self.lines, self.sparse, self.memory = list(lines), list(sparse), memory
        self._share_buffers, self.crossing = share_buffers, crossing
        note = partial(_touch, weakref.ref(self))
        self.places = [Place(line, slot, memory.rank, note) for line in lines for slot in range(len(line.params))]
        self._by_name = {place.name: place for place in self.places}
        self._parameters = TrainableParameters(named)
        self._is_open = False  # a window: nobody reads my line
        self._is_read = False  # others may be reading my line, until the step has ended
        self.noise = NoiseScale(world) if crossing is None or crossing.reduction.reducer.exact else None
        self._was_touched = False  # the program looked at gradients of this window
        self._hidden: list[tuple[Parameter, Tensor]] = []
        self.takes_means = crossing is not None
        self.parts: list[list[Piece]] = []  # of each line, what this rank reduces and steps
        self.watch((*named, *sparse))

    # During backward ----------------------------------------------------------------------------------------------

    def take(self, name: str) -> None:
        place = self._by_name.get(name)
        if self._is_last and place is not None and not place.fired:
            place.fired = True
            place.fill()

    def begin_pass(self, name: str) -> None:
        if self._is_last:
            self._open_window()

    def _open_window(self) -> None:
        """From here on this rank writes to its line: nobody may read it any more."""
        if self._parameters.have_changed() or not self.parts:
            self._cut()
        if not self._is_open:
            for place in self.places:
                place.part_with_kept(is_readable=self._is_read)
            kept = [place for place in self.places if place.is_kept]
            for place in kept:
                place.keep()
            if kept or self._is_read:
                self.memory.meet("another backward pass before optimizer.step()", everywhere=True)
            self._is_read = False
            self._is_open = True
        for place in self.places:
            place.fired = False

    def _cut(self) -> None:
        """Find the parts of the parameters that are trainable now."""
        rank, count = (self.memory.rank, self.memory.size) if self.crossing is None else self.crossing.place
        self.parts = [line.pieces(rank, count) for line in self.lines]
        if self.crossing is not None:
            self.crossing.set_pieces(self.lines, self.parts)

    def give_up_pass(self) -> None:
        for place in self.places:
            place.param.grad = None

    def end_pass(self) -> None:
        if self._local:
            self.window = Window.OPEN
        elif self._is_last:
            if self._is_open:  # else a pass inside this one (re-entrant checkpointing) came last, and ended it
                self._end_window()
        else:
            self._passes += 1
            self.window = Window.OPEN

    def _end_window(self) -> None:
        """Phases 2 and 3."""
        trainable = [place for place in self.places if place.param.requires_grad]
        used: list[int] = [(place.fired and not place.is_zero) or place.fill() for place in trainable]
        used += [layout_of(p.grad) for _, p in self.sparse]
        fell = False if self.crossing is None else self.crossing.reduction.learning_rate_fell()
        flags = torch.tensor([*used, self._was_touched, fell], dtype=torch.uint8)
        every = self.memory.every
        if self.noise is not None and self.noise.keeps_norm:  # before others may write means to my line
            self.noise.add_whole(line.gradients[self.memory.rank] for line in self.lines)
        every.all_reduce(flags, "max", tag="used").wait()
        *found, touched, decayed = flags.tolist()
        self._is_open, self._is_read, self._was_touched = False, True, False
        self.takes_means = bool(touched) or self.crossing is not None
        for place, anywhere in zip(trainable, found, strict=False):
            place.used = bool(anywhere)
        for (name, param), layout in zip(self.sparse, found[len(trainable) :], strict=True):
            if layout and param.requires_grad:
                mean_of_sparse(param, layout, every, f"gradients/{name}")
        if self.crossing is not None:
            self.crossing.reduction.set_decayed(bool(decayed))
        self._measure_own()
        if self.takes_means:
            self._take_means()
        self._measure_mean()
        if self.crossing is not None:
            self.crossing.end_window(every, sparse_values(p for _, p in self.sparse))
        for place in self.places:
            if place.param.grad is place.shown and not place.param.requires_grad:  # frozen since: it stays as it was
                place.has_mean = place.is_over = False
                continue
            is_used = place.used and place.param.requires_grad
            place.used, place.has_mean, place.is_over = is_used, self.takes_means, False
            place.begin()
            if is_used:
                place.param.grad = place.shown
        self._share_buffers(every)
        self._passes, self.window = 0, Window.ENDED
        self._advance()

    def _find_mine(self) -> Iterator[tuple[Line, int, int]]:
        for line, pieces in zip(self.lines, self.parts, strict=True):
            yield from ((line, start, stop) for _, start, stop in cut_tiles(pieces, _TILE_BYTES // line.dtype.itemsize))

    def _measure_own(self) -> None:
        """Of my part: this rank's gradients; all gradients are in their lines."""
        rank = self.memory.rank
        if self.noise is not None and self.noise.is_due:
            self.noise.add_own([line.gradients[rank][start:stop] for line, start, stop in self._find_mine()])

    def _measure_mean(self) -> None:
        """Of my part: the mean, which is taken when the optimizer steps, unless it is there."""
        if self.noise is None:
            return
        for line, start, stop in self._find_mine() if self.noise.is_due else ():
            mean = line.gradients[0][start:stop]
            if not self.takes_means:
                mean = torch.empty_like(mean)
                combine([ranks[start:stop] for ranks in line.gradients], "mean", mean)
            self.noise.add_mean([mean])
        self.noise.end_window()

    @torch.no_grad()
    def _take_means(self) -> None:
        """Each rank takes the mean of its part, into the line of the host's first rank."""
        for line, pieces in zip(self.lines, self.parts, strict=True):
            for _, start, stop in cut_tiles(pieces, _TILE_BYTES // line.dtype.itemsize):
                combine([ranks[start:stop] for ranks in line.gradients], "mean", line.gradients[0][start:stop])
        if self.crossing is not None:
            for number, line in enumerate(self.lines):
                self.crossing.exchange(number, line.gradients[0])
        self.memory.meet("means are there", everywhere=True)
        if self.memory.rank == 0:  # they are in my line, also where I had no gradient
            for place in self.places:
                place.is_zero = False

    # Outside backward ---------------------------------------------------------------------------------------------

    def before_step(self) -> None:
        """Close the window: a rank whose backward touched nothing, or a last short window, still takes part. So does
        what was kept local: the ranks have one model, which none can step with gradients of its own."""
        if self.window is not Window.ENDED:
            self.weigh_given()
            self._open_window()
            self._end_window()

    def hide(self) -> None:
        """Leave nothing to step to the optimizer's own code, but what is each rank's own."""
        self._hidden = [(place.param, place.param.grad) for place in self.places if place.param.grad is not None]
        for param, _ in self._hidden:
            param.grad = None

    def show(self) -> None:
        """Give back what was hidden: of another of several optimizers, perhaps one that the program has put there."""
        for param, grad in self._hidden:
            param.grad = grad
        self._hidden = []

    @contextmanager
    def unnoticed(self) -> Iterator[None]:
        """Inside the block gradients are read without a trace."""
        before = self._was_touched
        yield
        self._was_touched = before

    def end_step(self, stepped: Container[int] | None) -> None:
        """All ranks have stepped the parameters with these ids (None: all): nobody reads their gradients any more."""
        for place in self.places:
            place.is_over |= stepped is None or id(place.param) in stepped or not place.used
        self._is_read = not all(place.is_over for place in self.places)

    def close(self) -> None:
        """Take the hooks off, and give out gradients that stay what they are."""
        super().close()
        for place in self.places:
            if place.param.grad is place.shown or place.param.grad is place.mine:
                place.param.grad = None


def _touch(backward: weakref.ref[Backward]) -> None:
    """The program looks at a gradient."""
    if (alive := backward()) is not None:
        alive._was_touched = True
