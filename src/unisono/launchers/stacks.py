"""Every worker's stacks, read by the launcher: where a collective takes too long, and when somebody asks.

- `StackFiles`: the files of this host's workers, and what is read from them;
- `HangReports`: what is said about a hang, once when it has lasted for a quarter of the time after which ranks give up,
  and once before they do;
- `ask_for_stacks`: asks the launcher of a run (`unisono stacks`, the live page).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from unisono.launchers.control import Gone, ask_anything
from unisono.launchers.job import Job
from unisono.launchers.runtime.run_folder import NoSuchRun, find_run, is_running, read_run
from unisono.launchers.runtime.stack_dump import StackFile, list_children, read_stacks, read_state
from unisono.launchers.runtime.stack_text import SILENT_S, Verdict, WorkerStack, find_standing, judge
from unisono.launchers.runtime.status import StatusPage

__all__ = ["HangReports", "StackFiles", "answer_stacks", "ask_for_report", "ask_for_stacks", "find_launcher"]

_MOST_LOADERS = 16  # processes of one worker that are asked
_MOST_TEXT = 64 << 10  # characters of one worker's stacks in an answer


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


# The asking side ------------------------------------------------------------------------------------------------------


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
