"""What the decisions are made from, measured and agreed on by all ranks: the link, the steps, what candidates cost."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import islice
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from unisono.buckets import BUCKET_BYTES, LARGE_BUCKET_BYTES, Bucket, group_into_buckets, on_device
from unisono.exchange.overlap import split_sparse
from unisono.exchange.reduction import overlap_pays
from unisono.reducer import Reducer, dense_bytes
from unisono.strategies.auto.decisions import Costs, Measured, Probed
from unisono.strategy import Strategy
from unisono.world import World, probe
from unisono.world.probe import take_slowest
from unisono.world.virtual import simulate

TAG = "auto"
_SAMPLE_NUMBERS = 1 << 20  # of a dry run


# The link ---------------------------------------------------------------------------------------------------------


def measure_link(world: World) -> Probed:
    """How fast the link is, by some all-reduces, and how long finding out took; every rank calls it."""
    began = world.ledger.clock()
    latency_s, s_per_byte = probe.measure_link(world, tag=TAG)
    return Probed(latency_s, s_per_byte, take_slowest(world, [world.ledger.clock() - began], TAG)[0])


# Steps ------------------------------------------------------------------------------------------------------------


def measure_steps(world: World, count: int) -> Measured:
    """The last `count` steps in the ledger, as all ranks agree on them: of each time, the slowest rank's median."""
    rows = list(islice(reversed(world.ledger.rows), max(1, count)))
    mine = [
        median(row.wall for row in rows),
        median(row.compute + row.data for row in rows),
        median(row.hidden for row in rows),
        median(float(row.bytes_sent) for row in rows),
    ]
    return Measured(*take_slowest(world, mine, TAG))


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
    buckets = _lay_out(named, settings.bucket_bytes or _default_bytes(named, reducer))
    if reducer is None or not buckets:
        sent = sum(dense_bytes(bucket, world.size) for bucket in buckets)
        return Costs(sent, max(1, len(buckets)), 0.0, overlaps)
    sample, share = _make_sample(named)
    messages, sample_sent = _count_messages(reducer, sample, world)
    if reducer.sends is not None:
        sent = sum(reducer.sends(bucket, world.size) for bucket in buckets)
    else:
        sent = round(sample_sent * share)
    work_s = 0.0 if reducer.exact else _time_dry_run(reducer, sample, world) * share
    agreed = take_slowest(world, [sent, messages * len(buckets), work_s], TAG)
    return Costs(agreed[0], agreed[1], agreed[2], overlaps)


def _default_bytes(named: Sequence[tuple[str, Parameter]], reducer: Reducer | None) -> int:
    on_gpu = any(p.is_cuda for _, p in named)
    return LARGE_BUCKET_BYTES if on_gpu and reducer is not None and not reducer.exact else BUCKET_BYTES


def _lay_out(named: Sequence[tuple[str, Parameter]], bucket_bytes: int) -> list[Bucket]:
    """The buckets, without memory."""
    return [
        Bucket(i, group, lambda n, dtype: torch.empty(n, dtype=dtype, device="meta"))
        for i, group in enumerate(group_into_buckets(named, bucket_bytes))
    ]


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


def _fill(sample: Sequence[tuple[str, Tensor]]) -> Bucket:
    """A bucket with gradients such as there may be; the program's random numbers stay as they are."""
    device = sample[0][1].device
    bucket = Bucket(0, sample, lambda n, dtype: on_device(device, n, dtype))
    generator = torch.Generator().manual_seed(0)
    for x in bucket.tensors:
        x.copy_(torch.randn(x.shape, generator=generator, dtype=torch.float32))
    return bucket


def _count_messages(reducer: Reducer, sample: Sequence[tuple[str, Tensor]], world: World) -> tuple[int, int]:
    """Collectives and bytes for the sample, as this rank of the world would have them; over several hosts, those that
    leave a host."""
    per_host = max(1, world.size // len(set(world.hosts)))
    alone = simulate(world.size, rank=world.rank, per_host=per_host)
    bucket = _fill(sample)
    reducer.reduce(bucket, reducer.init(bucket), alone)
    counted = [r for r in alone.ledger.records if per_host == world.size or _leaves_a_host(r.channel, alone)]
    alone.close()
    return max(1, len(counted)), sum(record.bytes_sent for record in counted)


def _leaves_a_host(channel: str, world: World) -> bool:
    """Whether the ranks of a channel are on several hosts. Its name ends with them, if they are not all."""
    ranks = re.search(r"\[([\d,]+)\]$", channel)
    return ranks is None or len({world.hosts[int(r)] for r in ranks[1].split(",")}) > 1


def _time_dry_run(reducer: Reducer, sample: Sequence[tuple[str, Tensor]], world: World) -> float:
    """Seconds of a reduction in which nothing has to travel; the second one, as the first makes its memory."""
    alone, bucket, clock = World(device=world.device), _fill(sample), world.ledger.clock
    state, took_s = reducer.init(bucket), 0.0
    for _ in range(2):
        start = clock()
        _, state = reducer.reduce(bucket, state, alone)
        if bucket.flat.is_cuda:
            torch.cuda.synchronize(bucket.device)
        took_s = clock() - start
    alone.close()
    return took_s
