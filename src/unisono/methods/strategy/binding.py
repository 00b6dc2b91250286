"""`un.parallel`: binds a strategy to a model and its optimizer, once all ranks are known to hold the same."""

from __future__ import annotations

import dataclasses
import difflib
import gc
import hashlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from unisono.launchers.runtime.variables import read_observer_module
from unisono.methods.joined_optimizers import check_members, join_optimizers, members_of
from unisono.methods.spec import SpecError, build, describe
from unisono.methods.strategy.healing import Healing
from unisono.methods.strategy.loss_scale import follow_scaler
from unisono.methods.strategy.mistakes import refuse_split, refuse_wrapped
from unisono.methods.strategy.outliers import Outliers
from unisono.methods.strategy.replica import Replica, Strategy, bound_parameters
from unisono.methods.strategy.sharing import share
from unisono.observe.runs import recording
from unisono.observe.runs.recorder import Facts
from unisono.world import World, join
from unisono.world.process_groups import as_world

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

OVERRIDE = "UNISONO_STRATEGY"  # overrides the argument of `parallel`
_RECORDED = " record"  # after a rank's mark: it would have the run recorded

Observer = Callable[[nn.Module, Optimizer, Strategy, World], Replica]
observer: Observer | None = None  # binds instead (`unisono memory`)


def parallel(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    strategy: str | Strategy = "allreduce",
    *,
    world: World | ProcessGroup | DeviceMesh | None = None,
    skip_outliers: float | None = None,
    **settings: Any,
) -> Replica:
    """Train `model` together with the other ranks of `world`; the loop stays as it is.

    The model stays the same module, and rank 0's parameters and buffers become everyone's. Every rank calls it.
    Returns the replica, which `un.save`, `un.load` and `un.average` take.

    Args:
        model: The module to train.
        optimizer: Steps the model's trainable parameters. Or a list of optimizers that hold each of them once:
            [muon, adamw]. Your loop steps each, in any order, and as often as it likes.
        strategy: A method's spec such as "allreduce(accumulate=4)", or an object. UNISONO_STRATEGY in the environment
            (`unisono run --strategy`) overrides it, and `settings` with it.
        world: The ranks that train together; default: `un.join()`. Or a process group of torch.distributed, or one
            dimension of a DeviceMesh: `mesh["data"]`.
        skip_outliers: A factor, such as 10: skip a step, on all ranks, if the gradient norm or the loss of one rank
            alone is not finite, or more than so many times that of the others and of earlier steps. A warning and the
            record name the rank and its samples. Costs a pass over the gradients and a message of 24 bytes per step.
        settings: Fields of the strategy, which override those of `strategy`.

    >>> import torch
    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> parallel(model, optimizer, "allreduce", world=World()).step
    0
    """
    built = build(strategy, kind="strategy")
    if settings:
        built = _with_settings(built, settings)
    optimizer = check(model, optimizer)
    world = as_world(world) if world is not None else join()
    built = _override(built, world)
    watching, module = observer, read_observer_module()
    if watching is None and module:
        watching = importlib.import_module(module).bind
    if watching is not None:
        return watching(model, optimizer, built, world)
    replica = bind_for(model, optimizer, built, world)
    follow_scaler(replica)
    _record(replica, built, world)
    if skip_outliers is not None:  # after the recorder, which may be the one to see losses
        at_work = getattr(replica, "inner", replica)
        at_work.outliers = Outliers(at_work, skip_outliers)
    return replica


def bind_for(model: nn.Module, optimizer: Optimizer, strategy: Strategy, world: World) -> Replica:
    """The replica of a strategy; all has been checked and nobody observes (or it is the observer who calls)."""
    healing = Healing.of(world)
    if healing is None:
        return _bind(model, optimizer, strategy, world)
    description = _describe_all(model, optimizer, strategy)  # as it is before a method splits it
    with healing.elastic.inside():
        replica = _bind(model, optimizer, strategy, healing.elastic.solo if healing.elastic.is_joining else world)
    healing.add(replica, description)
    return replica


def _record(replica: Replica, strategy: Strategy, world: World) -> None:
    """Have the run recorded from here on, where somebody asked for it."""
    if world.size == 1 and recording.needs_folder(world):
        recording.share_folder(world)
    recording.begin(
        world,
        Facts(
            describe(strategy),
            sum(p.numel() for p in replica.model.parameters()),
            replica.not_measured,
            replica.bytes_by_formula,
            None if world.axes is None else (world.axes.sizes, world.axes.place),
        ),
    )


def _override(strategy: Strategy, world: World) -> Strategy:
    """What the environment asks for; else `strategy`."""
    text = os.environ.get(OVERRIDE, "").strip()
    if not text:
        return strategy
    try:
        built: Strategy = build(text, kind="strategy")
    except SpecError as error:  # the program's own line has another spec, or none
        raise SpecError(f"{OVERRIDE}: {error.problem}", error.text, error.position) from error.__cause__
    if world.rank == 0 and describe(built) != describe(strategy):
        print(f"unisono: {OVERRIDE}: {describe(built)} instead of {describe(strategy)}", file=sys.stderr)
    return built


