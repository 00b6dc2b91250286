"""What others ask of a run that is under way, and the asking: `unisono scale`, `unisono stacks`, the live page.

A launcher listens in the user's private folder (runtime/files.py) under its process id. A connection carries one
request and one answer (LocalChannel); whatever else comes is answered with an error, and the run goes on.

Workers ask too: one that waits for long in a collective has the launcher read all stacks (HangReports). What is found
is said once when the hang has lasted for a quarter of the time after which ranks give up, and once before they do.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from unisono.launchers.job import Job
from unisono.launchers.runtime.files import find_private_folder
from unisono.launchers.runtime.local_channel import EventLoop, LocalChannel
from unisono.launchers.runtime.run_folder import NoSuchRun, find_run, is_running, read_run
from unisono.launchers.runtime.stacks import SILENT_S, Verdict, WorkerStack, judge

__all__ = [
    "Control",
    "Gone",
    "HangReports",
    "RunStatus",
    "answer_stacks",
    "ask",
    "ask_anything",
    "ask_for_report",
    "ask_for_stacks",
    "find_launcher",
    "list_runs",
]

MOST_CONNECTIONS = 16
ANSWER_S = 10.0  # what a launcher has for its answer
_SUFFIX = ".run"
_MOST_TEXT = 64 << 10  # characters of one worker's stacks in an answer


# The launcher's side ----------------------------------------------------------------------------------------------


class Control:
    """The socket of one run. `answer` is given each request, and gives the answer or raises ValueError."""

    def __init__(self, loop: EventLoop, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self._loop, self._answer = loop, answer
        self._path: Path | None = None
        self._listener: socket.socket | None = None
        self._connections: list[LocalChannel] = []  # the oldest first

    def open(self) -> None:
        """Listen. Raises OSError or NotPrivate if that is not possible."""
        folder = find_private_folder()
        path = folder / f"{os.getpid()}{_SUFFIX}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with open(folder / "runs.lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # a socket that is bound and does not listen yet looks left behind
                for other in folder.glob(f"*{_SUFFIX}"):
                    if _is_left_behind(other):
                        other.unlink(missing_ok=True)
                listener.bind(str(path))
                listener.listen(128)
        except BaseException:
            listener.close()
            raise
        listener.setblocking(False)
        self._path, self._listener = path, listener
        self._loop.watch(listener, self._accept)

    def close(self) -> None:
        """Remove the socket. The loop is closed before or after."""
        for channel in self._connections:
            channel.close()
        if self._listener is not None and self._path is not None:
            self._path.unlink(missing_ok=True)
            self._listener.close()
            self._listener = None

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            channel = LocalChannel(self._listener.accept()[0])
        except OSError:  # it has left again, or there are too many open files: the run does not depend on this
            return
        channel.set_timeout(0)
        if not channel.is_of_this_user():
            channel.close()
            return
        while len(self._connections) >= MOST_CONNECTIONS:
            self._drop(self._connections[0])
        self._connections.append(channel)
        self._loop.watch(channel, partial(self._read, channel))

    def _read(self, channel: LocalChannel) -> None:
        try:
            request, files = channel.receive()
            for fd in files:
                os.close(fd)
            answer = None if request is None else self._answer(request)
        except BlockingIOError:
            return
        except ValueError as error:
            answer = {"error": str(error)[:1000]}
        if channel not in self._connections:  # an answer may take others in, which may be too many
            return
        if answer is not None:
            with contextlib.suppress(OSError):  # who asked has left
                channel.send(answer)
        self._drop(channel)

    def _drop(self, channel: LocalChannel) -> None:
        self._connections.remove(channel)
        self._loop.forget(channel)
        channel.close()


def _is_left_behind(path: Path) -> bool:
    """Whether nobody listens at a socket, as its launcher was killed; a launcher that is only busy still does."""
    try:
        LocalChannel.connect(path, timeout_s=1.0).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return False


class HangReports:
    """Reports on the hangs of one run.

    gather: every worker's stacks, and the ranks that have ended. say: a line on standard error.
    """

    def __init__(
        self,
        job: Job,
        gather: Callable[[], tuple[Sequence[WorkerStack], Sequence[int]]],
        say: Callable[[str], None],
    ) -> None:
        self._job, self._gather, self._say = job, gather, say
        self._reported = dict.fromkeys(("waiting", "hang"), float("-inf"))  # when each was last said
        self.last = ""  # what was said last, for the report of the run's end
        self._count = 0

    def take(self, message: dict[str, Any]) -> None:
        """Report a hang, if a worker's message says that it waits for long."""
        kind, waited_s, deadline_s = message.get("kind"), message.get("waited_s"), message.get("deadline_s")
        if kind not in self._reported or not isinstance(waited_s, float) or not isinstance(deadline_s, float):
            return
        now = time.monotonic()
        if now - waited_s < self._reported[kind]:  # the same hang as the one that was said
            return
        workers, gone = self._gather()
        for worker in workers:
            worker.doing = worker.doing or str(message.get("what", ""))
            worker.held_after_s = min(SILENT_S, 0.4 * deadline_s)
        text, verdicts = judge(workers, gone)
        self._reported[kind] = time.monotonic()
        end = "they give up" if kind == "hang" else f"they give up after {deadline_s:g} s"
        self.last = f"unisono: a collective has taken {waited_s:.0f} s: {text}; {end}"
        self._say(self.last)
        self._record(workers, verdicts, text=text, waited_s=waited_s, deadline_s=deadline_s)

    def _record(self, workers: Sequence[WorkerStack], verdicts: Sequence[Verdict], **values: Any) -> None:
        """Enter a hang into the run's record, if it has one."""
        record = self._job.record
        if record is None:
            return
        with contextlib.suppress(OSError):  # what cannot be written there is said once, below
            (record.path / "hangs").mkdir(exist_ok=True)
        for verdict in verdicts:
            record.event("verdict", **verdict._asdict())
        record.event("hang", **values)
        self._count += 1
        stacks = "\n\n".join(worker.to_text() for worker in workers)
        record.append(f"hangs/{self._count}.txt", f"{self.last}\n\n{stacks}\n")


