"""Strategy: what is exchanged and when. `parallel()` binds one to a model and its optimizer."""

from __future__ import annotations

import dataclasses
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.launchers import status
from unisono.world import World, join


class Strategy(ABC):
    """A method with its settings; the classes are frozen dataclasses whose fields are the settings."""

    @abstractmethod
    def bind(self, model: nn.Module, optimizer: Optimizer, world: World) -> Replica:
        """Refuse what cannot work, by name and with the reason; else start watching the model."""


class Replica:
    """This rank's copy of the model under a strategy. The defaults do nothing; a method overrides what it needs."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, world: World, strategy: Strategy) -> None:
        self.model, self.optimizer, self.world, self.strategy = model, optimizer, world, strategy
        self.step = 0  # windows of backward passes so far (AMP may skip optimizer steps: those are not counted)
        self._hooks: list[Any] = [
            optimizer.register_step_pre_hook(lambda *_: self.before_step()),
            optimizer.register_step_post_hook(lambda *_: self.after_step()),
        ]

    def before_step(self) -> None:
        """The optimizer is about to step."""

    def after_step(self) -> None:
        """The optimizer has stepped."""

    def advance(self) -> None:
        """Count a window, and end the ledger's step."""
        self.step += 1
        self.world.ledger.step(self)
        status.note(step=self.world.ledger.step_count)

    def no_sync(self) -> AbstractContextManager[None]:
        """Exchange nothing inside the block: gradients stay local and add up."""
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs beside model and optimizer: "shared" by all ranks, and "local" to this one."""
        return {"shared": {"step": self.step}, "local": {}}

    def load_state_dict(self, state: dict[str, Any], *, same_world: bool = True) -> None:
        """Take `state_dict()`'s state; at another world size `state["locals"]` has every old rank's part."""
        self.step = state["shared"]["step"]

    def consolidate(self) -> nn.Module:
        """The model to evaluate or to save: here, the model itself."""
        return self.model

    def rebind(self, world: World, *, source: int = 0) -> str:
        """Go on in another world; rank `source` of it has the state to go on from. Says what was done."""
        raise NotImplementedError(f"{type(self.strategy).__name__} cannot move to another world")

    def close(self) -> None:
        """Stop watching; the model is an ordinary one again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def parallel(
    model: nn.Module,
    optimizer: Optimizer,
    strategy: str | Strategy = "allreduce",
    *,
    world: World | None = None,
    **settings: Any,
) -> Replica:
    """Train `model` together with the other ranks of `world`; the loop stays as it is.

    `strategy` is a spec such as "allreduce(accumulate=4)" or an object; `settings` override its fields.
    The model stays the same module. Rank 0's parameters and buffers become everyone's.

    >>> import torch
    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> parallel(model, optimizer, "allreduce", world=World()).step
    0
    """
    from unisono.spec import build, describe

    built = build(strategy, kind="strategy")
    if settings:
        known = [f.name for f in dataclasses.fields(built)]
        for name in settings:
            if name not in known:
                raise TypeError(f"{type(built).__name__} has no setting {name!r}; it has {', '.join(known)}")
        built = dataclasses.replace(built, **settings)
    world = world if world is not None else join()
    check(model, optimizer)
    if world.size > 1:
        agree(model, optimizer, describe(built), world)
        share(model, world)
    replica: Replica = built.bind(model, optimizer, world)
    world.ledger.restart()
    return replica


def check(model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse a model without trainable parameters, and an optimizer that holds others."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
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


def agree(model: nn.Module, optimizer: Optimizer, strategy: str, world: World) -> None:
    """Raise, on every rank, where ranks hold different models or settings, naming parameter and rank."""
    lines = [
        f"{kind} {name}: {str(x.dtype).removeprefix('torch.')} {list(x.shape)}{frozen}"
        for kind, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers()))
        for name, x in tensors
        for frozen in ([", frozen"] if kind == "parameter" and not x.requires_grad else [""])
    ]
    lines += [f"optimizer: {type(optimizer).__name__}", f"strategy: {strategy}"]
    mark = hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()
    if len(set(world.gather_objects(mark))) == 1:
        return
    every = world.gather_objects(lines)
    for i in range(max(len(other) for other in every)):
        here = [other[i] if i < len(other) else "nothing" for other in every]
        if len(set(here)) > 1:
            told = "; ".join(f"rank {r} has {line}" for r, line in enumerate(here))
            raise ValueError(
                f"the ranks do not train the same thing: {told}. Every rank must build the same model, optimizer "
                "and strategy"
            )


def share(model: nn.Module, world: World, src: int = 0) -> None:
    """Give every rank rank `src`'s parameters and buffers."""
    tensors: Sequence[Tensor] = [t.detach() for t in (*model.parameters(), *model.buffers())]
    with torch.no_grad():
        world.broadcast(tensors, src, tag="initial state").wait()
