"""Processes that a launcher starts: a fresh interpreter here; forks.py has those of a fork server.

Both kinds take the same `Command` and are the same to their launcher: a process id, a descriptor that becomes readable
when the process ends, our ends of its pipes, and how it ended. A process is not reaped before `close`, so its id is
not used again while anything may still be sent to it.

The environment has torchrun's variables, Unisono's descriptors, a share of the cores, and settings of the allocator.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING

from unisono.launchers.runtime.channel import SECRET, STORE
from unisono.launchers.runtime.huge_pages import are_wanted
from unisono.launchers.runtime.local_channel import EventLoop
from unisono.launchers.runtime.machine import usable_cores
from unisono.launchers.runtime.run_folder import FOLDER, FOLDER_ID, RunFolder

if TYPE_CHECKING:
    from unisono.launchers.forks import ForkStarter
    from unisono.launchers.job import StartMethod

__all__ = [
    "ALLOCATOR",
    "Command",
    "Process",
    "Starter",
    "Streams",
    "open_starter",
    "pid_fd",
    "set_allocator",
    "threads_per_worker",
    "worker_environment",
]

WORKER_PROGRAM = Path(__file__).parent / "worker" / "program.py"
Stream = int | IO[bytes] | None


@dataclass(frozen=True)
class Command:
    """A run of worker/program.py. `descriptors` maps variables of the environment to the open files they will name."""

    program: Sequence[str]
    env: Mapping[str, str]
    descriptors: Mapping[str, int] = field(default_factory=dict)
    stdin: Stream = subprocess.DEVNULL
    stdout: Stream = None
    stderr: Stream = None


class Streams:
    """The standard streams of a process to be started: its ends, and ours of those that are pipes."""

    def __init__(self, stdin: Stream, stdout: Stream, stderr: Stream) -> None:
        self.theirs: list[int] = []
        self.ours: list[int | None] = []
        self._to_close: list[int] = []
        for number, stream in enumerate((stdin, stdout, stderr)):
            theirs, ours = self._open(number, stream)
            self.theirs.append(theirs)
            self.ours.append(ours)

    def _open(self, number: int, stream: Stream) -> tuple[int, int | None]:
        if stream == subprocess.PIPE:
            reading, writing = os.pipe()
            theirs, ours = (reading, writing) if number == 0 else (writing, reading)
            self._to_close.append(theirs)
            return theirs, ours
        if stream == subprocess.STDOUT:
            return self.theirs[1], None
        if stream is None and _is_open(number):
            return number, None
        if stream is None or stream == subprocess.DEVNULL:
            self._to_close.append(os.open(os.devnull, os.O_RDWR))
            return self._to_close[-1], None
        return (stream if isinstance(stream, int) else stream.fileno()), None

    def close_theirs(self) -> None:
        """Close the ends that the process has now."""
        for fd in self._to_close:
            os.close(fd)
        self._to_close.clear()

    def close_ours(self) -> None:
        """Close our ends: the process has ended, or was never started."""
        for fd in self.ours:
            if fd is not None:
                os.close(fd)
        self.ours = [None] * 3


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


class Process:
    """A process in a session of its own: our child, or one that a fork server forked, whose child it is.

    pid_fd: readable when it has ended; None if the system has no such descriptors.
    child: of ours. wait_status: gives the exit status of one that was forked and has ended; let_go: has it reaped.
    report_fd: our end of the pipe on which it reports.
    """

    def __init__(
        self,
        pid: int,
        pid_fd: int | None,
        streams: Streams,
        *,
        child: subprocess.Popen[bytes] | None = None,
        wait_status: Callable[[int], int] | None = None,
        let_go: Callable[[int], None] | None = None,
    ) -> None:
        self.pid, self.pid_fd, self._streams = pid, pid_fd, streams
        self.report_fd = -1
        self._child, self._wait_status, self._let_go = child, wait_status, let_go
        self._status: int | None = None
        self._pipes: dict[str, int] = {}

    def watch(self, loop: EventLoop, take: Callable[[str, bytes], None], on_end: Callable[[], object]) -> None:
        """Have `take` called with each piece that comes by a pipe ("report", "stdout", "stderr"), and `on_end`."""
        self._loop, self._take = loop, take
        _, stdout, stderr = self._streams.ours
        fds = {"report": self.report_fd, "stdout": stdout, "stderr": stderr}
        self._pipes = {name: fd for name, fd in fds.items() if fd is not None}
        for name, fd in self._pipes.items():
            os.set_blocking(fd, False)
            loop.watch(fd, partial(self._read, name, fd))
        if self.pid_fd is not None:
            loop.watch(self.pid_fd, on_end)

    def _read(self, name: str, fd: int) -> bool:
        """Pass one piece on; False if there is nothing now."""
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self._loop.forget(fd)
            return False
        self._take(name, data)
        return True

    def drain(self) -> None:
        """Pass on what the pipes hold now, without waiting for their end: a child of the process may keep them open."""
        for name, fd in self._pipes.items():
            for _ in range(64):  # a pipe holds 64 KiB, at most 1 MiB
                if self._loop.find_call(fd) is None or not self._read(name, fd):
                    break

    def forget(self) -> None:
        """Read no more."""
        for fd in self._pipes.values():
            self._loop.forget(fd)

    def exit_status(self, *, wait: bool = False) -> int | None:
        """How it ended, as subprocess counts it (negative: by a signal); None while it runs. Does not reap it."""
        if self._wait_status is None:
            return _read_status(self.pid, wait)
        if self._status is None and self._has_ended(wait):
            self._status = self._wait_status(self.pid)
        return self._status

    def _has_ended(self, wait: bool) -> bool:
        assert self.pid_fd is not None
        poll = select.poll()
        poll.register(self.pid_fd, select.POLLIN)
        return bool(poll.poll(None if wait else 0))

    def send(self, signum: int) -> None:
        """Send a signal to it, if it is still there."""
        with contextlib.suppress(ProcessLookupError):
            if self._wait_status is None:
                os.kill(self.pid, signum)
            elif self.pid_fd is not None:
                signal.pidfd_send_signal(self.pid_fd, signum)

    def send_group(self, signum: int) -> None:
        """Send a signal to it and the children in its process group."""
        with contextlib.suppress(ProcessLookupError):
            if self._wait_status is None or not self._has_ended(False):
                os.killpg(self.pid, signum)

    def close(self) -> None:
        """Wait for its end, reap it and close our ends of its pipes."""
        if self._child is not None:
            self._child.wait()
        else:
            self.exit_status(wait=True)
        if self._let_go is not None:
            self._let_go(self.pid)
        self._streams.close_ours()
        os.close(self.report_fd)
        if self.pid_fd is not None:
            os.close(self.pid_fd)
            self.pid_fd = None


class Starter:
    """Starts the processes of one run: by a fork server if there is one and it does not refuse, else afresh."""

    def __init__(self, server: ForkStarter | None = None) -> None:
        self.server = server

    def start(self, command: Command, *, timeout_s: float | None = None) -> Process:
        """Start a process. Raises TimeoutError if it could not be started in that time."""
        report_fd, theirs = os.pipe()
        command = replace(command, descriptors={**command.descriptors, "UNISONO_REPORT_FD": theirs})
        try:
            process = None if self.server is None else self.server.fork(command, timeout_s)
            process = process or _start_fresh(command)
        except BaseException:
            os.close(report_fd)
            raise
        finally:
            os.close(theirs)
        process.report_fd = report_fd
        return process

    def close(self) -> None:
        """The run is over; its processes have been closed."""
        if self.server is not None:
            self.server.close()


def _start_fresh(command: Command) -> Process:
    streams = Streams(command.stdin, command.stdout, command.stderr)
    try:
        child = subprocess.Popen(
            [sys.executable, str(WORKER_PROGRAM), *command.program],
            env={**command.env, **{name: str(fd) for name, fd in command.descriptors.items()}},
            pass_fds=tuple(command.descriptors.values()),
            start_new_session=True,
            stdin=streams.theirs[0],
            stdout=streams.theirs[1],
            stderr=streams.theirs[2],
        )
    except BaseException:
        streams.close_ours()
        raise
    finally:
        streams.close_theirs()
    return Process(child.pid, pid_fd(child.pid), streams, child=child)


def open_starter(method: StartMethod) -> Starter:
    """What starts a run's processes; fresh ones if there is no fork server, or none is wanted (UNISONO_WARM=0)."""
    wanted = os.environ.get("UNISONO_WARM", "")
    can_fork = sys.platform == "linux" and hasattr(os, "pidfd_open")
    if wanted == "0" or not can_fork or not (wanted or method != "fresh"):
        return Starter()
    from unisono.launchers.forks import NoServer, connect_starter

    with contextlib.suppress(NoServer, OSError):
        return Starter(connect_starter(method))
    return Starter()


