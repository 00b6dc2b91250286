"""The mean in 8-bit floating point: E4M3, with a scale for each row of numbers, summed in float32."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from unisono.methods.checks import validate
from unisono.methods.facts import Convergence, Example, Facts
from unisono.methods.kernels.noise import Noise
from unisono.methods.reducer import Reducer
from unisono.methods.reducers._quantised import Block, Wire, build_quantised, count_bytes

_E4M3 = torch.float8_e4m3fn
_TOP = torch.finfo(_E4M3).max  # 448

FACTS = Facts(
    [
        Example("fp8", memory=False, bytes=count_bytes(lambda n: n + 4 * math.ceil(n / 1024))),
        Example("fp8(row=64)", memory=False, bytes=count_bytes(lambda n: n + 4 * math.ceil(n / 64))),
    ],
    refuses={"row=100": "power of two"},
    convergence=Convergence("rounded", "gradients to 4 bits of precision, over 17 powers of two a row"),
)


@validate
def fp8(row: Block = 1024) -> Reducer:
    """Send each number as E4M3 times the scale of its row, which has max |g| / 448 for it; sum in float32.

    Every rank averages a share of the line from all ranks' bytes and sends the mean on, rounded again (where that is
    less, every rank sends all to all). A number is rounded to a relative 2^-4; one below 2^-15 of its row's largest to
    2^-19 of that. A message of d numbers takes d + 4 ceil(d/row) bytes. A row that holds an inf or NaN is NaN
    everywhere. What rounding takes away is lost; `error_feedback(fp8)` keeps it.

    row: numbers that share a scale, a power of two from 64 to 16384: rows of the line in which gradients travel.

    >>> from unisono.spec import build
    >>> build("fp8", kind="reducer").codec.nbytes(4096)
    4112
    """
    wire = Wire(lambda n: n + 4 * -(-n // row), partial(_encode, row), partial(_decode, row))
    return build_quantised("fp8", wire)


def _encode(row: int, x: Tensor, source: Noise) -> Tensor:
    rows = pad(x.float(), (0, -len(x) % row)).view(-1, row)
    scales = rows.abs().amax(1) / _TOP
    codes = (rows / torch.where(scales > 0, scales, 1.0)[:, None]).to(_E4M3).view(torch.uint8).view(-1)[: len(x)]
    return torch.cat([scales.view(torch.uint8), codes])


def _decode(row: int, code: Tensor, out: Tensor, ranks: int, add: bool) -> None:
    n, head = out.numel(), 4 * -(-out.numel() // row)
    codes = pad(code[head : head + n], (0, -n % row)).view(_E4M3).view(-1, row).float()
    values = (codes * (code[:head].view(torch.float32)[:, None] / ranks)).view(-1)[:n]
    if add:
        out.add_(values)
    else:
        out.copy_(values)
