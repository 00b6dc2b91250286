"""Values on their way in 8 bits: `gather="int8"`. A byte a number, between the least and the greatest of its block.

What the optimizer steps stays exact, on the rank that steps it. What modules compute with is what arrives, on every
rank alike, that one included. As qwZ of ZeRO++: Wang et al., 2023, arXiv:2306.10209.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.methods.kernels.quantise import bytes_nbytes, decode_bytes, encode_bytes
from unisono.world import World

BLOCK = 256  # numbers that share two floats: 1.03 bytes a number. Parameters and shards begin with a block of their own
CODE_BYTES = bytes_nbytes(BLOCK, BLOCK) / BLOCK  # of a number on its way


def round_line(line: Tensor) -> Tensor:
    """What arrives of a line."""
    return _decode(_encode(line), torch.empty_like(line))


def gather_codes(mine: Tensor, shards: Sequence[Tensor], world: World, tag: str) -> None:
    """Gather every rank's shard, rounded to bytes, into `shards`; `mine` is this rank's."""
    codes = [torch.empty(bytes_nbytes(len(x), BLOCK), dtype=torch.uint8, device=x.device) for x in shards]
    even = len(set(map(len, shards))) == 1
    world.all_gather(_encode(mine), even=even, out=codes, tag=tag).wait()
    for found, shard in zip(codes, shards, strict=True):
        _decode(found, shard)


def _encode(line: Tensor) -> Tensor:
    code = torch.empty(bytes_nbytes(line.numel(), BLOCK), dtype=torch.uint8, device=line.device)
    encode_bytes(line, BLOCK, code)
    return code


def _decode(code: Tensor, out: Tensor) -> Tensor:
    """Write a message's numbers into `out`, of any precision."""
    if out.dtype in (torch.float32, torch.float64):
        decode_bytes(code, BLOCK, out)
        return out
    wide = torch.empty(out.shape, dtype=torch.float32, device=out.device)
    decode_bytes(code, BLOCK, wide)
    return out.copy_(wide)
