"""Stacks of workers: asked for by a signal, put into words, and who keeps the others waiting.

Faulthandler's handler writes stacks from C, so that it works while native code holds Python's lock, without root and
without a debugger. The worker registers the handler for a signal that nobody else uses (worker/program.py), with a file
without a name that its launcher reads.

Every worker is in one of these: a collective, its data loader, other Python code, native code that holds Python's lock
(nothing else of that process runs then), or stopped. Workers that are in the same place are said together.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from types import FrameType
from typing import Literal, NamedTuple

from unisono.launchers.runtime.files import anonymous_file
from unisono.launchers.runtime.frames import is_of_program
from unisono.launchers.runtime.status import StatusPage

__all__ = [
    "SIGNAL",
    "SILENT_S",
    "VARIABLE",
    "Frame",
    "Kind",
    "PlaceSampler",
    "StackFile",
    "StackFiles",
    "Standing",
    "Verdict",
    "WorkerStack",
    "answer_here",
    "describe_together",
    "find_kind",
    "find_standing",
    "judge",
    "list_children",
    "list_frames",
    "open_file",
    "parse_stacks",
    "read_stacks",
    "read_state",
]

Kind = Literal["collective", "loader", "code", "held", "stopped", "silent"]
SILENT_S = 2.0
_HERE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)')
_LOADERS = (f"{os.sep}torch{os.sep}utils{os.sep}data{os.sep}", os.path.join(_HERE, "training", "data") + os.sep)
_WAITS = (os.path.join(_HERE, "world") + os.sep, os.path.join(_HERE, "background.py"))
_START = (os.path.join("worker", "program.py"), os.path.join("worker", "fork_server.py"))


class Frame(NamedTuple):
    """A line of a stack."""

    file: str
    line: int
    function: str

    @property
    def place(self) -> str:
        """`train.py:88`"""
        return f"{os.path.basename(self.file)}:{self.line}"


@dataclass
class WorkerStack:
    """What was found out about one worker."""

    rank: int
    pid: int = 0
    host: str = ""
    text: str = ""  # as faulthandler wrote it; "": it did not answer
    loaders: Sequence[str] = field(default=())  # the same of processes that load its data
    state: str = ""  # the kernel's letter for it; "T": stopped
    silent_s: float = 0.0  # since its last heartbeat; 0.0: it gives none
    doing: str = ""  # as it last noted: "all_reduce gradients/0"
    step: int | None = None
    held_after_s: float = SILENT_S  # without a heartbeat, which takes Python's lock: someone holds that

    def to_text(self) -> str:
        """All that is known, for people."""
        what = describe_together([self], bare=True)
        parts = [f"rank {self.rank} (process {self.pid}{f' on {self.host}' if self.host else ''}): {what}"]
        parts.append(self.text.rstrip() or "its stacks could not be read")
        parts += [f"a process that loads its data:\n{text.rstrip()}" for text in self.loaders]
        return "\n".join(parts)


class Standing(NamedTuple):
    """Where a worker is, as far as workers are told apart."""

    kind: Kind
    place: str  # "train.py:88", "" where the program has no part in it
    what: str  # the collective


class Verdict(NamedTuple):
    """Who keeps the others waiting, and by what."""

    rank: int
    cause: str
    place: str
    text: str


def parse_stacks(text: str) -> list[list[Frame]]:
    """The threads of a process, each from its innermost frame outwards; the main thread first.

    >>> text = 'Thread 0x1 (most recent call first):\\n  File "/a/train.py", line 8 in main\\n'
    >>> parse_stacks(text)
    [[Frame(file='/a/train.py', line=8, function='main')]]
    """
    threads: list[list[Frame]] = []
    for line in text.splitlines():
        if "(most recent call first)" in line:
            threads.append([])
        elif threads and (found := _FRAME.match(line)):
            number = int(found["line"]) if found["line"].isdigit() else 0
            threads[-1].append(Frame(found["file"], number, found["function"]))
    threads.reverse()  # the oldest is listed last
    is_main = [any(f.file.endswith(_START) or f.function == "<module>" for f in frames) for frames in threads]
    return [frames for _, frames in sorted(zip(is_main, threads, strict=True), key=lambda pair: not pair[0])]


def find_standing(worker: WorkerStack) -> Standing:
    """Where the worker's main thread is."""
    if worker.state in ("T", "t"):
        return Standing("stopped", "", "")
    threads = parse_stacks(worker.text)
    if not threads:
        return Standing("silent", "", "")
    kind, place = find_kind(threads[0])
    if worker.silent_s > worker.held_after_s:
        kind = "held"
    for text in worker.loaders:  # what it waits for may be in one of these
        for frames in parse_stacks(text)[:1]:
            place = next((f.place for f in frames if is_of_program(f.file)), place)
    return Standing(kind, place, worker.doing if kind == "collective" else "")


