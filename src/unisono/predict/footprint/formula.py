"""What a worker needs, in bytes, from what a method says that it keeps (`Keeps`): all formulas are here.

ZeRO: Rajbhandari et al., 2020, arXiv:1910.02054; Offload: Ren et al., 2021, arXiv:2101.06840; Infinity: Rajbhandari
et al., 2021, arXiv:2104.07857.

T trainable elements, N workers, c bytes of an element that computes, m of its master, o of its optimizer state, g of
its reduced gradient (m = 0 where the master is the computing copy itself):

    allreduce, N = 1   c T + c T + o T                   gradients come while activations go: the joint peak counts
    allreduce          c T + c T + o T                   gradients lie in buckets from the beginning to the end
      with a reducer   and what that keeps               its state, as its own code makes it
    shared             c T + (c + o) T/H                 H workers a host; several passes: + c T while they add up
    stage 1, 2         c T + (m + o + g) T/N             + gradients on their way; stage 1 that accumulates: + c T
      on one host's CPUs c T/N + (m + o + g) T/N         values lie once for all its workers
    stage 3            (c + m + o + g) T/N               + units gathered + gradients on their way
    optimizer_on=cpu   m + o, and c for gradients: host  half of it passes through a GPU, which keeps those gradients
      step_ahead       m + o and c again: host           of what does not pass through a GPU
      defer            2 c (2 g where passes add up)     of a step, and added up; host: m + o, 2 c; kept: m + o + c, too
    optimizer_on=disk  m + o: disk                       host: c for gradients, and bounded buffers
    params_on=cpu      c T/N of stage 3: host            and gradients: c (g where several passes add up)
    params_on=disk     the master is read: nothing more  host: gradients as above, and bounded buffers
    spare              (m + o + g) T/N more              stage 3: (m or c, + o + g) T/N more, and the frozen part again
    within             G workers a group instead of N    and what the reducer across keeps, of T/G
    gather=int8        m = 4 at stages 1, 2              + codes of the unit that is gathered
    reducer            and what that keeps, of T         what was left out of every other worker's part
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch

from unisono.methods.buckets import BUCKET_BYTES, Bucket, group_into_buckets, on_device
from unisono.methods.offload.chunks import CHUNK_BUFFERS, CHUNK_ELEMENTS
from unisono.methods.offload.device import STAGING_BUFFERS
from unisono.methods.offload.kinds import choose_owners
from unisono.methods.offload.plan import BLOCK_ELEMENTS, staged_share
from unisono.methods.reducer import Reducer, kept_bytes
from unisono.methods.strategies.shared.step import OWN_TILE_BYTES
from unisono.methods.strategies.zero import zero
from unisono.methods.strategies.zero.codes import CODE_BYTES
from unisono.methods.strategies.zero.gather import UNITS_GATHERED
from unisono.methods.strategies.zero.offloading import MOMENTS
from unisono.methods.strategies.zero.reduce import LINES_IN_FLIGHT
from unisono.methods.strategies.zero.replica import DTYPES
from unisono.methods.strategies.zero.scatter import build_scattered
from unisono.methods.strategy import Keeps

CORES = 16  # of the host beside a GPU, which is seldom this one; the link's threads take one of them
STAGED = staged_share(CORES - 1)  # of the state on the host, the share that passes through the GPU to be stepped there
HALF_BYTES = min(dtype.itemsize for dtype in DTYPES.values())  # of an element that computes, at the least
MASTER_BYTES = torch.float32.itemsize  # of an element that is stepped, at least
DEFAULTS: dict[str, Any] = {each.name: each.default for each in fields(zero)}


@dataclass(frozen=True)
class StepMemory:
    """What a step holds beside parameters, state and complete gradients, at its worst moments, in bytes."""

    alone: int = 0  # activations and temporaries
    with_gradients: int = 0  # the same together with the gradients that are there at that moment
    alone_bf16: int = 0  # as above, where the model computes in bf16
    with_gradients_bf16: int = 0
    rest: int = 0  # what is left of it when the optimizer steps: the batch, above all


@dataclass(frozen=True)
class UnitSizes:
    """Elements of the parameters that are gathered and reduced together."""

    root: int  # those that the model itself needs
    others: tuple[int, ...]  # those of its modules, the largest first
    waiting: int  # the most that can wait for the last gradient of such a group

    @property
    def largest(self) -> int:
        """Elements of the largest group."""
        return max(self.root, *self.others[:1], 0)


@dataclass(frozen=True)
class ModelFacts:
    """What the formulas know of a model, its optimizer and one step of one worker."""

    trainable: int  # elements
    trainable_bytes: int
    frozen: int
    frozen_bytes: int
    buffer_bytes: int
    state_elements: int  # optimizer state in the shape of parameters
    state_bytes: int
    state_other_bytes: int
    step_bytes: int  # temporaries of the optimizer's step
    units_by_size: UnitSizes  # stages 1 and 2: what is reduced together
    units_by_module: UnitSizes  # stage 3: what is gathered and reduced together
    step_memory: StepMemory | None  # None: not known
    device: str = "cpu"
    backwards: int = 1  # backward passes a step
    whole: tuple[tuple[int, ...], ...] = ()  # shapes of trainable tensors that the optimizer steps whole
    # The trainable parameters by name, without memory.
    shapes: tuple[tuple[str, torch.nn.Parameter], ...] = field(default=(), compare=False, repr=False)

    def count_share(self, workers: int) -> int:
        """Trainable elements of the worker that has most, where they are split: an equal part, and of tensors that are
        stepped whole those that it owns."""
        elements = [math.prod(shape) for shape in self.whole]
        owned = [0] * workers
        for count, owner in zip(elements, choose_owners(self.whole, workers), strict=True):
            owned[owner] += count
        return -(-(self.trainable - sum(elements)) // workers) + max(owned)

    def count_kept(self, reducer: Reducer | None) -> int:
        """What a reducer keeps from step to step: residuals, factors and the like."""
        if reducer is None or not self.shapes:
            return 0
        on_meta = partial(on_device, torch.device("meta"))
        groups = group_into_buckets(self.shapes, BUCKET_BYTES)
        kept = sum(kept_bytes(reducer, Bucket(i, named, on_meta)) for i, named in enumerate(groups))
        return round(kept * self.trainable / sum(x.numel() for _, x in self.shapes))  # of a mesh: of a rank's part


KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers")  # on the device


@dataclass(frozen=True)
class Need:
    """Bytes of one worker: on its device by kind, on its host, on disk."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    host: int = 0
    disk: int = 0

    @property
    def device(self) -> int:
        """Bytes on the device at the peak."""
        return sum(getattr(self, kind) for kind in KINDS)


