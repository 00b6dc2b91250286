"""Work in the background: a serial queue runs its jobs one after the other on a thread, or on that of who waits."""

from __future__ import annotations

import atexit
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Generic, Literal, Protocol, TypeVar, cast

T = TypeVar("T")


class JobWatch(Protocol):
    """Observer of the jobs of queues: which thread submits, runs and waits for them, and when."""

    def submit(self, *, moves: bool) -> int:
        """Called when a job is submitted; returns a number for it. `moves`: the job only moves bytes."""

    def run(self, job: int) -> AbstractContextManager[None]:
        """Context around the run of a job."""

    def wait(self, job: int) -> AbstractContextManager[None]:
        """Context around the wait for a job."""


class _Thread(threading.local):
    is_queue = False
    is_rank = False
    watch: JobWatch | None = None  # follows the queues that are made in this thread, and in their threads


_thread = _Thread()


LONG_S = 5.0
_watchers: list[Callable[[bool], None]] = []


def watch_long_waits(call: Callable[[bool], None]) -> None:
    """`call(True)` when a thread of the program has waited for long, in that thread, and `call(False)` after it."""
    _watchers.append(call)


class LongWait:
    """A wait that watchers are told of if it takes long: call `check()` now and then, `end()` after it."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._is_long = False

    def check(self) -> None:
        """Tell the watchers, once this has taken long; a queue's own thread is none of the program's."""
        if not self._is_long and not in_background() and time.monotonic() - self._began > LONG_S:
            self._is_long = True
            for call in _watchers:
                call(True)

    def end(self) -> None:
        """Tell the watchers that the wait is over."""
        if self._is_long:
            for call in _watchers:
                call(False)


def in_background() -> bool:
    """Whether this thread is a queue's own: the program does not stand still while it waits."""
    return _thread.is_queue


def be_among_ranks(is_rank: bool) -> None:
    """Say whether this thread runs the program of one of several ranks that are threads of this process."""
    _thread.is_rank = is_rank


def is_among_ranks() -> bool:
    """Whether it does: then others may draw random numbers of this process at any time."""
    return _thread.is_rank


@contextmanager
def watched_by(watch: JobWatch) -> Iterator[None]:
    """Queues made inside, in this thread, are followed by `watch`, as long as they live."""
    before, _thread.watch = _thread.watch, watch
    try:
        yield
    finally:
        _thread.watch = before


class Handle(Generic[T]):
    """A result that may still be on its way.

    `wait()` blocks until it has arrived and returns it, or raises the error; `done()` tells without blocking.
    """

    __slots__ = ("_error", "_finish", "_ready", "_value")

    def __init__(self, finish: Callable[[], T] | None, ready: Callable[[], bool] = lambda: True) -> None:
        self._finish = finish
        self._ready = ready
        self._value: T | None = None
        self._error: Exception | None = None

    @classmethod
    def of(cls, value: T) -> Handle[T]:
        """A handle of a value that is already there."""
        handle: Handle[T] = cls(None)
        handle._value = value
        return handle

    def done(self) -> bool:
        """Whether `wait()` would return at once."""
        return self._finish is None or self._ready()

    def wait(self) -> T:
        """The result; raises the error of the operation, again at each call."""
        finish = self._finish
        if finish is not None:
            try:
                self._value = finish()
            except Exception as error:  # not Ctrl-C: that is no result, and a later wait may still get one
                self._error = error
            self._finish = None
        if self._error is not None:
            raise self._error
        return cast(T, self._value)


class _Job:
    """One piece of work in a queue."""

    __slots__ = ("_run", "_watch", "after", "error", "finished", "number", "value", "waiter")

    def __init__(
        self,
        run: Callable[[], Any],
        watch: JobWatch | None,
        moves: bool,
        after: Callable[[], None] | None,
        waiter: int | None,
    ) -> None:
        """`waiter`: the thread that is sure to wait for it."""
        self._run, self._watch, self.after, self.waiter = run, watch, after, waiter
        self.number = watch.submit(moves=moves) if watch is not None else 0
        self.value: Any = None
        self.error: BaseException | None = None
        self.finished = threading.Event()

    def __call__(self) -> None:
        try:
            if self._watch is None:
                self.value = self._run()
            else:
                with self._watch.run(self.number):
                    self.value = self._run()
        except BaseException as error:
            self.error = error
            if not isinstance(error, Exception):  # Ctrl-C is for the thread that runs the job, whoever waits for it
                raise
        finally:
            del self._run
            self.finished.set()


Wakes = bool | Literal["soon"]
SOON_S = 0.002  # after which a job that nobody waits for is run by the thread
_ALERT_S = 0.05  # since the last such job: so long the thread looks by itself, which costs less than to call it


