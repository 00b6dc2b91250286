"""Calls of backward, seen by whoever asks in the thread that makes them: the loss of a program that logs none.

`loss.backward()` and `torch.autograd.backward` are the same call. A GradScaler's loss is a multiple: the one before
counts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["BackwardListener", "Losses", "follow_backward", "leave_backward"]


class BackwardListener(Protocol):
    """Is told of each call in its thread."""

    def before_backward(self, tensors: Any) -> None: ...

    def after_backward(self) -> None: ...

    def note_scaled(self, scaled: Any, loss: Any) -> None: ...


class _Patch:
    """A function of torch, replaced while somebody listens. What others put in its place meanwhile stays there."""

    def __init__(self, owner: Any, name: str, wrap: Callable[[_Patch, Callable[..., Any]], Callable[..., Any]]) -> None:
        self._owner, self._name, self._wrap = owner, name, wrap
        self._before: Any = None
        self.ours: Any = None

    def put(self) -> None:
        """Wrap what is there now. An older wrapper of ours below it is passed through from now on."""
        found = getattr(self._owner, self._name)
        if found is not self.ours:
            self._before, self.ours = found, self._wrap(self, found)
            setattr(self._owner, self._name, self.ours)

    def take_away(self) -> None:
        """Put back what was there before, unless somebody has wrapped ours."""
        if getattr(self._owner, self._name) is self.ours:
            setattr(self._owner, self._name, self._before)
        self.ours = None


_listeners: dict[int, BackwardListener] = {}  # by thread: each rank's program is one
_lock = threading.Lock()


def follow_backward(listener: BackwardListener) -> bool:
    """Tell `listener` of the calls in this thread; False where another one is told of them."""
    with _lock:
        if _listeners.setdefault(threading.get_ident(), listener) is not listener:
            return False
        _backward.put()
        _scale.put()
    return True


def leave_backward(listener: BackwardListener) -> None:
    """Tell it no more."""
    with _lock:
        for thread in [thread for thread, other in _listeners.items() if other is listener]:
            del _listeners[thread]
        if not _listeners:
            _backward.take_away()
            _scale.take_away()


def _wrap_backward(patch: _Patch, call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        listener = _listeners.get(threading.get_ident()) if patch.ours is backward else None
        if listener is None:
            call(tensors, *args, **kwargs)
            return
        listener.before_backward(tensors)
        call(tensors, *args, **kwargs)
        listener.after_backward()

    return backward


def _wrap_scale(patch: _Patch, call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def scale(scaler: torch.amp.GradScaler, outputs: Any) -> Any:
        scaled = call(scaler, outputs)
        listener = _listeners.get(threading.get_ident()) if patch.ours is scale else None
        if listener is not None:
            listener.note_scaled(scaled, outputs)
        return scaled

    return scale


_backward = _Patch(torch.autograd, "backward", _wrap_backward)
_scale = _Patch(torch.amp.GradScaler, "scale", _wrap_scale)


_DIVISIONS = ("DivBackward0", "MulBackward0")


class Losses:
    """The losses of the window under way.

    A loop that accumulates gradients may divide each loss by the number of passes before the optimizer's step, or by
    the tokens of all of them: then these losses add up to the loss of the step. What was divided (or multiplied) last
    thing before backward counts so; else each loss stands for the step, and their mean counts. So it is the same
    number, whatever the accumulation. A step may be several windows: the step before tells how many passes it has.
    """

    def __init__(self) -> None:
        self._losses: list[Tensor] = []
        self._are_parts = True  # each was divided
        self._passes = self._step_passes = 0  # since the optimizer's last step, and before that
        self._unscaled: dict[int, Tensor] = {}  # by the scaled loss that a GradScaler gave out

    def note(self, tensors: Any) -> None:
        """Backward is about to begin from these."""
        loss = tensors if isinstance(tensors, Tensor) else tensors[0] if len(tensors) == 1 else None
        if isinstance(loss, Tensor) and loss.numel() == 1:
            loss = self._unscaled.get(id(loss), loss)
            self._are_parts &= type(loss.grad_fn).__name__ in _DIVISIONS
            self._losses.append(loss.detach())
            self._passes += 1
        self._unscaled.clear()

    def note_scaled(self, scaled: Any, loss: Any) -> None:
        """A GradScaler has multiplied a loss: the loss itself counts."""
        if isinstance(scaled, Tensor) and isinstance(loss, Tensor):
            self._unscaled[id(scaled)] = loss

    @property
    def count(self) -> int:
        """How many there are so far."""
        return len(self._losses)

    def replace(self, since: int, loss: Tensor) -> None:
        """Those from number `since` on were parts of this one."""
        self._losses[since:] = [loss.detach()]
        self._are_parts = False

    def take(self) -> list[Tensor]:
        """Those since the last time, of which the mean counts."""
        taken, parts = self._losses, max(len(self._losses), self._step_passes) if self._are_parts else 1
        self._losses, self._are_parts = [], True
        return [loss * parts for loss in taken] if parts > 1 else taken

    def end_step(self) -> None:
        """The optimizer has stepped."""
        self._passes, self._step_passes = 0, self._passes
