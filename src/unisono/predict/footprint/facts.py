"""What the formulas need to know, found from a model, its optimizer and a batch without allocating any of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.methods.strategies.zero.units import Unit, unit_bytes_for, units_by_module, units_by_size
from unisono.predict.footprint.formula import DEFAULTS, ModelFacts, StepMemory, UnitSizes
from unisono.predict.footprint.live_bytes import Peaks
from unisono.predict.footprint.trace import Loss, OptimizerState, make_fake_mode, trace_activations, trace_optimizer


def find_facts(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    step_memory: StepMemory | None = None,
    backwards: int = 1,
) -> tuple[ModelFacts, list[str]]:
    """The facts, and what could not be found, in words."""
    left_out: list[str] = []
    params = list(model.parameters())
    trainable = [p for p in params if p.requires_grad]
    frozen = [p for p in params if not p.requires_grad]
    try:
        state = trace_optimizer(optimizer, params, mode=make_fake_mode())
    except Exception as error:
        state = OptimizerState()
        left_out.append(
            f"the state of {type(optimizer).__name__}: its step does not run on fake tensors ({format_error(error)})"
        )
    seen = {id(b): b for b in model.buffers()}
    return ModelFacts(
        trainable=sum(p.numel() for p in trainable),
        trainable_bytes=sum(p.nbytes for p in trainable),
        frozen=sum(p.numel() for p in frozen),
        frozen_bytes=sum(p.nbytes for p in frozen),
        buffer_bytes=sum(b.nbytes for b in seen.values()),
        state_elements=state.elements,
        state_bytes=state.element_bytes,
        state_other_bytes=state.other_bytes,
        step_bytes=state.step_bytes,
        units_by_size=measure_units_by_size(model),
        units_by_module=measure_units_by_module(model),
        step_memory=step_memory,
        device="cpu" if params[0].is_meta else params[0].device.type,
        backwards=backwards,
        shapes=tuple((name, _without_memory(p)) for name, p in model.named_parameters() if p.requires_grad),
    ), left_out


def _without_memory(param: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty(param.shape, dtype=param.dtype, device="meta"), requires_grad=False)


def measure_units_by_size(model: nn.Module) -> UnitSizes:
    """Sizes of the units that stages 1 and 2 of zero reduce."""
    units = units_by_size(model, unit_bytes_for(model, DEFAULTS["unit_bytes"]), dtype=None, size=1, rank=0)
    return UnitSizes(0, tuple(sorted((u.numel for u in units), reverse=True)), _count_waiting(units))


def measure_units_by_module(model: nn.Module) -> UnitSizes:
    """Sizes of the units that stage 3 of zero gathers and reduces."""
    units = units_by_module(model, unit_bytes_for(model, DEFAULTS["unit_bytes"]), dtype=None, size=1, rank=0)
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
