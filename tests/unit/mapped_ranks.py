"""Ranks that map each other's memory, with memory of the host in the place of a device's."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch import Tensor

from unisono.world.transports.cuda_memory import HANDLE_BYTES, NotShareable, Segment
from unisono.world.transports.mapped import open_published, publish


class StandIn:
    """Memory as `CudaMemory` gives it: files in memory that are mapped whole. Only its own can be mapped by others, and
    what `lose` was told of is gone."""

    device = torch.device("cpu")

    def __init__(self, *, refuses: bool = False) -> None:
        self.refuses = refuses
        self.made: dict[int, Segment] = {}  # by the address of its storage
        self.settled = self.mapped = self.unmapped = 0
        self._lines: list[Tensor] = []
        self._files: list[int] = []

    def settle(self) -> None:
        self.settled += 1

    def find(self, x: Tensor, known: Mapping[int, Segment]) -> Segment:
        segment = self.made.get(x.untyped_storage().data_ptr())
        if segment is None:
            raise NotShareable("memory of torch's own")
        return segment

    def is_there(self, segment: Segment) -> bool:
        return segment in self.made.values()

    def allocate(self, nbytes: int) -> Tensor:
        fd = os.memfd_create("device")
        self._files.append(fd)
        os.ftruncate(fd, nbytes)
        line = torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=nbytes, dtype=torch.uint8)
        handle = publish(fd).encode().ljust(HANDLE_BYTES, b"\0")
        address = line.data_ptr()
        self.made[address] = Segment(len(self._lines), address, nbytes, handle)
        self._lines.append(line)
        return line

    def close(self) -> None:
        """Give the files back: nobody maps one any more."""
        while self._files:
            os.close(self._files.pop())

    def lose(self, line: Tensor) -> None:
        self.made.pop(line.data_ptr())

    def map(self, handle: bytes, nbytes: int) -> Tensor:
        if self.refuses:
            raise NotShareable("not permitted")
        self.mapped += 1
        try:
            fd = open_published(handle.rstrip(b"\0").decode())
        except OSError as error:
            raise NotShareable(str(error)) from error
        try:
            return torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=nbytes, dtype=torch.uint8)
        finally:
            os.close(fd)

    def unmap(self, line: Tensor) -> None:
        self.unmapped += 1
