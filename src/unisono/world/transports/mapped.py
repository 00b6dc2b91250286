"""Memory that the processes of one host all see: one memfd a rank, mapped by every rank."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from unisono.launchers.runtime.huge_pages import HUGE, fill_with_huge_pages, map_shared
from unisono.world.transports import Mismatch

PAGE = mmap.PAGESIZE
PEER_MEMORY = "UNISONO_PEER_MEMORY"  # "0": never
_PR_SET_PTRACER = 0x59616D61
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")


def publish(fd: int) -> str:
    """The address by which another process of this host and user opens my descriptor."""
    return f"/proc/{os.getpid()}/fd/{fd}"


def open_published(address: str) -> int:
    """A new descriptor of what `publish` named."""
    return os.open(address, os.O_RDWR | os.O_CLOEXEC)


def _map(fd: int, size: int, *, huge: bool) -> Tensor:
    """The memory behind `fd`; holds no descriptor, as Python's own mmap would: a large model has many mappings."""
    if huge and size >= HUGE:
        return torch.frombuffer(map_shared(fd, size), dtype=torch.uint8)
    return torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=size, dtype=torch.uint8)


def map_view(fd: int, size: int) -> Tensor:
    """The memory behind `fd` as it is, until this process writes to a page of it."""
    return torch.frombuffer(map_shared(fd, size, private=True), dtype=torch.uint8)


class MappedMemory:
    """`nbytes` of every rank's memory: `mine` to work in, `ranks[r]` to read and write rank r's.

    view: with `viewed`, a private view of rank 0's memory: pages that this rank writes to become its own copies.
    """

    def __init__(
        self,
        nbytes: int,
        rank: int,
        swap: Callable[[bytes], Sequence[bytes]],
        *,
        huge: bool = False,
        viewed: bool = False,
    ) -> None:
        """`swap` gives every rank's bytes for mine; all ranks map together. `huge`: on huge pages, if possible."""
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
                    self.ranks.append(_map(other, size, huge=huge)[:nbytes])
                    if viewed and r == 0:
                        self.view = map_view(other, size)[:nbytes]
                finally:
                    if other != fd:
                        os.close(other)
            swap(b"mapped")  # nobody closes before all have opened
        finally:
            os.close(fd)
        self.mine = self.ranks[rank]
        self.address = self.mine.untyped_storage().data_ptr()

    def prepare(self, rank: int) -> None:
        """Put a rank's memory, all of which is about to be filled, on huge pages if possible."""
        memory = self.ranks[rank].untyped_storage()
        fill_with_huge_pages(memory.data_ptr(), memory.nbytes())


def allow_reading() -> None:
    """Let the processes of this run's launcher read my memory, on systems that allow that to parents only (Yama)."""
    launcher = os.environ.get("UNISONO_LAUNCHER_PID", "")
    if _YAMA.is_file() and _YAMA.read_text(encoding="ascii").strip() == "1" and launcher.isdecimal():
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(int(launcher)), 0, 0, 0)
