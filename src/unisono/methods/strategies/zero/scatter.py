"""Gradients on their way to shards through a reducer: each rank writes what it sends to each other rank as bytes, and
who receives them reads and adds.

1. send: my gradient of every other rank's shard, with what was left out of it before, goes there as a message;
2. receive: what the others sent of my shard is read, and their mean with my own gradient is taken. Mine is exact;
3. keep: what the messages left out, by shard, if the reducer has a memory (`error_feedback(bytegrad)`, `topk`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from unisono.methods.buckets import Bucket, on_device, widen
from unisono.methods.exchange.reduction import Reduction
from unisono.methods.kernels.noise import noise
from unisono.methods.reducer import (
    Codec,
    Reduced,
    Reducer,
    SpareLines,
    Stages,
    State,
    find_overflow,
    rescale,
    residual_like,
    staged,
)
from unisono.methods.strategies.zero.units import Unit
from unisono.world import World

_MEANING = (
    "bf16, fp16, fp8, bytegrad, qsgd, nuqsgd and topk do, and error_feedback around them; any reducer works between "
    "groups of ranks: within='host', across=..."
)


def find_codec(reducer: Reducer) -> Codec:
    """How a reducer writes a part of a line by itself; ValueError if it has no such meaning."""
    codec = reducer.codec or reducer.shard_codec
    if codec is None:
        raise ValueError(
            f"reducer={reducer.spec or '...'} has no meaning for shards: it looks at whole tensors, or at all ranks' "
            f"together, and here each rank sends a cut of a line to each other. Those that write numbers by themselves "
            f"do: {_MEANING}"
        )
    return codec


class Scatter:
    """Reduces lines of units to shards through a reducer.

    reduction: the reducer at work; what it keeps is kept by parameter, as under `allreduce`.
    """

    def __init__(self, reducer: Reducer, optimizer: Optimizer) -> None:
        self._owners: dict[Tensor, Tensor] = {}
        self.reduction = Reduction(build_scattered(reducer), optimizer, lambda _: None, "gradients", self._owners)
        self._buckets: dict[Unit, Bucket] = {}

    def set_units(self, units: Sequence[Unit]) -> None:
        """Reduce these from now on."""
        self._owners.clear()
        for unit in units:
            shapes = [torch.zeros((), dtype=unit.dtype, device=p.device).expand(p.shape) for p in unit.params]
            named = list(zip(unit.names, shapes, strict=True))
            on_meta = partial(on_device, torch.device("meta"))  # each line that it reduces is given to it
            room = unit.numel - unit.layout.numel
            bucket = self._buckets[unit] = Bucket(unit.index, named, on_meta, flags=room, layout=unit.layout)
            bucket.tag = unit.tag
            self._owners |= dict(zip(bucket.params, unit.params, strict=True))
        self._buckets = {unit: self._buckets[unit] for unit in units}
        self.reduction.set_buckets(list(self._buckets.values()))

    def reduce(self, unit: Unit, line: Tensor, mean: Tensor, world: World) -> None:
        """Write the mean of my shard of every rank's line to `mean`; the line is overwritten."""
        bucket = self._buckets[unit]
        bucket.use(line, unit.views(line))
        self.reduction.begin(bucket, world)
        self.reduction.drain()
        mean.copy_(unit.my_shard(line))


def build_scattered(reducer: Reducer) -> Reducer:
    """A reducer after which each rank has the mean of its own N-th of a bucket's line, there."""
    codec, spare = find_codec(reducer), SpareLines()

    def init(bucket: Bucket) -> State:
        kept = {"residual": residual_like(bucket), "lr": list(bucket.lr)} if reducer.memory else {}
        return {"step": 0, **kept}

    def stages(bucket: Bucket, state: State, world: World) -> Stages:
        if not reducer.memory:
            line = bucket.flat if bucket.flat.element_size() >= 4 else widen(bucket.flat)
        else:
            rescale(bucket, state)
            line = torch.add(state["residual"], bucket.flat, out=spare.beside(bucket, state["residual"]))
        shards = list(line.split(line.numel() // world.size))
        mine, n = shards[world.rank], len(shards[0])
        source = noise(0, state["step"], world.rank, bucket.index)
        codes = [codec.encode(x, source.after(r * n)) for r, x in enumerate(shards)]
        codes[world.rank] = codes[world.rank][:0]
        known = None
        if codec.nbytes is not None:
            known = [code.new_empty(0 if r == world.rank else codec.nbytes(n)) for r, code in enumerate(codes)]
        handle = world.all_to_all(codes, out=known, tag=bucket.tag)
        yield
        mean = bucket.flat.split(n)[world.rank]
        total = mine.clone()
        for code in handle.wait():
            if len(code):
                total += codec.decode(code, n)
        if reducer.memory:
            for code, shard in zip(codes, shards, strict=True):
                if len(code):
                    shard.sub_(codec.decode(code, n))
            mine.zero_()
            state = {**state, "residual": line}
        mean.copy_(total.div_(world.size))
        return Reduced(bucket.tensors, None, find_overflow([total])), {**state, "step": state["step"] + 1}

    return staged(init, stages, memory=reducer.memory, spec=reducer.spec)
