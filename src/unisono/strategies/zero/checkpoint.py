"""What a checkpoint holds of split parameters, and how it is taken up again: each rank its own elements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.checkpoint.slices import Piece, Stored
from unisono.strategies.zero import optimizer_shards as optimizers
from unisono.strategies.zero.offloading import Offloading
from unisono.strategies.zero.units import Unit


def model_pieces(model: nn.Module, units: Sequence[Unit], offload: Offloading | None) -> dict[str, Any]:
    """The model's state: a Piece for each parameter that is split, in the precision that the optimizer steps.

    `model.state_dict()` must leave the values where they are while this runs.
    """
    state: dict[str, Any] = dict(model.state_dict())
    made: dict[Tensor, Piece] = {}
    for unit in units:
        for slot, param in enumerate(unit.params):
            if offload is not None and unit.trainable:
                made[param] = offload.master_piece(unit, slot)
                continue
            line = unit.master if unit.trainable else unit.shard
            held = [part for part in unit.held if part.slot == slot]
            if held:
                part = held[0]
                made[param] = Piece.of(line[part.at : part.at + part.length], part.start, shape=unit.shapes[slot])
            else:
                made[param] = Piece(unit.shapes[slot], line.dtype)
    for name, param in model.named_parameters(remove_duplicate=False):
        if name in state and param in made:
            state[name] = made[param]
    return state


@torch.no_grad()
def load_model(
    model: nn.Module, units: Sequence[Unit], saved: Mapping[str, Any], *, whole: bool, offload: Offloading | None
) -> None:
    """Take up saved values: my elements of them, or all of them where a rank keeps `whole` units."""
    places = {param: (unit, slot) for unit in units for slot, param in enumerate(unit.params)}
    done: set[Tensor] = set()
    for name, param in model.named_parameters(remove_duplicate=False):
        if name not in saved or param in done or param not in places:
            continue
        done.add(param)
        unit, slot = places[param]
        stored = as_stored(saved[name])
        if whole:
            start = unit.starts[slot]
            stored.read(0, stored.numel(), out=unit.full[start : start + stored.numel()])
        for part in unit.held:
            if part.slot == slot and offload is not None and unit.trainable:
                offload.load_values(unit, part, stored)
            elif part.slot == slot:
                for line in dict.fromkeys((unit.shard, unit.master) if unit.trainable else (unit.shard,)):
                    stored.read(part.start, part.start + part.length, out=line[part.at : part.at + part.length])
    rest = {name: plain(value) for name, value in saved.items() if not _is_placed(model, name, places)}
    model.load_state_dict(rest, strict=False)


def _is_placed(model: nn.Module, name: str, places: Mapping[Any, Any]) -> bool:
    owner, _, leaf = name.rpartition(".")
    try:
        return model.get_submodule(owner)._parameters.get(leaf) in places
    except AttributeError:
        return False


def as_stored(value: Any) -> Stored:
    """A tensor, wherever it lies."""
    return value if isinstance(value, Stored) else Stored.of(value)


def plain(value: Any) -> Any:
    """State with whole tensors."""
    if isinstance(value, Stored):
        return value.full()
    if isinstance(value, dict):
        return {key: plain(x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(plain(x) for x in value)
    return value


def load_optimizer(optimizer: Optimizer, units: Sequence[Unit], groups: Sequence[Sequence[Tensor]], saved: Any) -> None:
    """Take up saved state."""
    if units:
        optimizers.load(optimizer, units, groups, saved)
    else:
        optimizer.load_state_dict(plain(saved))
