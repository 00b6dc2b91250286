"""Memory that the processes of one host all see: one memfd a rank, mapped by every rank."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from unisono.world.transports import Mismatch

PAGE = mmap.PAGESIZE


def publish(fd: int) -> str:
    """The address by which another process of this host and user opens my descriptor."""
    return f"/proc/{os.getpid()}/fd/{fd}"


def open_published(address: str) -> int:
    """A descriptor of my own for what `publish` named."""
    return os.open(address, os.O_RDWR | os.O_CLOEXEC)


def map_shared(fd: int, size: int) -> Tensor:
    """The memory behind `fd`; holds no descriptor, as Python's own mmap would: a large model has many mappings."""
    return torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=size, dtype=torch.uint8)


class MappedMemory:
    """`nbytes` of every rank's memory: `mine` to work in, `ranks[r]` to read and write rank r's."""

    def __init__(self, nbytes: int, rank: int, swap: Callable[[bytes], Sequence[bytes]]) -> None:
        """`swap` gives every rank's bytes for mine; all ranks map together."""
        size = max(PAGE, -(-nbytes // PAGE) * PAGE)
        fd = os.memfd_create("unisono", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, size)
            found = [
                item.decode("ascii", "replace").split() for item in swap(f"memory {nbytes} {publish(fd)}".encode())
            ]
            if any(item[:2] != ["memory", str(nbytes)] for item in found):
                each = ", ".join(f"rank {r} {' '.join(item[1:2]) or 'none'}" for r, item in enumerate(found))
                raise Mismatch(f"memory that is shared: every rank asks for the same bytes, got {each}")
            addresses = [item[2] for item in found]
            self.ranks: list[Tensor] = []
            for r, address in enumerate(addresses):
                other = fd if r == rank else open_published(address)
                try:
                    self.ranks.append(map_shared(other, size)[:nbytes])
                finally:
                    if other != fd:
                        os.close(other)
            swap(b"mapped")  # nobody closes before all have opened
        finally:
            os.close(fd)
        self.mine = self.ranks[rank]
        self.address = self.mine.untyped_storage().data_ptr()
