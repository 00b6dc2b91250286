"""Workers that come and go, on this host: those that are lost are replaced, others are taken in and let go.

What is decided is decided in coordinator.py. This file has the connection to each worker (whose end is
runtime/membership.py), and does what was decided through the run that starts and ends the processes (local.py).
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from unisono.launchers.child import Child
from unisono.launchers.control import Control
from unisono.launchers.coordinator import Action, Coordinator, Dismiss, End, Form, GiveUp, Start, Summon, TooFew
from unisono.launchers.debugging import RunDebugger
from unisono.launchers.failures import Failure, Outcome, fail_run
from unisono.launchers.job import ComeAndGo
from unisono.launchers.output import Output
from unisono.launchers.private_folder import NotPrivate
from unisono.launchers.scaling import Scaling
from unisono.runtime import membership
from unisono.runtime.memfd import anonymous_file
from unisono.runtime.status import StatusPage

__all__ = ["Line", "Members", "Starter"]

LOOK_S = 0.25  # between two looks at heartbeats and steps
LEAVE_S = 300.0  # that a process may take to end, when its program has ended well
_PAGE_NAME = "unisono-meeting-page"


class Starter(Protocol):
    """The run, as far as it matters here."""

    output: Output
    page: StatusPage
    selector: selectors.BaseSelector
    debugger: RunDebugger

    def start_worker(self, place: int) -> None:
        """Start a worker; `Members.opened` is called with it."""

    def let_go(self, worker: Child) -> None:
        """Let go of a worker that has ended; others of its group end too."""

    def preempt(self) -> bool:
        """Tell the workers that asked for it to save and leave; False where none did."""

    def describe_activity(self, place: int, now: float) -> str:
        """What a worker last noted, in words."""

    def tell_stacks(self) -> dict[str, Any]:
        """What all workers are doing, for who asks."""

    def describe_stack(self, worker: Child) -> str:
        """What a worker is doing, by its stacks."""

    def note(self, kind: str, **values: object) -> None:
        """Something happened: an event of the run's record, where there is one."""


@dataclass
class Line:
    """The connection to a worker."""

    worker: int  # its number in this run: no two have the same
    child: Child
    sock: socket.socket
    came: float | None = None  # since when it waits
    is_hung: bool = False  # and is being killed for it
    leaves: float | None = None  # since when its program has ended well


