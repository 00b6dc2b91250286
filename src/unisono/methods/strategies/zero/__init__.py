"""ZeRO: optimizer state, gradients and parameters split over the workers. Rajbhandari et al., 2020, arXiv:1910.02054.

Offload: Ren et al., 2021, arXiv:2101.06840. Infinity: Rajbhandari et al., 2021, arXiv:2104.07857. Here are
the settings; `replica` is what follows from them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from torch import nn
from torch.optim import Optimizer

from unisono.methods.checks import AtLeast
from unisono.methods.facts import Convergence, Example, Facts
from unisono.methods.strategies.zero.optimizer_shards import check_optimizer
from unisono.methods.strategies.zero.replica import ZeroReplica
from unisono.methods.strategy import Accumulate, Buffers, Keeps, Pattern, Replica, Strategy
from unisono.methods.strategy.mistakes import refuse_common_memory
from unisono.units import parse_size
from unisono.world import World

Place = Literal["device", "cpu", "disk"]

FACTS = Facts(
    [
        Example("zero", exact=True, splits_state=True),
        Example("zero(stage=1)", exact=True, splits_state=True),
        Example("zero(stage=2, unit_bytes=64, overlap=True)", exact=True, splits_state=True),
        Example("zero(stage=3)", exact=True, splits_state=True),
        Example("zero(stage=2, spare=True)", exact=True),
        Example("zero(stage=3, spare=True)", exact=True),
    ],
    refuses={
        "stage=0": "stage",
        "stage=4": "stage",
        "precision=fp8": "precision",
        "accumulate=0": "accumulate",
        "unit_bytes=0": "unit_bytes",
        "buffers=sometimes": "buffers",
        "spare=True, optimizer_on=cpu": "stepped together",
    },
    convergence=Convergence("exact", "as one process on the joined batches; state is split over the workers"),
    plans=["zero(stage=2)"],
)


@dataclass(frozen=True)
class zero(Strategy):
    """Every worker keeps a part of the optimizer's state (stage 1), of the gradients (2), of the parameters (3).

    The numbers are those of `allreduce`. Stages 1 and 2 send as much, stage 3 half as much again.

    stage: 1, 2 or 3. Stage 1 keeps the gradients of a window of several passes whole; 2 and 3 reduce every pass.
    precision: None computes in the parameters' own dtype; "bf16" computes in it and steps fp32 values.
    accumulate: backward passes a window.
    buffers: "broadcast" rank 0's after every window, "average" them, or leave them "local".
    overlap: reduce and gather while computing goes on. None: where it pays.
    unit_bytes: how much is gathered and reduced together. None: a sixteenth of the model, 1 to 128 MiB.
    optimizer_on: "cpu" keeps what the optimizer steps, and its state, in host memory and steps it there, while the
        device goes on; "disk" keeps on disk what does not fit (ZeRO-Offload, ZeRO-Infinity).
    params_on: "cpu" or "disk" (stage 3): the parameters too, which come when a module needs them.
    delayed_update: a step's gradients are applied while the next one computes, after `delay_after` steps.
    device_memory: such as "18GiB": state for which there is room on the device stays there.
    host_memory: how much host memory the optimizer's state may take; the rest goes to disk (optimizer_on="disk").
    spill: the share of the state that goes to disk, instead. Without both, all of it.
    moments: "bf16" keeps the optimizer's moments in 16 bits, rounded at random (off the device).
    disk: the folder for the scratch file. None: the system's folder for temporary files.
    spare: every rank keeps a copy of the next-lower rank's part, and steps it too: what a lost rank held is still
        there. Costs as much memory again for all that is split, and the bytes of a reduced gradient.
    """

    stage: Literal[1, 2, 3] = 2
    precision: Literal["bf16"] | None = None
    optimizer_on: Place = "device"
    params_on: Place = "device"
    accumulate: Accumulate = 1
    buffers: Buffers = "broadcast"
    overlap: bool | None = None
    unit_bytes: Annotated[int | None, AtLeast(1, "bytes a unit")] = None
    delayed_update: bool = False
    delay_after: Annotated[int, AtLeast(0, "steps")] = 40
    device_memory: str | int | None = None
    host_memory: str | int | None = None
    spill: float | None = None
    moments: Literal["fp32", "bf16"] = "fp32"
    disk: str | None = None
    spare: bool = False

    def check(self, model: nn.Module, optimizer: Optimizer, world: World) -> None:
        self._check_places()
        check_optimizer(optimizer)
        if world.size > 1:
            refuse_common_memory(model, "zero")

    def why_torch_optimizer(self) -> str:
        return "it splits the optimizer's state over the ranks"

    def pattern(self) -> Pattern:
        return replace(super().pattern(), gathers=2 if self.stage == 3 else 1, keeps=Keeps.as_set(self))

    def make(self, model: nn.Module, optimizer: Optimizer, world: World) -> Replica:
        return ZeroReplica(model, optimizer, world, self)

    def _check_places(self) -> None:
        """Refuse placements that make no sense together."""
        if self.params_on != "device" and self.stage != 3:
            raise ValueError(
                f"params_on={self.params_on!r} needs stage=3: the others keep all parameters on the device"
            )
        allowed = {"device": ("device", "cpu", "disk"), "cpu": ("cpu", "disk"), "disk": ("disk",)}[self.params_on]
        if self.optimizer_on not in allowed:
            raise ValueError(
                f"params_on={self.params_on!r} needs optimizer_on={' or '.join(map(repr, allowed))}, got "
                f"{self.optimizer_on!r}: the optimizer steps the parameters where they rest"
            )
        for name, size in (("device_memory", self.device_memory), ("host_memory", self.host_memory)):
            if size is not None:
                self._check_off_device(name, size)
                if parse_size(size, name) <= 0:
                    raise ValueError(f"{name} must be more than nothing, got {size!r}")
        if self.spill is not None:
            self._check_off_device("spill", self.spill, needs="disk")
            if isinstance(self.spill, bool) or not isinstance(self.spill, (int, float)) or not 0 <= self.spill <= 1:
                raise ValueError(f"spill is the share of the state that goes to disk, from 0 to 1, got {self.spill!r}")
        if self.disk is not None:
            self._check_off_device("disk", self.disk, needs="disk")
        if self.spill is not None and self.host_memory is not None:
            raise ValueError("give spill (a share) or host_memory (a size), not both")
        if self.moments != "fp32" and self.optimizer_on == "device":
            raise ValueError("moments='bf16' needs optimizer_on='cpu' or 'disk'")
        if self.delayed_update and (self.optimizer_on == "device" or self.params_on != "device"):
            raise ValueError("delayed_update needs optimizer_on='cpu' or 'disk', and params_on='device'")
        if self.spare and self.optimizer_on != "device":
            raise ValueError(
                f"spare=True needs optimizer_on='device', got {self.optimizer_on!r}: the copy of another rank's part "
                "is stepped together with this rank's own, by the optimizer itself"
            )

    def _check_off_device(self, name: str, value: object, *, needs: Place | None = None) -> None:
        """Refuse a setting that is for an optimizer off the device."""
        if self.optimizer_on == "device" or needs not in (None, self.optimizer_on):
            raise ValueError(f"{name}={value!r} says nothing with optimizer_on={self.optimizer_on!r}")
