"""What the formulas need to know of a model, its optimizer and a batch, or of a mesh rank's share of them; found
without allocating any of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.methods.hybrid import tensor_plan
from unisono.methods.hybrid.pipeline import AHEAD, check_schedule
from unisono.methods.joined_optimizers import describe_optimizer, members_of
from unisono.methods.offload.kinds import find_kinds
from unisono.methods.strategies.zero.units import Members, Unit, unit_bytes_for, units_by_module, units_by_size
from unisono.predict.costs.pipelines import count_under_way
from unisono.predict.footprint.formula import DEFAULTS, ModelFacts, StepMemory, UnitSizes
from unisono.predict.footprint.trace import (
    Loss,
    OptimizerState,
    Peaks,
    make_fake_mode,
    trace_activations,
    trace_optimizer,
)


def find_facts(
    model: nn.Module,
    optimizer: Optimizer,
    share: MeshShare,
    *,
    step_memory: StepMemory | None = None,
    backwards: int = 1,
) -> tuple[ModelFacts, list[str]]:
    """The facts of a worker's share, and what could not be found, in words."""
    left_out: list[str] = []
    params = list(model.parameters())
    trainable = [p for p in params if p.requires_grad]
    frozen = [p for p in params if not p.requires_grad]
    try:
        state = trace_optimizer(optimizer, params, mode=make_fake_mode())
    except Exception as error:
        state = OptimizerState()
        name, why = describe_optimizer(optimizer), format_error(error)
        left_out.append(f"the state of {name}: its step does not run on fake tensors ({why})")
    try:
        kinds = find_kinds(optimizer)
    except (TypeError, ValueError) as error:
        kinds = {}
        left_out.append(f"zero and shared, which refuse this optimizer: {error}")
    members = {p: i for i, one in enumerate(members_of(optimizer)) for g in one.param_groups for p in g["params"]}
    seen = {id(b): b for b in model.buffers()}
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    shapes = [(name, torch.empty(p.shape, dtype=p.dtype, device="meta")) for name, p in named]
    facts = ModelFacts(
        trainable=sum(p.numel() for p in trainable),
        trainable_bytes=sum(p.nbytes for p in trainable),
        frozen=sum(p.numel() for p in frozen),
        frozen_bytes=sum(p.nbytes for p in frozen),
        buffer_bytes=sum(b.nbytes for b in seen.values()),
        state_elements=state.elements,
        state_bytes=state.element_bytes,
        state_other_bytes=state.other_bytes,
        step_bytes=state.step_bytes,
        units_by_size=_measure_units_by_size(model, members),
        units_by_module=_measure_units_by_module(model, members),
        step_memory=step_memory,
        device="cpu" if params[0].is_meta else params[0].device.type,
        backwards=backwards,
        whole=tuple(tuple(p.shape) for p in trainable if kinds.get(p) == "tensors"),
        shapes=tuple((name, nn.Parameter(x, requires_grad=False)) for name, x in shapes),
    )
    if (share.tensor, share.pipeline) == (1, 1):
        return facts, left_out
    facts, notes = _share_facts(facts, model, share)
    return facts, [*left_out, *notes]


def _measure_units_by_size(model: nn.Module, members: Members) -> UnitSizes:
    """Sizes of the units that stages 1 and 2 of zero reduce."""
    nbytes = unit_bytes_for(model, DEFAULTS["unit_bytes"])
    units = units_by_size(model, nbytes, dtype=None, size=1, rank=0, members=members)
    return UnitSizes(0, tuple(sorted((u.numel for u in units), reverse=True)), _count_waiting(units))


def _measure_units_by_module(model: nn.Module, members: Members) -> UnitSizes:
    """Sizes of the units that stage 3 of zero gathers and reduces."""
    nbytes = unit_bytes_for(model, DEFAULTS["unit_bytes"])
    units = units_by_module(model, nbytes, dtype=None, size=1, rank=0, members=members)
    sizes: dict[nn.Module | None, int] = {None: 0}
    for unit in units:
        sizes[unit.owner] = sizes.get(unit.owner, 0) + unit.numel
    return UnitSizes(sizes.pop(None), tuple(sorted(sizes.values(), reverse=True)), _count_waiting(units))


def _count_waiting(units: Sequence[Unit]) -> int:
    """The most elements that can wait for a unit to be complete: all but its largest parameter's, counted elsewhere."""
    return max((u.numel - max(math.prod(shape) for shape in u.shapes) for u in units if u.trainable), default=0)


