"""Memory that the processes of one host all see: one memfd a rank, mapped by every rank."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

PAGE = mmap.PAGESIZE


def publish(fd: int) -> str:
    """The address by which another process of this host and user opens my descriptor."""
    return f"/proc/{os.getpid()}/fd/{fd}"


def open_published(address: str) -> int:
    """A descriptor of my own for what `publish` named."""
    return os.open(address, os.O_RDWR | os.O_CLOEXEC)


class Segment:
    """`nbytes` of every rank's memory: `mine` to work in, `ranks[r]` to read and write rank r's."""

    def __init__(self, nbytes: int, rank: int, swap: Callable[[str], Sequence[str]]) -> None:
        """`swap` gives every rank's string for mine; all ranks make a segment together."""
        size = max(PAGE, -(-nbytes // PAGE) * PAGE)
        fd = os.memfd_create("unisono", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, size)
            addresses = swap(publish(fd))
            self.ranks: list[Tensor] = []
            for r, address in enumerate(addresses):
                other = fd if r == rank else open_published(address)
                try:
                    self.ranks.append(torch.frombuffer(mmap.mmap(other, size), dtype=torch.uint8)[:nbytes])
                finally:
                    if other != fd:
                        os.close(other)
            swap("mapped")  # nobody closes before all have opened
        finally:
            os.close(fd)
        self.mine = self.ranks[rank]
        self.address = self.mine.untyped_storage().data_ptr()
        self.nbytes = nbytes
