"""Strategy: what is exchanged and when. `parallel()` binds one to a model and its optimizer."""

from __future__ import annotations

import dataclasses
import difflib
import gc
import hashlib
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.runtime import status
from unisono.world import World, join

Buffers = Literal["average", "broadcast", "local"]
_replicas: weakref.WeakSet[Replica] = weakref.WeakSet()  # those that watch a model
_replicas_lock = threading.Lock()
observer: Callable[[nn.Module, Optimizer, Strategy, World], Replica] | None = None  # binds instead (`unisono memory`)


class Strategy(ABC):
    """A method with its settings; the classes are frozen dataclasses whose fields are the settings."""

    @abstractmethod
    def bind(self, model: nn.Module, optimizer: Optimizer, world: World) -> Replica:
        """Refuse what cannot work, by name and with the reason; else start watching the model."""


class Replica:
    """This rank's copy of the model under a strategy. The defaults do nothing; a method overrides what it needs."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, world: World, strategy: Strategy) -> None:
        self.model, self.optimizer, self.world, self.strategy = model, optimizer, world, strategy
        self.scaler: torch.amp.GradScaler | None = None  # the one that it was told to watch
        self.step = 0  # windows of backward passes so far (not optimizer steps: AMP may skip those)
        self._hooks: list[Any] = [
            optimizer.register_step_pre_hook(self._about_to_step),
            optimizer.register_step_post_hook(lambda *_: self.after_step()),
        ]
        with _replicas_lock:
            _replicas.add(self)

    def _about_to_step(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        """With a closure (LBFGS), backward happens inside the step, as often as it is called."""
        closure = kwargs["closure"] if "closure" in kwargs else args[1] if len(args) > 1 else None
        if closure is None:
            return self.before_step()
        rest = {name: value for name, value in kwargs.items() if name != "closure"}
        return (args[0], _followed_by(closure, self.before_step), *args[2:]), rest

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

    def sync(self) -> None:
        """End the window now, on every rank: what has added up so far is exchanged. `optimizer.step()` does it
        too; call it before clipping or AMP's unscaling where the last window of an epoch may be short."""
        self.before_step()

    def watch(self, scaler: torch.amp.GradScaler) -> None:
        """Follow the loss scale of AMP: a method that keeps part of a gradient for later keeps it in the units of
        its step. Without it, that part counts twice or half once, after each change of the scale."""
        self.scaler = scaler

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs beside model and optimizer: "shared" by all ranks, and "local" to this one."""
        return {"shared": {"step": self.step}, "local": {}}

    def load_state_dict(self, state: dict[str, Any], *, same_world: bool = True) -> None:
        """Take `state_dict()`'s state; at another world size `state["locals"]` has every old rank's part."""
        self.step = state["shared"]["step"]

    def sharded_state(self) -> dict[str, Any] | None:
        """Model and optimizer as a checkpoint takes them, with a `unisono.checkpoint.slices.Piece` in place of each
        tensor that is split over the ranks; None: nothing is. Must not talk to other ranks."""
        return None

    def load_sharded_state(self, whole: dict[str, Any], *, same_world: bool) -> None:
        """Take my part of a checkpoint's model and optimizer, where `sharded_state()` is not None."""
        raise NotImplementedError(f"{type(self).__name__} splits its state, and does not say how to load it")

    def consolidate(self) -> nn.Module:
        """The model to evaluate or to save: here, the model itself."""
        return self.model

    def rebind(self, world: World, *, source: int = 0) -> str:
        """Go on in another world; rank `source` of it has the state to go on from. Says what was done."""
        raise NotImplementedError(f"{type(self.strategy).__name__} cannot move to another world")

    def switch(self, strategy: str | Strategy) -> Replica:
        """Go on with another strategy, from here on: `replica = replica.switch("powersgd(rank=2)")`.

        Every rank calls it at the same step. Returns the replica to use from now on; this one is closed. What a
        reducer had still to send goes over to the next, where that keeps such a memory too.
        """
        from unisono.spec import build
        from unisono.switching import switch

        return switch(self, build(strategy, kind="strategy"))

    def restore(self) -> None:
        """Give model and optimizer back whole where they are split over the ranks; every rank calls it.

        `close()` follows, or `resume()`.
        """

    def resume(self) -> None:
        """Take them back after `restore()`."""

    def close(self) -> None:
        """Stop watching; the model is an ordinary one again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.world.ledger.leave(self)
        with _replicas_lock:
            _replicas.discard(self)


def _followed_by(closure: Callable[[], Any], then: Callable[[], None]) -> Callable[[], Any]:
    def both() -> Any:
        loss = closure()
        then()
        return loss

    return both


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
        built = _with_settings(built, settings)
    check(model, optimizer)
    world = world if world is not None else join()
    if not isinstance(world, World):
        raise TypeError(f"world must be a World such as un.join() gives, got {world!r}")
    if observer is not None:
        return observer(model, optimizer, built, world)
    if world.size > 1:
        agree(model, optimizer, describe(built), world)
        share(model, world)
    replica: Replica = built.bind(model, optimizer, world)
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


def check(model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse a model without trainable parameters or already bound, and an optimizer that holds others."""
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
    _check_free(names)


