"""Mistakes that no error would show: found at little cost, said once, with what to do.

- a model that torch wraps already (DistributedDataParallel): its gradients would be exchanged twice;
- parameters that have one memory without being one: methods that move parameters would part them;
- ranks that train on the same samples: N workers do the work of one.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from unisono.launchers.runtime.frames import warn_user
from unisono.methods.exchange.windows import if_alive
from unisono.world import World

_WINDOWS = 3  # in so many, one after the other, every rank has to have the same
_SAMPLE = 4096  # numbers that are compared
_DISTINCT = 8  # fewer different ones say nothing: the gradient of a sum's bias is the same whatever the data


# A model that torch wraps ------------------------------------------------------------------------------------------


def refuse_wrapped(model: nn.Module) -> None:
    """Refuse a model whose gradients torch's DistributedDataParallel exchanges: all would be sent twice."""
    inside = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
    if not inside and torch.distributed.is_available() and torch.distributed.is_initialized():  # else there can be none
        inside = _find_wrappers(model)
    if inside:
        raise ValueError(
            f"{type(model).__name__} is wrapped in torch's DistributedDataParallel, which exchanges its gradients too: "
            "all would be sent twice. Give un.parallel the model itself, without the wrapper"
        )


def _find_wrappers(model: nn.Module) -> list[DistributedDataParallel]:
    """Those that hold a parameter of the model, in a list of theirs. Not all objects are looked at: to hold a tuple
    that another thread is about to make breaks it."""
    held: list[Any] = list(model.parameters())
    found: list[DistributedDataParallel] = []
    for _ in range(3):  # the list, the wrapper's dict, the wrapper
        holders = [x for x in gc.get_referrers(*held) if x is not held]
        found += [x for x in holders if issubclass(type(x), DistributedDataParallel)]
        held = [x for x in holders if type(x) in (list, dict)]
        if not held:
            break
    return found


def refuse_split(model: nn.Module) -> None:
    """Refuse parameters that torch has split over ranks, where it is not known over which."""
    tensors = sys.modules.get("torch.distributed.tensor")  # else there can be none
    split = [name for name, p in model.named_parameters() if tensors is not None and isinstance(p, tensors.DTensor)]
    if split:
        raise ValueError(
            f"{len(split)} parameter(s) of the model, the first {split[0]!r}, are split over ranks (DTensor): train it "
            "in the data axis of a mesh, un.parallel(..., world=un.mesh(tensor=...).data)"
        )


def refuse_common_memory(model: nn.Module, method: str) -> None:
    """Refuse parameters that lie in one memory without being one parameter: moved elsewhere, they would part."""
    places = []
    for name, p in model.named_parameters():
        dense = sum((n - 1) * step for n, step in zip(p.shape, p.stride(), strict=True)) + 1 == p.numel()
        if p.layout == torch.strided and not p.is_meta and p.numel() and dense:
            places.append((p.data_ptr(), p.numel() * p.element_size(), str(p.device), name))
    places.sort()
    for (at, nbytes, device, name), (after, _, other_device, other) in pairwise(places):
        if after < at + nbytes and device == other_device:
            raise ValueError(
                f"parameters {name!r} and {other!r} lie in one memory, and {method} moves parameters to memory of its "
                "own, where each would have values of its own: make them one parameter (model.b.weight = "
                "model.a.weight), or use allreduce"
            )


# Ranks that train on the same samples ---------------------------------------------------------------------------------


def sample(x: Tensor) -> Tensor:
    """A copy of some of its numbers, from all over it."""
    x = torch.view_as_real(x.detach().resolve_conj()) if x.is_complex() else x.detach()
    line = x.reshape(-1)
    return line[:: -(-line.numel() // _SAMPLE) or 1].clone()


class SameData:
    """Compares what this rank has with the mean over the ranks: if all have the same, these are equal.

    It looks until the ranks differ once, which as a rule is in the first window; nothing is sent for it.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._left = _WINDOWS if world.size > 1 else 0

    @property
    def is_looking(self) -> bool:
        """Whether it still needs to see something."""
        return self._left > 0

    def compare(self, mine: Tensor, mean: Tensor) -> None:
        """Two samples from one place: before an exact exchange, and after it."""
        if not self.is_looking or not _says_something(mine):
            return
        self._left = self._left - 1 if _are_equal(mine, mean) else 0
        if not self._left and _are_equal(mine, mean) and self._world.rank == 0:
            warn_user(
                f"the ranks train on the same samples: in {_WINDOWS} windows every rank had the same gradients, so "
                f"{self._world.size} workers do the work of one. Give each its part of the data: un.shard(dataset, "
                "batch_size=...) instead of a DataLoader over all of it. If that is intended, ignore this warning "
                "(warnings.filterwarnings)"
            )

    @contextmanager
    def watching(self, x: Tensor | None) -> Iterator[None]:
        """Around an exchange that replaces `x` by the mean over the ranks (None: nothing is compared)."""
        mine = sample(x) if x is not None and self.is_looking else None
        yield
        if x is not None and mine is not None:
            self.compare(mine, sample(x))


def _says_something(x: Tensor) -> bool:
    wide = x.double()  # not every dtype can be compared
    return bool(torch.isfinite(wide).all()) and wide.unique().numel() >= _DISTINCT


def _are_equal(mine: Tensor, mean: Tensor) -> bool:
    if mine.dtype in (torch.float32, torch.float64):  # the mean over three or over several hosts is rounded
        return bool((mine - mean).abs().max() <= 4 * torch.finfo(mine.dtype).eps * mine.abs().max())
    return mine.double().equal(mean.double())


class GradientProbe:
    """Keeps a sample of one parameter's own gradient for `SameData`, by a hook that goes when it is not needed."""

    def __init__(self, params: Iterable[Parameter], world: World) -> None:
        """To be made before the hooks of who exchanges the gradients: hooks run in the order of their making."""
        self._same = SameData(world)
        self._mine: Tensor | None = None
        self._hook: Any = None
        wide = [p for p in params if p.requires_grad and p.dim() > 1 and p.numel() >= _DISTINCT]
        self._param = wide[-1] if wide else None  # the last: backward reaches it first
        if self._param is not None and self._same.is_looking:
            note = weakref.WeakMethod(self._note)
            self._hook = self._param.register_post_accumulate_grad_hook(partial(if_alive, note, ""))

    def _note(self, _name: str, param: Tensor) -> None:
        grad = param.grad
        plain = type(grad) is Tensor and grad.layout == torch.strided  # not the mean of a window before
        self._mine = sample(grad) if grad is not None and plain else None

    def compare(self) -> None:
        """The window has ended, and gradients are the mean."""
        if self._hook is None:
            return
        mine, self._mine = self._mine, None
        grad = self._param.grad if self._param is not None else None
        if mine is not None and grad is not None:
            self._same.compare(mine, sample(grad))
        if not self._same.is_looking:
            self.close()

    def close(self) -> None:
        """Take the hook off."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
