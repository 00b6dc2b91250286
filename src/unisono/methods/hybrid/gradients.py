"""Gradients of which a mesh's other ranks have parts: their norm over all axes, clipping, and AMP's overflows."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unisono.methods.exchange.windows import StepHooks
from unisono.methods.hybrid.local_tensors import find_split
from unisono.methods.strategy import Replica
from unisono.world import World

if TYPE_CHECKING:
    from unisono.methods.hybrid.axes import Mesh

__all__ = ["Copies", "MeshGradient", "clip_gradients", "mark_gradients"]

_NORMS = {torch.linalg.vector_norm, torch.linalg.norm, torch.norm, Tensor.norm, torch._foreach_norm}
_UNSCALE = torch._amp_foreach_non_finite_check_and_unscale_


class MeshGradient(Tensor):
    """A gradient, of which it is known that other ranks have the rest: its norm alone is refused, and AMP's check for
    values that are not finite asks all of them. It is the same memory, and any other operation is a plain tensor's."""

    mesh: weakref.ref[Mesh]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in _NORMS and (mesh := _find_mesh(args)) is not None:
                mesh.check_norm()
            done = func(*args, **(kwargs or {}))
            if func is _UNSCALE and (mesh := _find_mesh(args)) is not None:
                mesh.agree_overflow(args[1])
        return done


def _find_mesh(args: Sequence[Any]) -> Mesh | None:
    flat = [x for arg in args for x in (arg if isinstance(arg, list | tuple) else [arg])]
    found = next((x.mesh for x in flat if isinstance(x, MeshGradient)), None)
    return None if found is None else found()


def mark_gradients(mesh: Mesh, replica: Replica) -> None:
    """Let what the model and the optimizer hold as gradients be `MeshGradient`s."""
    ref = weakref.ref(mesh)
    held = [p for group in replica.optimizer.param_groups for p in group["params"]]
    for param in dict.fromkeys([*replica.model.parameters(), *held]):
        if type(param.grad) is Tensor and param.grad.layout == torch.strided:
            grad = param.grad.as_subclass(MeshGradient)
            grad.mesh = ref
            param.grad = grad


@torch.no_grad()
def clip_gradients(mesh: Mesh, params: Sequence[Tensor], max_norm: float, order: float) -> Tensor:
    """Multiply the gradients of these parameters so that their norm over all ranks of a model is at most `max_norm`;
    returns that norm. A parameter that several ranks of the tensor axis have whole is counted by the first of them."""
    held = [p for p in params if p.grad is not None]
    device = held[0].device if held else mesh.world.device
    wide = any(p.dtype == torch.float64 for p in held)
    sums = torch.zeros((), dtype=torch.float64 if wide else torch.float32, device=device)
    inf = math.isinf(order)
    for param in held:
        assert param.grad is not None
        norm = torch.linalg.vector_norm(param.grad, order).to(sums)  # every rank asks, where that takes the data axis
        if find_split(param) is not None or mesh.place[1] == 0:
            sums = torch.maximum(sums, norm) if inf else sums + norm**order
    every = sums.double()  # stages may differ in precision
    mesh.model.all_reduce(every, "max" if inf else "sum", tag="norms").wait()
    total = (every if inf else every ** (1.0 / order)).to(sums)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for param in held:
        assert param.grad is not None
        param.grad.mul_(factor.to(param.grad.dtype))
    return total


class Copies:
    """Parameters that every rank of the tensor axis has whole: they have to stay the same there.

    Their gradients are the same, and so is an exact mean over the data axis. What a reducer makes of them depends on
    the parts beside them, which differ: then the ranks of the tensor axis take the mean of what they got. Of methods
    that exchange models, it is the mean of the parameters after each step.
    """

    def __init__(self, replica: Replica, world: World) -> None:
        self._world = world
        self._params = [p for p in replica.model.parameters() if find_split(p) is None and p.requires_grad]
        unsent, reducer = replica.unsent(), getattr(replica, "reducer", None)
        by_gradients = unsent is not None and unsent.unit == "gradients"
        is_exact = replica.sharded_state() is not None or (by_gradients and reducer is not None and reducer.exact)
        self._takes_gradients = by_gradients and not is_exact
        self._watcher: Any = None
        if not by_gradients and not is_exact:
            self._watcher = StepHooks.of(replica.optimizer).watch(None, self.agree_on_values)

    def close(self) -> None:
        """Stop watching the optimizer: another replica takes this one's place."""
        if self._watcher is not None:
            self._watcher.remove()

    def agree_on_gradients(self) -> None:
        """Called at the end of a window: take the mean of the copies' gradients."""
        grads = [p.grad for p in self._params if p.grad is not None]
        if self._takes_gradients and grads:
            self._world.all_reduce([g.detach() for g in grads], "mean", tag="copies").wait()

    def agree_on_values(self) -> None:
        """Called after a step: take the mean of the copies' values."""
        if self._params:
            self._world.all_reduce([p.detach() for p in self._params], "mean", tag="copies").wait()