def pid_fd(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends; None if the system has no such descriptors."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # kernel before 5.3
            return os.pidfd_open(pid)
    return None


def _read_status(pid: int, wait: bool) -> int | None:
    """How a child of ours ended."""
    try:
        result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | (0 if wait else os.WNOHANG))
    except ChildProcessError:  # reaped by others: this program ignores SIGCHLD
        return 0
    if result is None:
        return None
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status


# The environment -----------------------------------------------------------------------------------------------------


# glibc gives freed memory back to the kernel and takes it anew, page by page, in every training step: keep up to 1 GiB.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
_TUNABLES, _HUGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"  # 1: ask the kernel for them, where it lets one ask


def worker_environment(
    rank: int,
    workers: int,
    *,
    address: tuple[str, int],
    run_id: str,
    threads: int | None = None,
    most: int | None = None,
    faults: str = "",
    record: RunFolder | None = None,
) -> dict[str, str]:
    """This process's environment with what `rank` needs to know about itself; `faults`: see failures.py.

    `most`: how many workers there may be on this host, where that is more than `workers`.
    """
    env = {name: value for name, value in os.environ.items() if not _is_of_another_run(name)}
    host, port = address
    env.update(
        RANK=str(rank),
        WORLD_SIZE=str(workers),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(workers),
        GROUP_RANK="0",
        GROUP_WORLD_SIZE="1",
        MASTER_ADDR=host,
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        UNISONO_LAUNCHER_PID=str(os.getpid()),
        # A run inside a worker of another run belongs to both.
        UNISONO_RUN=":".join(filter(None, [os.environ.get("UNISONO_RUN"), run_id])),
    )
    if faults:
        env["UNISONO_WORKER_FAULTS"] = faults
    if record is not None:
        env.update(record.variables)
    share = str(threads or threads_per_worker(most or workers))
    if threads is not None or "OMP_NUM_THREADS" not in env:
        env["OMP_NUM_THREADS"] = share
        if threads is not None or "MKL_NUM_THREADS" not in env:
            env["MKL_NUM_THREADS"] = share
    set_allocator(env)
    return env


