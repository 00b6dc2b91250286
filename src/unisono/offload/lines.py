"""The lines of a pipeline, cut into parts, and reading and writing of their state for checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from unisono.offload.device import DeviceLanes, Stepped
from unisono.offload.plan import Part
from unisono.offload.segments import Run
from unisono.offload.stepper import Stepper


class Line(NamedTuple):
    """The values of one unit that this rank steps.

    compute: 1-D line in the dtype that computes; the parameters are views of it, or are gathered from it.
    runs: which of its elements belong to which group of the optimizer; the rest is padding.
    master: the values in the optimizer's precision, copied; None: those of `compute`.
    home: where the state lives that is not on the device.
    """

    compute: Tensor
    runs: Sequence[Run]
    master: Tensor | None = None
    home: Literal["cpu", "disk"] = "cpu"


@dataclass
class HostPart:
    """A part that the CPU steps: its number in the stepper, and its padding."""

    index: int
    part: Part
    padding: list[tuple[int, int]]


@dataclass
class Unit:
    """One line, with its parts in order; the CPU's come first."""

    compute: Tensor
    border: int  # the CPU steps the elements before it, the device the others
    host: list[HostPart] = field(default_factory=list)
    staged: list[Stepped] = field(default_factory=list)
    resident: list[Stepped] = field(default_factory=list)
    sent: list[Tensor] = field(default_factory=list)  # on the host: gradients, then the new values
    values: list[Tensor] = field(
        default_factory=list
    )  # on the host: the new values; `sent` where the dtype is the same
    kept: list[Tensor] = field(default_factory=list)  # on the device: the gradient of what is stepped there
    shadow: Tensor | None = None  # new values that wait for the end of the step

    @property
    def holders(self) -> Iterator[HostPart | Stepped]:
        """Who holds the state, in the order of the elements."""
        every: list[HostPart | Stepped] = [*self.host, *self.staged, *self.resident]
        return iter(sorted(every, key=lambda one: one.part.start))


def master_dtype(line: Line) -> torch.dtype:
    """The precision in which the optimizer steps a line."""
    if line.master is not None:
        return line.master.dtype
    return torch.float32 if line.compute.dtype.itemsize < 4 else line.compute.dtype


class Access:
    """The state of all lines, wherever it is; nothing may be under way."""

    def __init__(self, units: Sequence[Unit], stepper: Stepper, device: DeviceLanes) -> None:
        self._units, self._stepper, self._device = units, stepper, device

    def names(self, u: int) -> list[str]:
        """The lines of state of unit `u`: "master", then those of the optimizer."""
        found = ["master"]
        for one in self._units[u].holders:
            found += self._stepper.names(one.index) if isinstance(one, HostPart) else one.home_lines
        return list(dict.fromkeys(found))

    def read(self, u: int, name: str, start: int, stop: int | None) -> Tensor:
        """A copy on the host of elements [start, stop) of a line."""
        if name not in self.names(u):
            raise ValueError(f"unit {u} has no state {name!r}: it has {self.names(u)}")
        found = []
        for one, low, high in self._spans(u, start, stop):
            if isinstance(one, HostPart):
                found.append(self._stepper.state(one.index, name, low, high))
            else:
                found.append(self._device.read(one, name, low, high))
        return torch.cat(found) if found else torch.empty(0)

    def scalars(self, u: int, at: int) -> dict[str, Any] | None:
        """What the optimizer keeps once for the parameter that holds element `at`; None before its first step."""
        for one, low, _ in self._spans(u, at, at + 1):
            if isinstance(one, HostPart):
                return self._stepper.scalars(one.index, low)
            found = one.segments.scalars(low)
            return None if found is None else dict(found)
        raise ValueError(f"unit {u} has {self._units[u].compute.numel()} elements, got {at}")

    def write(self, u: int, values: Mapping[str, Any], start: int, stop: int | None) -> None:
        """Set lines (tensors of stop - start elements) and scalars of elements [start, stop); see `Stepper.load`."""
        names = self.names(u)
        unit, stop = self._units[u], self._units[u].compute.numel() if stop is None else stop
        for name in names:
            if name in values and values[name].numel() != stop - start:
                raise ValueError(f"got {values[name].numel()} elements of {name!r} for elements {start} to {stop}")
        for one, low, high in self._spans(u, start, stop):
            at = one.part.start + low - start
            mine = {k: v.flatten()[at : at + high - low] if k in names else v for k, v in values.items()}
            if isinstance(one, HostPart):
                self._stepper.load(one.index, mine, start=low, stop=high)
            else:
                self._device.load(one, mine, low, high)
        if "master" in values:
            unit.compute.detach()[start:stop].copy_(values["master"].flatten())

    def reset(self, u: int, start: int, stop: int | None) -> None:
        """Forget the optimizer's state of elements [start, stop): their next step is their first."""
        for one, low, high in self._spans(u, start, stop):
            if isinstance(one, HostPart):
                self._stepper.reset(one.index, start=low, stop=high)
            else:
                one.segments.mark(low, high, None)

    def _spans(self, u: int, start: int, stop: int | None) -> Iterator[tuple[HostPart | Stepped, int, int]]:
        """Who holds elements [start, stop), and which of its own elements they are."""
        n = self._units[u].compute.numel()
        stop = n if stop is None else stop
        if not 0 <= start <= stop <= n:
            raise ValueError(f"got elements {start} to {stop}: unit {u} has {n}")
        for one in self._units[u].holders:
            low, high = max(start, one.part.start), min(stop, one.part.stop)
            if low < high:
                yield one, low - one.part.start, high - one.part.start
