"""The meeting page (shared memory) of the workers of one host, offered to agents that are on the launcher's host.

Workers of a local run inherit it. Those of an engine's run descend from other processes: their agents open it through
the launcher's entry in /proc. Where every agent could, no store is needed, whose process would import torch.
"""

from __future__ import annotations

import os
import sys

from unisono.launchers.runtime.files import anonymous_file
from unisono.launchers.runtime.machine import read_boot_id, read_namespaces

__all__ = ["OfferedPage", "open_page"]


class OfferedPage:
    """A page for each attempt, always behind the same descriptor."""

    def __init__(self) -> None:
        self.fd = anonymous_file("unisono-meeting-page")

    @property
    def number(self) -> int:
        """A number that tells this attempt's page from others."""
        return os.fstat(self.fd).st_ino

    def offer(self) -> str:
        """What agents are told of the page; "" if shared memory is not to be used."""
        if sys.platform != "linux" or os.environ.get("UNISONO_SHARED_MEMORY", "1") == "0":
            return ""
        return f"{_machine_key()} /proc/{os.getpid()}/fd/{self.fd}"

    def renew(self) -> None:
        """Make a new page for the next attempt."""
        fresh = anonymous_file("unisono-meeting-page")
        os.dup2(fresh, self.fd, inheritable=False)
        os.close(fresh)

    def close(self) -> None:
        """Close the launcher's descriptor."""
        os.close(self.fd)


def open_page(offer: str) -> int:
    """A descriptor of the page that was offered; -1 on another host, or if it may not be opened."""
    machine, _, address = offer.rpartition(" ")
    if not machine or os.environ.get("UNISONO_SHARED_MEMORY", "1") == "0":
        return -1
    try:
        if machine != _machine_key() or "unisono-meeting-page" not in os.readlink(address):
            return -1
        return os.open(address, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return -1


def _machine_key() -> str:
    """Equal for two processes exactly if they can open each other's files in /proc."""
    return " ".join([read_boot_id(), str(os.getuid()), *read_namespaces("net", "pid")])
