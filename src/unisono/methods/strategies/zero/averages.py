"""An average of the weights in shards: each rank averages what the optimizer steps here, its own shards' masters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unisono.methods.buckets import find_wide_dtype
from unisono.methods.strategies.zero.checkpoint import Holder, find_given, join_lines
from unisono.methods.strategies.zero.groups import Groups
from unisono.methods.strategies.zero.offloads import Offloads
from unisono.methods.strategies.zero.optimizer_shards import OptimizerShards
from unisono.methods.strategies.zero.spare import Spare
from unisono.methods.strategies.zero.units import Unit
from unisono.methods.strategies.zero.values import Values
from unisono.methods.strategy.averages import AveragedValues, Part, Source
from unisono.world import World

if TYPE_CHECKING:
    from unisono.methods.strategies.zero.replica import ZeroReplica


class ShardValues(AveragedValues):
    """The masters of a replica's trainable units; frozen parameters do not move and have no average."""

    def __init__(
        self,
        replica: ZeroReplica,
        units: Sequence[Unit],
        values: Values | None,
        offload: Offloads | None,
        spare: Spare | None,
        shards: OptimizerShards,
        groups: Groups,
    ) -> None:
        super().__init__(replica)
        self._groups = groups
        self._units, self._model_values, self._offload, self._spare = list(units), values, offload, spare
        self._shards = shards
        self.is_late, self.steps_here = offload is not None, offload is None

    def sources(self) -> list[Source]:
        first = {param: name for name, param in self.named_parameters()}
        return [self._source(unit, one, first) for unit in self._units for one in unit.held]

    def _source(self, unit: Unit, one: Unit, first: dict[Tensor, str]) -> Source:
        parts = [Part(first[one.params[p.slot]], one.shapes[p.slot], p.at, p.start, p.length) for p in one.parts]
        offload = None if unit.steps_here else self._offload
        read, write = partial(_read, one, offload), partial(_write, one, offload)
        return Source(one, read, read, write, parts, is_copy=one is not unit)

    def collect(self, held: Mapping[Any, Tensor]) -> dict[str, Any]:
        """Of what other groups of ranks have too, the part that mine gives to a checkpoint."""
        found: dict[str, Any] = self._groups.share_out(super().collect(held))
        return found

    @contextmanager
    def optimizing(self) -> Iterator[None]:
        self._shards.begin_step()
        try:
            yield
        finally:
            self._shards.end_step()

    @contextmanager
    def writing(self) -> Iterator[None]:
        assert self._model_values is not None
        with nullcontext() if self._spare is None else self._spare.changing():
            self._model_values.begin_loading()
            yield
            for one in (one for unit in self._units if unit.steps_here for one in unit.held):
                one.update_shard()
        self._model_values.take_shards(self._units)


def _read(unit: Unit, offload: Offloads | None) -> Tensor:
    return unit.master if offload is None else offload.state(unit).read("master")


def _write(unit: Unit, offload: Offloads | None, values: Tensor) -> None:
    if offload is None:
        unit.master.copy_(values)
    else:
        offload.set_master(unit, values)


def join_averages(
    units: Sequence[Unit], held: dict[Unit, Tensor], world: World, order: Sequence[Holder], names: dict[Tensor, str]
) -> dict[str, Tensor]:
    """The averages of whole parameters, by name, from those who hold the shards, in `order`."""
    found: dict[str, Tensor] = {}
    for unit in units:
        if not unit.trainable:
            continue
        mine = [held[unit.held[which]] for which in find_given(world, order)]
        empty = torch.empty(0, dtype=find_wide_dtype(unit.master_dtype), device=unit.params[0].device)
        full = join_lines(world, order, unit, [x.to(empty.device) for x in mine], empty)
        found |= {names[p]: x.clone() for p, x in zip(unit.params, unit.views(full), strict=True) if p in names}
    return found