def find_kind(frames: Sequence[Frame]) -> tuple[Kind, str]:
    """What a thread does, and the innermost line of the program in its stack."""
    place = next((frame.place for frame in frames if is_of_program(frame.file)), "")
    inner = list(takewhile(lambda frame: not is_of_program(frame.file), frames))  # what the program has called
    if any(frame.file.startswith(_WAITS) for frame in inner) and not _is_loading(inner):
        return "collective", place
    return ("loader" if _is_loading(frames) else "code"), place


def _is_loading(frames: Sequence[Frame]) -> bool:
    return any(part in frame.file for frame in frames for part in _LOADERS)


_CAUSES: Mapping[Kind, str] = {
    "loader": "hung loader",
    "code": "hung",
    "held": "held GIL",
    "stopped": "hung",
    "silent": "hung",
}


def judge(workers: Sequence[WorkerStack], gone: Sequence[int] = ()) -> tuple[str, list[Verdict]]:
    """What all workers are doing, in one sentence; and who keeps the others waiting.

    `gone`: ranks whose processes have ended.
    """
    groups = _group(workers)
    parts = [describe_together(group) for group in groups.values()]
    parts += [f"rank {rank} has ended" for rank in gone]
    waiting = [group for standing, group in groups.items() if standing.kind == "collective"]
    verdicts = [
        Verdict(worker.rank, _CAUSES[standing.kind], standing.place, describe_together([worker]))
        for standing, group in groups.items()
        if standing.kind != "collective"
        for worker in group
    ]
    verdicts += [Verdict(rank, "hung", "", f"rank {rank} has ended") for rank in gone]
    if not verdicts and len(waiting) > 1:  # all wait, in different calls: the fewest are out of turn
        fewest = min(waiting[::-1], key=len)
        for worker in fewest:
            place, text = find_standing(worker).place, "; ".join(parts)
            verdicts.append(Verdict(worker.rank, "different collective", place, text))
    if not verdicts and waiting:
        parts.append("every rank waits in the same call: what they send each other does not arrive")
    return "; ".join(parts), verdicts


def _group(workers: Sequence[WorkerStack]) -> dict[Standing, list[WorkerStack]]:
    """Those that are in the same place together; those that wait come first."""
    groups: dict[Standing, list[WorkerStack]] = {}
    for worker in workers:
        groups.setdefault(find_standing(worker), []).append(worker)
    return dict(sorted(groups.items(), key=lambda item: (item[0].kind != "collective", -len(item[1]))))


def describe_together(workers: Sequence[WorkerStack], *, bare: bool = False) -> str:
    """Workers that are in the same place, in words; `bare`: without who they are.

    >>> describe_together([WorkerStack(2, state="T")])
    'rank 2 is stopped (SIGSTOP, or a debugger)'
    """
    standing, many = find_standing(workers[0]), len(workers) > 1
    at = f" at {standing.place}" if standing.place else ""
    said = {
        "collective": f"{'wait' if many else 'waits'} in {standing.what or 'a collective'}{at}",
        "loader": f"{'are' if many else 'is'} in {'their data loaders' if many else 'its data loader'}{at}",
        "code": f"{'are' if many else 'is'} in Python code{at or ' that is not the program' + chr(39) + 's'}",
        "held": f"{'are' if many else 'is'} in native code that holds Python's lock (GIL){at}",
        "stopped": f"{'are' if many else 'is'} stopped (SIGSTOP, or a debugger)",
        "silent": f"{'do' if many else 'does'} not answer",
    }[standing.kind]
    if bare:
        return said
    ranks = [worker.rank for worker in workers]
    listed = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"{len(ranks)} ranks ({listed}) {said}" if many else f"rank {ranks[0]} {said}"


