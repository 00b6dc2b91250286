"""What this machine has: the cores that this process may use."""

from __future__ import annotations

import math
import os

__all__ = ["usable_cores"]


def usable_cores() -> int:
    """The cores that this process may use: those it is bound to, and no more than its container's quota."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on this system
        cores = os.cpu_count() or 1
    return max(1, math.ceil(min(cores, _quota())))


def _quota() -> float:
    """CPUs that the control group allows; infinite where there is no limit."""
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
        return math.inf if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        with (
            open("/sys/fs/cgroup/cpu/cpu.cfs_quota_us") as first,
            open("/sys/fs/cgroup/cpu/cpu.cfs_period_us") as second,
        ):
            quota_us, period_us = int(first.read()), int(second.read())
        return quota_us / period_us if quota_us > 0 and period_us > 0 else math.inf
    except (OSError, ValueError):
        return math.inf
