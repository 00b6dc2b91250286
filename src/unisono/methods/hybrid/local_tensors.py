"""Parameters that torch has split over the tensor axis, as plain tensors: this rank's part of each; and gradients of
which a mesh's other ranks have parts.

A strategy, an optimizer and a checkpoint then see plain parameters. The module still computes with torch's DTensor: its
attribute is one over the plain parameter, made anew each time it is read, so that gradients arrive at the part.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement
from torch.nn import Parameter
from torch.optim import Optimizer

from unisono.methods.exchange.windows import watch_steps
from unisono.methods.joined_optimizers import members_of
from unisono.methods.offload.kinds import find_kind
from unisono.methods.strategy import Replica
from unisono.world import World

if TYPE_CHECKING:
    from unisono.methods.hybrid.axes import Mesh

__all__ = [
    "Copies",
    "MeshGradient",
    "Split",
    "clip_gradients",
    "find_split",
    "localise",
    "mark_gradients",
    "refuse_whole_tensors",
]

_ATTRIBUTE = "unisono_split"
_NORMS = {torch.linalg.vector_norm, torch.linalg.norm, torch.norm, Tensor.norm, torch._foreach_norm}
_UNSCALE = torch._amp_foreach_non_finite_check_and_unscale_
_classes: dict[tuple[type[nn.Module], str], type[nn.Module]] = {}


@dataclass(frozen=True, eq=False)
class Split:
    """How a parameter is split over ranks: what torch's DTensor knows of it.

    shape, stride: of the whole parameter; `local_shape` is this rank's, which begins at `offset`.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        """Whether every rank of the axis has the whole parameter."""
        return not any(isinstance(one, Shard) for one in self.placements)

    @property
    def block(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shape of this rank's part, and where it begins in each dimension."""
        shape, offset = compute_local_shape_and_global_offset(self.shape, self.mesh, self.placements)
        return tuple(shape), tuple(offset)

    def wrap(self, part: Tensor) -> Tensor:
        """The whole parameter as the DTensor that torch computes with."""
        return DTensor.from_local(
            part, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )


def find_split(param: Tensor) -> Split | None:
    """How a parameter is split; None where every rank has all of it."""
    found: Split | None = getattr(param, _ATTRIBUTE, None)
    return None if found is None or found.is_whole else found


def refuse_whole_tensors(model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse an optimizer whose step of a tensor needs all of it (Muon), of which each rank would step a part."""
    split = {p: name for name, p in model.named_parameters() if _is_split(p)}
    for member in members_of(optimizer):
        for group in member.param_groups:
            held = [split[p] for p in group["params"] if p in split]
            if held and find_kind(member, group) == "tensors":
                more = f" and {len(held) - 1} more" if len(held) > 1 else ""
                raise ValueError(
                    f"{type(member).__name__} has to step {held[0]!r}{more} whole, and the tensor axis splits that "
                    "over the ranks: give what is split to an optimizer that steps each element by itself (AdamW, SGD, "
                    "...), or use the data and pipeline axes alone"
                )


def _is_split(param: Tensor) -> bool:
    if isinstance(param, DTensor):
        return any(isinstance(one, Shard) for one in param.placements)
    return find_split(param) is not None


def localise(model: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Put a plain parameter in the place of each DTensor, in the model and in the optimizer, with its state."""
    parts: dict[Parameter, Parameter] = {}
    for module in model.modules():
        for name, param in list(module._parameters.items()):
            if isinstance(param, DTensor):
                whole: Any = param
                if whole not in parts:
                    part = parts[whole] = Parameter(whole.detach().to_local(), requires_grad=whole.requires_grad)
                    split = Split(whole.device_mesh, tuple(whole.placements), whole.shape, tuple(whole.stride()))
                    setattr(part, _ATTRIBUTE, split)
                module._parameters[name] = parts[whole]
                module.__class__ = _expose(type(module), name)
    if optimizer is None:
        return
    for group in optimizer.param_groups:
        group["params"] = [parts.get(p, p) for p in group["params"]]
    for whole, part in parts.items():
        if whole in optimizer.state:
            state = optimizer.state.pop(whole)
            optimizer.state[part] = {k: x.to_local() if isinstance(x, DTensor) else x for k, x in state.items()}


def _expose(kind: type[nn.Module], name: str) -> type[nn.Module]:
    """A class of the same name whose attribute gives the DTensor over the plain parameter."""

    def read(module: nn.Module) -> Any:
        param = module._parameters[name]
        split = getattr(param, _ATTRIBUTE, None)
        return param if param is None or split is None else split.wrap(param)

    if (kind, name) not in _classes:
        made = type(kind.__name__, (kind,), {name: property(read), "__module__": kind.__module__})
        made.__qualname__ = kind.__qualname__
        _classes[kind, name] = made
    return _classes[kind, name]


# Gradients -----------------------------------------------------------------------------------------------------------


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
        self._watchers: list[Any] = []
        if not by_gradients and not is_exact:
            self._watchers = watch_steps(replica.optimizer, None, lambda _: self.agree_on_values())

    def close(self) -> None:
        """Stop watching the optimizer: another replica takes this one's place."""
        for watcher in self._watchers:
            watcher.remove()

    def agree_on_gradients(self) -> None:
        """Called at the end of a window: take the mean of the copies' gradients."""
        grads = [p.grad for p in self._params if p.grad is not None]
        if self._takes_gradients and grads:
            self._world.all_reduce([g.detach() for g in grads], "mean", tag="copies").wait()

    def agree_on_values(self) -> None:
        """Called after a step: take the mean of the copies' values."""
        if self._params:
            self._world.all_reduce([p.detach() for p in self._params], "mean", tag="copies").wait()