def compute_need(
    facts: ModelFacts,
    keeps: Keeps,
    workers: int,
    *,
    reducer: Reducer | None = None,
    overlap: bool = True,
    apart: bool = True,
    per_host: int | None = None,
) -> Need:
    """What one of `workers` workers needs; of what a host keeps once for all its workers, an equal share.

    reducer: how means are taken. overlap: they exchange while they compute. apart: the device has memory of its own.
    per_host: workers of a host; None: all.
    """
    if keeps.stage:
        near = per_host or workers
        shards = keeps.count_shards(workers, min(near, workers))
        one_host = not apart and facts.device == "cpu" and near >= shards
        need = _compute_zero(facts, keeps, shards, overlap=overlap and workers > 1, apart=apart, one_host=one_host)
        kept = facts.count_kept(keeps.across) // shards if workers > shards else 0
        if reducer is not None and not reducer.exact and shards > 1:
            kept += facts.count_kept(build_scattered(reducer))
        return replace(need, buffers=need.buffers + kept)
    if keeps.once_a_host and workers > 1:
        return _compute_shared(facts, keeps, reducer, workers, per_host or workers)
    return _compute_allreduce(facts, keeps, reducer, workers)


def _compute_allreduce(facts: ModelFacts, keeps: Keeps, reducer: Reducer | None, workers: int) -> Need:
    gradients = facts.trainable_bytes
    step_memory = facts.step_memory or StepMemory()
    passes = max(keeps.accumulate, facts.backwards)
    exact = reducer is None or reducer.exact
    if workers == 1 and passes == 1 and exact:  # no buckets: a gradient's memory is taken when it comes
        beside = max(step_memory.with_gradients, gradients + facts.step_bytes + step_memory.rest) - gradients
    else:
        beside = max(step_memory.alone, facts.step_bytes + step_memory.rest)
    in_flight = min(BUCKET_BYTES, gradients) if workers > 1 and facts.device != "cpu" else 0
    return Need(
        parameters=facts.trainable_bytes + facts.frozen_bytes,
        gradients=gradients,
        optimizer=facts.state_bytes + facts.state_other_bytes,
        activations=beside,
        buffers=facts.buffer_bytes + facts.count_kept(reducer) + in_flight,
    )


