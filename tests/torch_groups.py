"""The end of torch's own process groups, where DistributedDataParallel was over gloo.

In torch 2.13 a thread of gloo takes Python's lock to let go of the last collective. Where DistributedDataParallel has
the last reference to the group, it waits for that thread with the lock held: for ever, once in the first
hundred ends on a busy machine.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

__all__ = ["leave_group"]

_kept: list[Any] = []


def leave_group() -> None:
    """torch.distributed.destroy_process_group(); what is left of the group goes with the process."""
    _kept.append(dist.group.WORLD)
    dist.destroy_process_group()