class SerialQueue:
    """A queue with one thread, started at the first job; a thread that waits for a job runs the queue itself.

    Jobs run strictly in the order given, whoever runs them: collectives then meet in one order on every rank.
    `moves`: its jobs do nothing but move bytes.
    """

    def __init__(self, name: str, *, moves: bool = False) -> None:
        self.name, self._moves = name, moves
        self._closed = False
        self._watch = _thread.watch
        self.begin_anew()
        _queues.add(self)

    def begin_anew(self) -> None:
        """Reset to no jobs and no thread: at first, and in a forked child, which does not have the thread."""
        self._jobs: deque[_Job] = deque()
        self._signal = threading.Condition()
        self._running = threading.Lock()
        self._thread: threading.Thread | None = None
        self._due = math.inf  # when the thread is to run what is queued
        self._last_soon = -math.inf
        self._is_alert = False  # the thread looks by itself

    def submit(
        self, run: Callable[[], T], *, after: Callable[[], None] | None = None, wakes: Wakes = True
    ) -> Handle[T]:
        """Queue `run`; its handle gives the result.

        `after` is called once it has run, where the next job may run already. `wakes=False`: the caller waits for it
        right away, and so runs it. "soon": it is likely to, before the thread would have woken up; if it does not, the
        thread runs it some milliseconds later.
        """
        job = _Job(run, self._watch, self._moves, after, None if wakes else threading.get_ident())
        with self._signal:
            if self._closed:
                raise RuntimeError(f"{self.name} is closed: nothing more can be sent through it")
            self._jobs.append(job)
            if wakes == "soon":
                self._last_soon = time.monotonic()
                self._due = min(self._due, self._last_soon + SOON_S)
                if not self._is_alert:
                    self._call_thread()
        if wakes is True:
            self.wake()
        return Handle(lambda: self._result(job), job.finished.is_set)

    def try_run(self, run: Callable[[], None], when: Callable[[], bool] = lambda: True) -> bool:
        """Run a job in this thread if none is queued or running and `when()` allows it; whether it was run."""
        if self._jobs or self._watch is not None or not self._running.acquire(blocking=False):
            return False
        try:
            if self._jobs or self._closed or not when():
                return False
            run()
            return True
        finally:
            self._running.release()

    def wake(self) -> None:
        """Have the thread run what is queued."""
        with self._signal:
            self._due = 0.0
            self._call_thread()

    def _call_thread(self) -> None:
        if self._thread is None and not self._closed:
            held = (weakref.ref(self), self._signal)
            self._thread = threading.Thread(target=_run_queue, args=held, name=self.name, daemon=True)
            self._thread.start()
        self._signal.notify()

    def holds_one(self) -> bool:
        """Whether one job is queued, and none runs."""
        return len(self._jobs) == 1 and not self._running.locked()

    def _result(self, job: _Job) -> Any:
        if self._watch is None:
            return self._wait_for(job)
        with self._watch.wait(job.number):
            return self._wait_for(job)

    def _wait_for(self, job: _Job) -> Any:
        wait = LongWait()
        try:
            while not job.finished.is_set():
                if self._running.acquire(blocking=False):
                    self._run_next()
                    if job.finished.is_set() and self._is_for_others():
                        self.wake()
                else:
                    job.finished.wait(0.05)
                    wait.check()
        finally:
            wait.end()
        if job.error is not None:
            raise job.error
        return job.value

    def _is_for_others(self) -> bool:
        """Whether the next job is one that this thread does not come to wait for: its waiter may have counted on me."""
        try:
            return self._jobs[0].waiter != threading.get_ident()
        except IndexError:
            return False

    def _run_next(self) -> None:
        """Run the next job; the caller holds `_running`, which is released."""
        try:
            job = self._jobs.popleft()
            job()
        except IndexError:
            return
        finally:
            self._running.release()
        if job.after is not None:
            job.after()

    def _is_due(self) -> bool:
        return self._closed or (bool(self._jobs) and time.monotonic() >= self._due)

    def _find_nap(self) -> float | None:
        """How long the thread may sleep; None: until it is called."""
        if not self._jobs:
            self._due = math.inf
        return SOON_S if self._due < math.inf or time.monotonic() < self._last_soon + _ALERT_S else None

    def close(self, timeout_s: float = 5.0) -> None:
        """Run what is queued, then end the thread."""
        with self._signal:
            self._closed = True
            self._signal.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=timeout_s)

    def __del__(self) -> None:
        """End the thread of a queue that was dropped without `close()`."""
        with self._signal:
            self._signal.notify_all()


def _run_queue(me: weakref.ref[SerialQueue], signal: threading.Condition) -> None:
    """A queue's thread, which does not hold a queue that has no jobs."""
    _thread.is_queue = True
    while (queue := me()) is not None:
        _thread.watch = queue._watch
        with signal:
            if not queue._is_due():
                queue._is_alert = (nap_s := queue._find_nap()) is not None
                if not queue._jobs:
                    del queue
                    if me() is None:  # `del` was what dropped it
                        return
                signal.wait(nap_s)
                continue
            if queue._closed and not queue._jobs:
                return
        queue._running.acquire()
        queue._run_next()
        del queue


_queues: weakref.WeakSet[SerialQueue] = weakref.WeakSet()
_EXIT_S = 2.0
_deadline = 0.0


@atexit.register
def close_queues() -> None:
    """At the end of the program: a thread that comes back from C++ while Python shuts down would abort the process."""
    global _deadline
    _deadline = _deadline or time.monotonic() + _EXIT_S  # for all who call it at the end together
    for queue in list(_queues):
        queue.close(max(0.0, _deadline - time.monotonic()))


def _begin_anew_in_child() -> None:
    for queue in list(_queues):
        queue.begin_anew()


os.register_at_fork(after_in_child=_begin_anew_in_child)
