"""Private memory that comes again and again, such as DDP's buckets: moved into memory that all ranks of a host map.

The tensors stay as they are: torch exchanges the memory below their storage, as `share_memory_()` does. From then on a
collective finds it where all ranks see it, and nothing passes over the stage.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from unisono.world.transports.mapped import map_shared, open_published, publish

__all__ = ["AdoptedMemory", "Offers"]

_LEAST = 256 << 10  # bytes for which it pays
_TIMES = 2  # that memory has come before it is moved: the buckets of DDP's first step do not come again
_SPARE = 2  # times the bytes that must be free where it goes
_SHARED = "/dev/shm"  # where torch's shared memory is


class AdoptedMemory:
    """A storage of every rank's, mapped by all: `ranks[r]` is rank r's."""

    def __init__(self, ref: StorageWeakRef, address: int, ranks: list[Tensor]) -> None:
        self.address, self.ranks, self._ref = address, ranks, ref

    def is_gone(self) -> bool:
        """Whether nobody holds the storage any more."""
        return bool(self._ref.expired())

    def holds(self, x: Tensor) -> bool:
        """Whether `x` lies in it; another storage may have come to its address."""
        storage = x.untyped_storage()
        return not self.is_gone() and storage._cdata == self._ref.cdata and storage.data_ptr() == self.address


class Offers:
    """The storages that may be moved, and how often each has come."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def add(self, x: Tensor) -> None:
        """`x` comes again, as far as its owner knows, and nobody else holds the address of its memory."""
        storage = x.untyped_storage()
        if storage.nbytes() != x.numel() * x.element_size() or storage.nbytes() < _LEAST or not storage.resizable():
            return  # a part of something larger, too small, or numpy has its address
        self._seen = {key: entry for key, entry in self._seen.items() if not entry[0].expired()}
        ref, times = self._seen.get(storage._cdata) or (StorageWeakRef(storage), 0)
        self._seen[storage._cdata] = (ref, times + 1)

    def is_due(self, x: Tensor) -> bool:
        """Whether it has come often enough, and where it would go there is room."""
        storage = x.untyped_storage()
        found = self._seen.get(storage._cdata)
        if found is None or found[0].expired() or found[1] < _TIMES or not storage.resizable():
            return False
        free = os.statvfs(_SHARED) if os.path.isdir(_SHARED) else None
        return free is not None and free.f_bavail * free.f_frsize > _SPARE * storage.nbytes()

    def move(self, x: Tensor, rank: int, swap: Callable[[bytes], Sequence[bytes]]) -> AdoptedMemory | None:
        """Move its memory, as all ranks do now; None where one of them cannot. `swap` gives every rank's bytes."""
        storage = x.untyped_storage()
        ref, _ = self._seen.pop(storage._cdata)
        mine = b""
        try:
            fd, nbytes = storage._share_fd_cpu_()
            mine = publish(fd).encode()
        except RuntimeError:  # no room after all: the others are told, and it goes over the stage as before
            fd, nbytes = -1, storage.nbytes()
        addresses = swap(mine)
        ranks: list[Tensor] = []
        if all(addresses):
            for r, address in enumerate(addresses):
                other = fd if r == rank else open_published(address.decode())
                try:
                    ranks.append(map_shared(other, nbytes))
                finally:
                    if other != fd:
                        os.close(other)
        swap(b"mapped")  # nobody lets go of its memory before all have opened it
        return AdoptedMemory(ref, storage.data_ptr(), ranks) if ranks else None
