"""Finds the GradScaler of a program, so that its replicas follow the loss scale without `replica.watch(scaler)`.

A method that keeps part of a gradient for later, or steps by signs, has to know what the gradients are multiplied by.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from unisono.methods.exchange.windows import watch_steps
from unisono.methods.strategy.replica import Replica

_torch_scale = torch.amp.GradScaler.scale  # what ours calls: torch's, or what another library has put there
_waiting: weakref.WeakSet[Replica] = weakref.WeakSet()  # replicas that follow no scaler yet
_lock = threading.Lock()
_is_installed = False


def follow_scaler(replica: Replica) -> None:
    """Have `replica` watch the first GradScaler that scales a loss of its model, unless it is told of another."""
    global _torch_scale, _is_installed
    with _lock:
        _waiting.add(replica)
        if not _is_installed:
            _torch_scale, _is_installed = torch.amp.GradScaler.scale, True
            torch.amp.GradScaler.scale = _scale  # type: ignore[method-assign]


def _scale(self: torch.amp.GradScaler, outputs: Any) -> Any:
    """Replaces `GradScaler.scale`. Replicas are told before the loss is scaled: their backward pass comes next."""
    if _waiting and self.is_enabled():
        _tell_replicas(self, outputs)
    return _torch_scale(self, outputs)


def _tell_replicas(scaler: torch.amp.GradScaler, outputs: Any) -> None:
    with _lock:
        for replica in [one for one in _waiting if one.is_closed or one.scaler is not None]:
            _waiting.discard(replica)
        waiting = list(_waiting)
    if not waiting:
        return
    reached = {id(param) for param in _find_leaves(outputs)}
    for replica in waiting:
        if any(id(param) in reached for param in replica.model.parameters()):
            with _lock:
                _waiting.discard(replica)
            replica.watch(scaler)
            _check_at_step(replica, scaler)


def _check_at_step(replica: Replica, scaler: torch.amp.GradScaler) -> None:
    """At the first step: refuse a program that steps without the scaler which its backward passes were held for."""

    def check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for hook in hooks:
            hook.remove()
        reduction = replica.reduction
        is_used = id(optimizer) in scaler._per_optimizer_states  # `scaler.unscale_` and `scaler.step` note them here
        if not is_used and not replica.is_closed and reduction is not None and not reduction.reducer.exact:
            raise ValueError(
                f"a loss that a GradScaler has multiplied passes through {type(replica.model).__name__}, whose "
                f"{type(optimizer).__name__} steps without the scaler: {reduction.reducer.spec} cannot tell what its "
                "gradients are multiplied by. Step with scaler.step(optimizer), or set requires_grad_(False) on the "
                "model while only other models learn from that loss"
            )

    hooks = watch_steps(replica.optimizer, check, lambda _: None)


def _find_leaves(outputs: Any) -> Iterator[Tensor]:
    """The tensors that will get a gradient from these losses."""
    roots = [x.grad_fn for x in tree_leaves(outputs) if isinstance(x, Tensor)]
    stack = [node for node in roots if node is not None]
    seen: set[Node] = set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        stack += [following for following, _ in node.next_functions if following is not None]
