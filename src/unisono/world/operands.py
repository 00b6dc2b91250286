"""What a collective needs around the bytes it moves: lines of memory, checks of its input, agreement on shapes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from unisono import packing
from unisono.world.transports import Mismatch, Transport

# Memory ------------------------------------------------------------------------------------------------------


def flat(x: Tensor) -> Tensor:
    """`x` as one contiguous line: the same memory where it can be."""
    if x.layout != torch.strided:
        raise TypeError(f"a collective takes dense tensors, got layout {x.layout}: send its indices and values")
    return x.detach().resolve_conj().resolve_neg().contiguous().view(-1)


def put_back(x: Tensor, line: Tensor) -> None:
    """Copy the result into `x` where `flat` had to copy."""
    if x.numel() and x.data_ptr() != line.data_ptr():
        x.detach().copy_(line.view(x.shape))


def memory(what: str, given: Tensor | None, shape: Sequence[int], like: Tensor) -> Tensor:
    """A line of memory for a result of `shape`: the one given, or a new one."""
    if given is None:
        return torch.empty(math.prod(shape), dtype=like.dtype, device=like.device)
    if tuple(given.shape) != tuple(shape) or given.dtype != like.dtype or not given.is_contiguous():
        raise ValueError(
            f"{what}: out must be contiguous {like.dtype} of shape {tuple(shape)}, "
            f"got {given.dtype} of shape {tuple(given.shape)}"
        )
    return given.detach().view(-1)


def kept(what: str, out: Tensor | None, x: Tensor) -> Tensor:
    """The result in a world of one: `x`, or `out` filled with it."""
    if out is None:
        return x
    memory(what, out, x.shape, x).copy_(flat(x))
    return out


def by_dtype(lines: Sequence[Tensor]) -> list[list[Tensor]]:
    """Lines that can travel as one, in the order in which their dtypes first occur."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    for line in lines:
        groups.setdefault(line.dtype, []).append(line)
    return list(groups.values())


def nbytes_of(parts: Sequence[Tensor]) -> int:
    """Bytes of their elements."""
    return sum(p.numel() * p.element_size() for p in parts)


# Checks ------------------------------------------------------------------------------------------------------


def as_list(what: str, x: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """One tensor or several, all on one device."""
    if isinstance(x, Tensor):
        return [x]
    if not isinstance(x, Iterable):
        raise TypeError(f"{what} takes a tensor or a list of tensors, got {x!r}: put a number into torch.tensor(...)")
    parts = list(x)
    for part in parts:
        if not isinstance(part, Tensor):
            raise TypeError(f"{what} takes a tensor or a list of tensors, got {type(part).__name__} in it")
    devices = {p.device for p in parts}
    if len(devices) > 1:
        raise ValueError(f"{what} needs tensors of one device, got {sorted(map(str, devices))}: call it for each")
    return parts


def one_each(what: str, parts: Sequence[Tensor], size: int) -> list[Tensor]:
    """One tensor for each rank, all of one dtype."""
    pieces = as_list(what, parts) if not isinstance(parts, Tensor) else list(parts)
    if len(pieces) != size:
        raise ValueError(f"{what} needs one tensor for each of the {size} ranks, got {len(pieces)}")
    if len({p.dtype for p in pieces}) > 1:
        raise TypeError(f"{what} needs tensors of one dtype, got {sorted({str(p.dtype) for p in pieces})}")
    return pieces


def rows_each(x: Tensor, size: int) -> list[Tensor]:
    """The rows of `x` in `size` equal parts."""
    if x.dim() == 0 or x.shape[0] % size:
        raise ValueError(
            f"reduce_scatter of a tensor needs a first dimension divisible by the {size} ranks, "
            f"got shape {tuple(x.shape)}: pad it, or pass a list of {size} tensors"
        )
    each = x.shape[0] // size
    return [x[r * each : (r + 1) * each] for r in range(size)]


def check_rank(what: str, rank: int, me: int, size: int, *, other: bool = False) -> None:
    """Refuse a rank that is not here, or is me where another is meant."""
    if isinstance(rank, bool) or not isinstance(rank, int):
        raise TypeError(f"{what} needs a rank as a whole number, got {rank!r}")
    if not 0 <= rank < size or (other and rank == me):
        who = "another rank" if other else "a rank"
        raise ValueError(f"{what} needs {who} of 0..{size - 1}, got {rank} (I am rank {me})")


def groups_by(by: Literal["host"] | Sequence[Sequence[int]], hosts: Sequence[str]) -> list[list[int]]:
    """The groups of ranks that a split names."""
    if by == "host":
        return [[r for r, other in enumerate(hosts) if other == host] for host in dict.fromkeys(hosts)]
    if isinstance(by, str):
        raise ValueError(f"split takes 'host' or lists of ranks, got {by!r}")
    return [list(group) for group in by]


# Agreement ---------------------------------------------------------------------------------------------------


def shapes_of_all(transport: Transport, x: Tensor, tag: str) -> list[tuple[int, ...]]:
    """Every rank's shape, of tensors of one dtype."""
    seen = _seen(transport, [str(x.dtype), list(x.shape)], f"all_gather {tag!r}")
    return [tuple(shape) for _, shape in seen]


def shapes_for_me(transport: Transport, pieces: Sequence[Tensor], tag: str) -> list[tuple[int, ...]]:
    """The shape of what every rank sends to me, of tensors of one dtype."""
    seen = _seen(transport, [str(pieces[0].dtype), [list(p.shape) for p in pieces]], f"all_to_all {tag!r}")
    return [tuple(shapes[transport.rank]) for _, shapes in seen]


def _seen(transport: Transport, mine: list[Any], what: str) -> list[Any]:
    seen = [packing.from_bytes(message) for message in transport.exchange(packing.to_bytes(mine))]
    if len({dtype for dtype, _ in seen}) > 1:
        told = ", ".join(f"rank {r} {dtype}" for r, (dtype, _) in enumerate(seen))
        raise Mismatch(f"{what}: the ranks' dtypes differ: {told}")
    return seen
