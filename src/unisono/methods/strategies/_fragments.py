"""A fragment: some of a model's parameters, the values of them that all ranks last agreed on, and buckets in which
their differences to these travel."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from unisono.methods.buckets import Bucket, group_into_buckets, on_device, widen
from unisono.methods.exchange.reduction import Reduction
from unisono.methods.exchange.windows import TrainableParameters
from unisono.methods.reducer import Reducer
from unisono.methods.strategy.program_writes import Written
from unisono.world import World


class Fragment:
    """Some of the model's parameters x, their anchors x0 (float32 for 16-bit ones), and buckets for x0 - x.

    Parameters take part while they are trainable, and after that until the ranks have agreed on them once more.
    """

    def __init__(self, index: int, named: Sequence[tuple[str, Parameter]], reducer: Reducer, optimizer: Optimizer):
        self.index = index
        self.params = dict(named)
        self.anchors: dict[str, Tensor] = {}
        self.live: list[str] = []  # those that take part
        self._parameters = TrainableParameters(named)
        self.together = True  # every rank's parameters are the anchors
        self.written = Written()  # by the program, since the last exchange
        self.reduction = Reduction(reducer, optimizer, lambda world: None, "parameters")
        self.buckets: list[Bucket] = []
        self.follow()

    def follow(self) -> None:
        """Parameters that have become trainable take part, from where they are."""
        if not self._parameters.have_changed():
            return
        before = set(self.live)
        for name, p in self._parameters.trainable:
            if name not in before:
                self._set_anchor(name, p.detach())
        self.live = [name for name, p in self.params.items() if p.requires_grad or name in before]

    def _set_anchor(self, name: str, value: Tensor) -> None:
        """Anchors stay the same tensors: buckets and an outer optimizer hold them."""
        if name not in self.anchors:
            self.anchors[name] = widen(self.params[name])
        self.anchors[name].copy_(value)

    def set_anchors(self, anchors: dict[str, Tensor] | None) -> None:
        """Take all anchors; None: they are the parameters."""
        self.live = [n for n, p in self.params.items() if p.requires_grad or n in (anchors or {})]
        for name in self.live:
            self._set_anchor(name, (anchors or {}).get(name, self.params[name].detach()))
        self.together = anchors is None
        self.written = Written()

    def build(self, bucket_bytes: int, channel: World) -> None:
        """Lay the buckets out; the memory is the channel's (every rank calls it alike)."""
        self.release(channel)
        named: list[Any] = [(name, self.anchors[name]) for name in self.live]
        for i, some in enumerate(group_into_buckets(named, bucket_bytes)):
            device = some[0][1].device
            flat = channel.empty if device.type == "cpu" else partial(on_device, device)
            bucket = Bucket(1000 * self.index + i, some, flat)
            bucket.tag = f"differences/{self.index}.{i}"
            self.buckets.append(bucket)
        self.reduction.set_buckets(self.buckets)

    def release(self, channel: World) -> None:
        """Give the buckets' memory back; reducer states stay, by parameter."""
        self.reduction.set_buckets([])
        for bucket in self.buckets:
            channel.release(bucket.flat)
        self.buckets = []

    def difference(self, name: str, written: Tensor | None = None) -> Tensor:
        """x0 - x: how far this rank has come; x0 as the parameter's dtype holds it, so that standing still is 0.
        `written` counts instead of x0."""
        anchor, param = self.anchors[name], self.params[name].detach()
        start = anchor.to(param.dtype) if written is None else written
        return start.to(anchor.dtype) - param.to(anchor.dtype)

    def fill(self, weight: float, written: dict[str, Tensor]) -> None:
        """Write the differences into the buckets, times `weight`; those of parameters that the program wrote, to what
        it wrote."""
        for bucket in self.buckets:
            params = [self.params[name].detach() for name in bucket.names]
            if all(p.dtype == bucket.dtype for p in params):
                starts = zip(bucket.names, bucket.params, strict=True)
                torch._foreach_copy_(bucket.tensors, [written.get(name, anchor) for name, anchor in starts])
                torch._foreach_sub_(bucket.tensors, params)
            else:
                found = [self.difference(name, written.get(name)) for name in bucket.names]
                torch._foreach_copy_(bucket.tensors, found)
            if weight == 0.0:
                torch._foreach_zero_(bucket.tensors)  # also where they are not finite
            elif weight != 1.0:
                torch._foreach_mul_(bucket.tensors, weight)

    def reduce(self, channel: World) -> None:
        """Turn the differences in the buckets into their mean."""
        for bucket in self.buckets:
            self.reduction.begin(bucket, channel)
        self.reduction.drain()
        self.reduction.end_window()

    def means(self) -> dict[str, Tensor]:
        """What the buckets hold, by parameter."""
        return {n: t for bucket in self.buckets for n, t in zip(bucket.names, bucket.tensors, strict=True)}

    def return_to_anchors(self, mix: float = 0.0) -> None:
        """x <- mix * x + (1 - mix) * x0. Parameters that were frozen become x0, and leave. Those that the program
        loaded since this exchange began stay as they are, till the ranks have agreed on them in the next."""
        if self.written.values and not self.written.loaded:
            self.written = Written()
        moved = [name for name in self.live if name not in self.written.values]
        kept = [name for name in moved if mix > 0.0 and self.params[name].requires_grad]
        back = [name for name in moved if mix == 0.0 or not self.params[name].requires_grad]
        if back:
            torch._foreach_copy_([self.params[n].detach() for n in back], [self.anchors[n] for n in back])
        for name in kept:
            param, anchor = self.params[name].detach(), self.anchors[name]
            param.copy_(torch.lerp(anchor, param.to(anchor.dtype), mix))
        self.live = [name for name in self.live if self.params[name].requires_grad]
        self.together = mix == 0.0 and not self.written.values
