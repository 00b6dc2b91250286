"""Calls of backward, seen by whoever asks in the thread that makes them: the loss of a program that logs none.

`loss.backward()` and `torch.autograd.backward` are the same call. A GradScaler's loss is a multiple: the one before
counts.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["BackwardListener", "Losses", "follow_backward", "leave_backward"]


class BackwardListener(Protocol):
    """Receives the calls of backward that are made in its thread."""

    def before_backward(self, tensors: Any) -> None: ...

    def after_backward(self) -> None: ...

    def note_scaled(self, scaled: Any, loss: Any) -> None: ...


_torch_backward = torch.autograd.backward  # what ours calls: torch's, or what another library has put there
_torch_scale = torch.amp.GradScaler.scale
_listeners: dict[int, BackwardListener] = {}  # by thread: each rank's program is one
_lock = threading.Lock()
_in_backward = _in_scale = False  # whether ours are called


def follow_backward(listener: BackwardListener) -> bool:
    """Tell `listener` of the calls in this thread; False where another one is told of them."""
    with _lock:
        if _listeners.setdefault(threading.get_ident(), listener) is not listener:
            return False
        _install()
    return True


def leave_backward(listener: BackwardListener) -> None:
    """Tell `listener` of no further calls."""
    with _lock:
        for thread in [thread for thread, other in _listeners.items() if other is listener]:
            del _listeners[thread]
        if not _listeners:
            _uninstall()


def _install() -> None:
    """Put our functions in the place of torch's, once: another library's patch above ours may call them already."""
    global _torch_backward, _torch_scale, _in_backward, _in_scale
    if not _in_backward and torch.autograd.backward is not _backward:
        _torch_backward, torch.autograd.backward, _in_backward = torch.autograd.backward, _backward, True
    if not _in_scale and torch.amp.GradScaler.scale is not _scale:
        _torch_scale, _in_scale = torch.amp.GradScaler.scale, True
        torch.amp.GradScaler.scale = _scale  # type: ignore[method-assign]


def _uninstall() -> None:
    """Put back what was there, unless another library has replaced ours meanwhile: its patch stays."""
    global _in_backward, _in_scale
    if torch.autograd.backward is _backward:
        torch.autograd.backward, _in_backward = _torch_backward, False
    if torch.amp.GradScaler.scale is _scale:
        torch.amp.GradScaler.scale, _in_scale = _torch_scale, False  # type: ignore[method-assign]


def _backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
    """Replaces `torch.autograd.backward`: tells this thread's listener before and after the call."""
    listener = _listeners.get(threading.get_ident())
    if listener is None:
        _torch_backward(tensors, *args, **kwargs)
        return
    listener.before_backward(tensors)
    _torch_backward(tensors, *args, **kwargs)
    listener.after_backward()


def _scale(self: torch.amp.GradScaler, outputs: Any) -> Any:
    scaled = _torch_scale(self, outputs)
    listener = _listeners.get(threading.get_ident())
    if listener is not None:
        listener.note_scaled(scaled, outputs)
    return scaled


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
        """Record the loss that backward is about to be called on."""
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
        """The number of losses in the window so far."""
        return len(self._losses)

    def replace(self, since: int, loss: Tensor) -> None:
        """Replace the losses from number `since` on, which were parts of `loss`, by it."""
        self._losses[since:] = [loss.detach()]
        self._are_parts = False

    def take(self) -> list[Tensor]:
        """Return and clear the losses recorded since the last call; their mean is the loss of the step."""
        taken, parts = self._losses, max(len(self._losses), self._step_passes) if self._are_parts else 1
        self._losses, self._are_parts = [], True
        return [loss * parts for loss in taken] if parts > 1 else taken

    def end_step(self) -> None:
        """Begin to count passes anew, after a step of an optimizer; one within another's step had none."""
        if self._passes:
            self._passes, self._step_passes = 0, self._passes
