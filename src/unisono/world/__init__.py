"""World: who is here, and the collectives. Every byte between ranks passes through this package and is recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same as below, for type checkers
    from unisono.background import Handle as Handle
    from unisono.world.preemption import preempted as preempted
    from unisono.world.rendezvous import enter as enter
    from unisono.world.rendezvous import join as join
    from unisono.world.transports import Mismatch as Mismatch
    from unisono.world.transports import Op as Op
    from unisono.world.transports import PeerLost as PeerLost
    from unisono.world.world import World as World

_MODULE_OF = {
    "Handle": "unisono.background",
    "Mismatch": "unisono.world.transports",
    "Op": "unisono.world.transports",
    "PeerLost": "unisono.world.transports",
    "World": "unisono.world.world",
    "enter": "unisono.world.rendezvous",
    "join": "unisono.world.rendezvous",
    "preempted": "unisono.world.preemption",
}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    """Import on first use: `world.backend` is registered with torch before torch is there."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value
