"""A central model, how far its learners are from it, and the buckets in which the sum of that travels."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from unisono.methods.buckets import Bucket, group_into_buckets, on_device, widen
from unisono.world import World


class CentralModel:
    """The central model z and its velocity v = z - z_before (float32 for 16-bit parameters), the same on every rank.

    Learners are given as lists of tensors in the order of `named`. A parameter takes part from when it is trainable.
    """

    def __init__(self, named: Sequence[tuple[str, Parameter]]) -> None:
        self.named = list(named)
        self.z: dict[str, Tensor] = {}
        self.velocity: dict[str, Tensor] = {}
        self.buckets: list[Bucket] = []
        self._difference: dict[str, Tensor] = {}  # w - z of the learner at work
        self.follow()

    def follow(self) -> None:
        """Parameters that have become trainable take part, from where they are: called before any learner steps."""
        for name, param in self.named:
            if param.requires_grad and name not in self.z:
                self._add(name, param.detach())

    def _add(self, name: str, value: Tensor) -> None:
        self.z[name] = widen(value)
        self.velocity[name] = torch.zeros_like(self.z[name])
        self._difference[name] = torch.zeros_like(self.z[name])

    def _of(self, learner: Sequence[Tensor]) -> list[Tensor]:
        """A learner's tensors that take part, in the order of z."""
        by_name = {name: x for (name, _), x in zip(self.named, learner, strict=True)}
        return [by_name[name] for name in self.z]

    # Buckets -----------------------------------------------------------------------------------------------------

    @property
    def has_its_buckets(self) -> bool:
        """Whether the buckets are those of the parameters that take part."""
        return {name for bucket in self.buckets for name in bucket.names} == set(self.z)

    def build(self, channel: World, bucket_bytes: int) -> None:
        """Lay the buckets out; the memory is the channel's (every rank calls it alike)."""
        self.release(channel)
        named: list[Any] = list(self.z.items())
        for i, some in enumerate(group_into_buckets(named, bucket_bytes)):
            device = some[0][1].device
            bucket = Bucket(i, some, channel.empty if device.type == "cpu" else partial(on_device, device))
            bucket.tag = f"corrections/{i}"
            self.buckets.append(bucket)

    def release(self, channel: World) -> None:
        """Give the buckets' memory back."""
        for bucket in self.buckets:
            channel.release(bucket.flat)
        self.buckets = []

    def sums(self) -> dict[str, Tensor]:
        """What the buckets hold, by parameter."""
        return {n: x for bucket in self.buckets for n, x in zip(bucket.names, bucket.tensors, strict=True)}

    # The method --------------------------------------------------------------------------------------------------

    def fill(self, learners: Sequence[Sequence[Tensor]]) -> None:
        """Write the sum of w_j - z over these learners into the buckets."""
        held = self.sums()
        sums, scratch, z = [held[n] for n in self.z], list(self._difference.values()), list(self.z.values())
        _difference(sums, self._of(learners[0]), z)
        for learner in learners[1:]:
            _difference(scratch, self._of(learner), z)
            torch._foreach_add_(sums, scratch)

    def remember(self, learner: Sequence[Tensor]) -> None:
        """Remember w - z."""
        _difference(list(self._difference.values()), self._of(learner), list(self.z.values()))

    def correct(self, learner: Sequence[Tensor], alpha: float, but: Collection[str] = ()) -> None:
        """w <- w - alpha (what `remember` took), but for some parameters."""
        both = zip(self.z, self._of(learner), self._difference.values(), strict=True)
        pairs = [(w, x) for name, w, x in both if name not in but]
        if not pairs:
            return
        mine, kept = [w for w, _ in pairs], [x for _, x in pairs]
        if all(w.dtype == x.dtype for w, x in pairs):
            torch._foreach_sub_(mine, kept, alpha=alpha)
        else:
            torch._foreach_copy_(mine, [w.to(x.dtype) - alpha * x for w, x in pairs])

    def move(self, sums: dict[str, Tensor], alpha: float, momentum: float) -> None:
        """z <- z + alpha sums + momentum (z - z_before), by its velocity: v <- alpha sums + momentum v; z <- z + v.

        What came to take part in mid-round is not in the sum: no learner had moved it before.
        """
        v = [self.velocity[name] for name in sums]
        torch._foreach_mul_(v, momentum)
        torch._foreach_add_(v, list(sums.values()), alpha=alpha)
        torch._foreach_add_([self.z[name] for name in sums], v)

    def replace(self, values: dict[str, Tensor]) -> None:
        """z <- what the program wrote on every rank, at rest; numbers that it did not change keep their precision."""
        for name, value in values.items():
            z = self.z[name]
            z.copy_(torch.where(value == z.to(value.dtype), z, value.to(z.dtype)))
            self.velocity[name].zero_()

    def rest(self) -> None:
        """z_before <- z."""
        torch._foreach_zero_(list(self.velocity.values()))

    def copy_to(self, learner: Sequence[Tensor]) -> None:
        """w <- z."""
        torch._foreach_copy_(self._of(learner), list(self.z.values()))

    # State -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The same on every rank."""
        return {"center": dict(self.z), "velocity": dict(self.velocity)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What was not trainable then begins where the model is."""
        params = dict(self.named)
        for name, param in self.named:
            if name in state["center"] and name not in self.z:
                self._add(name, param.detach())
        for name, z in self.z.items():
            z.copy_(state["center"].get(name, params[name].detach()))
            self.velocity[name].copy_(state["velocity"].get(name, torch.zeros_like(z)))


def _difference(out: list[Tensor], w: list[Tensor], z: list[Tensor]) -> None:
    """w - z, with z as w's dtype holds it: a learner that stands at z has none."""
    if all(x.dtype == y.dtype for x, y in zip(w, out, strict=True)):
        torch._foreach_copy_(out, w)
        torch._foreach_sub_(out, z)
    else:
        torch._foreach_copy_(out, [x.to(c.dtype) - c.to(x.dtype).to(c.dtype) for x, c in zip(w, z, strict=True)])