def _compute_shared(facts: ModelFacts, keeps: Keeps, reducer: Reducer | None, workers: int, per_host: int) -> Need:
    step_memory = facts.step_memory or StepMemory()
    passes = max(keeps.accumulate, facts.backwards)
    return Need(
        parameters=-(-(facts.trainable_bytes + facts.frozen_bytes) // per_host),
        gradients=facts.trainable_bytes * (1 if passes == 1 else 2),
        optimizer=-(-facts.state_bytes // per_host) + facts.state_other_bytes,
        activations=max(step_memory.alone, OWN_TILE_BYTES + step_memory.rest),
        buffers=facts.buffer_bytes + (facts.count_kept(reducer) // per_host if workers > per_host else 0),
    )


def _compute_zero(facts: ModelFacts, keeps: Keeps, workers: int, *, overlap: bool, apart: bool, one_host: bool) -> Need:
    sizes = _compute_sizes(facts, keeps, workers)
    compute, away = sizes.compute, keeps.optimizer_on != "device"
    units = facts.units_by_module if keeps.stage == 3 else facts.units_by_size
    step_memory = facts.step_memory or StepMemory()

    # device: parameters, and the units that are gathered
    here = keeps.params_on == "device"
    coded = keeps.gather is not None and workers > 1
    once = one_host and not away and not keeps.spare and not coded  # values that all workers of the host have together
    values = compute * (sizes.shard if keeps.stage == 3 or once else facts.trainable) if here else 0
    frozen = sizes.frozen if here else 0
    gathered = compute * (units.root + sum(units.others[: UNITS_GATHERED if overlap else 1]))
    gathered = (gathered if keeps.stage == 3 else 0) + (CODE_BYTES * units.largest if coded else 0)
    # device: gradients that stay, those that wait until their unit is complete, and those being reduced
    passes = max(keeps.accumulate, facts.backwards)
    whole = compute * facts.trainable if keeps.stage == 1 and passes > 1 else 0
    waiting = 0 if whole else compute * units.waiting
    reducing = compute * units.largest * (LINES_IN_FLIGHT if overlap else 1)
    reducing += compute * units.largest / workers if sizes.wide else 0  # my part, before it is added up in fp32
    kept = compute * units.largest / workers if away and passes == 1 else sizes.step * sizes.shard
    defers = away and here and keeps.defer is not None
    if defers:  # of this step, and those that add up
        kept = 2 * (compute if passes == 1 else sizes.step) * sizes.shard
    # device: what the optimizer needs there; the others are gone when it steps
    copies = 2 if keeps.spare and workers > 1 else 1  # of what is split: my part, and another worker's
    divided = 1 if facts.whole else workers  # a tensor that is stepped whole takes as much on its owner
    temporary = 0 if away else copies * facts.step_bytes * sizes.step / sizes.own / divided
    stepping = temporary + step_memory.rest - waiting - gathered
    staged = STAGED if away and here and apart and keeps.optimizer_on == "cpu" and not defers else 0.0
    passing = min(STAGING_BUFFERS * min(BLOCK_ELEMENTS, staged * units.largest / workers), staged * sizes.shard)
    slots = passing * sizes.state / max(1, sizes.shard)
    slots += keeps.kept_share * (sizes.state + compute * sizes.shard) if defers else 0
    shadow = compute * sizes.shard if keeps.delayed_update else 0
    copied = (copies - 1) * (sizes.frozen + (0 if sizes.wide else compute * sizes.shard)) if keeps.stage == 3 else 0

    host, disk = _compute_elsewhere(keeps, sizes, -(-units.largest // workers), staged=staged, passes=passes)
    return Need(
        parameters=round(values + frozen + gathered + shadow + copied),
        gradients=round(whole + copies * kept + waiting + reducing + staged * compute * sizes.shard),
        optimizer=round(slots if away else copies * sizes.state) + (0 if away else copies * facts.state_other_bytes),
        activations=round(max(step_memory.alone_bf16 if keeps.precision else step_memory.alone, stepping)),
        buffers=facts.buffer_bytes,
        host=round(host + (0 if keeps.params_on != "cpu" else sizes.frozen)),
        disk=round(disk + (0 if keeps.params_on != "disk" else sizes.frozen)),
    )


class _Sizes(NamedTuple):
    """Bytes of an element, and of what one worker has."""

    own: float  # of a trainable element, as the model has it
    compute: float  # as it computes
    step: float  # as it is stepped
    wide: bool  # these two differ
    shard: int  # elements
    state: float  # master, where that is another, and optimizer state: bytes
    frozen: int  # bytes


def _compute_sizes(facts: ModelFacts, keeps: Keeps, workers: int) -> _Sizes:
    own = facts.trainable_bytes / max(1, facts.trainable)
    compute = DTYPES[keeps.precision].itemsize if keeps.precision else own
    step = max(MASTER_BYTES, compute)
    wide, away = step != compute, keeps.optimizer_on != "device"
    shard = facts.count_share(workers)
    part = shard / max(1, facts.trainable) if facts.whole else 1 / workers
    moment = step if keeps.moments == DEFAULTS["moments"] else MOMENTS[keeps.moments].itemsize
    apart = wide or away or (keeps.gather is not None and keeps.stage < 3 and workers > 1)
    state = (step * shard if apart else 0) + moment * facts.state_elements * part
    frozen = DTYPES[keeps.precision].itemsize * facts.frozen if keeps.precision else facts.frozen_bytes
    return _Sizes(own, compute, step, wide, shard, state, -(-frozen // (workers if keeps.stage == 3 else 1)))


def _compute_elsewhere(keeps: Keeps, sizes: _Sizes, largest: int, *, staged: float, passes: int) -> tuple[float, float]:
    """Host and disk bytes of an optimizer that is not on the device; `largest`: elements of my largest shard."""
    if keeps.optimizer_on == "device":
        return 0, 0
    gradient = sizes.compute if passes == 1 else sizes.step
    if keeps.params_on == "device":  # gradients as they come, in whose place the new values go back
        sides = 2 if keeps.delayed_update else 1
        twice = gradient != sizes.compute or keeps.step_ahead or keeps.defer is not None
        slab = gradient + (sizes.compute if twice else 0)
        lines = sides * slab * sizes.shard * (1 - staged)
    else:  # gradients, and on the host the values that compute
        lines = (gradient + (sizes.compute if keeps.params_on == "cpu" else 0)) * sizes.shard
    if keeps.optimizer_on == "cpu":
        return lines + sizes.state * (1 + keeps.step_ahead * (1 - staged)), 0
    buffers = CHUNK_BUFFERS * min(CHUNK_ELEMENTS, largest) * sizes.state / max(1, sizes.shard)
    buffers += (sizes.step + sizes.compute) * largest if keeps.params_on == "disk" else 0  # read, to be gathered
    return lines + min(buffers, sizes.state), sizes.state


def list_settings(workers: int, *, device_is_host: bool, half: bool = True, whole: bool = False) -> list[str]:
    """Specs of every stage and placement, the fastest first.

    What stays on the device comes before what goes to the host, and that before what goes to disk; in each of these
    fp32 moments before 16-bit ones, the model's own precision before bf16, and less traffic between workers (stages 1
    and 2 as much as allreduce, stage 3 half as much again) before more. `half` leaves bf16 in; where the device's
    memory is the host's own, moving things to the host gains nothing and is left out. `whole`: some tensors are stepped
    whole, which cannot be done on disk.
    """
    found = ["shared", "allreduce"] if device_is_host and workers > 1 else ["allreduce"]
    places = [
        ("device", "device"), ("cpu", "device"), ("cpu", "cpu"), ("disk", "device"), ("disk", "cpu"), ("disk", "disk")
    ]  # fmt: skip
    precisions: list[str | None] = [None, *DTYPES] if half else [None]
    for optimizer_on, params_on in places:
        if (device_is_host and "cpu" in (optimizer_on, params_on)) or (whole and optimizer_on == "disk"):
            continue
        for moments, precision in product(MOMENTS, precisions):
            if optimizer_on == "device" and (moments != DEFAULTS["moments"] or (workers == 1 and precision is None)):
                continue  # alone and with everything here there is nothing to divide: allreduce needs as much or less
            chosen = {"precision": precision, "optimizer_on": optimizer_on, "params_on": params_on, "moments": moments}
            words = [f'{name}="{value}"' for name, value in chosen.items() if value != DEFAULTS[name]]
            stages = (1, 2, 3) if params_on == "device" else (3,)
            found += [f"zero({', '.join([f'stage={stage}', *words])})" for stage in stages]
    return found
