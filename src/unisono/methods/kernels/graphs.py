"""A fixed sequence of kernels as one CUDA graph: one launch, where each kernel's own takes longer than its work."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from unisono.background import in_background, is_among_ranks

_MOST = 16  # graphs of one owner; where addresses keep changing, recording does not pay


class Graphs:
    """The sequences of one owner, by name and by the addresses of the tensors that they work on.

    The first time a sequence runs as it is (Triton compiles), the second time it is recorded, then it is replayed.
    """

    def __init__(self) -> None:
        self._seen: dict[Any, torch.cuda.CUDAGraph | None] = {}
        self._pool: Any = None

    def run(self, name: Any, tensors: Sequence[Tensor | None], kernels: Callable[[], object]) -> None:
        """Do what `kernels` does.

        It must do the same whenever `name` and the addresses of `tensors` are the same: kernels on these tensors and
        on others that stay where they are; nothing that waits for the device, and no tensor made in it lives on.
        """
        like = next((x for x in tensors if x is not None), None)
        if like is None or not like.is_cuda or in_background() or is_among_ranks():
            kernels()  # a graph is recorded where nobody else draws numbers
            return
        key = (name, *[0 if x is None else x.data_ptr() for x in tensors])
        if key not in self._seen:
            kernels()
            if len(self._seen) < _MOST:
                self._seen[key] = None
            return
        graph = self._seen[key]
        if graph is None:
            pool, self._pool = self._pool or torch.cuda.graph_pool_handle(), None  # of no use after an error
            graph = self._seen[key] = record(kernels, like.device, pool)
            self._pool = pool
        graph.replay()


def record(kernels: Callable[[], object], device: torch.device, pool: Any) -> torch.cuda.CUDAGraph:
    """What `kernels` does, as a graph; nothing is computed. `pool`: `torch.cuda.graph_pool_handle()`, no use after an
    error."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    collects = gc.isenabled()
    gc.disable()  # the collector may free another graph, which breaks a recording off
    try:
        with torch.cuda.stream(stream):
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                kernels()
            except BaseException:
                with suppress(RuntimeError):
                    graph.capture_end()
                _leave_capture(device, pool)
                raise
            graph.capture_end()
    finally:
        if collects:
            gc.enable()
    torch.cuda.current_stream(device).wait_stream(stream)
    return graph


def _leave_capture(device: torch.device, pool: Any) -> None:
    """After a capture that failed, memory still goes to its pool, and random numbers belong to it: the first is ended,
    a capture that succeeds brings the second out."""
    cuda: Any = torch._C
    with suppress(RuntimeError, AttributeError):
        cuda._cuda_endAllocateToPool(torch.cuda._utils._get_device_index(device), pool)
    with suppress(RuntimeError), torch.cuda.stream(torch.cuda.Stream(device)):
        x, graph = torch.zeros(1, dtype=torch.float32, device=device), torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        x.add_(1)
        graph.capture_end()
