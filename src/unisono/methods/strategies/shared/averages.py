"""An average of the weights once a host: in lines of its memory, of which each rank averages a part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unisono.methods.buckets import alignment
from unisono.methods.model_copies import unwrap
from unisono.methods.strategies._host_memory import HostMemory, Writes, cut
from unisono.methods.strategies.shared.lines import Line
from unisono.methods.strategy.averages import Average, AveragedValues, Source, void
from unisono.training.checkpoint.slices import Stored

if TYPE_CHECKING:
    from unisono.methods.strategies.shared.replica import SharedReplica

_BEGUN, _ENDED = 0, 1  # of what a rank notes: the number of the average's update


class LineValues(AveragedValues):
    """The lines of a replica's parameters; parameters with sparse gradients are each rank's own."""

    steps_here, is_common = False, True

    def __init__(self, replica: SharedReplica, lines: Sequence[Line], memory: HostMemory, writes: Writes) -> None:
        super().__init__(replica)
        self._lines, self._memory, self._writes = list(lines), memory, writes
        self._rooms: dict[Line, Tensor] = {}  # the averages of whole lines
        self._marks = [line.numpy() for line in memory.lines(8, torch.int64)]

    def sources(self) -> list[Source]:
        here = {id(param) for line in self._lines for param in line.params}
        rest = [self.whole(name, p) for name, p in self.named_parameters() if id(p) not in here]
        floats = [line for line in self._lines if line.dtype.is_floating_point or line.dtype.is_complex]
        return [*(self._source(line) for line in floats), *rest]

    def _source(self, line: Line) -> Source:
        mine = line.values[slice(*self._part(line, self._memory.rank))]
        make = partial(self._make_room, line)
        return Source(line, lambda: mine, lambda: mine, lambda values: void(mine.copy_(values)), (), make)

    def _part(self, line: Line, rank: int) -> tuple[int, int]:
        return cut(line.numel, rank, self._memory.size, step=alignment(line.dtype))

    def _make_room(self, line: Line, _: int, dtype: torch.dtype) -> Tensor:
        self._rooms[line] = self._memory.line(line.numel, dtype)
        return self._rooms[line][slice(*self._part(line, self._memory.rank))]

    @contextmanager
    def writing(self) -> Iterator[None]:
        self._writes.settle("average.applied()")
        yield
        self._writes.take_loaded("what average.applied() wrote")

    def collect(self, held: Mapping[Any, Tensor]) -> dict[str, Any]:
        return self._collect(held, self._rooms)

    def collect_values(self) -> dict[str, Any]:
        held = {source.key: source.follow() for source in self.listed if source.parts is None}
        return self._collect(held, {line: line.values for line in self._rooms})

    def _collect(self, held: Mapping[Any, Tensor], rooms: Mapping[Line, Tensor]) -> dict[str, Any]:
        known = {param: name for name, param in unwrap(self.replica.model).named_parameters()}
        found = {source.key: held[source.key] for source in self.listed if source.parts is None}
        for line, room in rooms.items():
            found |= {known[p]: x for p, x in zip(line.params, line.view(room), strict=True)}
        return found

    def fill(self, held: Mapping[Any, Tensor], values: Mapping[str, Any]) -> None:
        """One rank of the host fills the lines, while the others wait."""
        self._memory.meet("an average is loaded")
        whole = {source.key for source in self.listed if source.parts is None}
        known = dict(self.named_parameters())
        for name, mine in self.collect(held).items():
            if name in whole or self._memory.rank == 0:
                given = values.get(name, known[name])  # without one it was frozen there: its value
                mine.copy_(given.full() if isinstance(given, Stored) else given)
        self._memory.meet("an average has been loaded")

    # A rank that is lost while it averages its part ----------------------------------------------------------------

    def note(self, update: int, *, ended: bool) -> None:
        self._marks[self._memory.rank][_ENDED if ended else _BEGUN] = update

    def end_parts(self, average: Average) -> list[int]:
        """Average the parts of ranks that have not done so: they were lost, or wait for this one. Gives those who were
        lost in the middle of it: their part is left as it is."""
        torn = []
        for rank, mark in enumerate(self._marks):
            if int(mark[_ENDED]) >= average.updates:
                continue
            if int(mark[_BEGUN]) >= average.updates:
                torn.append(rank)
                continue
            places = [(line, room, slice(*self._part(line, rank))) for line, room in self._rooms.items()]
            average.blend([room[at] for _, room, at in places], [line.values[at] for line, _, at in places])
        return torn