def trace_step(model: nn.Module, batch: Any, loss: Loss | None) -> tuple[StepMemory, list[str]]:
    """Run forward and backward on fakes, in the model's own precision and in bf16."""
    mode = make_fake_mode()
    own = trace_activations(model, batch, loss, mode=mode)
    try:
        half = trace_activations(model, batch, loss, mode=mode, dtype=torch.bfloat16)
    except Exception as error:
        note = (
            f"a bf16 run: it failed ({format_error(error)}); with bf16, floating-point activations count half of fp32's"
        )
        return estimate_from(own), [note]
    return StepMemory(
        own.without_gradients, own.with_gradients, half.without_gradients, half.with_gradients, own.rest
    ), []


def estimate_from(own: Peaks) -> StepMemory:
    """What bf16 needs, from a run in another precision: every floating-point number takes 2 bytes."""
    return StepMemory(
        own.without_gradients, own.with_gradients, own.without_gradients_narrow, own.with_gradients_narrow, own.rest
    )


def format_error(error: BaseException) -> str:
    """Type and message of an error, in one line."""
    lines: Sequence[str] = str(error).strip().splitlines() or [""]
    text = lines[0] if len(lines[0]) <= 160 else f"{lines[0][:160]}..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@dataclass(frozen=True)
class MeshShare:
    """A mesh of which a worker has a part. `traced`: microbatches in which the step that was traced ran already."""

    tensor: int = 1
    pipeline: int = 1
    microbatches: int = 4
    schedule: str = "1F1B"
    traced: int = 1

    def count_held(self) -> float:
        """How many microbatches' activations the first stage's rank holds at the worst moment.

        >>> [MeshShare(pipeline=4, microbatches=16, schedule=name).count_held() for name in ("GPipe", "1F1B")]
        [16.0, 7.0]
        """
        kind, per_rank = check_schedule(self.schedule, None, self.microbatches, self.pipeline, AHEAD)
        if kind in ("gpipe", "loopedbfs"):
            return float(self.microbatches)
        # of several stages a rank: as many microbatches as ranks in each, and those on their way there and back
        held = (per_rank - 1) * self.pipeline + count_under_way(0, self.pipeline, AHEAD)
        return min(self.microbatches * per_rank, held) / per_rank


def _share_facts(facts: ModelFacts, model: nn.Module, share: MeshShare) -> tuple[ModelFacts, list[str]]:
    """The facts of one rank of a mesh, and notes on what they leave out.

    Layers of `un.tensor_plan` are divided by the tensor axis, all of it by the pipeline axis (stages of equal size). A
    stage keeps the activations of the microbatches that its schedule has under way.
    """
    tensor, pipeline = share.tensor, share.pipeline
    split = _count_split(model, tensor) if tensor > 1 else 0
    every = sum(p.numel() for p in model.parameters())
    by_tensor = (split / tensor + every - split) / every
    part = by_tensor / pipeline
    kept = share.count_held() / share.microbatches / pipeline if pipeline > 1 else 1.0
    notes = []
    step_memory = facts.step_memory
    if step_memory is not None:
        step_memory = StepMemory(
            **{name: round(bytes_ * kept * share.traced) for name, bytes_ in dataclasses.asdict(step_memory).items()}
        )
    if tensor > 1:
        notes.append(
            f"what the tensor axis saves of activations: they count whole ({split / every:.0%} of the parameters are "
            f"divided by {tensor})"
        )
    if pipeline > 1:
        part_name = {2: "half", 3: "third", 4: "quarter"}.get(pipeline, f"{pipeline}th")
        notes.append(
            f"stages that differ: each counts a {part_name} of the model, with {share.count_held():g} of "
            f"{share.microbatches} microbatches under way ({share.schedule})"
        )
    scaled = {
        name: round(getattr(facts, name) * part)
        for name in (
            "trainable", "trainable_bytes", "frozen", "frozen_bytes", "state_elements", "state_bytes",
            "state_other_bytes", "step_bytes",
        )
    }  # fmt: skip
    return dataclasses.replace(
        facts,
        **scaled,
        units_by_size=_scale_units(facts.units_by_size, by_tensor, pipeline),
        units_by_module=_scale_units(facts.units_by_module, by_tensor, pipeline),
        step_memory=step_memory,
        backwards=max(facts.backwards, share.microbatches if pipeline > 1 else 1),
    ), notes


def _count_split(model: nn.Module, tensor: int) -> int:
    """Elements of the parameters that the plan divides; a bias that is added once is not divided."""
    count = 0
    for name, style in tensor_plan(model, ranks=tensor).items():
        module = model.get_submodule(name)
        whole = {"bias"} if type(style).__name__ == "RowwiseParallel" else set()
        count += sum(p.numel() for key, p in module.named_parameters(recurse=False) if key not in whole)
    return count


def _scale_units(units: UnitSizes, by_tensor: float, pipeline: int) -> UnitSizes:
    others = units.others[: -(-len(units.others) // pipeline)]
    return UnitSizes(
        round(units.root * by_tensor / pipeline),
        tuple(round(size * by_tensor) for size in others),
        round(units.waiting * by_tensor),
    )
