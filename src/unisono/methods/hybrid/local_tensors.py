"""Parameters that torch has split over the tensor axis, as plain tensors: this rank's part of each.

A strategy, an optimizer and a checkpoint then see plain parameters. The module still computes with torch's DTensor: its
attribute is one over the plain parameter, made anew each time it is read, so that gradients arrive at the part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement
from torch.nn import Parameter
from torch.optim import Optimizer

__all__ = ["Split", "find_split", "localise"]

_ATTRIBUTE = "unisono_split"
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


def localise(model: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Put a plain parameter in the place of each DTensor, in the model and in the optimizer, with its state."""
    parts: dict[Parameter, Parameter] = {}
    for module in model.modules():
        for name, param in list(module._parameters.items()):
            if isinstance(param, DTensor):
                whole: Any = param
                if whole not in parts:
                    parts[whole] = _make_part(whole)
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


def _make_part(whole: Any) -> Parameter:
    part = Parameter(whole.detach().to_local(), requires_grad=whole.requires_grad)
    setattr(part, _ATTRIBUTE, Split(whole.device_mesh, tuple(whole.placements), whole.shape, tuple(whole.stride())))
    return part


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
