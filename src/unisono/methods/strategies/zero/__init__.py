"""ZeRO: optimizer state, gradients and parameters split over the workers. Rajbhandari et al., 2020, arXiv:1910.02054.

Offload: Ren et al., 2021, arXiv:2101.06840. Infinity: Rajbhandari et al., 2021, arXiv:2104.07857. Here are
the settings; `replica` is what follows from them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from torch import nn
from torch.optim import Optimizer

from unisono.methods.checks import AtLeast
from unisono.methods.exchange.reduction import check_real
from unisono.methods.facts import Convergence, Example, Facts
from unisono.methods.joined_optimizers import describe_optimizer, members_of
from unisono.methods.offload.deferred import check_deferrable
from unisono.methods.offload.kinds import find_kinds
from unisono.methods.reducer import Reducer
from unisono.methods.strategies.zero.codes import CODE_BYTES
from unisono.methods.strategies.zero.groups import check_within, find_groups
from unisono.methods.strategies.zero.replica import ZeroReplica
from unisono.methods.strategies.zero.scatter import find_codec
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
        Example("zero(stage=2, within=1)", exact=True),
        Example("zero(stage=3, within=1)", exact=True),
        Example("zero(stage=3, gather=int8)", splits_state=True),
        Example("zero(stage=2, gather=int8, reducer=error_feedback(bytegrad))", splits_state=True),
    ],
    refuses={
        "stage=0": "stage",
        "stage=4": "stage",
        "precision=fp8": "precision",
        "accumulate=0": "accumulate",
        "unit_bytes=0": "unit_bytes",
        "buffers=sometimes": "buffers",
        "spare=True, optimizer_on=cpu": "stepped together",
        "step_ahead=True": "step_ahead needs optimizer_on='cpu'",
        "step_ahead=True, optimizer_on=disk": "step_ahead needs optimizer_on='cpu'",
        "step_ahead=True, optimizer_on=cpu, stage=3, params_on=cpu": "params_on='device'",
        "step_ahead=True, optimizer_on=cpu, delayed_update=True": "delayed_update",
        "defer=4": "defer=4 needs optimizer_on='cpu'",
        "defer=1, optimizer_on=cpu": "defer",
        "defer=4, optimizer_on=disk": "defer=4 needs optimizer_on='cpu'",
        "defer=4, optimizer_on=cpu, step_ahead=True": "step_ahead",
        "defer=4, optimizer_on=cpu, delayed_update=True": "delayed_update",
        "defer=4, optimizer_on=cpu, device_memory=1000000000": "device_memory",
        "defer=4, optimizer_on=cpu, stage=3, params_on=cpu": "params_on='device'",
        "keep=0.1, optimizer_on=cpu": "keep=0.1 says nothing without defer",
        "defer=4, optimizer_on=cpu, keep=1.0": "keep",
        "gather=int4": "gather",
        "gather=int8, optimizer_on=cpu": "gather='int8' needs optimizer_on='device'",
        "reducer=powersgd": "no meaning for shards",
        "within=hosts": "'host'",
        "within=0": "number of ranks",
        "across=bf16": "between groups",
        "within=2, spare=True": "already",
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
    step_ahead: the host steps a unit as soon as its gradient has come, while backward goes on; what clipping or the
        like then changes is stepped again from the old values. Takes the state's host memory twice.
    defer: the gradients of so many steps add up before the host steps them, behind the program (Adam, AdamW), after
        `delay_after` steps; keep: but for this share of the parameters, those with the largest gradients, which the
        device steps in every step. None: 0.05.
    device_memory: such as "18GiB": state for which there is room on the device stays there.
    host_memory: how much host memory the optimizer's state may take; the rest goes to disk (optimizer_on="disk").
    spill: the share of the state that goes to disk, instead. Without both, all of it.
    moments: "bf16" keeps the optimizer's moments in 16 bits, rounded at random (off the device).
    disk: the folder for the scratch file. None: the system's folder for temporary files.
    spare: every rank keeps a copy of the next-lower rank's part, and steps it too: what a lost rank held is still
        there. Costs as much memory again for all that is split, and the bytes of a reduced gradient.
    within: "host", so many ranks that follow each other, or a dimension of torch's mesh (`mesh["shard"]`): each such
        group of ranks splits everything among its own, and only means of gradients pass between groups.
    across: how means are taken between the groups (None: exactly); any reducer, such as powersgd(rank=4).
    gather: "int8" gathers parameters in 8 bits, rounded in blocks of 256, a quarter of the bytes of fp32. What the
        optimizer steps, and what is saved, stays exact.
    reducer: how gradients travel to the ranks that step them (None: exactly): bf16, fp16, fp8, bytegrad, qsgd, nuqsgd,
        topk, and error_feedback around one of them, which keeps a number a parameter on every rank.
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
    step_ahead: bool = False
    defer: Annotated[int | None, AtLeast(2, "steps")] = None
    keep: float | None = None
    device_memory: str | int | None = None
    host_memory: str | int | None = None
    spill: float | None = None
    moments: Literal["fp32", "bf16"] = "fp32"
    disk: str | None = None
    spare: bool = False
    within: Any = None
    across: Reducer | None = None
    gather: Literal["int8"] | None = None
    reducer: Reducer | None = None

    def check(self, model: nn.Module, optimizer: Optimizer, world: World) -> None:
        self._check_places()
        self._check_groups()
        kinds = find_kinds(optimizer)  # refuses what cannot be split
        places = {"optimizer_on='disk'": self.optimizer_on == "disk", "delayed_update=True": self.delayed_update}
        places |= {"step_ahead=True": self.step_ahead, f"defer={self.defer}": self.defer is not None}
        asked = [setting for setting, is_set in places.items() if is_set]
        if "tensors" in kinds.values() and asked:
            raise ValueError(
                f"zero({asked[0]}) steps parts of tensors, {describe_optimizer(optimizer)} has to step whole ones: use "
                "optimizer_on='cpu' alone, which steps them in the host's memory"
            )
        for member in members_of(optimizer) if self.defer is not None else ():
            check_deferrable(member)
        if world.size > 1:
            refuse_common_memory(model, "zero")
            find_groups(self.within, world)
        for reducer in (self.across, self.reducer):
            if reducer is not None:
                check_real(reducer, list(model.named_parameters()))
                if reducer.check is not None:
                    reducer.check(optimizer, world)

    def why_torch_optimizer(self) -> str:
        return "it splits the optimizer's state over the ranks"

    def pattern(self) -> Pattern:
        effect = None
        if self.puts_off:
            effect = Convergence("other", f"{self.puts_off}: gradients count one step late or more; tuned apart")
        elif self.gather is not None:
            effect = Convergence("rounded", "computes with parameters of 8 bits; what is stepped is exact")
        return replace(
            super().pattern(),
            gathers=2 if self.stage == 3 else 1,
            gathered=1.0 if self.gather is None else CODE_BYTES / 4,
            keeps=Keeps.as_set(self),
            convergence=effect,
        )

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
        if self.step_ahead and (self.optimizer_on != "cpu" or self.params_on != "device" or self.delayed_update):
            raise ValueError(
                "step_ahead needs optimizer_on='cpu' and params_on='device', without delayed_update: a unit is stepped "
                "in host memory, where there is a second copy of its state, before optimizer.step() asks for it"
            )
        self._check_deferred()
        if self.spare and self.optimizer_on != "device":
            raise ValueError(
                f"spare=True needs optimizer_on='device', got {self.optimizer_on!r}: the copy of another rank's part "
                "is stepped together with this rank's own, by the optimizer itself"
            )

    def _check_deferred(self) -> None:
        """Refuse what cannot be put off, and settings of it alone."""
        if self.defer is None:
            if self.keep is not None:
                raise ValueError(f"keep={self.keep!r} says nothing without defer=..., a number of steps such as 4")
            return
        if self.optimizer_on != "cpu" or self.params_on != "device":
            raise ValueError(
                f"defer={self.defer} needs optimizer_on='cpu' and params_on='device', got {self.optimizer_on!r} and "
                f"{self.params_on!r}: what is put off is stepped in host memory, the rest on the device"
            )
        others = {"delayed_update": self.delayed_update, "step_ahead": self.step_ahead}
        for name, is_set in {**others, "device_memory": self.device_memory is not None}.items():
            if is_set:
                raise ValueError(
                    f"got defer={self.defer} and {name}: what is put off has time already, and keep=... says what "
                    f"stays on the device. Leave {name} out"
                )
        if isinstance(self.keep, bool) or not 0 <= self.kept_share < 1:
            raise ValueError(f"keep is a share of the parameters, from 0 to less than 1, got {self.keep!r}")

    @property
    def puts_off(self) -> str:
        """The setting by which a step's values come after the next step has begun; "": there is none."""
        return "delayed_update" if self.delayed_update else "defer" if self.defer is not None else ""

    @property
    def kept_share(self) -> float:
        """With `defer`, the share of the parameters that the device steps in every step."""
        return 0.05 if self.keep is None else self.keep

    def _check_groups(self) -> None:
        """Refuse settings of hybrid sharding that make no sense together."""
        check_within(self.within)
        if self.reducer is not None and not self.reducer.exact:
            find_codec(self.reducer)
        if self.across is not None and self.within is None:
            raise ValueError(
                f"across={self.across.spec or '...'} is how means are taken between groups of ranks, and "
                "without within there are none: give within='host', or within=K ranks"
            )
        if self.gather is not None and self.optimizer_on != "device":
            raise ValueError(
                f"gather={self.gather!r} needs optimizer_on='device', got {self.optimizer_on!r}: exact values are kept "
                "where they are stepped"
            )
        if self.spare and self.within is not None:
            raise ValueError(
                f"spare=True says nothing with within={self.within!r}: every group has a copy of every part already"
            )

    def _check_off_device(self, name: str, value: object, *, needs: Place | None = None) -> None:
        """Refuse a setting that is for an optimizer off the device."""
        if self.optimizer_on == "device" or needs not in (None, self.optimizer_on):
            raise ValueError(f"{name}={value!r} says nothing with optimizer_on={self.optimizer_on!r}")
