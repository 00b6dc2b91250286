"""A worker of servers: its links to them, who is there, and the leaving."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unisono import packing
from unisono.methods.strategies._serving.placement import Connections
from unisono.methods.strategies._serving.protocol import LocalLink, RemoteLink
from unisono.methods.strategy import Change, PeriodicReplica


class ServedWorker(PeriodicReplica):
    """Has `_connections` to servers (None: the method needs none here), and goes on without workers that have left."""

    slow_ranks = "ignore"
    _connections: Connections | None = None
    _connected = False  # in this world

    @property
    def _links(self) -> Sequence[LocalLink | RemoteLink]:
        return self._connections.links if self._connections is not None else ()

    def present_ranks(self) -> list[int]:
        """The workers that have not left, by what the first server knows."""
        return sorted(self.gather_present(None))

    def gather_present(self, obj: Any) -> dict[int, Any]:
        """By way of the first server: it goes on without workers that have died, as training does."""
        if self._connections is None:
            return super().gather_present(obj)
        every = packing.from_bytes(self._links[0].gather(packing.to_bytes(obj)))
        return {worker: packing.from_bytes(data) for worker, data in every}

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their mean over the workers that have not left."""
        every = list(self.gather_present(list(tensors)).values()) if tensors else []
        for x, *each in zip(tensors, *every, strict=True):
            fractions = x.is_floating_point() or x.is_complex()
            x.copy_(torch.stack(each).mean(0) if fractions else each[0])

    def stop(self, change: Change | None = None) -> None:
        connections, self._connections, self._connected = self._connections, None, False
        if connections is not None and change is None:
            connections.finish()
        elif connections is not None:
            connections.abandon()
