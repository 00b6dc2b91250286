"""Pages of a private mapping of a file that this process has written to: it has copies of its own of these.

All others show the file, whoever changes it. Linux says which are which, by 8 bytes a page.
"""

from __future__ import annotations

import mmap
import os

import numpy as np

from unisono.launchers.runtime.huge_pages import advise

__all__ = ["drop_copied", "find_copied"]

_TABLE = "/proc/self/pagemap"
_FLAGS = 61  # the lowest of three bits of an entry: a page of a file (1), swapped out (2), in memory (4)


def find_copied(address: int, nbytes: int) -> list[tuple[int, int]] | None:
    """Where copies begin and end, in bytes from `address`, the beginning of a page; None: the kernel does not say."""
    first, count = address // mmap.PAGESIZE, -(-nbytes // mmap.PAGESIZE)
    try:
        with open(_TABLE, "rb", buffering=0) as file:
            raw = os.pread(file.fileno(), 8 * count, 8 * first)
    except OSError:
        return None
    if len(raw) < 8 * count:
        return None
    flags = np.frombuffer(raw, np.uint64) >> np.uint64(_FLAGS)
    copied = (flags > 1) & (flags % 2 == 0)
    if not copied.any():
        return []
    edges = np.flatnonzero(np.diff(copied, prepend=False, append=False)).reshape(-1, 2)
    return [(int(a) * mmap.PAGESIZE, int(b) * mmap.PAGESIZE) for a, b in edges]


def drop_copied(address: int, nbytes: int) -> None:
    """Let go of all copies: the pages show the file again."""
    advise(address, nbytes, mmap.MADV_DONTNEED)
