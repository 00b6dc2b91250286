"""Errors of a group: what torch's users expect to catch, with this package's texts."""

from __future__ import annotations

from torch.distributed import DistBackendError

from unisono.world.transports import Mismatch, PeerLost

__all__ = ["GroupMismatch", "GroupPeerLost", "GroupTimeout", "translate"]


class GroupPeerLost(PeerLost, DistBackendError):
    """Another rank of the group ended, died, or did not come in time."""

    __module__ = "unisono.backend"  # where it is found: torch's futures pickle what they hold


class GroupMismatch(Mismatch, DistBackendError):
    """Ranks of the group called one collective with different arguments."""

    __module__ = "unisono.backend"


class GroupTimeout(DistBackendError, TimeoutError):
    """`wait(timeout)` ended before the operation did."""

    __module__ = "unisono.backend"


def translate(error: BaseException, what: str, group: str) -> BaseException:
    """The same error as one of torch's kinds; its text says in what, and of which group."""
    if isinstance(error, DistBackendError):
        return error
    for kind, ours in ((PeerLost, GroupPeerLost), (Mismatch, GroupMismatch)):
        if isinstance(error, kind):
            text = str(error.args[0] if error.args else error)
            how = "hit its timeout in" if "which did not come" in text else "in"
            found = ours(f"{text} (process group {group!r}, {how} {what})")
            found.__cause__ = error
            return found.with_traceback(error.__traceback__)
    return error
