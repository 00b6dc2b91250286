"""Values that rest on the host or on disk, and come to the device when a module needs them: ZeRO-Infinity.

The optimizer steps them where they rest; on disk, the master values are the only ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unisono.offload.disk import Disk
from unisono.offload.lines import Line, master_dtype
from unisono.offload.stepper import Block, Stepper, StepSettings


class _Update(NamedTuple):
    """One step, and what of it is still to be done."""

    settings: StepSettings
    gradients: dict[int, Tensor]
    scale: float
    absent: Mapping[int, Any]


class Resting:
    """Steps the optimizer over lines none of which is on the device.

    keep: `line.compute`, on the host, holds the values that compute; otherwise they are made from the master values at
    each use, and `line.compute` is let go.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        moments: torch.dtype = torch.float32,
        disk: Disk | None = None,
        keep: bool,
        threads: int | None = None,
    ) -> None:
        self._stepper = Stepper(optimizer, moments=moments, disk=disk, threads=threads)
        self._computes: list[Tensor] | None = [] if keep else None
        self._dtypes: list[torch.dtype] = []
        self._gradients: dict[int, Tensor] = {}
        self._update: _Update | None = None  # one that an error broke off

    def add(self, line: Line) -> None:
        """Take one more unit."""
        values = (line.compute if line.master is None else line.master).detach()
        own = values.to("cpu", master_dtype(line), copy=line.home == "cpu").contiguous()
        self._stepper.add(Block(own, line.runs, line.home))
        self._dtypes.append(line.compute.dtype)
        if self._computes is not None:
            self._computes.append(line.compute)

    def offer(self, u: int, gradient: Tensor, *, replace: bool = False) -> None:
        """Take the gradient of unit `u` for the next step; `replace`: instead of one that it may have."""
        if u in self._gradients and not replace:
            raise RuntimeError(f"unit {u} has a gradient already: call step() before it gets the next one")
        self._gradients[u] = gradient.detach().to("cpu")

    def step(self, scale: float = 1.0, absent: Mapping[int, Any] | None = None, *, delay: bool | None = None) -> None:
        """Step everything, in order; the disk reads ahead and writes behind."""
        if delay:
            raise ValueError("a delayed update needs parameters on the device")
        self.retry()
        self._update = _Update(self._stepper.begin(), self._gradients, scale, absent or {})
        self._gradients = {}
        self._go_on()

    def _go_on(self) -> None:
        """Step what is left; where it fails, what was done is kept, and the rest stays to be done."""
        update = self._update
        if update is None:
            return
        order = sorted(update.gradients)
        if order:
            self._stepper.prefetch(order[0])
        for u, following in zip(order, [*order[1:], None], strict=True):
            if following is not None:
                self._stepper.prefetch(following)
            out = None if self._computes is None else self._computes[u]
            ranges = update.absent.get(u, ())
            gradient = update.gradients[u]
            self._stepper.step(u, gradient, out, scale=update.scale, absent=ranges, settings=update.settings)
            del update.gradients[u]
        self._stepper.flush()
        self._update = None

    def retry(self) -> None:
        """After an error of the disk: go on with the step where it broke off. Nothing was lost."""
        if self._update is not None:
            self._stepper.flush()
            self._go_on()

    def wait(self, u: int) -> None:
        """Nothing is ever under way."""

    def values(self, u: int) -> Tensor:
        """The values of unit `u`, on the host, in the dtype that computes."""
        if self._computes is not None:
            return self._computes[u]
        return self._stepper.state(u, "master").to(self._dtypes[u])

    def finish(self) -> None:
        """Wait for the disk."""
        self._stepper.flush()

    def names(self, u: int) -> list[str]:
        """Lines of state."""
        return self._stepper.names(u)

    def state(self, u: int, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """A copy of part of a line."""
        return self._stepper.state(u, name, start, stop)

    def scalars(self, u: int, at: int = 0) -> dict[str, Any] | None:
        """What is kept once for the parameter at this element."""
        return self._stepper.scalars(u, at)

    def load(self, u: int, values: Mapping[str, Any], *, start: int = 0, stop: int | None = None) -> None:
        """Set lines and scalars of elements [start, stop)."""
        self._stepper.load(u, values, start=start, stop=stop)
        if self._computes is not None and "master" in values:
            self._computes[u].detach()[start:stop].copy_(values["master"].flatten())

    def reset(self, u: int, *, start: int = 0, stop: int | None = None) -> None:
        """Forget the optimizer's state of elements [start, stop)."""
        self._stepper.reset(u, start=start, stop=stop)

    @property
    def steps(self) -> int:
        """Steps so far."""
        return self._stepper.steps

    @steps.setter
    def steps(self, count: int) -> None:
        self._stepper.steps = count

    def close(self) -> None:
        """End the threads."""
        self._stepper.close()
