"""Sums and means of several lines of memory in Triton: each number is read once and written once, wherever it lies."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from unisono.methods.kernels.launch_triton import launch

_BLOCK, _WARPS = 4096, 8
_MOST_TABLES = 1024
_tables: dict[tuple[Any, ...], Tensor] = {}


def reduce_to_all(lines: Sequence[Tensor], outs: Sequence[Tensor], *, mean: bool) -> None:
    """Write the sum or mean of `lines`, added up in fp32 in their order, into each of `outs`; all at 16 bytes."""
    like, n = lines[0], lines[0].numel()
    places = tuple(x.data_ptr() for x in (*lines, *outs))
    which = (like.device, *places)
    table = _tables.get(which)
    if table is None:
        if len(_tables) >= _MOST_TABLES:
            _tables.clear()
        table = _tables[which] = torch.tensor(places, dtype=torch.int64).to(like.device)
    constants = (len(lines), len(outs), 1.0 / len(lines) if mean else 1.0, _BLOCK)
    launch(_reduce, triton.cdiv(n, _BLOCK), (table, like), *constants, numbers=(n,), warps=_WARPS)


# fmt: off
@triton.jit(do_not_specialize=["n"])
def _reduce(
    table, like, n, LINES: tl.constexpr, OUTS: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr,
):
    kind: tl.constexpr = tl.pointer_type(like.dtype.element_ty)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for i in tl.static_range(LINES):
        line = tl.multiple_of(tl.load(table + i).to(kind), 16)
        x = tl.load(line + at, mask=mask, other=0.0).to(tl.float32)
        total = x if i == 0 else total + x
    total = total * SCALE
    for i in tl.static_range(OUTS):
        out = tl.multiple_of(tl.load(table + LINES + i).to(kind), 16)
        tl.store(out + at, total.to(like.dtype.element_ty), mask=mask)
