"""Threads that help a rank with what is large: copies and sums of memory, tile by tile."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from unisono.background import SerialQueue
from unisono.launchers.runtime.machine import usable_cores

_MOST, _LEAST_ITEMS = 3, 4  # threads; items for each


class SpareCores:
    """Cores of this host beyond those that the ranks' own threads need: threads there help with what is large."""

    def __init__(self, size: int) -> None:
        """`size`: ranks of this host."""
        self._cores = usable_cores() // size
        self._queues: list[SerialQueue] = []

    def each(self, do: Callable[..., object], items: Iterable[tuple[Any, ...]]) -> None:
        """Call `do(*item)` for each item, in several threads if there are some free."""
        items = list(items)
        left = iter(items)

        def work() -> None:
            for item in left:
                do(*item)

        free = self._cores // torch.get_num_threads() - 1
        count = max(0, min(_MOST, free, len(items) // _LEAST_ITEMS))
        self._queues += [SerialQueue("unisono spare core", moves=True) for _ in range(len(self._queues), count)]
        handles = [queue.submit(work) for queue in self._queues[:count]]
        try:
            work()
        finally:
            for handle in handles:
                handle.wait()

    def close(self) -> None:
        """End the threads."""
        for queue in self._queues:
            queue.close()
