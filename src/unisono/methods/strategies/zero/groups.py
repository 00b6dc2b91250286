"""Hybrid sharding: groups of ranks, each of which splits everything among its own, and a mean between the groups.

Two phases of a gradient: inside a group it is reduced to shards; then the ranks that have the same shard, one of each
group, take the mean of it (`across`). Values are gathered inside a group only. As HSDP: Zhao et al., 2023,
arXiv:2304.11277.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from unisono.methods.exchange.reduction import Reduction
from unisono.methods.reducer import Reducer
from unisono.methods.strategies._crossing import Crossing
from unisono.methods.strategies._crossing import Piece as LinePiece
from unisono.methods.strategies.zero.units import Unit
from unisono.training.checkpoint.slices import Piece, Span
from unisono.units import show_ranks
from unisono.world import World
from unisono.world.operations import list_groups

DROPPED = "what the reducer between groups had still to send is dropped, as it belongs to shards of the former ranks"


class Groups:
    """The groups of a world, and this rank's place in them.

    inside: the ranks that split everything among them: my group, or the world itself if that is the only one.
    across: the ranks that have the same shard as this one, one of each group; None: there is one group.
    number, count: which group is mine, and how many there are.
    size, rank: in how many shards a group splits everything, and which of them this rank has.
    """

    def __init__(self, world: World, groups: Sequence[Sequence[int]]) -> None:
        self.world, self.count = world, len(groups)
        self.number = next(i for i, ranks in enumerate(groups) if world.rank in ranks)
        self.inside, self.across = world, None
        if self.count > 1:
            self.inside = world.split(groups, inline=True)
            self.across = world.split([list(ranks) for ranks in zip(*groups, strict=True)], inline=True)
        self.size, self.rank = self.inside.size, self.inside.rank  # as they are now: an elastic world becomes another

    def share_out(self, value: Any) -> Any:
        """A state with the part of each `Piece` that my group gives to a checkpoint: all groups hold the same."""
        if isinstance(value, dict):
            return {key: self.share_out(x) for key, x in value.items()}
        return self._cut(value) if isinstance(value, Piece) and self.count > 1 else value

    def _cut(self, piece: Piece) -> Piece:
        spans = []
        for start, stop, read in piece.spans:
            low, high = (start + (stop - start) * k // self.count for k in (self.number, self.number + 1))
            spans += [Span(low, high, read)] if low < high else []
        return Piece(piece.shape, piece.dtype, spans)

    def close(self) -> None:
        """Close the worlds of groups."""
        if self.across is not None:
            self.across.close()
            self.inside.close()


def find_groups(within: Any, world: World) -> list[list[int]]:
    """The groups that `within` names, all of one size; ValueError with what would fit. One process alone is one."""
    everyone = list(range(world.size))
    if within is None or world.size == 1:
        return [everyone]
    if within == "host":
        groups = list_groups("host", world.hosts)
        if len(set(map(len, groups))) > 1:
            each = ", ".join(f"{world.hosts[ranks[0]]} has {len(ranks)}" for ranks in groups)
            raise ValueError(
                f"within='host' splits alike on every host, and they differ in ranks ({each}): start as many on each, "
                f"or give within=K, ranks that follow each other, where K divides all {world.size}"
            )
        return groups
    if isinstance(within, int):
        if world.size % within:
            fit = [k for k in range(2, world.size + 1) if world.size % k == 0]
            raise ValueError(
                f"within={within} does not divide the {world.size} ranks of the world: start a multiple of {within}, "
                f"or give within={' or '.join(map(str, fit))}"
            )
        return [everyone[r : r + within] for r in range(0, world.size, within)]
    return _find_torch_groups(within, world)


def check_within(within: Any) -> None:
    """Refuse what names no groups."""
    is_torch = hasattr(within, "get_group") or hasattr(within, "rank")  # a DeviceMesh, a ProcessGroup
    if within is None or within == "host" or (type(within) is int and within > 0) or is_torch:
        return
    raise ValueError(
        f"within={within!r}: expected 'host', a number of ranks, or of torch's the process group or the mesh dimension "
        "whose ranks split the model among them, mesh['shard']"
    )


def _find_torch_groups(within: Any, world: World) -> list[list[int]]:
    """Each rank knows its own group of torch's, a dimension of a mesh: those that know the same one belong together."""
    from torch.distributed import get_process_group_ranks

    mine = get_process_group_ranks(within.get_group() if hasattr(within, "get_group") else within)
    together: dict[tuple[int, ...], list[int]] = {}
    for rank, ranks in enumerate(world.gather_objects(list(mine))):
        together.setdefault(tuple(ranks), []).append(rank)
    groups = list(together.values())
    if len({len(ranks) for ranks in (*groups, *together)}) > 1:
        raise ValueError(
            f"within: torch's groups ({'; '.join(show_ranks(ranks) for ranks in together)}) do not divide the "
            f"{world.size} ranks of this world into groups of one size: give the dimension of a mesh over these ranks"
        )
    return groups


