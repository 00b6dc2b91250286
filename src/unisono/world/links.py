"""How fast bytes come from the neighbouring hosts: a few small messages now and then, behind the program."""

from __future__ import annotations

from itertools import islice
from statistics import median_low

import torch

from unisono.background import Handle
from unisono.world.ledger import Ledger
from unisono.world.stragglers import LINK_BYTES, list_leaders
from unisono.world.world import World

__all__ = ["LinkProbe"]

_TAG = "stragglers: links"
_MESSAGES = 5  # of which the first only says that the other has begun
_LOOK_BACK = 4_000  # records


class LinkProbe:
    """The first rank of every host sends to those before and after it, where hosts send messages and are three or more.

    A collective cannot tell whose link is slow: all of its ranks wait for the slowest.
    """

    def __init__(self, world: World) -> None:
        leaders = list_leaders(world.hosts)
        by_messages = world.transport is not None and "messages" in world.transport.name
        self.peers: list[int] = []  # the one before, the one after; none: nothing to measure here
        if by_messages and len(leaders) >= 3 and world.rank in leaders:
            place = leaders.index(world.rank)
            self.peers = [leaders[place - 1], leaders[(place + 1) % len(leaders)]]
        self._pending: list[Handle[torch.Tensor]] = []

    def begin(self, channel: World) -> None:
        """Begin to send and to receive; every such rank calls it."""
        for peer in self.peers:
            for _ in range(_MESSAGES):
                self._pending.append(channel.send(torch.zeros(LINK_BYTES, dtype=torch.uint8), peer, tag=_TAG))
                self._pending.append(channel.recv(torch.empty(LINK_BYTES, dtype=torch.uint8), peer, tag=_TAG))

    def end(self, channel: World, ledger: Ledger) -> list[float]:
        """Seconds for a message from the host before mine, and from the one after it; zeros where none was sent."""
        pending, self._pending = self._pending, []
        if not pending:
            return [0.0, 0.0]
        for handle in pending:
            handle.wait()
        taken: dict[str, list[float]] = {f"{channel.name}:recv-{peer}": [] for peer in self.peers}
        for record in islice(reversed(list(ledger.records)), _LOOK_BACK):
            lengths = taken.get(record.channel)
            if lengths is not None and len(lengths) < _MESSAGES - 1:
                lengths.append(record.end - record.start)
        return [median_low(lengths) if lengths else 0.0 for lengths in taken.values()]
