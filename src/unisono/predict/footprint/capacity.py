"""What a machine has: memory of the device, of the host, and room on the disk."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from unisono.launchers.runtime.machine import host_bytes
from unisono.units import parse_size, show_size


@dataclass(frozen=True)
class Capacity:
    """Bytes that there are: of a worker's device, of a host with `workers` workers on it, and of its disk.

    `device` None: the workers compute in the host's own memory.
    """

    device: int | None
    host: int
    disk: int
    workers: int
    guessed: tuple[str, ...] = ()  # what was not given, and taken from this machine

    def describe(self) -> str:
        """The capacity in one line, for a report."""
        here = {name: " (this machine's)" if name in self.guessed else "" for name in ("device", "host", "disk")}
        shared = f", shared by {self.workers} workers" if self.workers > 1 else ""
        parts = [f"host {show_size(self.host)}{here['host']}{shared}", f"disk {show_size(self.disk)}{here['disk']}"]
        if self.device is not None:
            return "; ".join([f"device {show_size(self.device)}{here['device']}", *parts])
        return "; ".join([f"{parts[0]}, in which they compute", parts[1]])


def find_capacity(
    device_memory: str | int | None,
    host_memory: str | int | None,
    disk: str | int | Path | None,
    *,
    workers: int,
) -> Capacity:
    """Sizes as given; what is not given is this machine's. `disk` is a size, or a folder on that disk."""
    guessed: list[str] = []
    if device_memory is not None:
        device: int | None = parse_size(device_memory, "device_memory")
    elif torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0).total_memory
        guessed.append("device")
    else:
        device = None
    if host_memory is not None:
        host = parse_size(host_memory, "host_memory")
    else:
        host = host_bytes()
        guessed.append("host")
    room, here = _find_room(disk)
    return Capacity(device, host, room, workers, (*guessed, "disk") if here else tuple(guessed))


def _find_room(disk: str | int | Path | None) -> tuple[int, bool]:
    if disk is None:
        return shutil.disk_usage(".").free, True
    if isinstance(disk, (str, Path)) and Path(disk).is_dir():
        return shutil.disk_usage(disk).free, False
    if isinstance(disk, Path):
        raise ValueError(f"disk: no such folder: {disk}; give a folder that exists, or a size such as '200GiB'")
    try:
        return parse_size(disk, "disk"), False
    except ValueError as error:
        raise ValueError(f"{error}; or a folder that exists, whose free space counts") from None
