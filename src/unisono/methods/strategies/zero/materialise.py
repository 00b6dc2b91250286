"""Memory for the values of units, and values for parameters that were made on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.methods.offload.streams import copy_to
from unisono.methods.strategies.zero.units import Unit
from unisono.world import World


@torch.no_grad()
def adopt(
    unit: Unit,
    empty: Callable[[int, torch.dtype], Tensor],
    *,
    whole: bool,
    device: torch.device,
    shard_on: torch.device,
    master_on: torch.device,
    master_in: Tensor | None = None,
) -> None:
    """Move a unit's parameters into a line of its own. `whole`: all of it stays on the device; else only my shard.

    empty: memory for what stays, if the device is the host. Ranks may all have the same memory, as they have the same
        values.
    master_in: memory for values of higher precision, instead of new memory on `master_on`.
    """

    def line(n: int, dtype: torch.dtype, *, shared: bool) -> Tensor:
        if shared and device.type == "cpu":
            return empty(n, dtype)
        return torch.empty(n, dtype=dtype, device=device)

    unit.full = line(unit.numel, unit.dtype, shared=whole)
    unit.zero_gaps(unit.full)
    wide = unit.trainable and unit.master_dtype != unit.dtype
    before = torch.zeros(unit.numel, dtype=unit.master_dtype, device=device) if wide else unit.full
    for view, param in zip(unit.views(before), unit.params, strict=True):
        view.copy_(param)
    if wide:
        unit.full.copy_(before)
    for view, param in zip(unit.views(unit.full), unit.params, strict=True):
        param.grad = None  # of before: the optimizer, which clears gradients, will not see it
        param.data = view
    if whole:
        unit.shard = unit.my_shard(unit.full)
    else:
        unit.shard = line(unit.shard_length, unit.dtype, shared=True) if shard_on == device else _make_host_shard(unit)
        unit.shard.copy_(unit.my_shard(unit.full))
    if not wide:
        unit.master = unit.shard
    elif master_in is not None:
        unit.master = master_in.copy_(unit.my_shard(before))
    else:
        unit.master = copy_to(unit.my_shard(before), master_on)
    if unit.spare is not None:
        _adopt_spare(unit.spare, unit, before, whole=whole)
    if not whole:
        unit.full.untyped_storage().resize_(0)


def _adopt_spare(spare: Unit, unit: Unit, before: Tensor, *, whole: bool) -> None:
    """Take the shard of the rank before me while all values are here. Where they stay, it lies among them."""
    spare.params, spare.full = unit.params, unit.full
    wide = before is not unit.full
    mine = spare.my_shard(before)
    spare.master = mine if whole and not wide else mine.clone()
    spare.shard = spare.my_shard(unit.full) if whole and wide else spare.master


def _make_host_shard(unit: Unit) -> Tensor:
    return torch.empty(unit.shard_length, dtype=unit.dtype, pin_memory=torch.cuda.is_available())


Replacements = dict[nn.Parameter, nn.Parameter]  # parameters on the meta device, and what took their places


@torch.no_grad()
def materialise(
    model: nn.Module, world: World, replacements: Replacements, wanted: Iterable[nn.Parameter] | None = None
) -> None:
    """Give values to modules whose tensors are on the meta device: their own `reset_parameters()`, rank 0's for all.

    wanted: only modules that hold one of these parameters. The parameters become other objects: see `replacements`.
    """
    chosen = None if wanted is None else set(wanted)
    for name, module in model.named_modules():
        held = {key: p for key, p in module._parameters.items() if p is not None}
        if not any(x.is_meta for x in own_tensors(module)) or (chosen is not None and chosen.isdisjoint(held.values())):
            continue
        reset = getattr(module, "reset_parameters", None)
        if reset is None:
            raise ValueError(
                f"{name or 'the model'} ({type(module).__name__}) has parameters or buffers on the meta device and no "
                "reset_parameters(): give it one, or make it on a real device"
            )
        tied = {key: replacements[p] for key, p in held.items() if p in replacements}
        module.to_empty(device=world.device, recurse=False)
        reset()
        for key, old in held.items():
            new = module._parameters[key]
            assert new is not None
            if key in tied:  # another module made it
                module._parameters[key] = tied[key]
            else:
                replacements[old] = new
        if world.size > 1:
            world.broadcast([x.detach() for x in own_tensors(module)], tag="initial state").wait()


def swap(optimizer: Optimizer, replacements: Replacements) -> None:
    """Let the optimizer hold the parameters that have values."""
    for group in optimizer.param_groups:
        group["params"] = [replacements.get(p, p) for p in group["params"]]


def own_tensors(module: nn.Module) -> list[Tensor]:
    """List a module's own parameters and buffers."""
    return [x for x in (*module._parameters.values(), *module._buffers.values()) if x is not None]
