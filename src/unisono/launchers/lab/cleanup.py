"""`unisono lab clean`: what killed runs of the lab left.

Namespaces without names go with their last process, so that only processes can be left, where the launcher and its
guard were both killed. Versions before this one made namespaces with names, un PID - HOST, which stay.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time

__all__ = ["clean", "find_processes", "mark_of_this_process"]

_VARIABLE = b"UNISONO_LAB="
_TO_END_S = 2.0


def mark_of_this_process() -> str:
    """The mark that a run's processes carry in their environment: the launcher's process id and start time."""
    return f"{os.getpid()}:{_read_start(os.getpid())}"


def find_processes() -> dict[int, int]:
    """Processes of this user in runs whose launcher is gone, by process id with the launcher's."""
    found = {}
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            with open(f"/proc/{entry}/environ", "rb") as file:
                marks = [item for item in file.read().split(b"\0") if item.startswith(_VARIABLE)]
        except OSError:  # it ended meanwhile, or is another user's
            continue
        mark = re.fullmatch(rb"UNISONO_LAB=(\d+):(\d+)", marks[0]) if marks else None
        if mark is not None and _read_start(int(mark[1])) != int(mark[2]):
            found[int(entry)] = int(mark[1])
    return found


def clean() -> list[str]:
    """End and remove what killed runs left; returns a line for each thing done."""
    done = []
    processes = find_processes()
    for launcher in sorted(set(processes.values())):
        mine = [pid for pid, other in processes.items() if other == launcher]
        done.append(f"ended {len(mine)} process{'es' * (len(mine) > 1)} of a run whose launcher ({launcher}) is gone")
    _end(list(processes))
    return done + _remove_named()


def _read_start(pid: int) -> int:
    """When a process was started, in ticks since the boot; -1 if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except OSError:
        return -1


def _end(pids: list[int]) -> None:
    for signum in (signal.SIGTERM, signal.SIGKILL):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)
        deadline = time.monotonic() + _TO_END_S
        while any(pid in find_processes() for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.02)


def _remove_named() -> list[str]:
    """Remove namespaces and links whose names carry the id of a process that is gone."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        return []
    done = []
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True).stdout
    for space, pid in re.findall(r"^(un(\d+)-\d+)\b", spaces, flags=re.MULTILINE):
        if not os.path.exists(f"/proc/{pid}"):
            subprocess.run(["ip", "netns", "del", space], capture_output=True)
            done.append(f"removed the network namespace {space}")
    for link, pid in re.findall(r"^\d+: (un(\d+)(?:br|v\d+))[@:]", links, flags=re.MULTILINE):
        if not os.path.exists(f"/proc/{pid}"):
            subprocess.run(["ip", "link", "del", link], capture_output=True)
            done.append(f"removed the link {link}")
    return done
