"""Places of a bucket's matrices, drawn anew in every step and the same on every rank."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from unisono.methods.buckets import Bucket
from unisono.methods.kernels.select import count_kept


class RandomPlaces:
    """The share k of each tensor of two dimensions or more, at least one number. `counts`: how many of each."""

    def __init__(self, bucket: Bucket, k: float) -> None:
        sparse = [i for i, x in enumerate(bucket.tensors) if x.dim() >= 2 and x.numel()]
        self._names = [bucket.names[i] for i in sparse]
        self._starts = [bucket.starts[i] for i in sparse]
        self._lengths = [bucket.tensors[i].numel() for i in sparse]
        self.counts = [count_kept(k, n) for n in self._lengths]
        self._device = bucket.device
        self._table: list[Tensor] | None = None

    def draw(self, seed: int, step: int) -> Tensor:
        """Where in the line the numbers are that are sent in this step: start + (a j + b) mod length."""
        if self._table is None:
            counts = torch.tensor(self.counts, dtype=torch.int64)
            which = torch.repeat_interleave(torch.arange(len(self.counts)), counts)
            j = torch.arange(len(which)) - (torch.cumsum(counts, 0) - counts)[which]
            columns = [torch.tensor(x, dtype=torch.int64)[which] for x in (self._lengths, self._starts)]
            self._table = [x.to(self._device, non_blocking=True) for x in (which, j, *columns)]
        which, j, lengths, starts = self._table
        drawn = [draw_map(seed, step, name, n) for name, n in zip(self._names, self._lengths, strict=True)]
        maps = torch.tensor(drawn, dtype=torch.int64).view(-1, 2).t().contiguous().to(self._device, non_blocking=True)
        a, b = [one.index_select(0, which) for one in maps.unbind()]  # both at once take a GPU ten times as long
        return (a * j).add_(b).remainder_(lengths).add_(starts)


def draw_map(seed: int, step: int, name: str, length: int) -> tuple[int, int]:
    """(a, b) of a map j -> (a j + b) mod length that meets every place once: a and length have no common factor."""
    digest = hashlib.blake2b(f"{seed}/{step}/{name}".encode(), digest_size=16).digest()
    a, b = (int.from_bytes(half, "little") % length for half in (digest[:8], digest[8:]))
    while math.gcd(a, length) != 1:
        a += 1
    return a, b
