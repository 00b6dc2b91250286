"""Queues of work beside the current stream, and host memory that the device's copy engines reach.

On a GPU a queue is a CUDA stream and a mark is an event; on the CPU work is done at once. What runs on them is the same
code, so its order can be tested without a GPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from unisono.methods.offload.disk import make_buffer
from unisono.units import show_size

LINE_BYTES = 256  # lines in a slab begin on such a border


class Mark:
    """A point in a queue: it is reached once all work given to the queue before is done. On the CPU that is at once."""

    def hold(self) -> None:
        """Let work that the current stream gets from now on begin after this mark."""

    def wait(self) -> None:
        """Block this thread until the mark is reached."""


class Queue:
    """Work in order, beside the current stream. That of a CPU does it at once.

    >>> Queue().run(lambda: print("done")).wait()
    done
    """

    def run(self, work: Callable[[], Any], after: Iterable[Mark] = ()) -> Mark:
        """Do `work` once the marks `after` are reached; the mark of its end. What it reads must stay alive."""
        for mark in after:
            mark.wait()
        work()
        return Mark()


class Streams:
    """The queues of one device; these are a CPU's.

    immediate: work is done when it is given, in memory that the host reaches.
    """

    immediate = True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def queue(self) -> Queue:
        """A new queue."""
        return Queue()

    def now(self) -> Mark:
        """Where the current stream stands."""
        return Mark()

    def lend(self, tensor: Tensor, queue: Queue) -> None:
        """`tensor` may be freed before `queue` has read it: its memory is not given out again until then."""


class CudaMark(Mark):
    """A CUDA event as a mark."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self.device = device
        self.event = torch.cuda.Event()
        self.event.record(stream)

    def hold(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.event)

    def wait(self) -> None:
        self.event.synchronize()


class CudaQueue(Queue):
    """A CUDA stream as a queue."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def run(self, work: Callable[[], Any], after: Iterable[Mark] = ()) -> Mark:
        with torch.cuda.stream(self.stream):
            for mark in after:
                mark.hold()
            work()
        return CudaMark(self.device, self.stream)


class CudaStreams(Streams):
    """The streams of one GPU."""

    immediate = False

    def queue(self) -> Queue:
        return CudaQueue(self.device)

    def now(self) -> Mark:
        return CudaMark(self.device, torch.cuda.current_stream(self.device))

    def lend(self, tensor: Tensor, queue: Queue) -> None:
        assert isinstance(queue, CudaQueue)
        tensor.record_stream(queue.stream)


class Slab:
    """Host memory taken in one piece, given out as lines; `pinned`: locked, so that a GPU copies it on its own.

    Memory from `mmap` (on huge pages where the kernel has them), touched by all threads and then registered in one
    call: torch's own pinned memory is rounded up to a power of two.

    >>> slab = Slab(1 << 20)
    >>> slab.take_line(1000, torch.bfloat16).shape, slab.take_line(5, torch.float32).data_ptr() % 256
    (torch.Size([1000]), 0)
    >>> slab.close()
    """

    def __init__(self, nbytes: int, *, pinned: bool = False) -> None:
        self.nbytes = nbytes
        self._memory = make_buffer(nbytes)
        self._used = 0
        self._unpin: Callable[[], Any] | None = None
        if nbytes and pinned:
            self._memory.zero_()
            _register(self._memory)
            self._unpin = weakref.finalize(self, _unregister, self._memory)

    @staticmethod
    def bytes_for(n: int, dtype: torch.dtype) -> int:
        """The bytes that a line of `n` elements takes up."""
        return -(-n * dtype.itemsize // LINE_BYTES) * LINE_BYTES

    def take_line(self, n: int, dtype: torch.dtype) -> Tensor:
        """A new line of `n` elements, all zero."""
        start, self._used = self._used, self._used + self.bytes_for(n, dtype)
        assert self._used <= self.nbytes, f"a slab of {self.nbytes} bytes was asked for {self._used}"
        return self._memory[start : start + n * dtype.itemsize].view(dtype)

    def close(self) -> None:
        """Unlock the memory; it goes when the last line of it goes."""
        if self._unpin is not None:
            self._unpin()
            self._unpin = None


def copy_to(values: Tensor, to: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A copy of `values` on a device.

    From a GPU to the host, all threads touch the new memory first: the driver's copy would, with one thread.

    >>> copy_to(torch.ones(2), torch.device("cpu"), torch.float64)
    tensor([1., 1.], dtype=torch.float64)
    """
    if to.type != "cpu" or values.device.type == "cpu":
        return values.detach().to(to, dtype, copy=True)
    line = torch.empty(values.shape, dtype=dtype or values.dtype)
    return line.zero_().copy_(values.detach())


def _register(memory: Tensor) -> None:
    code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    if code != 0:
        raise RuntimeError(
            f"{show_size(memory.numel())} of host memory could not be locked for the GPU (CUDA error {code}). "
            f"Raise the limit of locked memory (ulimit -l), offload less (a larger device_memory) or use 16-bit moments"
        )


def _unregister(memory: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
