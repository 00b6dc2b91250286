"""The guard: ends what a run left behind, also when the launcher itself was killed with SIGKILL.

Started by file as `python -I -S guard.py RUN_ID LAUNCHER_PID`, before which the kernel has already ended the workers
(they ask for it, see worker/program.py); the guard ends *their* children. A process belongs to a run when it carries
the run's identity in its environment or when a worker leads its session, so a child that made itself a daemon is found
as well.

What ends processes must not mistake them: a run's identity is 24 random hexadecimal digits, looked for as a whole word
of one variable, and anything else is refused.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection

__all__ = ["Guard", "members", "sweep"]

_DONE = b"done\n"
_VARIABLE = b"UNISONO_RUN="
_MANAGER = "torch_shm_manag"  # the kernel cuts names to 15 characters


class Guard:
    """The launcher's handle on a guard process of its own."""

    def __init__(self, run_id: str, sessions: Collection[int]) -> None:
        command = [sys.executable, "-I", "-S", os.path.abspath(__file__), run_id, str(os.getpid())]
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True, bufsize=0
        )
        self._tell(" ".join(map(str, sessions)).encode() + b"\n")

    def add(self, session: int) -> None:
        """Another worker has been started."""
        self._tell(f"{session}\n".encode())

    def done(self) -> None:
        """Nothing is left to guard."""
        assert self._process.stdin is not None
        self._tell(_DONE)
        self._process.stdin.close()
        self._process.wait()

    def _tell(self, text: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # someone killed it; the workers still die with this process
            self._process.stdin.write(text)


def members(run_id: str, sessions: Collection[int]) -> dict[int, str]:
    """The live processes that belong to the run, by process id with their names (never the caller itself)."""
    if not re.fullmatch("[0-9a-f]{24}", run_id) or min(sessions, default=2) < 2:
        raise ValueError(f"got run {run_id!r} and sessions {sorted(sessions)}; expected 24 hex digits and worker pids")
    found: dict[int, str] = {}
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if not entry.isdigit() or int(entry) in (1, os.getpid()):
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                head, _, tail = file.read().rpartition(b")")
            state, _, _, session, *_ = tail.split()  # after the name: state, parent, group, session
            if state in (b"Z", b"X"):
                continue
            if int(session) not in sessions and not _carries(entry, run_id):
                continue
            found[int(entry)] = head.partition(b"(")[2].decode("utf-8", "replace")
        except OSError:  # it ended meanwhile, or is another user's
            continue
    return found


def _carries(entry: str, run_id: str) -> bool:
    """Whether UNISONO_RUN, in the environment that the process was started with, names the run."""
    with open(f"/proc/{entry}/environ", "rb") as file:
        variables = file.read().split(b"\0")
    runs = [value.removeprefix(_VARIABLE) for value in variables if value.startswith(_VARIABLE)]
    return any(run_id.encode() in run.split(b":") for run in runs)


def sweep(
    run_id: str,
    sessions: Collection[int],
    *,
    patience_s: float,
    manager_patience_s: float = 0.0,
    ended: Collection[int] = (),
) -> None:
    """End every process of the run: wait `patience_s` for them to go, SIGTERM, wait as long again, SIGKILL.

    The waits matter: multiprocessing's resource tracker leaves by itself once its worker is gone, and tidies up on the
    way. So does torch's shared-memory manager, but only 2 s after its last client: it is given `manager_patience_s`
    after the others have gone, and where that is too short the files of the run's processes are removed here: of those
    that are seen now, and of those in `ended`.
    """
    seen = {*sessions, *ended}

    def others() -> list[int]:
        found = members(run_id, sessions)
        seen.update(found)
        return [pid for pid, name in found.items() if not name.startswith(_MANAGER)]

    def managers() -> list[int]:
        return [pid for pid, name in members(run_id, sessions).items() if name.startswith(_MANAGER)]

    for signum, wait_s in ((None, patience_s), (signal.SIGTERM, patience_s), (signal.SIGKILL, 1.0)):
        if _all_gone(others, signum, wait_s):
            break
    if not _all_gone(managers, None, manager_patience_s):
        _all_gone(managers, signal.SIGKILL, 1.0)
        _remove_files_of(seen)


def _all_gone(who: Callable[[], list[int]], signum: signal.Signals | None, wait_s: float) -> bool:
    """Signal those processes, and wait until there are none left."""
    deadline = time.monotonic() + wait_s
    left = who()
    if signum is not None:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signum)
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        left = who()
    return not left


def _remove_files_of(pids: Collection[int]) -> None:
    """Remove the shared memory that torch made in these processes, as its manager would have."""
    for name in os.listdir("/dev/shm"):
        owner = re.fullmatch(r"torch_(\d+)_\d+_\d+", name)
        if owner and int(owner[1]) in pids:
            with contextlib.suppress(OSError):
                os.unlink(f"/dev/shm/{name}")


def _main(run_id: str, launcher: int) -> None:
    """Read the workers' process ids from standard input until the launcher says it is done, or is no more."""
    text = b""
    poll = select.poll()
    poll.register(0, select.POLLIN)
    # A fork of the launcher may hold the pipe open, so the parent is looked at too; first what it wrote is read.
    while poll.poll(1000) or os.getppid() == launcher:
        if not poll.poll(0):
            continue
        data = os.read(0, 65536)
        text += data
        if text.endswith(_DONE):
            return
        if not data:
            break
    whole = text.rpartition(b"\n")[0]  # a number that the launcher did not finish is another process's
    sweep(run_id, {int(word) for word in whole.split()}, patience_s=0.3, manager_patience_s=3.0)


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]))
