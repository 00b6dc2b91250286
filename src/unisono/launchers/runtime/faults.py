"""The faults of this worker that a fault script asks for: what is still to fire, and how each fires.

The launcher gives a worker its own faults, and is told as each fires. When one is due is for `strategy/watches.py`
to say, and for the two places that write to a disk, which call `before_write`.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Literal

from unisono.launchers.runtime import status
from unisono.launchers.runtime.fault_script import Fault, parse_script
from unisono.launchers.runtime.variables import read_worker_number

__all__ = ["Armed", "before_write", "find_armed", "fire_in_healing", "listen"]

_FOR_USERS, _FOR_WORKERS = "UNISONO_FAULTS", "UNISONO_WORKER_FAULTS"
# Stops its parent, and lets it go on. The parent waits for the end of this: it does nothing before it is stopped.
_STOPPER = """
import os, signal, sys, time
parent, until = int(sys.argv[1]), time.monotonic() + float(sys.argv[2])
if os.getppid() == parent:
    os.kill(parent, signal.SIGSTOP)
while os.getppid() == parent and time.monotonic() < until:
    time.sleep(min(0.1, max(0.0, until - time.monotonic())))
if os.getppid() == parent:
    os.kill(parent, signal.SIGCONT)
"""

_armed: list[Armed] | None = None  # None: not looked for yet
_writes: list[Armed] = []  # those of them that wait for a write
_listener: Callable[[Fault, int], None] | None = None


class Armed:
    """A fault of this worker that fires once. `number`: its place in the launcher's script."""

    def __init__(self, number: int, fault: Fault, rank: int) -> None:
        self.number, self.fault, self.rank = number, fault, rank
        self.fired = False
        self._lock = threading.Lock()  # writes and collectives have threads of their own

    def is_due(self, step: int) -> bool:
        """Whether it happens at this step; where workers are replaced, at the first from then on that this one sees."""
        return step == self.fault.step or (step > self.fault.step and "UNISONO_PLACE" in os.environ)

    def fire(self, step: int) -> bool:
        """Say so, and let it happen; False where it has before. A full disk is for the caller to raise."""
        with self._lock:
            if self.fired:
                return False
            self.fired = True
        print(f"unisono: fault: rank {self.rank} {self._describe()} at step {step}", file=sys.stderr, flush=True)
        if _listener is not None:
            _listener(self.fault, step)
        status.report("fault", number=self.number, time=time.monotonic())
        if self.fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.fault.kind == "stop":
            command = [sys.executable, "-I", "-S", "-c", _STOPPER, str(os.getpid()), str(self.fault.seconds)]
            subprocess.run(command, stdin=subprocess.DEVNULL, check=True)
        return True

    def _describe(self) -> str:
        fault = self.fault
        inside = "" if fault.phase == "step" else f" in {fault.phase}"
        if fault.kind == "kill":
            return f"kills itself{inside}"
        if fault.kind == "stop":
            return f"stops for {fault.seconds:g} s{inside}"
        if fault.kind == "slow":
            return f"is {fault.factor:g} times as slow until step {fault.last}, beginning"
        return "finds the disk full"


def find_armed() -> list[Armed]:
    """The faults of this worker, looked for once; RuntimeError where they are asked for and no launcher looks on."""
    global _armed
    if _armed is None:
        if os.environ.get(_FOR_USERS, "").strip() and not status.is_attached():
            raise RuntimeError(
                f"{_FOR_USERS} is set, but this program was started without Unisono's launcher, which sees to it that "
                f"every fault fires: start it with `unisono run` (on an engine: with --on) or un.launch, or unset "
                f"{_FOR_USERS}"
            )
        found = json.loads(os.environ.get(_FOR_WORKERS, "{}")) if status.is_attached() else {}
        rank = read_worker_number() or 0
        _armed = [Armed(int(number), fault, rank) for number, text in found.items() for fault in parse_script(text)]
        _writes[:] = [one for one in _armed if one.fault.kind == "full-disk" or one.fault.phase == "save"]
    return _armed


def fire_in_healing(step: int) -> None:
    """Called while the world is formed anew, after so many steps."""
    for armed in find_armed():
        if armed.fault.phase == "healing" and not armed.fired and step >= armed.fault.step:
            armed.fire(step)


def listen(listener: Callable[[Fault, int], None]) -> None:
    """Have `listener(fault, step)` called as a fault fires, instead of the one before."""
    global _listener
    _listener = listener


def before_write(what: Literal["checkpoint", "scratch"]) -> None:
    """Called before each write to a file: the disk may be full, or a save interrupted."""
    for armed in _writes:
        _try_write(armed, what)


def _try_write(armed: Armed, what: str) -> None:
    step = status.read_step() or 0
    if armed.fired or step < armed.fault.step or (armed.fault.phase == "save" and what != "checkpoint"):
        return
    if armed.fire(step) and armed.fault.kind == "full-disk":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
