"""Memory that all workers of a host have in common, in parts, and where these workers meet.

For methods that keep something once a host instead of once a worker:

    memory = HostMemory(world, "zero")            # every rank; on several hosts each has memory of its own
    line = memory.line(unit.numel, dtype)         # zero at first; what one rank of the host writes, all of it read
    start, stop = memory.part(line)               # what this rank is to write: borders lie on cache lines
    memory.meet("values")                         # all ranks of the host have come: what each wrote is there

`move_in` lets parameters lie in a view of such a line, with the values of the host's first rank, and `move_out` gives
every rank its own again. Nobody may write to a part while another reads it: a meeting lies between the two. What a rank
writes to its view of a line stays there, until it is taken over (see `_writes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

import torch
from torch import Tensor

from unisono.methods.buckets import alignment
from unisono.world import Mismatch, World

__all__ = ["HostMemory", "cut", "move_in", "move_out"]

_NUMBERS = 6  # that travel with a meeting: all meetings are alike, so that ranks in different ones can say so


class HostMemory:
    """Lines of memory of my host.

    home: the ranks of my host. every: all ranks. Both have an order of their own, and run in the thread that calls;
    on one host they are the same.
    """

    def __init__(self, world: World, method: str) -> None:
        """Every rank makes it; `method` is named where there is no such memory."""
        self._method = method
        self.home = world.split("host", inline=True)
        self.hosts = len(set(world.hosts))
        self.every = self.home if self.hosts == 1 else world.channel(inline=True)
        self._views: dict[int, Tensor] = {}  # of lines, by where these lie

    @property
    def rank(self) -> int:
        """This process's rank within its host."""
        return self.home.rank

    @property
    def size(self) -> int:
        """How many ranks this host has."""
        return self.home.size

    def line(self, n: int, dtype: torch.dtype) -> Tensor:
        """`n` elements that all ranks of my host see, zero at first; each of these ranks asks alike."""
        try:
            line, view = self.home.shared_view(max(1, n), dtype)
        except ValueError as error:
            raise ValueError(
                f"{self._method} keeps one model for all workers of a host in memory that they share, and here they "
                f"have none ({error}): UNISONO_SHARED_MEMORY must not be 0, and all workers of a host must run as "
                "one user, in one container; else use allreduce or zero"
            ) from None
        self._views[line.untyped_storage().data_ptr()] = view
        return line[:n]

    def view(self, line: Tensor) -> Tensor:
        """A line as this rank's program sees it: what is written to it here, no other rank sees."""
        return self._views[line.untyped_storage().data_ptr()][: line.numel()]

    def lines(self, n: int, dtype: torch.dtype) -> list[Tensor]:
        """Such a line for each rank of my host; the others see mine too."""
        step = alignment(dtype)
        room = -(-n // step) * step
        whole = self.line(room * self.size, dtype)
        return [whole[r * room : r * room + n] for r in range(self.size)]

    def part(self, line: Tensor) -> tuple[int, int]:
        """Where my part of a line begins and ends."""
        return cut(line.numel(), self.rank, self.size, step=alignment(line.dtype))

    def meet(self, what: str, numbers: Sequence[int] = (), *, everywhere: bool = False) -> list[int]:
        """Wait until all ranks of my host have come (`everywhere`: those of all hosts) to do the same; gives the
        largest of every rank's `numbers` (at most six, of 32 bits)."""
        world = self.every if everywhere else self.home
        code = crc32(what.encode()) & 0x7FFFFFFF
        found = torch.tensor([code, -code, *numbers, *[0] * (_NUMBERS - len(numbers))], dtype=torch.int32)
        world.all_reduce(found, "max", tag=what.rstrip("0123456789 ")).wait()  # tags are few
        most, least, *largest = found.tolist()
        if most != -least:
            each = "; ".join(f"rank {r} came for: {text}" for r, text in enumerate(world.gather_objects(what)))
            raise Mismatch(
                f"the workers of one model have come to different places of their program ({each}). Every rank makes "
                "as many backward passes and optimizer steps as the others, in the same order"
            )
        return largest[: len(numbers)]

    def close(self) -> None:
        """Close the worlds in which ranks meet. Memory stays as long as a tensor lies in it."""
        self._views.clear()
        for world in dict.fromkeys((self.every, self.home)):
            world.close()


def cut(length: int, rank: int, size: int, *, step: int = 1) -> tuple[int, int]:
    """The part of `rank` in so many elements: all about equal, borders at multiples of `step`.

    >>> [cut(100, rank, 3, step=16) for rank in range(3)]
    [(0, 48), (48, 96), (96, 100)]
    """
    each = -(-length // (size * step)) * step
    return min(rank * each, length), min((rank + 1) * each, length)


@torch.no_grad()
def move_in(params: Sequence[Tensor], places: Sequence[Tensor], views: Sequence[Tensor], memory: HostMemory) -> None:
    """Let parameters lie at `views` of a line, with the values that they have on the host's first rank; `places`: the
    same places in the line itself."""
    if memory.rank == 0:
        for param, place in zip(params, places, strict=True):
            place.copy_(param)
    memory.meet("moving in")
    for param, view in zip(params, views, strict=True):
        param.data = view


@torch.no_grad()
def move_out(params: Sequence[Tensor], views: Sequence[Tensor]) -> None:
    """Give parameters memory of this rank's own, unless another has moved them since."""
    for param, view in zip(params, views, strict=True):
        if param.data_ptr() == view.data_ptr():
            param.data = param.detach().clone(memory_format=torch.preserve_format)
