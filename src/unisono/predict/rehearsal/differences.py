"""Whether worlds of one and several workers agree, and what differs: judged from what their ranks noted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from unisono.methods.facts import Grade

__all__ = ["Observed", "Verdict", "judge"]

_CLOSE = {"exact": 1e-3, "rounded": 3e-2}  # of a gradient's norm
_HALF = 3e-2  # of numbers of 16 bits
_MOVED = 5e-2  # of how far a parameter has moved: optimizers enlarge what rounding leaves
_SHOWN = 8


@dataclass
class Observed:
    """What was seen in one world: its ranks' notes, mean losses by step, rank 0's gradients and parameters."""

    notes: Sequence[Mapping[str, Any]]
    losses: Sequence[float | None]
    gradients: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]


@dataclass
class Verdict:
    """Whether worlds agree, and what was found. `agrees` None: that cannot be told, and `lines` say why."""

    agrees: bool | None
    lines: list[str] = field(default_factory=list)


def judge(one: Observed, several: Observed, start: Mapping[str, Tensor], grade: Grade) -> Verdict:
    """Compare a world of one worker with one of several."""
    workers, lines = len(several.notes), _describe_course(one, several)
    data = _compare_inputs(one, several)
    if data.agrees is False:
        return Verdict(False, [*data.lines, *lines])
    if grade not in _CLOSE:
        method = several.notes[0]["strategy"]
        return Verdict(
            None,
            [
                f"{method} is not exact: its worlds train on other courses, so that parameters are not compared. Try "
                "--strategy allreduce, which tells whether the program itself is right",
                *data.lines,
                *lines,
            ],
        )
    if data.agrees is None:
        return Verdict(None, [*data.lines, *lines])
    found = _compare_gradients(one, several, workers, grade)
    if found.agrees:
        found = _compare_parameters(one, several, start, found)
    return Verdict(found.agrees, [*found.lines, *lines])


def _describe_course(one: Observed, several: Observed) -> list[str]:
    """Losses, and what was done so that they can be compared."""
    lines = []
    pairs = [(a, b) for a, b in zip(one.losses, several.losses, strict=False) if a is not None and b is not None]
    if pairs:
        rows = [" ".join(f"{x:.6g}" for x in column) for column in zip(*pairs, strict=True)]
        lines.append(f"losses of one worker: {rows[0]}; of {len(several.notes)}: {rows[1]}")
    dropped = sorted({name for note in (*one.notes, *several.notes) for name in note["dropout"]})
    if dropped:
        lines.append(f"dropout was switched off for this comparison: {', '.join(dropped[:_SHOWN])}")
    if not all(note["seeded"] for note in several.notes):
        lines.append(
            "the script begins with other parameters each time (no torch.manual_seed before the model is made, or "
            "seeds that differ by rank); here all worlds began with the same"
        )
    return lines


def _compare_inputs(one: Observed, several: Observed) -> Verdict:
    """Whether the workers' batches are the parts of the one worker's batch."""
    whole, parts = one.notes[0], list(several.notes)
    if whole["samples"] is None or any(part["samples"] is None for part in parts):
        return Verdict(True)
    count, total = sum(part["samples"] for part in parts), sum(part["total"] for part in parts)
    each = ", ".join(str(part["samples"]) for part in parts)
    if len({part["digest"] for part in parts}) < len(parts) and count != whole["samples"]:
        return Verdict(
            False,
            [
                f"workers train on the same samples ({each}; one worker alone: {whole['samples']}): divide the data by "
                "un.shard(dataset, batch_size=...), whose batch_size counts the samples of all workers"
            ],
        )
    if count != whole["samples"]:
        return Verdict(
            False,
            [
                f"the global batch is not the same: {whole['samples']} samples with one worker, {count} with "
                f"{len(parts)} ({each}). batch_size is a worker's own here; un.shard divides one that all share"
            ],
        )
    if abs(total - whole["total"]) > 1e-5 * max(1e-12, abs(whole["total"])):
        if whole["shards"]:
            return Verdict(
                None,
                [
                    "the samples are dealt by un.shard, but their numbers differ: random augmentation, or other random "
                    "numbers on the way. Whether the worlds agree cannot be told; switch them off to find out"
                ],
            )
        return Verdict(
            False,
            [
                "the workers' batches are not the parts of the batch that one worker has: seeds of each rank's own, or "
                "an order that depends on the number of workers. un.shard gives every world the same batches"
            ],
        )
    return Verdict(True)


def _compare_gradients(one: Observed, several: Observed, workers: int, grade: Grade) -> Verdict:
    names = [name for name in one.gradients if name in several.gradients]
    if not names:
        return Verdict(
            None, ["gradients and parameters are split over the workers by this method: only losses are compared"]
        )
    whole = torch.cat([one.gradients[name].double().flatten() for name in names])
    other = torch.cat([several.gradients[name].double().flatten() for name in names])
    norm = float(whole.norm())
    scale = float(whole @ other) / norm**2 if norm else 1.0
    close = max(_CLOSE[grade], *(_HALF if x.element_size() < 4 else 0.0 for x in one.gradients.values()))
    off = {name: _distance(one.gradients[name], several.gradients[name], norm) for name in names}
    if max(off.values()) <= close:
        largest = max(off, key=lambda name: off[name])
        return Verdict(True, [f"gradients agree: {largest} differs most, by {off[largest]:.1e} of its norm"])
    if float((other - scale * whole).norm()) <= close * float(other.norm()):
        return Verdict(False, [_explain_scale(scale, workers)])
    differing = [name for name in names if off[name] > close]
    lines = [f"gradients differ in {len(differing)} of {len(names)} parameters (of the norm of each):"]
    lines += [f"  {name}: {off[name]:.1%}" for name in _list_worst({name: off[name] for name in differing})]
    if len(differing) > _SHOWN:
        lines.append(f"  and {len(differing) - _SHOWN} more")
    norms = several.notes[0]["batch_norms"]
    if norms:
        lines.append(
            f"batch normalisation ({', '.join(norms[:3])}{', ...' if len(norms) > 3 else ''}) takes its statistics "
            "from each worker's own samples: un.sync_batch_norm(model) takes them over all"
        )
    elif float(several.notes[0]["samples"] or 0) and len({n["samples"] for n in several.notes}) > 1:
        lines.append("the workers have parts of different sizes: a loss that is a mean weighs them alike")
    else:
        lines.append(
            "the loss may depend on more than each sample by itself (contrastive losses, statistics of a batch), or on "
            "the rank or random numbers"
        )
    return Verdict(False, lines)


def _distance(a: Tensor, b: Tensor, norm: float) -> float:
    """The distance over the norm of `a`; if that is tiny beside `norm` of all, over a part of that."""
    a, b = a.double(), b.double()
    return float((a - b).norm()) / max(float(a.norm()), 1e-4 * norm, 1e-30)


def _explain_scale(scale: float, workers: int) -> str:
    text = f"gradients of {workers} workers are {scale:.3g} times those of one"
    if abs(scale * workers - 1) < 0.01:
        return (
            f"{text}: the loss is a sum over samples, and gradients are means over workers. Take the mean "
            '(reduction="mean"), or divide by the samples of the global batch and multiply by the number of workers'
        )
    if abs(scale / workers - 1) < 0.01:
        return f"{text}: the loss is multiplied by the number of workers, or divided by its share of the samples twice"
    return f"{text}: the loss is multiplied by something that depends on the number of workers"


def _compare_parameters(one: Observed, several: Observed, start: Mapping[str, Tensor], gradients: Verdict) -> Verdict:
    names = [name for name in one.parameters if name in several.parameters and name in start]
    steps = one.notes[0]["steps"], several.notes[0]["steps"]
    if not names or steps[0] != steps[1]:
        return gradients
    off = {}
    moved = {name: one.parameters[name].double() - start[name].double() for name in names}
    whole = float(torch.cat([x.flatten() for x in moved.values()]).norm())
    for name in names:
        off[name] = _distance(moved[name], several.parameters[name].double() - start[name].double(), whole)
    worst = max(off, key=lambda name: off[name])
    text = f"after {steps[0]} steps, {worst} differs most: by {off[worst]:.1e} of how far it has moved"
    if off[worst] <= _MOVED:
        return Verdict(True, [*gradients.lines, text])
    return Verdict(
        False,
        [
            *gradients.lines,
            f"{text}. The first gradients agree, so something after them does not: an optimizer, schedule or clipping "
            "that depends on the rank or on the number of workers",
            *(f"  {name}: {off[name]:.1%}" for name in _list_worst(off) if off[name] > _MOVED),
        ],
    )


def _list_worst(off: Mapping[str, float]) -> list[str]:
    return sorted(off, key=lambda name: -off[name])[:_SHOWN]
