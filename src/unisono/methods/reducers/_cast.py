"""The mean in 16 bits: cast, all-reduce, cast back. What `bf16` and `fp16` share."""

from __future__ import annotations

import weakref
from functools import partial

import torch
from torch import Tensor

from unisono.methods.buckets import Bucket
from unisono.methods.reducer import Codec, Reduced, Reducer, Stages, State, all_reduce_bytes, staged
from unisono.world import World

_lines: weakref.WeakKeyDictionary[Bucket, weakref.WeakKeyDictionary[World, dict[torch.dtype, Tensor]]]
_lines = weakref.WeakKeyDictionary()


def build_cast(dtype: torch.dtype) -> Reducer:
    """The reducer that casts to `dtype`. Sends an all-reduce of 2 bytes a number."""

    def sends(bucket: Bucket, size: int) -> int:
        return all_reduce_bytes(bucket.flat.numel() * min(dtype.itemsize, bucket.flat.element_size()), size)

    codec = Codec(
        encode=lambda x, noise: x.detach().reshape(-1).to(dtype).view(torch.uint8),
        decode=lambda code, n: code.view(dtype)[:n].to(torch.float32),
        nbytes=lambda n: n * dtype.itemsize,
    )
    return staged(lambda bucket: {}, partial(_stages, dtype), sends=sends, codec=codec)


def _stages(dtype: torch.dtype, bucket: Bucket, state: State, world: World) -> Stages:
    """The mean of a bucket in `dtype`; one of 16 bits goes as it is."""
    if bucket.flat.element_size() <= dtype.itemsize:
        handle = world.all_reduce(bucket.flat, "mean", tag=bucket.tag)
        yield
        handle.wait()
        return Reduced(bucket.tensors), state
    line = _find_line(bucket, dtype, world)
    line.copy_(bucket.flat)
    handle = world.all_reduce(line, "mean", tag=bucket.tag)
    yield
    handle.wait()
    bucket.flat.copy_(line)

    def sent(given: list[Tensor]) -> list[Tensor]:
        return [x.to(dtype).to(x.dtype) for x in given]

    return Reduced(bucket.tensors, sent), state


def _find_line(bucket: Bucket, dtype: torch.dtype, world: World) -> Tensor:
    """Memory for the bucket in `dtype` that this world moves fastest; given back when the bucket is gone."""
    lines = _lines.setdefault(bucket, weakref.WeakKeyDictionary()).setdefault(world, {})
    if dtype not in lines:
        lines[dtype] = line = world.empty(bucket.flat.numel(), dtype)
        weakref.finalize(bucket, world.release, line).atexit = False
    return lines[dtype]
