"""Another strategy in the middle of a run: the model, the optimizer and what was still to be sent go on."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from unisono.methods.buckets import load_optimizer
from unisono.methods.exchange.reduction import Residual
from unisono.methods.spec import build, describe
from unisono.methods.strategy.program_writes import digest
from unisono.methods.strategy.replica import Replica, Strategy
from unisono.world import World


def switch(replica: Replica, strategy: str | Strategy) -> Replica:
    """Bind `strategy` to the replica's model and optimizer, on every rank; a refusal leaves everything as it was.

    1. agree: every rank asks for the same strategy at the same step;
    2. gather: the model becomes the one that `consolidate()` gives, and the optimizer's states their mean, on every
       rank (where ranks had the same, nothing changes);
    3. go on: the new replica counts on, and takes over what a reducer had still to send, in its own unit.
    """
    built: Strategy = build(strategy, kind="strategy")
    world, model = replica.world, replica.model
    _agree(describe(built), replica.step, world)
    consolidated = replica.consolidate()
    unsent = replica.unsent()
    replica.restore()
    before = copy.deepcopy([model.state_dict(), replica.optimizer.state_dict()])
    _gather(model, consolidated)
    _average_optimizer(replica.optimizer, world)
    new: Replica | None = None
    try:
        new = built.bind(model, replica.optimizer, world)
        new.step = replica.step
        if unsent is not None:
            _hand_over(unsent, new)
    except BaseException:
        if new is not None:
            new.restore()
            new.close()
        model.load_state_dict(before[0])
        replica.optimizer.load_state_dict(before[1])
        replica.split_again()
        raise
    replica.close()  # before the next one wraps the scaler's update: each unwraps only its own
    if replica.scaler is not None:
        new.watch(replica.scaler)
    new.forget_writes()
    if world.axes is not None:
        world.axes.attach(new)
    return new


def _agree(strategy: str, step: int, world: World) -> None:
    every = world.gather_objects([strategy, step])
    if any(other != every[0] for other in every):
        asked = "; ".join(f"rank {r} asks for {text} at step {at}" for r, (text, at) in enumerate(every))
        raise ValueError(f"the ranks do not switch alike: {asked}. Every rank must call switch() at the same step")


@torch.no_grad()
def _gather(model: nn.Module, consolidated: nn.Module) -> None:
    if consolidated is not model:
        theirs = consolidated.state_dict()
        for name, value in model.state_dict().items():
            if isinstance(value, Tensor):
                value.copy_(theirs[name])


@torch.no_grad()
def _hand_over(unsent: Residual, new: Replica) -> None:
    """What was still to be sent goes to the new replica. Differences of parameters that it has no use for are applied
    now: that is what sending them would have done."""
    taken = new.unsent()
    if unsent.unit != "parameters" or (taken is not None and taken.unit == "parameters"):
        new.take_unsent(unsent)
        return
    for name, param in new.model.named_parameters():
        total = unsent.total(name)
        if total is not None:
            new.world.all_reduce(total, "mean", tag="switch").wait()
            param.detach().sub_(total)


@torch.no_grad()
def _average_optimizer(optimizer: torch.optim.Optimizer, world: World) -> None:
    """Momenta that differ between ranks become their mean: ranks with one model and other momenta would part."""
    if world.size == 1:
        return
    states: list[dict[str, Any]] = [optimizer.state.get(p, {}) for g in optimizer.param_groups for p in g["params"]]
    floats = [v for s in states for _, v in sorted(s.items()) if isinstance(v, Tensor) and v.is_floating_point()]
    shapes = [[len(s) for s in states], [list(x.shape) for x in floats]]
    every = world.gather_objects({"shapes": shapes, "digest": digest(floats)})
    if all(other["digest"] == every[0]["digest"] for other in every):
        return
    if any(other["shapes"] != shapes for other in every):  # some rank has not stepped yet: rank 0's count
        load_optimizer(optimizer, world.broadcast_object(optimizer.state_dict(), 0))
        return
    for device in dict.fromkeys(x.device for x in floats):
        world.all_reduce([x for x in floats if x.device == device], "mean", tag="optimizer").wait()
