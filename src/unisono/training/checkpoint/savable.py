"""What saving and loading ask of a replica."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, Protocol, TypeGuard

from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.world import World


class ModelPart(NamedTuple):
    """How one rank counts in the one model that a checkpoint gives to plain PyTorch and to other strategies.

    Keys are the model's own parameters and buffers. A tensor that is not named is taken as it is; if the ranks hold
    different values, their mean is taken, with equal weights.

    values: what to take in a tensor's place.
    weights: how much this rank counts in a tensor's mean.
    first: tensors of which rank 0's is taken instead of the mean.
    """

    values: Mapping[Tensor, Tensor] = {}
    weights: Mapping[Tensor, float] = {}
    first: Collection[Tensor] = ()


class Savable(Protocol):
    """What saving and loading ask of a replica (`unisono.strategy.Replica` says what each member is)."""

    world: World
    model: nn.Module
    optimizer: Optimizer
    strategy: Any
    step: int

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any], *, same_world: bool) -> None: ...
    def present_ranks(self) -> list[int]: ...
    def gather_present(self, obj: Any) -> dict[int, Any]: ...
    def model_part(self) -> ModelPart: ...
    def sharded_state(self) -> dict[str, Any] | None: ...
    def load_sharded_state(self, whole: dict[str, Any], *, same_world: bool) -> None: ...


def is_savable(replica: object) -> TypeGuard[Savable]:
    """Whether it is what un.parallel returned."""
    # Not isinstance: from Python 3.12 on that does not see what an object hands on from another one.
    return all(hasattr(replica, name) for name in ("world", "model", "optimizer", "strategy", "sharded_state"))


def name_parameters(model: nn.Module, replica: Savable) -> list[str]:
    """The names of the optimizer's parameters, by their numbers, for formats that have names there too."""
    if (known := getattr(replica, "optimizer_names", None)) is not None:
        return list(known)
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [names.get(p, "") for group in replica.optimizer.param_groups for p in group["params"]]


def unwrap(model: nn.Module) -> nn.Module:
    """The user's module, without the wrapper of torch.compile."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model
