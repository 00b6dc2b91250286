"""ByteGrad: a byte a number, between the least and the greatest of its block.

BAGUA: Gan et al. 2021, arXiv:2107.01499."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from unisono.methods.checks import validate
from unisono.methods.facts import Convergence, Example, Facts
from unisono.methods.kernels.noise import Noise
from unisono.methods.kernels.quantise import bytes_nbytes, decode_bytes, encode_bytes
from unisono.methods.reducer import Reducer
from unisono.methods.reducers._quantised import Block, Wire, build_quantised, count_bytes

FACTS = Facts(
    [Example("bytegrad", memory=False, bytes=count_bytes(lambda n: n + 8 * math.ceil(n / 2048)))],
    refuses={"block=100": "power of two"},
    convergence=Convergence("rounded", "gradients to a byte, between the ends of their block"),
)


@validate
def bytegrad(*, block: Block = 2048) -> Reducer:
    """Send every number as one of 256 steps from its block's least to its greatest, rounded to the nearest.

        step = (max - min)/255,  q_i = round((v_i - low)/step),  Q(v_i) = low + q_i step

    `low` is min, moved by at most half a step so that zero lies on a step: zeros stay zeros, and blocks of one
    number are exact, whatever their size. Parts go to their owners, are averaged there, and go to all, rounded
    again: 2(N-1) d/N bytes and 8 for each block, about 1/4 of dense float32. With 2 ranks every rank gathers the
    other's line, as many bytes, and rounds once. A block that holds an inf or NaN is NaN everywhere.

    block: numbers that share a least and a greatest: a power of two from 64 to 16384.

    >>> from unisono.spec import build
    >>> build("bytegrad", kind="reducer").codec.nbytes(2048)
    2056
    """

    def encode(x: Tensor, _: Noise) -> Tensor:
        code = torch.empty(bytes_nbytes(x.numel(), block), dtype=torch.uint8, device=x.device)
        encode_bytes(x, block, code)
        return code

    def decode(code: Tensor, out: Tensor, ranks: int, add: bool) -> None:
        decode_bytes(code, block, out, ranks=ranks, add=add)

    return build_quantised("bytegrad", Wire(lambda n: bytes_nbytes(n, block), encode, decode))
