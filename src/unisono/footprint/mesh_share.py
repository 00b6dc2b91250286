"""What a rank of a mesh has of a model: the facts of the whole, divided over the tensor and pipeline axes."""

from __future__ import annotations

import dataclasses

from torch import nn

from unisono.footprint.formula import Facts, StepMemory, UnitSizes
from unisono.hybrid import tensor_plan

__all__ = ["share_facts"]


def share_facts(
    facts: Facts, model: nn.Module, *, tensor: int, pipeline: int, microbatches: int
) -> tuple[Facts, list[str]]:
    """The facts of one rank, and what is not known.

    Layers of `un.tensor_plan` are divided by the tensor axis, all of it by the pipeline axis (stages of equal size). A
    stage of 1F1B keeps the activations of at most as many microbatches as there are stages.
    """
    split = _count_split(model, tensor) if tensor > 1 else 0
    every = sum(p.numel() for p in model.parameters())
    by_tensor = (split / tensor + every - split) / every
    part = by_tensor / pipeline
    kept = min(pipeline, microbatches) / microbatches / pipeline if pipeline > 1 else 1.0
    notes = []
    if tensor > 1:
        notes.append(
            f"what the tensor axis saves of activations: they count whole ({split / every:.0%} of the parameters are "
            f"divided by {tensor})"
        )
    if pipeline > 1:
        notes.append(
            f"stages that differ: each counts a {_ordinal(pipeline)} of the model, of {microbatches} microbatches"
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
        step_memory=None if facts.step_memory is None else _scale_step(facts.step_memory, kept),
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


def _scale_step(memory: StepMemory, kept: float) -> StepMemory:
    return StepMemory(**{f.name: round(getattr(memory, f.name) * kept) for f in dataclasses.fields(memory)})


def _ordinal(n: int) -> str:
    return {2: "half", 3: "third", 4: "quarter"}.get(n, f"{n}th")
