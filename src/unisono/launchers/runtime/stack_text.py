"""What workers are doing, read from the stacks that Python's faulthandler writes: in words, and who keeps the others
waiting.

Every worker is in one of these: a collective, its data loader, other Python code, native code that holds Python's lock
(nothing else of that process runs then), or stopped. Workers that are in the same place are said together.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from unisono.launchers.runtime.frames import is_of_program

__all__ = [
    "SILENT_S",
    "Frame",
    "Kind",
    "Standing",
    "Verdict",
    "WorkerStack",
    "describe_together",
    "find_kind",
    "find_standing",
    "judge",
    "parse_stacks",
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
    threads.sort(key=lambda frames: not _is_main(frames))
    return threads


def _is_main(frames: Sequence[Frame]) -> bool:
    return any(frame.file.endswith(_START) or frame.function == "<module>" for frame in frames)


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
    inner = _above_program(frames)
    if any(frame.file.startswith(_WAITS) for frame in inner) and not _is_loading(inner):
        return "collective", place
    return ("loader" if _is_loading(frames) else "code"), place


def _above_program(frames: Sequence[Frame]) -> list[Frame]:
    """The frames that the program's own innermost one has called."""
    found = []
    for frame in frames:
        if is_of_program(frame.file):
            break
        found.append(frame)
    return found


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
