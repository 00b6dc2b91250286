"""ZeRO: optimizer state, gradients and parameters split over the workers. Rajbhandari et al., 2020, arXiv:1910.02054.

Offload: Ren et al., 2021, arXiv:2101.06840. Infinity: Rajbhandari et al., 2021, arXiv:2104.07857.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn
from torch.optim import Optimizer

from unisono.sharding.optimizers import check
from unisono.sharding.replica import DTYPES, ZeroReplica
from unisono.strategy import Replica, Strategy, check_count
from unisono.world import World

Place = Literal["device", "cpu", "disk"]


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
    """

    stage: int = 2
    precision: Literal["bf16"] | None = None
    optimizer_on: Place = "device"
    params_on: Place = "device"
    accumulate: int = 1
    buffers: Literal["broadcast", "average", "local"] = "broadcast"
    overlap: bool | None = None
    unit_bytes: int | None = None

    def bind(self, model: nn.Module, optimizer: Optimizer, world: World) -> Replica:
        if self.stage not in (1, 2, 3) or isinstance(self.stage, bool):
            raise ValueError(f"stage must be 1, 2 or 3, got {self.stage!r}")
        check_count("accumulate", self.accumulate, "backward passes a window")
        if self.unit_bytes is not None:
            check_count("unit_bytes", self.unit_bytes, "bytes a unit")
        for name, allowed in (
            ("precision", (None, *DTYPES)),
            ("buffers", ("broadcast", "average", "local")),
            ("overlap", (True, False, None)),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {getattr(self, name)!r}")
        check(optimizer)
        return ZeroReplica(model, optimizer, world, self)
