"""The backend `unisono` of torch.distributed: `dist.init_process_group("unisono")`, and any program of PyTorch's runs
over this package's transports, with every byte in one ledger. docs/backend.md says what works.

Nothing here imports torch before a group is made: this is loaded with every `import torch` (see registration.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from unisono.world.backend.registration import register

if TYPE_CHECKING:
    from unisono.world.backend.errors import GroupMismatch, GroupPeerLost, GroupTimeout
    from unisono.world.ledger import Ledger
    from unisono.world.timeline import Report

__all__ = ["GroupMismatch", "GroupPeerLost", "GroupTimeout", "ledger", "register", "report"]


def ledger() -> Ledger:
    """Every byte and second of all groups of this process, by step: each optimizer step ends one."""
    from unisono.world.backend.accounts import find_ledger

    return find_ledger()


def report() -> Report:
    """Every rank's ledger on one clock: `print(un.backend.report().table())`. All ranks call it."""
    from unisono.world.backend.accounts import gather_report

    return gather_report()


def __getattr__(name: str) -> Any:
    """The errors, which need torch."""
    if not name.startswith("Group"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from unisono.world.backend import errors

    return getattr(errors, name)
