"""A channel of a world on which jobs run in order: in the program itself, or behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from unisono.background import Handle, SerialQueue
from unisono.world import World

T = TypeVar("T")


class SideChannel:
    """A channel of the world whose jobs run one after the other: in the program itself, or `behind` it.

    Behind it is a thread; or, where CUDA tensors travel from device to device, a stream.
    """

    def __init__(self, world: World, cuda: torch.device | None, *, inline: bool, behind: bool) -> None:
        self.channel = world.channel(inline=inline)
        self._cuda = cuda
        self._stream = torch.cuda.Stream(cuda) if behind and cuda is not None and world.has_nccl else None
        self._lane = SerialQueue("unisono side channel") if behind and self._stream is None else None

    def start(self, job: Callable[[World], T]) -> Handle[T]:
        """Run a job on the channel, after those before it and after what the program's CUDA stream has to do."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._cuda))
            with torch.cuda.stream(self._stream):
                value = job(self.channel)
            return Handle(lambda: self._wait_for(value))
        if self._lane is None:
            return Handle.of(job(self.channel))
        if self._cuda is None:
            return self._lane.submit(lambda: job(self.channel))
        here = torch.cuda.Event()
        here.record(torch.cuda.current_stream(self._cuda))

        def later() -> T:
            torch.cuda.current_stream(self._cuda).wait_event(here)
            return job(self.channel)

        handle = self._lane.submit(later)
        return Handle(lambda: self._wait_for(handle.wait()), handle.done)

    def _wait_for(self, value: T) -> T:
        """`value`; the program's CUDA stream goes on after what made it (a thread works on the default stream)."""
        made = self._stream or torch.cuda.default_stream(self._cuda)
        torch.cuda.current_stream(self._cuda).wait_stream(made)
        return value

    def finish(self) -> None:
        """Run what is queued, and end the thread."""
        if self._lane is not None:
            self._lane.close()
