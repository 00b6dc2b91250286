"""A run whose workers come and go, on this host: starts N, replaces those that are lost, takes in and lets go.

What is decided is decided in coordinator.py; this file has the processes, and the connection to each (the worker's end
is runtime/membership.py).
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from dataclasses import dataclass
from functools import partial

from unisono.launchers.child import Child
from unisono.launchers.coordinator import Action, Coordinator, Dismiss, End, Form, GiveUp, Start, Summon, TooFew
from unisono.launchers.failures import Failure, Outcome
from unisono.launchers.job import Job, TimedOut
from unisono.launchers.local import LocalRun
from unisono.runtime import membership
from unisono.runtime.memfd import anonymous_file

__all__ = ["ElasticRun"]

_LOOK_S = 0.25  # between two looks at heartbeats and steps
_PAGE_NAME = "unisono-meeting-page"


@dataclass
class _Line:
    """The connection to a worker."""

    worker: int  # its number in this run: no two have the same
    child: Child
    sock: socket.socket
    came: float | None = None  # since when it waits
    is_hung: bool = False  # and is being killed for it


class ElasticRun(LocalRun):
    """One run of one job. Ranks in reports, files and the status page are places: a replacement has its former's."""

    def __init__(self, job: Job) -> None:
        assert job.elastic is not None
        super().__init__(job, places=job.elastic.most)
        self.elastic = job.elastic
        self.coordinator = Coordinator(job.workers, job.elastic.least, patience_s=job.elastic.patience_s)
        self._lines: dict[int, _Line] = {}
        self._started = 0
        self._lost_at: dict[int, float] = {}  # place: when its worker was lost
        self._formed_at: float | None = None
        self._looked = time.monotonic()
        self._fresh_since = self._looked  # this process itself was not stopped since
        self._step = -1
        self._losses: list[Failure] = []
        self._heartbeat_s = float(os.environ.get("UNISONO_HEARTBEAT_S", job.elastic.heartbeat_s))
        self._results = anonymous_file("unisono-results")
        self._unwanted: set[int] = set()  # told to end
        self._have_saved = False
        self._given_up: GiveUp | None = None

    # -- start ---------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        super()._start()
        self.coordinator.begin(list(self._lines))

    def _start_worker(self, rank: int) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control_end = theirs.fileno()
        with theirs:
            try:
                super()._start_worker(rank)
            except BaseException:
                ours.close()
                raise
        ours.setblocking(False)
        line = _Line(self._started, self._workers[-1], ours)
        self._lines[line.worker] = line
        self._started += 1
        if self._guard is not None:
            self._guard.add(line.child.process.pid)
        self._selector.register(ours, selectors.EVENT_READ, partial(self._on_message, line))

    def _descriptors(self, rank: int) -> dict[str, int]:
        found = super()._descriptors(rank)
        found |= {membership.VARIABLE: self._control_end, membership.LOG_VARIABLE: self._results}
        if self._is_under_way:
            del found["UNISONO_SHM_FD"]
        return found

    @property
    def _is_under_way(self) -> bool:
        """Whether a worker that is started now comes later than the first."""
        return bool(self.coordinator.members)

    def _environment(self, rank: int) -> dict[str, str]:
        env = super()._environment(rank)
        env["UNISONO_PLACE"] = str(rank)
        if self._is_under_way:
            size = len(self.coordinator.members)
            env.update(RANK=str(size), WORLD_SIZE=str(size + 1), LOCAL_RANK=str(size), LOCAL_WORLD_SIZE=str(size + 1))
            env[membership.JOINING] = "1"
        return env

    # -- watch ---------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while any(worker.exited is None for worker in self._workers):
            if self._step < 0 and any(worker.failure for worker in self._workers):
                return super()._watch()
            now = time.monotonic()
            if self.job.timeout_s is not None and now >= self._begin + self.job.timeout_s:
                raise TimedOut(self._activities(now))
            for action in self.coordinator.decide(now):
                self._act(action)
            if self._given_up is not None:
                return
            self._look(now)
            self._pump(_LOOK_S)

    def _act(self, action: Action) -> None:
        match action:
            case Start(count):
                for _ in range(count):
                    taken = {line.child.rank for line in self._lines.values()}
                    place = next(place for place in range(self.elastic.most) if place not in taken)
                    self._page.clear(place)
                    self._start_worker(place)
                    self.coordinator.started(self._started - 1)
            case Summon(generation):
                self._page.summon(generation)
            case Form(generation, workers):
                self._form(generation, workers)
            case End(worker):
                self._unwanted.add(worker)
                self._lines[worker].child.send(signal.SIGKILL)
            case Dismiss(worker):
                self._unwanted.add(worker)
                membership.send(self._lines[worker].sock, {"kind": "leave"})
            case TooFew(left):
                self.output.say(
                    f"unisono: {left} of at least {self.elastic.least} workers are left, and no other came within "
                    f"{self.elastic.patience_s:g} s: they save and leave"
                )
                if not self.preempt():
                    self._given_up = GiveUp(
                        f"{left} of at least {self.elastic.least} workers are left, and no other came within "
                        f"{self.elastic.patience_s:g} s; the program does not save by itself (un.preempted, un.Trainer)"
                    )
            case GiveUp():
                self._given_up = action

    def _form(self, generation: int, workers: tuple[int, ...]) -> None:
        page = anonymous_file(_PAGE_NAME)
        pids = [self._lines[worker].child.process.pid for worker in workers]
        try:
            for rank, worker in enumerate(workers):
                message = {"kind": "go", "generation": generation, "rank": rank, "size": len(workers), "pids": pids}
                self._lines[worker].came = None
                self._tell(self._lines[worker], message, page)
        finally:
            os.close(page)
        self._formed_at = time.monotonic()
        self.output.say(f"unisono: {len(workers)} workers go on{self._describe_losses()}")

    def _tell(self, line: _Line, message: dict[str, object], page: int) -> None:
        try:
            membership.send(line.sock, message, (page,))
        except OSError:
            return  # it has died, and its end will be noticed

    def _describe_losses(self) -> str:
        if not self._lost_at:
            return ""
        first = min(self._lost_at.values())
        self._lost_at.clear()
        return f", {time.monotonic() - first:.2f} s after the loss"

    def _on_message(self, line: _Line) -> None:
        message, _ = membership.receive(line.sock)
        if message is None:
            self._selector.unregister(line.sock)
        elif message["kind"] == "come":
            line.came = time.monotonic()
            self.coordinator.came(line.worker, is_open=message["open"])
        elif message["kind"] == "settled":
            self.coordinator.settled(line.worker)

    def _look(self, now: float) -> None:
        """Steps, and workers that stand still: killed, and then replaced as any other that was lost."""
        if now - self._looked > 4 * _LOOK_S + 1.0:  # this process was stopped, perhaps with all of them
            self._fresh_since = now
        self._looked = now
        step = self._find_step()
        if step > self._step:
            self._step = step
            self.coordinator.advanced()
        some_wait = [line.came for line in self._lines.values() if line.came is not None]
        for line in list(self._lines.values()):
            beat = self._page.read(line.child.rank).heartbeat
            silent_s = now - max(beat, self._fresh_since) if beat else 0.0
            waited_s = now - min(some_wait) if some_wait and line.came is None else 0.0
            if line.child.exited is not None or line.worker not in self.coordinator.members:
                continue
            if silent_s > self._heartbeat_s:
                self._end_hung(line, f"has stood still for {silent_s:.0f} s (SIGSTOP, or no time to run)")
            elif waited_s > self.elastic.stuck_s:
                self._end_hung(line, f"did not come for {waited_s:.0f} s while others waited")

    def _end_hung(self, line: _Line, why: str) -> None:
        if line.is_hung:
            return
        line.is_hung = True
        self.output.say(f"unisono: worker {line.child.rank} (process {line.child.process.pid}) {why}: it is replaced")
        line.child.send(signal.SIGKILL)

    def _find_step(self) -> int:
        found = [self._page.read(line.child.rank).step for line in self._lines.values()]
        return max((step for step in found if step is not None), default=-1)

    def _on_exit(self, worker: Child) -> None:
        super()._on_exit(worker)
        line = next((line for line in self._lines.values() if line.child is worker), None)
        if worker.exited is None or line is None or self._stop_time is not None:
            return
        if self._step < 0 and worker.failure is not None:
            return  # before the first step: the program is wrong, and the run ends as any other
        if line.worker in self._unwanted:
            self._unwanted.discard(line.worker)
            self._retire(line)
            return
        well = worker.failure is None
        was_member = line.worker in self.coordinator.members
        self.coordinator.ended(line.worker, well=well)
        if worker.failure is not None:
            self._note_loss(worker, was_member)
        self._retire(line)

    def _note_loss(self, worker: Child, was_member: bool) -> None:
        assert worker.failure is not None
        self._losses.append(worker.failure)
        del self._losses[:-100]
        if was_member:
            self._lost_at[worker.rank] = worker.failure.time
        what = "worker" if was_member else "a worker that was to join as"
        status = self._activity(worker.rank, worker.failure.time)
        details = f" ({status})" if status else ""
        text = f"unisono: {what} {worker.rank} (process {worker.process.pid}) was lost: {worker.failure.headline}{details}"
        if worker.failure.traceback:
            text += "\n" + worker.failure.traceback.rstrip("\n")
        self.output.say(text)

    def _retire(self, line: _Line) -> None:
        """Let go of all that this process has of a worker that has ended; others of its group end too."""
        child = line.child
        child.process.send_group(signal.SIGKILL)
        for fd in (child.report_fd, *child.stream_fds()):
            if fd in self._selector.get_map():
                self._selector.unregister(fd)
        if line.sock in self._selector.get_map():
            self._selector.unregister(line.sock)
        line.sock.close()
        del self._lines[line.worker]
        self._have_saved = self._have_saved or child.preempted
        self._workers.remove(child)
        child.close()

    # -- clean up ------------------------------------------------------------------------------------------------------

    def _clean_up(self, patience_s: float) -> None:
        super()._clean_up(patience_s)
        for line in self._lines.values():
            line.sock.close()
        os.close(self._results)

    # -- the report ----------------------------------------------------------------------------------------------------

    def _outcome(self) -> Outcome:
        if self._given_up is None and self._have_saved:
            return Outcome(step=self._step, preempted=True)
        if self._given_up is None:
            return super()._outcome()
        lines = [f"unisono: the run has failed: {self._given_up.why}"]
        lines += [f"  worker {loss.rank}: {loss.headline}" for loss in self._losses[-10:]]
        last = self._losses[-1] if self._losses else Failure(0, time.monotonic(), "lost", 1)
        return Outcome(last, "\n".join(lines), self._step)