class Members:
    """The workers of one run. Ranks in reports, files and on the status page are places: a replacement has its
    former's."""

    def __init__(self, elastic: ComeAndGo, workers: int, starter: Starter, program: str) -> None:
        self.elastic, self._starter = elastic, starter
        self.coordinator = Coordinator(workers, elastic.least, patience_s=elastic.patience_s)
        self._scaling = Scaling(self.coordinator, elastic, program, starter.output.say)
        self._control = Control(starter.selector, self._answer)
        self.lines: dict[int, Line] = {}
        self.step = -1  # the furthest that any has come
        self.given_up: GiveUp | None = None
        self.look_s = LOOK_S if elastic.adapt is None else min(LOOK_S, max(0.02, elastic.adapt.window_s))
        self._started = 0
        self._lost_at: dict[int, float] = {}  # place: when its worker was lost
        self._looked = self._fresh_since = time.monotonic()  # since when this process itself was not stopped
        self._losses: list[Failure] = []
        self._heartbeat_s = float(os.environ.get("UNISONO_HEARTBEAT_S", elastic.heartbeat_s))
        self._results = anonymous_file("unisono-results")
        self._unwanted: set[int] = set()  # told to end
        self._have_saved = False
        self._failed_late = ""  # how, if a process did after its program
        self._ends: tuple[socket.socket, socket.socket] | None = None  # of the line to a worker that is being started

    # -- start ---------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """The first workers have been started."""
        self.coordinator.begin(list(self.lines))
        try:
            self._control.open()
        except (OSError, NotPrivate) as error:
            self._starter.output.say(f"unisono: `unisono scale` and `unisono stacks` cannot reach this run: {error}")

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        return self._starter.tell_stacks() if request.get("do") == "stacks" else self._scaling.answer(request)

    @property
    def is_under_way(self) -> bool:
        """Whether a worker that is started now comes later than the first."""
        return bool(self.coordinator.members)

    def open_line(self) -> dict[str, int]:
        """What the next worker is to inherit, beside what all do."""
        self._ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return {membership.VARIABLE: self._ends[1].fileno(), membership.LOG_VARIABLE: self._results}

    def opened(self, child: Child | None) -> None:
        """It has been started (None: could not be)."""
        assert self._ends is not None
        (ours, theirs), self._ends = self._ends, None
        theirs.close()
        if child is None:
            ours.close()
            return
        ours.setblocking(False)
        line = Line(self._started, child, ours)
        self._started += 1
        self.lines[line.worker] = line
        self._starter.selector.register(ours, selectors.EVENT_READ, partial(self._on_message, line))
        if self.is_under_way:
            self.coordinator.started(line.worker)

    def environment(self, place: int) -> dict[str, str]:
        """What the next worker is to know, beside what all do."""
        env = {"UNISONO_PLACE": str(place)}
        if self.is_under_way:
            size = len(self.coordinator.members)
            env.update(RANK=str(size), WORLD_SIZE=str(size + 1), LOCAL_RANK=str(size), LOCAL_WORLD_SIZE=str(size + 1))
            env[membership.JOINING] = "1"
        return env

    # -- watch ---------------------------------------------------------------------------------------------------------

    def act(self) -> bool:
        """Do what is to be done now; False where the run has failed."""
        now = time.monotonic()
        for action in self.coordinator.decide(now):
            self._do(action)
        if self.given_up is None:
            self._look(now)
        return self.given_up is None

    def _do(self, action: Action) -> None:
        match action:
            case Start(count):
                for place in self._find_places()[:count]:
                    self._starter.page.clear(place)
                    self._starter.start_worker(place)
            case Summon(generation):
                self._starter.page.request_regroup(generation)
            case Form(generation, workers):
                self._form(generation, workers)
            case End(worker):
                self._unwanted.add(worker)
                self.lines[worker].child.send(signal.SIGKILL)
            case Dismiss(worker):
                self._unwanted.add(worker)
                self._tell(self.lines[worker], {"kind": "leave"})
            case TooFew(left):
                why = self.elastic.describe_shortage(left)
                self._starter.output.say(f"unisono: {why}: they save and leave")
                if not self._starter.preempt():
                    self.given_up = GiveUp(f"{why}; the program does not save by itself (un.preempted, un.Trainer)")
            case GiveUp():
                self.given_up = action

    def _find_places(self) -> list[int]:
        """Where workers can be started now: one that leaves has its place until it has ended. The coordinator asks
        again. Before the first step there are none: a newcomer would not find what the others have done."""
        if self.step < 0:
            return []
        taken = {line.child.rank for line in self.lines.values()}
        return [place for place in range(self.elastic.most) if place not in taken]

    def _form(self, generation: int, workers: tuple[int, ...]) -> None:
        page = anonymous_file(_PAGE_NAME)
        pids = [self.lines[worker].child.process.pid for worker in workers]
        try:
            for rank, worker in enumerate(workers):
                message = {"kind": "go", "generation": generation, "rank": rank, "size": len(workers), "pids": pids}
                self._tell(self.lines[worker], message, page)
        finally:
            os.close(page)
        who = "1 worker goes" if len(workers) == 1 else f"{len(workers)} workers go"
        self._starter.output.say(f"unisono: {who} on{self._describe_losses()}")
        self._starter.note("world", generation=generation, size=len(workers))

    def _tell(self, line: Line, message: dict[str, object], *fds: int) -> None:
        """Answer a worker that waits."""
        line.came = None
        try:
            membership.send(line.sock, message, fds)
        except OSError:
            return  # it has died, and its end will be noticed

    def _describe_losses(self) -> str:
        if not self._lost_at:
            return ""
        first = min(self._lost_at.values())
        self._lost_at.clear()
        return f", {time.monotonic() - first:.2f} s after the loss"

    def _on_message(self, line: Line) -> None:
        message, _ = membership.receive(line.sock)
        if message is None:
            self._starter.selector.unregister(line.sock)
        elif message["kind"] == "come":
            line.came = time.monotonic()
            self.coordinator.came(line.worker, is_open=message["open"])
        elif message["kind"] == "settled":
            self.coordinator.settled(line.worker)

    def _look(self, now: float) -> None:
        """Steps, and workers that stand still: killed, and then replaced as any other that was lost."""
        if now - self._looked > 4 * LOOK_S + 1.0:  # this process was stopped, perhaps with all of them
            self._fresh_since = now
        self._looked = now
        if self._starter.debugger.is_paused:
            self._fresh_since = now
        self._note_step()
        if self.coordinator.members:
            first = self._starter.page.read(self.lines[self.coordinator.members[0]].child.rank)
            self._scaling.look(first.step, first.step_at)
        some_wait = [line.came for line in self.lines.values() if line.came is not None]
        for line in list(self.lines.values()):
            beat = self._starter.page.read(line.child.rank).heartbeat
            silent_s = now - max(beat, self._fresh_since) if beat else 0.0
            waited_s = now - max(min(some_wait), self._fresh_since) if some_wait and line.came is None else 0.0
            if line.leaves is not None and now - max(line.leaves, self._fresh_since) > LEAVE_S:
                self._end_leaving(line)
            is_over = line.child.exited is not None or line.child.preempted
            if is_over or line.worker not in self.coordinator.members:
                continue
            if silent_s > self._heartbeat_s:
                self._end_hung(line, f"has stood still for {silent_s:.0f} s (SIGSTOP, or no time to run)")
            elif waited_s > self.elastic.stuck_s:
                self._end_hung(line, f"did not come for {waited_s:.0f} s while others waited")

    def _end_hung(self, line: Line, why: str) -> None:
        if line.is_hung:
            return
        line.is_hung = True
        doing = self._starter.describe_stack(line.child)
        self._starter.output.say(
            f"unisono: worker {line.child.rank} (process {line.child.process.pid}) {why}: {doing}; it is replaced"
        )
        line.child.send(signal.SIGKILL)

    def _end_leaving(self, line: Line) -> None:
        """Its program has ended well: that its process does not end is no failure."""
        if not line.child.is_overdue:
            line.child.is_overdue = True
            who = f"worker {line.child.rank} (process {line.child.process.pid})"
            self._starter.output.say(
                f"unisono: {who} has ended its program, but its process has not ended for {LEAVE_S:.0f} s since: "
                f"{self._starter.describe_stack(line.child)}; it is killed, and counts as ended"
            )
            line.child.send(signal.SIGKILL)

    def on_done(self, worker: Child) -> None:
        """The program of a worker has ended well. Nobody waits for it any more, nor for its heartbeat: its process may
        take long to end."""
        line = next((line for line in self.lines.values() if line.child is worker), None)
        self._note_step()
        if line is not None and self.step >= 0:
            line.leaves = time.monotonic()
            self.coordinator.ended(line.worker, well=True)

    def _note_step(self) -> None:
        found = [self._starter.page.read(line.child.rank).step for line in self.lines.values()]
        step = max((step for step in found if step is not None), default=-1)
        if step > self.step:
            self.step = step
            self.coordinator.advanced(step)

    def on_exit(self, worker: Child) -> None:
        """A worker has ended. Before the first step the program is wrong, and the run ends as any other."""
        line = next((line for line in self.lines.values() if line.child is worker), None)
        if line is None:
            return
        self._note_step()  # it may have been made since the last look
        if line.worker in self._unwanted:
            self._unwanted.discard(line.worker)
        elif self.step < 0 and worker.failure is not None:
            return
        else:
            was_member = line.worker in self.coordinator.members or line.leaves is not None
            self.coordinator.ended(line.worker, well=worker.failure is None)
            if worker.failure is not None:
                self._note_loss(worker, was_member)
                if line.leaves is not None:
                    self._failed_late = "a worker failed as its process ended, after its program"
        self._retire(line)

    def _note_loss(self, worker: Child, was_member: bool) -> None:
        assert worker.failure is not None
        self._losses.append(worker.failure)
        del self._losses[:-100]
        if was_member:
            self._lost_at[worker.rank] = worker.failure.time
        what = "worker" if was_member else "a worker that was to join as"
        status = self._starter.describe_activity(worker.rank, worker.failure.time)
        details = f" ({status})" if status else ""
        text = (
            f"unisono: {what} {worker.rank} (process {worker.process.pid}) was lost: {worker.failure.headline}{details}"
        )
        if worker.failure.traceback:
            text += "\n" + worker.failure.traceback.rstrip("\n")
        self._starter.output.say(text)

    def _retire(self, line: Line) -> None:
        if line.sock in self._starter.selector.get_map():
            self._starter.selector.unregister(line.sock)
        line.sock.close()
        del self.lines[line.worker]
        self._have_saved = self._have_saved or line.child.preempted
        self._starter.let_go(line.child)

    # -- the end -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """The run is over."""
        self._control.close()
        for line in self.lines.values():
            line.sock.close()
        os.close(self._results)

    def find_outcome(self) -> Outcome | None:
        """How the run ended, where it did not as any other."""
        why = self._failed_late if self.given_up is None else self.given_up.why
        if why:
            return fail_run(why, self._losses, self.step)
        return Outcome(step=self.step, preempted=True) if self._have_saved else None
