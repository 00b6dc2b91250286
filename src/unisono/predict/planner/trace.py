"""A step taken apart while it runs: who handed over which job, who waited for it, and what it sent.

The program is every thread that runs no job of a queue. Its clock stands still while it waits.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import fmean, median, variance
from typing import Literal, NamedTuple

from unisono.predict.costs import Anatomy, Job, Operation
from unisono.predict.costs.network import Among

_PROGRAM = 0
_SHORT_S = 2e-6  # work that is not worth a job of its own


class _Event(NamedTuple):
    """In the program or in a job. A wait lasts; an operation too, which counts as no time."""

    kind: Literal["submit", "wait", "operation"]
    began: float
    ended: float
    job: int = 0
    operation: Operation | None = None


@dataclass
class _Context:
    """The program, or one job: what happened in it, in order."""

    began: float = math.nan
    ended: float = math.nan
    submitted: float = math.nan
    is_message: bool = False  # a job that does nothing but move bytes
    events: list[_Event] = field(default_factory=list)


@dataclass(frozen=True)
class TracedStep:
    """One step: what the program computed, the jobs beside it, and how long all took with communication for nothing."""

    compute_s: float
    wall_s: float
    jobs: tuple[Job, ...]


class Trace:
    """Follows queues (`background.JobWatch`) and the operations of a `SilentTransport`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._contexts: dict[int, _Context] = {_PROGRAM: _Context()}
        self._number = 0
        self._inside = threading.local()

    # Called while the step runs ----------------------------------------------------------------------------------

    def _current(self) -> int:
        stack: list[int] = getattr(self._inside, "stack", [])
        return stack[-1] if stack else _PROGRAM

    def _note(self, event: _Event) -> None:
        with self._lock:
            context = self._contexts.get(self._current())
            if context is not None:
                context.events.append(event)

    def submit(self, *, moves: bool) -> int:
        now = time.perf_counter()
        with self._lock:
            self._number += 1
            number = self._number
            self._contexts[number] = _Context(submitted=now, is_message=moves)
        self._note(_Event("submit", now, now, number))
        return number

    @contextmanager
    def run(self, job: int) -> Iterator[None]:
        stack = self._inside.__dict__.setdefault("stack", [])
        stack.append(job)
        context = self._contexts.get(job)
        if context is not None:
            context.began = time.perf_counter()
        try:
            yield
        finally:
            if context is not None:
                context.ended = time.perf_counter()
            stack.pop()

    @contextmanager
    def wait(self, job: int) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._note(_Event("wait", began, time.perf_counter(), job))

    def listen(self, op: str, nbytes: int, among: Among, began: float, ended: float) -> None:
        """Called by the silent transport for every operation."""
        self._note(_Event("operation", began, ended, operation=Operation(op, nbytes, among)))

    # Step by step ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """A step begins: what was before is forgotten, but for jobs that are not done or not waited for yet."""
        with self._lock:
            waited = {e.job for c in self._contexts.values() for e in c.events if e.kind == "wait"}
            keep = {n: c for n, c in self._contexts.items() if n != _PROGRAM and n not in waited}
            self._contexts = {_PROGRAM: _Context(began=time.perf_counter()), **keep}

    def stop(self) -> TracedStep:
        """End the step, and give it taken apart."""
        now = time.perf_counter()
        with self._lock:
            contexts = {
                n: replace(c, events=sorted(c.events, key=lambda e: e.began)) for n, c in self._contexts.items()
            }
        contexts[_PROGRAM].ended = now
        return _Compiler(contexts).compile()


