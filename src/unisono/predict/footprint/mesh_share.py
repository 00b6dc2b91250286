"""What a rank of a mesh has of a model: the facts of the whole, divided over the tensor and pipeline axes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from torch import nn

from unisono.methods.hybrid import tensor_plan
from unisono.methods.hybrid.pipeline import AHEAD, check_schedule
from unisono.predict.costs.pipelines import count_under_way
from unisono.predict.footprint.formula import ModelFacts, StepMemory, UnitSizes

__all__ = ["MeshShare", "share_facts"]


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


def share_facts(facts: ModelFacts, model: nn.Module, share: MeshShare) -> tuple[ModelFacts, list[str]]:
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