def _bind(model: nn.Module, optimizer: Optimizer, strategy: Strategy, world: World) -> Replica:
    if world.axes is not None:
        world.axes.prepare(model, optimizer)
    else:
        refuse_split(model)
    if world.size > 1:
        agree(model, optimizer, strategy, world)
        share(model, world)
    replica: Replica = strategy.bind(model, optimizer, world)
    if world.axes is not None:
        world.axes.attach(replica)
    world.ledger.restart()
    return replica


def _with_settings(strategy: Strategy, settings: dict[str, Any]) -> Strategy:
    """`strategy` with some of its fields replaced."""
    name = type(strategy).__name__
    fields: list[str] = [f.name for f in dataclasses.fields(strategy)] if dataclasses.is_dataclass(strategy) else []
    for key in settings:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(fields) or 'none'}"
            raise TypeError(f"{name} has no setting {key!r}; {hint}")
    changed: Strategy = dataclasses.replace(strategy, **settings)  # type: ignore[type-var]
    return changed


def check(model: nn.Module, given: Optimizer | Sequence[Optimizer]) -> Optimizer:
    """Refuse a model without trainable parameters, already bound or wrapped, and optimizers that hold others, or one
    parameter twice. Returns the optimizer, or several as one."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    optimizer = join_optimizers(given)
    refuse_wrapped(model)
    names = {param: name for name, param in model.named_parameters()}
    if not any(param.requires_grad for param in names):
        raise ValueError(
            f"{type(model).__name__} has no trainable parameters ({len(names)} in all): there is nothing to "
            "exchange; set requires_grad_(True) on what should learn"
        )
    held = [p for group in optimizer.param_groups for p in group["params"]]
    foreign = [p for p in held if p not in names]
    if foreign:
        raise ValueError(
            f"the optimizer holds {len(foreign)} parameter(s) that are not the model's, the first of shape "
            f"{tuple(foreign[0].shape)}: make it from model.parameters() of the same model, after moving the "
            "model to its device"
        )
    check_members(optimizer, names)
    if not bound_parameters(names):
        return optimizer
    gc.collect()  # a replica that nobody holds any more, but its own hooks, watches nothing
    bound = bound_parameters(names)
    if bound:  # their gradients would be exchanged twice
        raise ValueError(
            f"{len(bound)} parameter(s) of the model, the first {bound[0]!r}, are already trained by another "
            "replica: call close() on that one first, or give un.parallel one module that holds both"
        )
    return optimizer


def _describe_all(model: nn.Module, optimizer: Optimizer, strategy: Strategy) -> list[str]:
    return [*_description(model, optimizer), f"strategy: {describe(strategy)}"]


def agree(model: nn.Module, optimizer: Optimizer, strategy: Strategy, world: World) -> None:
    """Raise, on every rank, where ranks hold different models or settings, naming parameter and rank."""
    lines = _describe_all(model, optimizer, strategy)
    mark = hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()
    marks = world.gather_objects(mark + _RECORDED if recording.needs_folder(world) else mark)
    if any(other.endswith(_RECORDED) for other in marks):
        recording.share_folder(world)
    if len({other.removesuffix(_RECORDED) for other in marks}) == 1:
        return
    every = world.gather_objects(lines)
    for i in range(max(len(other) for other in every)):
        here = [other[i] if i < len(other) else "nothing" for other in every]
        if len(set(here)) > 1:
            differences = "; ".join(f"rank {r} has {line}" for r, line in enumerate(here))
            raise ValueError(
                f"the ranks do not train the same thing: {differences}. Every rank must build the same model, "
                "optimizer and strategy"
            )


def _description(model: nn.Module, optimizer: Optimizer) -> Iterator[str]:
    """What must be the same on every rank, a line each."""
    for name, x in model.named_parameters():
        frozen = "" if x.requires_grad else ", frozen"
        order = "" if x.is_contiguous() else f", strides {list(x.stride())}"  # a bucket holds it in its memory order
        yield f"parameter {name}: {str(x.dtype).removeprefix('torch.')} {list(x.shape)}{order}{frozen}"
    for name, buffer in model.named_buffers():
        yield f"buffer {name}: {str(buffer.dtype).removeprefix('torch.')} {list(buffer.shape)}"
    for member in members_of(optimizer):
        for i, group in enumerate(member.param_groups):
            plain = [f"{k}={v!r}" for k, v in group.items() if isinstance(v, bool | int | float | str | tuple)]
            yield f"optimizer: {type(member).__name__}, group {i} of {len(group['params'])} tensors, {', '.join(plain)}"
