"""`un.memory` and `unisono memory`: what each worker will need, found without allocating it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.methods.hybrid.axes import choose_sizes
from unisono.methods.joined_optimizers import join_optimizers
from unisono.predict.footprint.facts import MeshShare, find_facts, format_error, trace_step
from unisono.predict.footprint.formula import StepMemory
from unisono.predict.footprint.memory_report import Comparison, MemoryReport, find_capacity
from unisono.predict.footprint.trace import Loss

__all__ = ["Comparison", "MemoryReport", "memory"]


def memory(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    batch: Any = None,
    loss: Loss | None = None,
    workers: int = 1,
    workers_per_host: int | None = None,
    tensor: int = 1,
    pipeline: int = 1,
    microbatches: int | None = None,
    schedule: str = "1F1B",
    device_memory: str | int | None = None,
    host_memory: str | int | None = None,
    disk: str | int | Path | None = None,
) -> MemoryReport:
    """What each worker needs to train `model`, for allreduce and every stage and placement of zero; then what fits.

    Nothing is allocated: a step is run on fake tensors. The model may be on the meta device, so that one larger than
    this machine can be asked for: `with torch.device("meta"): model = Net()`.

    Args:
        model, optimizer: as for `un.parallel`; they are left as they are. None: AdamW is assumed.
        batch: one worker's batch, for the activations (meta tensors will do): the model's input; a tuple of its
            inputs and, where there is a `loss`, the target; or a dict of its keyword arguments.
        loss: `loss(output, target)`; of a dict, `loss(output, batch)`. Without it, the output's own `loss` or the sum.
        workers: the total number.
        workers_per_host: how many share a host's memory and disk; by default all.
        tensor, pipeline: of a mesh (`un.mesh`); the data axis has the workers that remain. `batch` is that of a place
            on the data axis, which the pipeline takes in `microbatches` (default 4, or as many as there are stages), by
            a `schedule` of `mesh.pipe`.
        device_memory, host_memory, disk: the capacity, as "24GiB" or a number of bytes; `disk` may also be a folder,
            whose free space counts. By default this machine's; without a GPU and `device_memory`, the workers compute
            in the host's memory.

    >>> with torch.device("meta"):
    ...     model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(60)))
    >>> report = memory(model, batch=torch.empty(64, 4096, device="meta"), workers=4, device_memory="12 GiB",
    ...                 host_memory="256GiB", disk="1TB")
    >>> report.fits()[0]
    'zero(stage=1)'
    """
    optimizer = None if optimizer is None else join_optimizers(optimizer)
    _check(model, workers, workers_per_host)
    if workers % (tensor * pipeline):
        choose_sizes(workers, data=None, tensor=tensor, pipeline=pipeline)
    there = find_capacity(device_memory, host_memory, disk, workers=min(workers, workers_per_host or workers))
    left_out: list[str] = []
    step_memory: StepMemory | None = None
    if batch is None:
        left_out.append("activations: give a batch= for them")
    else:
        try:
            step_memory, left_out = trace_step(model, batch, loss)
        except Exception as error:
            left_out.append(
                f"activations: the model does not run on fake tensors with this batch ({format_error(error)})"
            )
    if optimizer is None:
        optimizer = torch.optim.AdamW(model.parameters())
        left_out.append("your optimizer: AdamW was assumed; give optimizer= for another")
    share = MeshShare(tensor, pipeline, microbatches or max(4, pipeline), schedule)
    facts, more = find_facts(model, optimizer, share, step_memory=step_memory)
    title = type(model).__name__
    return MemoryReport(facts, there, workers, (*left_out, *more), title=title, mesh=(tensor, pipeline))


def _check(model: nn.Module, workers: int, workers_per_host: int | None) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(f"{type(model).__name__} has no trainable parameters: there is nothing to train")
    for name, value in (("workers", workers), ("workers_per_host", workers_per_host)):
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