class _Compiler:
    """Turns the events of a step into jobs on the exchange lane."""

    def __init__(self, contexts: dict[int, _Context]) -> None:
        self._contexts = contexts
        self._program = contexts[_PROGRAM]
        self._jobs: list[Job] = []
        self._issued: dict[int, int] = {}  # the place, in _jobs, of the job that sent a message
        self._last: dict[int, int] = {}  # the place of a queue's job, or of its last piece

    def compile(self) -> TracedStep:
        program = self._program
        at = {event: self._clock(event.began) for event in program.events}
        handed = {event.job: event for event in program.events if event.kind == "submit"}
        due = {event.job: at[event] for event in reversed(program.events) if event.kind == "wait"}
        entries: list[tuple[float, int, _Event | None]] = [
            (event.began, _PROGRAM, event) for event in program.events if event.kind == "operation"
        ]
        for number in due:  # what is not waited for here is waited for in the next step, as this one's predecessor's is
            context = self._contexts.get(number)
            if context is None or math.isnan(context.ended):
                continue
            began = context.submitted if context.is_message else context.began
            entries.append((max(began, program.began), number, None))
        ready = {number: at[event] for number, event in handed.items()}
        for _, number, event in sorted(entries, key=lambda entry: entry[0]):
            if event is not None and event.operation is not None:
                self._jobs.append(Job(at[event], 0.0, (event.operation,), at[event]))
            elif self._is_message(number):
                self._issued[number] = self._last[number] = len(self._jobs)
                self._jobs.append(Job(ready.get(number, 0.0), 0.0, self._operations(number), behind=True))
            else:
                self._add_pieces(number, ready.get(number, 0.0))
        for number, place in self._last.items():
            self._jobs[place] = replace(self._jobs[place], due_s=due.get(number, math.inf))
        return TracedStep(self._clock(program.ended), program.ended - program.began, tuple(self._jobs))

    def _clock(self, when: float) -> float:
        """The program's own time at a moment: without what it waited for, and without operations."""
        stood = 0.0
        for event in self._program.events:
            if event.kind != "submit":
                stood += max(0.0, min(event.ended, when) - event.began)
        return when - self._program.began - stood

    def _is_message(self, job: int) -> bool:
        context = self._contexts.get(job)
        return context is not None and context.is_message

    def _operations(self, job: int) -> tuple[Operation, ...]:
        return tuple(e.operation for e in self._contexts[job].events if e.operation is not None)

    def _add_pieces(self, number: int, ready: float) -> None:
        """A queue's job in pieces, each of which ends where something is sent."""
        context = self._contexts[number]
        work, since, awaits = 0.0, context.began, None

        def add(operations: tuple[Operation, ...], *, behind: bool) -> None:
            nonlocal work, awaits
            self._last[number] = len(self._jobs)
            self._jobs.append(Job(ready, work, operations, behind=behind, awaits=awaits))
            work, awaits = 0.0, None

        for event in context.events:
            work += max(0.0, event.began - since)
            since = event.ended
            if event.operation is not None:
                add((event.operation,), behind=False)
            elif event.kind == "submit" and self._is_message(event.job):
                self._issued[event.job] = len(self._jobs)
                add(self._operations(event.job), behind=True)
            elif event.kind == "wait" and event.job in self._issued:
                if work > _SHORT_S:
                    add((), behind=False)
                awaits = max(awaits or 0, self._issued[event.job])
        work += max(0.0, context.ended - since)
        if work > _SHORT_S or awaits is not None or number not in self._last:
            add((), behind=False)


_FEWEST = 4  # methods from which on something can be said
_CLEAR = 3.0  # standard errors: a difference beyond that is no chance
_MEDIAN = 1.57  # the variance of a median over that of a mean
_DEVIATION = 1.4826  # a standard deviation over a median distance from the middle


def steady(anatomies: Sequence[Anatomy]) -> list[Anatomy]:
    """The same with less chance in `compute_s`; times of jobs move along.

    >>> steps = [(0.10, 0.12, 0.11), (0.09, 0.11, 0.13), (0.11, 0.10, 0.12), (0.08, 0.09, 0.085)]
    >>> some = [Anatomy(f"m{i}", 1, sorted(s)[1], samples_s=s) for i, s in enumerate(steps)]
    >>> [round(each.compute_s, 3) for each in steady(some)]
    [0.11, 0.11, 0.11, 0.085]
    """
    series = [_slowest(each) for each in anatomies]
    spread = [variance(steps) for steps in series if len(steps) > 1]
    if len(anatomies) < _FEWEST or not spread:
        return list(anatomies)
    own = [median(steps) for steps in series]
    chance = [_MEDIAN * (variance(s) if len(s) > 1 else fmean(spread)) / len(s) for s in series]
    centre, typical = median(own), fmean(chance)
    apart = (_DEVIATION * median(abs(each - centre) for each in own)) ** 2
    real = max(0.0, apart - typical)
    steadied = []
    for anatomy, mine, error in zip(anatomies, own, chance, strict=True):
        error = (error + typical) / 2  # of three steps' own spread little is known
        share = real / (real + error) if real + error else 1.0
        if (mine - centre) ** 2 > _CLEAR**2 * error:
            share = 1.0
        steadied.append(anatomy.slowed((centre + share * (mine - centre)) / mine, work=1.0))
    return steadied


def _slowest(anatomy: Anatomy) -> list[float]:
    """Of every step, the rank that computed longest. Samples are by rank, then by step."""
    steps = len(anatomy.samples_s) // anatomy.ranks
    return [max(anatomy.samples_s[step::steps]) for step in range(steps)]
