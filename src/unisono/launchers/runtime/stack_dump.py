"""Stacks of a worker, asked for by a signal: faulthandler's handler writes them from C, so that it works while native
code holds Python's lock, without root and without a debugger.

The worker registers the handler for a signal that nobody else uses (worker/program.py), with a file without a name
that its launcher reads.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import signal
import time
from collections.abc import Mapping

from unisono.launchers.runtime.memfd import anonymous_file

__all__ = [
    "SIGNAL",
    "VARIABLE",
    "StackFile",
    "answer_here",
    "list_children",
    "open_file",
    "read_stacks",
    "read_state",
]

VARIABLE = "UNISONO_STACKS_FD"
# Neither schedulers nor libraries use it. 0 where the system has no such signals: then nobody answers.
SIGNAL = signal.SIGRTMIN + 9 if hasattr(signal, "SIGRTMIN") else 0
_NAME = "unisono-stacks"
_TO_ANSWER_S = 1.0
_LOOK_S = 0.01
_MOST_BYTES = 1 << 20


class StackFile:
    """Where one worker writes its stacks; the launcher's end."""

    def __init__(self, fd: int | None = None) -> None:
        """`fd`: of one that is there; it is closed with this."""
        self.fd = anonymous_file(_NAME) if fd is None else fd
        fcntl.fcntl(self.fd, fcntl.F_SETFL, fcntl.fcntl(self.fd, fcntl.F_GETFL) | os.O_APPEND)

    def empty(self) -> None:
        """Forget what was written."""
        os.ftruncate(self.fd, 0)

    def size(self) -> int:
        """Bytes that have been written."""
        return os.fstat(self.fd).st_size

    def read(self) -> str:
        """What was written."""
        return os.pread(self.fd, _MOST_BYTES, 0).decode("utf-8", "replace")

    def close(self) -> None:
        """Let go of it; the worker may still have it."""
        os.close(self.fd)


_own: StackFile | None = None


def answer_here() -> StackFile | None:
    """Have this process write its stacks when it gets the signal: for one that no launcher of ours started. None where
    the program has a use of its own for the signal."""
    global _own
    if _own is None:
        if not SIGNAL or signal.getsignal(SIGNAL) is not signal.SIG_DFL:
            return None
        _own = StackFile()
        faulthandler.register(SIGNAL, file=_own.fd, all_threads=True)
    return _own


def open_file(pid: int, fd: int) -> StackFile | None:
    """Open the stack file of another process of this user; None if it has none."""
    path = f"/proc/{pid}/fd/{fd}"
    try:
        return StackFile(os.open(path, os.O_RDWR)) if fd >= 0 and _NAME in os.readlink(path) else None
    except OSError:
        return None


def read_stacks(asked: Mapping[int, StackFile], wait_s: float = _TO_ANSWER_S) -> dict[int, str]:
    """The stacks of processes, by their numbers; "" of one that does not answer. One file may not be asked twice."""
    sizes: dict[int, int] = {}
    for pid, file in asked.items():
        file.empty()
        if _would_answer(pid):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, SIGNAL)
                sizes[pid] = 0
    deadline = time.monotonic() + wait_s
    waiting = set(sizes)
    while waiting and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
        for pid in list(waiting):
            before, sizes[pid] = sizes[pid], asked[pid].size()
            if sizes[pid] and sizes[pid] == before:  # it has stopped growing
                waiting.discard(pid)
    return {pid: file.read() for pid, file in asked.items()}


def _would_answer(pid: int) -> bool:
    """Whether a handler for the signal is there: one that has none would be ended by it; and it is not stopped."""
    try:
        with open(f"/proc/{pid}/status") as file:
            fields = dict(line.split(":", 1) for line in file if ":" in line)
        caught = int(fields["SigCgt"], 16)
    except (OSError, KeyError, ValueError):
        return False
    return bool(caught >> (SIGNAL - 1) & 1) and read_state(pid) not in "TtZX"


def read_state(pid: int) -> str:
    """The kernel's letter for what a process does: R, S, D, T (stopped), Z; "X" where there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return "X"


def list_children(pid: int) -> list[int]:
    """The processes that a process has started, which are still its children."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children") as file:
                found += map(int, file.read().split())
    return found
