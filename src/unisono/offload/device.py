"""The parts of the optimizer state that are stepped on the device: some live there, some pass through.

Staged parts follow one another through a few slots of device memory, in three queues beside the current stream:

  load    state from host memory into the next free slot; runs ahead, also while the model computes
  step    the user's optimizer, and the new values into the line that computes
  store   state back to host memory; the slot is free again

So the link to the host works in both directions at once while the CPU steps its own parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.kernels.noise import noise
from unisono.offload.cells import Moments
from unisono.offload.fused import apply, device_rule
from unisono.offload.optimizers import Own, Rule, settings_of
from unisono.offload.plan import Part
from unisono.offload.segments import Batch, Run, Segments
from unisono.offload.stepper import StepSettings
from unisono.offload.streams import Mark, Slab, Streams

SLOTS = 3  # one is loaded, one stepped, one stored
_TABLE = 1 << 14  # random numbers for rounding, used by all elements in turn from a place that changes with every step
_SEED = 1
Ranges = Sequence[tuple[int, int]]
Scale = float | Tensor


class Rounding:
    """float32 into bfloat16, up or down at random in proportion, as `Moments` does it on the host."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        order = torch.randperm(_TABLE, generator=torch.Generator().manual_seed(seed)).to(torch.int32)
        self._table = (order * (65536 // _TABLE) + 65536 // _TABLE // 2).repeat(2).to(device)

    def __call__(self, line: Tensor, into: Tensor, *, step: int, part: int, stream: int) -> None:
        """Round `line`, which is used up, into `into`."""
        bits = line.view(torch.int32)
        place = noise(self._seed, step, bucket=part, stream=stream).shift % _TABLE
        table = self._table[place : place + _TABLE]
        whole = bits.numel() // _TABLE * _TABLE
        bits[:whole].view(-1, _TABLE).add_(table)
        bits[whole:].add_(table[: bits.numel() - whole])
        into.copy_(bits.bitwise_and_(-65536).view(torch.float32))


class Layout:
    """Where the lines of a part of `n` elements lie in its memory: the master, then the optimizer's state."""

    def __init__(self, dtypes: Mapping[str, torch.dtype], n: int) -> None:
        self.n, self.dtypes = n, dtypes
        self.nbytes = sum(Slab.room(n, dtype) for dtype in dtypes.values())

    def lines(self, memory: Tensor) -> dict[str, Tensor]:
        """The lines in `memory`, a line of bytes."""
        found, at = {}, 0
        for name, dtype in self.dtypes.items():
            found[name] = memory[at : at + self.n * dtype.itemsize].view(dtype)
            at += Slab.room(self.n, dtype)
        return found


class Stepped:
    """A part that the device steps, the memory it lives in and the memory it is stepped in."""

    def __init__(
        self, number: int, turn: int, part: Part, segments: Segments, layout: Layout, home: Tensor, place: Tensor
    ) -> None:
        self.number, self.turn, self.part, self.segments = number, turn, part, segments
        self.home, self.place = home[: layout.nbytes], place[: layout.nbytes]
        self.home_lines, self.place_lines = layout.lines(self.home), layout.lines(self.place)
        self.n, self.dtype = part.length, layout.dtypes["master"]


class Kernel:
    """One step of the user's optimizer on a part that lies on the device; it has scratch memory of its own."""

    def __init__(self, rule: Rule, rounding: Rounding, device: torch.device) -> None:
        self._rule, self._round, self._device = rule, rounding, device
        self._scratch: dict[tuple[str, torch.dtype], Tensor] = {}

    def reserve(self, stepped: Stepped) -> None:
        """Take the scratch memory that `stepped` needs, before training begins."""
        self._line("gradient", stepped.n, stepped.dtype)
        for name, line in stepped.place_lines.items():
            if line.dtype != stepped.dtype:
                self._line(name, stepped.n, stepped.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of scratch memory."""
        return sum(line.numel() * line.element_size() for line in self._scratch.values())

    def _line(self, name: str, n: int, dtype: torch.dtype) -> Tensor:
        line = self._scratch.get((name, dtype))
        if line is None or line.numel() < n:
            line = self._scratch[name, dtype] = torch.empty(n, dtype=dtype, device=self._device)
        return line[:n]

    @torch.no_grad()
    def __call__(
        self, stepped: Stepped, target: Tensor, gradient: Tensor, *, scale: Scale, absent: Ranges, now: StepSettings
    ) -> None:
        """Step the part with `scale * gradient`; `target` gets its new values."""
        lines, packed = self._unpacked(stepped)
        gradient = self._scaled(gradient, stepped, scale)
        batches = stepped.segments.batches(absent, self._rule)
        for batch in batches:
            self._batch(batch, lines, gradient, now)
        stepped.segments.advance(batches)
        for stream, name in enumerate(packed):
            into = stepped.place_lines[name]
            self._round(lines[name], into, step=now.step, part=stepped.number, stream=stream)
        target.copy_(lines["master"])

    def _batch(self, batch: Batch, lines: Mapping[str, Tensor], gradient: Tensor, now: StepSettings) -> None:
        group = now.groups[batch.group]
        spans = batch.spans()
        first = self._rule.kept(group).lines
        mine = {name: [lines[name][a:b] for a, b in spans] for name in first}
        if batch.fresh:
            for name, value in first.items():
                for line in mine[name]:
                    line.fill_(value)
        params = [lines["master"][a:b] for a, b in spans]
        grads = [gradient[a:b] for a, b in spans]
        batch.after = apply(self._rule, group, batch.scalars, fresh=batch.fresh, params=params, grads=grads, lines=mine)

    def _scaled(self, gradient: Tensor, stepped: Stepped, scale: Scale) -> Tensor:
        plain = not isinstance(scale, Tensor) and scale == 1.0
        if plain and gradient.dtype == stepped.dtype and not isinstance(self._rule, Own):
            return gradient
        gradient = self._line("gradient", stepped.n, stepped.dtype).copy_(gradient)
        return gradient if plain else gradient.mul_(scale)

    def _unpacked(self, stepped: Stepped) -> tuple[dict[str, Tensor], list[str]]:
        """The lines to compute with, and the names of those that are to be rounded back."""
        lines, packed = dict(stepped.place_lines), []
        for name, line in stepped.place_lines.items():
            if line.dtype != stepped.dtype:
                lines[name] = self._line(name, stepped.n, stepped.dtype).copy_(line)
                packed.append(name)
        return lines, packed


class DeviceLanes:
    """Steps the staged and the resident parts; see the head of this file."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parts: Sequence[tuple[Part, Sequence[Run], torch.dtype]],
        *,
        moments: torch.dtype,
        streams: Streams,
        slots: int = SLOTS,
    ) -> None:
        device = streams.device
        self.rule = device_rule(optimizer)
        rounding, kinds = Rounding(_SEED, device), Moments(moments, _SEED)
        self._streams, self._optimizer = streams, optimizer
        self._load, self._step, self._store = (streams.queue() for _ in range(3))
        self._aside, self._here = (Kernel(self.rule, rounding, device) for _ in range(2))
        segments = [Segments(runs, part.length, len(optimizer.param_groups)) for part, runs, _ in parts]
        layouts = [
            Layout(_dtypes(self.rule, optimizer, kinds, one, dtype), part.length)
            for (part, _, dtype), one in zip(parts, segments, strict=True)
        ]
        passing = [lay for lay, (part, _, _) in zip(layouts, parts, strict=True) if part.lane == "staged"]
        most = max((lay.nbytes for lay in passing), default=0)
        self._slots = [self._room(most) for _ in range(min(slots, len(passing)))]
        self.slab = Slab(sum(lay.nbytes for lay in passing), pinned=device.type == "cuda")
        self.staged: list[Stepped] = []
        self.resident: list[Stepped] = []
        for number, ((part, _, _), one, lay) in enumerate(zip(parts, segments, layouts, strict=True)):
            self._place(number, part, one, lay)
        self._free: list[Mark | None] = [None] * len(self._slots)
        self._owner = [-1] * len(self._slots)  # whose state was loaded last
        self._stored: dict[int, Mark] = {}
        self._loaded: dict[int, Mark] = {}

    def _place(self, number: int, part: Part, segments: Segments, layout: Layout) -> None:
        if part.lane == "staged":
            turn = len(self.staged)
            home = self.slab.line(layout.nbytes, torch.uint8)
            slot = self._slots[turn % len(self._slots)]
            self.staged.append(Stepped(number, turn, part, segments, layout, home, slot))
            self._aside.reserve(self.staged[-1])
        else:
            here = self._room(layout.nbytes)
            self.resident.append(Stepped(number, 0, part, segments, layout, here, here))
            self._here.reserve(self.resident[-1])

    def _room(self, nbytes: int) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=self._streams.device)

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory held: resident state, slots and scratch lines."""
        held = sum(t.numel() for t in (*self._slots, *(s.home for s in self.resident)))
        return held + self._aside.nbytes + self._here.nbytes

    # Steps ------------------------------------------------------------------------------------------------

    def step_resident(
        self, stepped: Stepped, target: Tensor, gradient: Tensor, *, scale: Scale, absent: Ranges, now: StepSettings
    ) -> None:
        """Step a resident part in the current stream; `target` gets its new values."""
        self._here(stepped, target, gradient, scale=scale, absent=absent, now=now)

    def step_staged(
        self,
        stepped: Stepped,
        target: Tensor,
        gradient: Tensor,
        *,
        scale: Scale,
        absent: Ranges,
        now: StepSettings,
        after: Mark,
    ) -> Mark:
        """Send a part through the device; `target` has its new values by the mark that is returned."""
        i = stepped.turn
        self._fetch(i)
        if isinstance(scale, Tensor):
            self._streams.lend(scale, self._step)
        ready = self._step.run(
            lambda: self._aside(stepped, target, gradient, scale=scale, absent=absent, now=now),
            after=[self._loaded.pop(i), after],
        )
        stored = self._store.run(lambda: stepped.home.copy_(stepped.place, non_blocking=True), after=[ready])
        self._stored[i] = self._free[i % len(self._slots)] = stored
        return ready

    def run_ahead(self) -> None:
        """Begin to load the first parts of the next step."""
        for i in range(len(self._slots)):
            self._fetch(i)

    def _fetch(self, i: int) -> None:
        if i in self._loaded:
            return
        stepped, slot = self.staged[i], i % len(self._slots)
        self._loaded.pop(self._owner[slot], None)  # loaded ahead, then it had no gradient
        self._owner[slot] = i
        marks = (self._free[slot], self._stored.get(i))
        self._loaded[i] = self._load.run(
            lambda: stepped.place.copy_(stepped.home, non_blocking=True), after=[m for m in marks if m is not None]
        )

    def wait(self) -> None:
        """Block until all state is home and nothing is on its way."""
        for mark in (*self._stored.values(), *self._loaded.values()):
            mark.wait()

    def close(self) -> None:
        """Give locked host memory back."""
        self.wait()
        self.slab.close()

    # State ------------------------------------------------------------------------------------------------

    def read(self, stepped: Stepped, name: str, start: int, stop: int) -> Tensor:
        """A copy on the host of elements [start, stop) of a line, in the precision of the master."""
        self.wait()
        return stepped.home_lines[name][start:stop].to("cpu", stepped.dtype, copy=True)

    def load(self, stepped: Stepped, values: Mapping[str, Any], start: int, stop: int) -> None:
        """Set lines and scalars of elements [start, stop)."""
        self.wait()
        self._loaded.clear()  # what was loaded ahead is loaded again
        lines = {name: value for name, value in values.items() if name in stepped.home_lines}
        scalars = {name: value for name, value in values.items() if name not in lines}
        for name, value in lines.items():
            stepped.home_lines[name][start:stop].copy_(value.detach())
        groups = [settings_of(self._optimizer.param_groups[g]) for g in stepped.segments.groups(start, stop)]
        known = {name for group in groups for name in self.rule.kept(group).scalars}
        if scalars and set(scalars) != known:
            raise ValueError(f"got the state {sorted(values)}: expected {[*stepped.home_lines]} and {sorted(known)}")
        if scalars or (not known and set(lines) - {"master"}):
            stepped.segments.mark(start, stop, self.rule.scalars(scalars))


def _dtypes(
    rule: Rule, optimizer: torch.optim.Optimizer, moments: Moments, segments: Segments, master: torch.dtype
) -> dict[str, torch.dtype]:
    names: dict[str, float] = {}
    for group in sorted({run.group for run in segments.runs}):
        names |= rule.kept(settings_of(optimizer.param_groups[group])).lines
    return {"master": master, **moments.dtypes(list(names), master)}
