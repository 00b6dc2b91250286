"""What torch gives a group to work on: tensors checked and laid out, options filled in."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.world.transports.arithmetic import count_span_bytes

__all__ = [
    "as_list",
    "check_count",
    "check_dtypes",
    "check_multiple",
    "check_shapes",
    "find_splits",
    "provide",
    "reduce_options",
    "root_options",
]


def as_list(tensors: Any) -> list[Tensor]:
    """One tensor or several, as a list."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def provide(out: Tensor, given: Sequence[Tensor] = ()) -> tuple[Tensor, Tensor]:
    """Contiguous memory for a result, and the same as a line: the tensor's own if possible.

    `given`: what the ranks still read while results come; on the host's memory, results do not go there.
    """
    out = out.detach()
    plain = out.is_contiguous() and not out.is_conj() and not out.is_neg()
    plain = plain and (out.is_cuda or not any(_overlap(out, x) for x in given))
    target = out if plain else torch.empty(out.shape, dtype=out.dtype, device=out.device)
    return target, target.view(-1)


def _overlap(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors may have memory in common."""
    return x.data_ptr() < y.data_ptr() + count_span_bytes(y) and y.data_ptr() < x.data_ptr() + count_span_bytes(x)


def reduce_options(kind: Any, given: Any, timeout: Any) -> Any:
    """The options of a reduction: as given, or made of an operator and a timeout."""
    if given is not None and hasattr(given, "reduceOp"):
        return given
    options = kind()
    if given is not None:
        options.reduceOp = given if isinstance(given, dist.ReduceOp) else dist.ReduceOp(given)
    if timeout is not None:
        options.timeout = timeout
    return options


def root_options(kind: Any, given: Any, more: Sequence[Any]) -> Any:
    """The options of an operation with a root: `pg.broadcast(x, root)`, `pg.reduce(x, root, op)`."""
    if given is not None and hasattr(given, "rootRank"):
        return given
    options = kind()
    if given is not None:
        options.rootRank = int(given)
    for value in more:
        if isinstance(value, timedelta):
            options.timeout = value
        elif value is not None:
            options.reduceOp = value if isinstance(value, dist.ReduceOp) else dist.ReduceOp(value)
    return options


def check_count(what: str, tensors: Sequence[Tensor], size: int) -> None:
    """Refuse anything but one tensor a rank."""
    if len(tensors) != size:
        raise ValueError(f"{what}: one tensor for each of the {size} ranks of the group, got {len(tensors)}")


def check_dtypes(what: str, x: Tensor, others: Sequence[Tensor]) -> None:
    """Refuse tensors of several dtypes."""
    for other in others:
        if other.dtype != x.dtype:
            raise ValueError(f"{what}: invalid tensor type, all are of one: {other.dtype} and {x.dtype}")


def check_shapes(what: str, x: Tensor, others: Sequence[Tensor]) -> None:
    """Refuse tensors of several sizes."""
    check_dtypes(what, x, others)
    for other in others:
        if other.numel() != x.numel():
            raise ValueError(f"{what}: invalid tensor size, all are of one: {tuple(other.shape)} and {tuple(x.shape)}")


def check_multiple(what: str, whole: Tensor, part: Tensor, size: int) -> None:
    """Refuse a whole that is not as large as all ranks' parts."""
    check_dtypes(what, whole, [part])
    if whole.numel() != part.numel() * size:
        raise ValueError(
            f"{what}: the whole tensor is {size} times (the ranks of the group) as large as a rank's, "
            f"got {whole.numel()} elements and {part.numel()}"
        )


def find_splits(x: Tensor, splits: Sequence[int], size: int) -> list[int]:
    """How many rows go to each rank."""
    rows = x.shape[0] if x.dim() else 0
    if splits:
        if len(splits) != size or sum(splits) != rows:
            raise ValueError(f"all_to_all: {size} split sizes that add up to the {rows} rows, got {list(splits)}")
        return list(splits)
    if rows % size:
        raise ValueError(f"all_to_all: {rows} rows do not divide by the {size} ranks of the group; give split sizes")
    return [rows // size] * size
