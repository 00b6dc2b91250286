"""World: who is here, and the collectives. Every byte between ranks passes through this package and is recorded."""

from __future__ import annotations

from unisono.background import Handle
from unisono.world.preemption import preempted
from unisono.world.rendezvous import enter, join
from unisono.world.transports import Mismatch, Op, PeerLost
from unisono.world.world import World

__all__ = ["Handle", "Mismatch", "Op", "PeerLost", "World", "enter", "join", "preempted"]