def set_allocator(env: dict[str, str]) -> None:
    """Have the C library keep freed memory for the next step, unless the user has set its variables.

    >>> env = {"GLIBC_TUNABLES": "glibc.malloc.check=1"}
    >>> set_allocator(env)
    >>> env["GLIBC_TUNABLES"]
    'glibc.malloc.check=1:glibc.malloc.hugetlb=1'
    """
    if not ALLOCATOR.keys() & env.keys():
        env.update(ALLOCATOR)
    given = [one for one in env.get(_TUNABLES, "").split(":") if one]
    if are_wanted() and not any(one.startswith(_HUGE_PAGES + "=") for one in given):
        env[_TUNABLES] = ":".join([*given, f"{_HUGE_PAGES}=1"])


def _is_of_another_run(name: str) -> bool:
    of_a_worker = ("UNISONO_PLACE", "UNISONO_JOINING", "UNISONO_OVER_HOSTS", FOLDER, FOLDER_ID)
    if name.startswith("TORCHELASTIC_") or name in (SECRET, STORE, *of_a_worker):
        return True
    return name.startswith("UNISONO_") and name.endswith(("_FD", "_FAULTS"))


def threads_per_worker(workers: int) -> int:
    """The cores divided among the workers, at least one each."""
    return max(1, usable_cores() // workers)