def fit_groups(within: Any, world: World) -> tuple[list[list[int]], str]:
    """The groups of `within`, and ""; or one of all ranks, and why: a world that lost some may have none that fit."""
    try:
        return find_groups(within, world), ""
    except ValueError as error:
        instead = f"Till then all {world.size} ranks are one group, with copies as spare=True has"
        return [list(range(world.size))], f"{error}. {instead}"


# Between the groups -----------------------------------------------------------------------------------------------


class UnitLine:
    """The line of a unit, as `Crossing` takes it."""

    def __init__(self, unit: Unit) -> None:
        self.names: list[str] = unit.names
        self.params: list[Parameter] = unit.params
        self.dtype = unit.dtype
        self._layout = unit.layout

    def bounds(self, slot: int) -> tuple[int, int]:
        """Where a parameter begins and ends in the line."""
        start = self._layout.starts[slot]
        return start, start + self._layout.lengths[slot]


class Across:
    """Means of shards between the groups.

    crossing: at work with a reducer; None: the means are exact.
    """

    def __init__(self, units: Sequence[Unit], groups: Groups, reducer: Reducer | None, optimizer: Optimizer) -> None:
        assert groups.across is not None
        self._world, self._units = groups.across, list(units)
        self.crossing: Crossing | None = None
        if reducer is not None:
            place = (groups.rank, groups.size)
            self.crossing = Crossing(self._world, reducer, optimizer, place=place)
            lines = [UnitLine(unit) for unit in units]
            self.crossing.set_pieces(lines, [_find_pieces(unit) for unit in units])
        self._layout = [groups.number, groups.count, groups.rank, groups.size, len(self._units)]
        self._number = {unit: i for i, unit in enumerate(self._units)}

    @torch.no_grad()
    def exchange(self, unit: Unit) -> None:
        """Replace the gradient of my shard, the mean of my group, by the mean over all groups. It travels in the dtype
        that computes."""
        gradient = unit.gradient
        assert gradient is not None
        if self.crossing is not None:
            self.crossing.exchange(self._number[unit], gradient, unit.bounds[unit.rank])
            return
        line = gradient.to(unit.dtype)
        self._world.all_reduce(line, "mean", tag=f"across/{unit.index}").wait()
        if line is not gradient:
            gradient.copy_(line)

    @property
    def reductions(self) -> list[Reduction]:
        """The reducer at work, if there is one."""
        return [] if self.crossing is None else [self.crossing.reduction]

    def state_dict(self) -> dict[str, Any]:
        """What the reducer keeps: of this rank's shards, whatever others keep."""
        kept = {} if self.crossing is None else self.crossing.reduction.state_dict()
        return {**kept, "layout": self._layout}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it, if it is of the same shards."""
        if self.crossing is not None and "shared" in state and state["layout"] == self._layout:
            self.crossing.reduction.load_state_dict(state["shared"], [state["local"]])

    def describe_loss(self) -> str:
        """What is lost if another world, or another method, drops it."""
        return DROPPED if any(reduction.keeps_own for reduction in self.reductions) else ""

    def watch(self, scale: Callable[[], float]) -> None:
        """Follow AMP's loss scale."""
        if self.crossing is not None:
            self.crossing.reduction.scale = scale


def _find_pieces(unit: Unit) -> list[LinePiece]:
    """What lies in my shard, by places in the unit's line."""
    low = unit.bounds[unit.rank]
    return [LinePiece(part.slot, low + part.at, low + part.at + part.length) for part in unit.parts]