# Asked for by a signal -----------------------------------------------------------------------------------------------


VARIABLE = "UNISONO_STACKS_FD"
# Neither schedulers nor libraries use it. 0 where the system has no such signals: then nobody answers.
SIGNAL = signal.SIGRTMIN + 9 if hasattr(signal, "SIGRTMIN") else 0
_NAME = "unisono-stacks"
_TO_ANSWER_S = 1.0
_LOOK_S = 0.01
_MOST_BYTES = 1 << 20
_MOST_LOADERS = 16  # processes of one worker that are asked


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


class StackFiles:
    """The files into which the workers of one host write their stacks, by place."""

    def __init__(self) -> None:
        self._files: dict[int, StackFile] = {}

    def open(self, place: int) -> int:
        """The descriptor that the next worker in a place is to inherit."""
        if place in self._files:
            self._files[place].close()
        self._files[place] = StackFile()
        return self._files[place].fd

    def gather(self, pids: dict[int, int], page: StatusPage, host: str = "") -> list[WorkerStack]:
        """The stacks of the workers in these places; `pids`: their processes."""
        known = {place: pid for place, pid in pids.items() if place in self._files}
        texts = read_stacks({pid: self._files[place] for place, pid in known.items()})
        found = []
        for place, pid in known.items():
            now, noted = time.monotonic(), page.read(place)
            silent_s = now - noted.heartbeat if noted.heartbeat else 0.0
            worker = WorkerStack(place, pid, host, texts[pid], (), read_state(pid), silent_s, noted.doing, noted.step)
            if find_standing(worker).kind == "loader":
                worker.loaders = self._ask_loaders(place, pid)
            found.append(worker)
        return found

    def _ask_loaders(self, place: int, pid: int) -> list[str]:
        """The processes that load a worker's data were forked from it, with its file: one after the other."""
        children = list_children(pid)[:_MOST_LOADERS]
        texts = [read_stacks({child: self._files[place]}, wait_s=0.2)[child] for child in children]
        return [text for text in texts if text]

    def close(self) -> None:
        """The run is over."""
        for file in self._files.values():
            file.close()
        self._files.clear()


# Where a slow rank spends its time -----------------------------------------------------------------------------------


_MOST_LOOKS = 200


class PlaceSampler:
    """Looks at one thread, every `interval_s`, until it is stopped or has looked often enough."""

    def __init__(self, thread: int, interval_s: float) -> None:
        self._thread, self._interval_s = thread, interval_s
        self._found: Counter[tuple[Kind, str]] = Counter()
        self._stopped = threading.Event()
        self._looker = threading.Thread(target=self._look, name="unisono sampler", daemon=True)
        self._looker.start()

    def stop(self, kind: Kind) -> str:
        """The line of the program where the thread was most often, of those times that it did this; "": never."""
        self._stopped.set()
        self._looker.join()
        counts = {place: count for (what, place), count in self._found.items() if what == kind and place}
        return max(counts, key=lambda place: counts[place]) if counts else ""

    def _look(self) -> None:
        for _ in range(_MOST_LOOKS):
            if self._stopped.wait(self._interval_s):
                return
            frame = sys._current_frames().get(self._thread)
            if frame is None:
                return
            self._found[find_kind(list_frames(frame))] += 1


def list_frames(frame: FrameType | None) -> list[Frame]:
    """A stack, from its innermost frame outwards."""
    found = []
    while isinstance(frame, FrameType):  # CPython 3.11 was seen to give another object for a frame that ends just now
        found.append(Frame(frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name))
        frame = frame.f_back
    return found
