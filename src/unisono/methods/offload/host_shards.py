"""The optimizer step over shards whose values rest on the host or on disk, and are on the device while they compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unisono.methods.offload.blocks import Block, Shard
from unisono.methods.offload.disk import Disk
from unisono.methods.offload.stepper import Stepper, StepSettings


class _Rest(NamedTuple):
    """What is left of a step: its settings, and the gradients that are still to be applied."""

    settings: StepSettings
    gradients: dict[int, Tensor]
    scale: float
    absent: Mapping[int, Any]


class HostShards:
    """Steps the optimizer over shards that rest on the host or on disk, where they are, and gives their values to the
    device when a module needs them: ZeRO-Infinity (Rajbhandari et al., 2021, arXiv:2104.07857).

    keep: `shard.compute`, on the host, holds the values that compute; otherwise they are made from the master values at
    each use, and `shard.compute` is let go.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        moments: torch.dtype = torch.float32,
        disk: Disk | None = None,
        keep: bool,
    ) -> None:
        self.stepper = Stepper(optimizer, moments=moments, disk=disk)
        self._keep = keep
        self._shards: list[Shard] = []
        self._gradients: dict[int, Tensor] = {}
        self._rest: _Rest | None = None  # of a step that an error broke off

    def add(self, shard: Shard) -> None:
        """Take one more unit."""
        values = (shard.compute if shard.master is None else shard.master).detach()
        own = values.to("cpu", shard.master_dtype, copy=shard.home == "cpu").contiguous()
        shard.blocks = [self.stepper.add(Block(own, shard.runs, shard.home, unit=len(self._shards)))]
        shard.master = None
        if not self._keep:
            shard.compute = torch.empty(0, dtype=shard.compute.dtype)
        self._shards.append(shard)

    def offer(self, u: int, gradient: Tensor, *, replace: bool = False) -> None:
        """Take the gradient of unit `u` for the next step, instead of one that it may have."""
        self._gradients[u] = gradient.detach().to("cpu")

    def step(self, scale: float = 1.0, absent: Mapping[int, Any] | None = None, *, delay: bool | None = None) -> None:
        """Step everything, in order; the disk reads ahead and writes behind."""
        if delay:
            raise ValueError("a delayed update needs parameters on the device")
        self.retry()
        self._rest = _Rest(self.stepper.begin(), self._gradients, scale, absent or {})
        self._gradients = {}
        self._go_on()

    def _go_on(self) -> None:
        """Step what is left; where it fails, what was done is kept, and the rest stays to be done."""
        rest = self._rest
        if rest is None:
            return
        order = sorted(rest.gradients)
        for number, u in enumerate(order):
            for soon in order[number : number + 2]:
                self.stepper.prefetch(soon)
            out = self._shards[u].compute if self._keep else None
            absent = rest.absent.get(u, ())
            gradient = rest.gradients[u]
            self.stepper.step(u, gradient, out, scale=rest.scale, absent=absent, settings=rest.settings)
            del rest.gradients[u]
        self.stepper.flush()
        self._rest = None

    def retry(self) -> None:
        """After an error of the disk: go on with the step where it broke off. Nothing was lost."""
        if self._rest is not None:
            self.stepper.flush()
            self._go_on()

    def wait(self, u: int) -> None:
        """No-op: `step` returns when everything has been stepped."""

    def values(self, u: int) -> Tensor:
        """The values of unit `u`, on the host, in the dtype that computes."""
        shard = self._shards[u]
        return shard.compute if self._keep else shard.read("master").to(shard.compute.dtype)

    def finish(self) -> None:
        """Wait for the disk."""
        self.stepper.flush()

    def shard(self, u: int) -> Shard:
        """The state of unit `u`, to be read and set."""
        return self._shards[u]

    @property
    def steps(self) -> int:
        """Steps so far."""
        return self.stepper.steps

    @steps.setter
    def steps(self, count: int) -> None:
        self.stepper.steps = count

    def close(self) -> None:
        """End the threads."""
        self.stepper.close()