def answer_stacks(workers: Sequence[WorkerStack], gone: Sequence[int]) -> dict[str, Any]:
    """The launcher's answer to a request for stacks."""
    text, verdicts = judge(workers, gone)
    stacks = {str(worker.rank): worker.to_text()[:_MOST_TEXT] for worker in workers}
    return {"text": text, "verdicts": [verdict._asdict() for verdict in verdicts], "stacks": stacks}


# The asking side --------------------------------------------------------------------------------------------------


class Gone(Exception):
    """There is no such run, or it does not answer."""


@dataclass(frozen=True)
class RunStatus:
    """What a run says of itself."""

    pid: int
    program: str
    workers: int  # in the world now
    wanted: int  # that are aimed at
    least: int
    most: int
    step: int | None
    adapts: bool  # whether the run finds the number by itself
    elastic: bool = True  # whether it can be changed
    join: str = ""  # the command by which another host joins it; "" if none can

    def describe(self) -> str:
        """The status in one line."""
        to = "" if self.workers == self.wanted else f", {self.wanted} to be"
        step = "no step yet" if self.step is None else f"step {self.step}"
        adapts = ", adapts" if self.adapts else ""
        return f"workers: {self.workers}{to} (MIN {self.least}, MAX {self.most}{adapts}), {step}"


def ask(pid: int, request: dict[str, Any]) -> RunStatus:
    """How many workers the run of launcher `pid` has and aims at. Raises Gone, or ValueError if it refuses."""
    return RunStatus(**ask_anything(pid, request))


def ask_anything(pid: int, request: dict[str, Any]) -> dict[str, Any]:
    """Ask the run of launcher `pid`, and return its answer. Raises Gone, or ValueError if it refuses."""
    path = find_private_folder() / f"{pid}{_SUFFIX}"
    try:
        with LocalChannel.connect(path, timeout_s=ANSWER_S) as channel:
            channel.send(request)
            answer, _ = channel.receive()
    except FileNotFoundError:
        raise Gone(f"process {pid} is no launcher of a run of this user that is under way") from None
    except ConnectionRefusedError:
        raise Gone(f"the launcher {pid} was killed and its socket was left behind; the next run removes it") from None
    except (TimeoutError, BlockingIOError):  # the latter: its queue is full
        raise Gone(f"the launcher {pid} does not answer: is it stopped?") from None
    except (OSError, ValueError) as error:
        raise Gone(f"the launcher {pid} cannot be asked: {error}") from None
    if answer is None:
        raise Gone(f"the run of launcher {pid} has ended")
    if "error" in answer:
        raise ValueError(answer["error"])
    return answer


def list_runs() -> tuple[list[RunStatus], list[str]]:
    """The runs of this user on this host, and what is wrong with those that do not answer."""
    found, wrong = [], []
    for path in sorted(find_private_folder().glob(f"*{_SUFFIX}")):
        if path.stem.isdigit():
            try:
                found.append(ask(int(path.stem), {"do": "status"}))
            except Gone as error:
                wrong.append(str(error))
    return found, wrong


def find_launcher(run: str | Path | int) -> int:
    """The process id of a run's launcher: `run` is that number, or the run's folder, its name, or "last".

    Raises Gone where there is no such run, or it is over.
    """
    if isinstance(run, int) or str(run).isdigit():
        return int(str(run))
    try:
        folder = find_run(str(run))
    except NoSuchRun as error:
        raise Gone(str(error)) from None
    found = read_run(folder) or {}
    if is_running(found) is None:
        host = found.get("machine", {}).get("host", "another")
        raise Gone(f"the run in {folder} was started on host {host}: ask there")
    if not is_running(found):
        raise Gone(f"the run in {folder} is over")
    return int(found["launcher_pid"])


def ask_for_report(run: str | Path | int) -> dict[str, Any]:
    """What all workers of a run do now: {"text", "verdicts", "stacks"}. Raises Gone, or ValueError where the launcher
    refuses."""
    return ask_anything(find_launcher(run), {"do": "stacks"})


def ask_for_stacks(run: str | Path | int) -> dict[int, str]:
    """Every worker's stacks, by rank. Raises Gone if the run is over or does not answer."""
    return {int(rank): text for rank, text in ask_for_report(run)["stacks"].items()}