def _check_free(names: dict[nn.Parameter, str]) -> None:
    """Refuse parameters that another replica watches: their gradients would be exchanged twice."""
    if not taken(names):
        return
    gc.collect()  # one that nobody holds any more, but its own hooks, watches nothing
    held = taken(names)
    if held:
        raise ValueError(
            f"{len(held)} parameter(s) of the model, the first {held[0]!r}, are already trained by another "
            "replica: call close() on that one first, or give un.parallel one module that holds both"
        )


def taken(names: dict[nn.Parameter, str]) -> list[str]:
    """Which of these parameters a replica watches, by name."""
    with _replicas_lock:
        return [names[p] for replica in _replicas for p in replica.model.parameters() if p in names]


def agree(model: nn.Module, optimizer: Optimizer, strategy: str, world: World) -> None:
    """Raise, on every rank, where ranks hold different models or settings, naming parameter and rank."""
    lines = [*_description(model, optimizer), f"strategy: {strategy}"]
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


def _description(model: nn.Module, optimizer: Optimizer) -> Iterator[str]:
    """What must be the same on every rank, a line each."""
    for name, x in model.named_parameters():
        frozen = "" if x.requires_grad else ", frozen"
        order = "" if x.is_contiguous() else f", strides {list(x.stride())}"  # a bucket holds it in its memory order
        yield f"parameter {name}: {str(x.dtype).removeprefix('torch.')} {list(x.shape)}{order}{frozen}"
    for name, buffer in model.named_buffers():
        yield f"buffer {name}: {str(buffer.dtype).removeprefix('torch.')} {list(buffer.shape)}"
    for i, group in enumerate(optimizer.param_groups):
        plain = [f"{k}={v!r}" for k, v in group.items() if isinstance(v, bool | int | float | str | tuple)]
        yield f"optimizer: {type(optimizer).__name__}, group {i} of {len(group['params'])} tensors, {', '.join(plain)}"


def share(model: nn.Module, world: World, src: int = 0) -> None:
    """Give every rank rank `src`'s parameters and buffers."""
    tensors = [t.detach() for t in (*model.parameters(), *model.buffers()) if not t.is_meta]
    with torch.no_grad():
        world.broadcast(tensors, src, tag="initial state").wait()


def share_buffers(buffers: Sequence[Tensor], how: Buffers, world: World) -> None:
    """Make buffers the same on every rank: numbers with a fraction become their mean, the others are rank 0's."""
    if how == "local" or not buffers:
        return
    floats = [b for b in buffers if how == "average" and (b.is_floating_point() or b.is_complex())]
    others = [b for b in buffers if not any(b is x for x in floats)]
    world.all_reduce(floats, "mean", tag="buffers").wait()
    world.broadcast(others, tag="buffers").wait()


def check_count(name: str, value: object, meaning: str, *, least: int = 1) -> None:
    """Refuse a setting that is not a whole number of at least `least`."""
    if type(value) is not int or value < least:
        raise ValueError(f"{name} counts {meaning}: expected a whole number of at least {least}, got {value!r}")
