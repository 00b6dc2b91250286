"""What the decisions are made from, measured and agreed on by all ranks: the link, the steps, what candidates cost."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import islice
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from unisono.methods.buckets import BUCKET_BYTES, LARGE_BUCKET_BYTES, Bucket, group_into_buckets, on_device
from unisono.methods.exchange.dry_run import run_reducer
from unisono.methods.exchange.overlap import split_sparse
from unisono.methods.exchange.reduction import overlap_pays
from unisono.methods.reducer import Reducer, dense_bytes
from unisono.methods.strategies.auto.decisions import Costs, Probed, StepTimes
from unisono.methods.strategy import Strategy
from unisono.predict.costs import sent_share
from unisono.world import World, probe
from unisono.world.probe import take_slowest

TAG = "auto"
_SAMPLE_NUMBERS = 1 << 20  # of a dry run


# The link ---------------------------------------------------------------------------------------------------------


def measure_link(world: World) -> Probed:
    """How fast the link is, by some all-reduces, and how long finding out took; every rank calls it."""
    began = world.ledger.clock()
    latency_s, s_per_byte = probe.measure_link(world, tag=TAG)
    return Probed(latency_s, s_per_byte, take_slowest(world, [world.ledger.clock() - began], TAG)[0])


# Steps ------------------------------------------------------------------------------------------------------------


def measure_steps(world: World, count: int) -> StepTimes:
    """The last `count` steps in the ledger, as all ranks agree on them: of each time, the slowest rank's median."""
    rows = list(islice(reversed(world.ledger.rows), max(1, count)))
    mine = [
        median(row.wall for row in rows),
        median(row.compute + row.data for row in rows),
        median(row.hidden for row in rows),
        median(float(row.bytes_sent) for row in rows),
    ]
    return StepTimes(*take_slowest(world, mine, TAG))


# What a candidate costs -------------------------------------------------------------------------------------------


def estimate_costs(strategy: Strategy, model: nn.Module, world: World) -> Costs | None:
    """Bytes and collectives of a step, and seconds of compression: by closed forms and a dry run on a part of the
    model. None for a method other than all-reduce. Every rank calls it."""
    if type(strategy).__name__ != "allreduce":
        return None
    settings: Any = strategy
    reducer: Reducer | None = settings.reducer
    named = [(name, p) for name, p in split_sparse(model)[0] if p.requires_grad]
    overlaps = overlap_pays(world) if settings.overlap is None else settings.overlap
    compresses = reducer is not None and not reducer.exact
    large = compresses and any(p.is_cuda for _, p in named)
    bucket_bytes = settings.bucket_bytes or (LARGE_BUCKET_BYTES if large else BUCKET_BYTES)
    on_meta = partial(on_device, torch.device("meta"))
    buckets = [Bucket(i, group, on_meta) for i, group in enumerate(group_into_buckets(named, bucket_bytes))]
    if reducer is None or not buckets:
        sent = sum(dense_bytes(bucket, world.size) for bucket in buckets)
        return Costs(sent, max(1, len(buckets)), 0.0, overlaps)
    sample, share = _make_sample(named)
    bucket = Bucket(0, sample, partial(on_device, sample[0][1].device))
    by_messages = world.transport is not None and world.transport.name == "messages"
    clock = world.ledger.clock
    cost = run_reducer(reducer, bucket, world.hosts, rank=world.rank, by_messages=by_messages, repeats=2, clock=clock)
    hosts = len(set(world.hosts))
    crossing = [o for o in cost.operations if hosts == 1 or o.among != "inside"]
    if reducer.sends is not None:
        sent = sum(reducer.sends(bucket, world.size) for bucket in buckets)
    else:
        sizes = {"all": world.size, "inside": world.local_size, "across": hosts}
        sent = round(share * sum(sent_share(o.op, sizes[o.among]) * o.nbytes for o in crossing))
    messages = max(1, len(crossing)) * len(buckets)
    agreed = take_slowest(world, [sent, messages, cost.work_s * share], TAG)
    return Costs(agreed[0], agreed[1], agreed[2], overlaps)


def _make_sample(named: Sequence[tuple[str, Parameter]]) -> tuple[list[tuple[str, Tensor]], float]:
    """Tensors like the parameters of the commonest kind, up to some numbers; how many times the model is that."""
    kinds = [(p.dtype, p.device) for _, p in named]
    kind = max(kinds, key=kinds.count)
    sample: list[tuple[str, Tensor]] = []
    taken = 0
    for name, p in named:
        if (p.dtype, p.device) != kind or taken >= _SAMPLE_NUMBERS or not p.numel():
            continue
        rows = max(1, min(len(p), _SAMPLE_NUMBERS * len(p) // p.numel())) if p.dim() else 0
        sample.append((name, torch.empty_like(p[:rows] if p.dim() else p, requires_grad=False)))
        taken += sample[-1][1].numel()
    return sample, sum(p.numel() for _, p in named) / max(1, taken)
