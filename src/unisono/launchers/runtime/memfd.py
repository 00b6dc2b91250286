"""Anonymous files: memory with a descriptor, no name in /dev/shm, gone with the last process that holds it."""

from __future__ import annotations

import os
import sys
import tempfile

__all__ = ["anonymous_file"]


def anonymous_file(name: str) -> int:
    """Descriptor of a new empty file in memory (not inherited by other programs unless passed on purpose)."""
    if sys.platform == "linux":
        return os.memfd_create(name)
    with tempfile.TemporaryFile(prefix=name) as file:
        return os.dup(file.fileno())
