"""Work in the background: a serial queue runs its jobs one after the other on a thread, or on that of who waits."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")


class _Thread(threading.local):
    is_queue = False


_thread = _Thread()


def in_background() -> bool:
    """Whether this thread is a queue's own: the program does not stand still while it waits."""
    return _thread.is_queue


class Handle(Generic[T]):
    """A result that may still be on its way.

    `wait()` blocks until it is there and returns it, or raises what went wrong; `done()` asks without blocking.
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

    __slots__ = ("_run", "error", "finished", "value")

    def __init__(self, run: Callable[[], Any]) -> None:
        self._run = run
        self.value: Any = None
        self.error: BaseException | None = None
        self.finished = threading.Event()

    def __call__(self) -> None:
        try:
            self.value = self._run()
        except BaseException as error:
            self.error = error
            if not isinstance(error, Exception):  # Ctrl-C is for the thread that runs the job, whoever waits for it
                raise
        finally:
            del self._run
            self.finished.set()


class SerialQueue:
    """A queue with one thread, started at the first job; a thread that waits for a job runs the queue itself.

    Jobs run strictly in the order given, whoever runs them: collectives then meet in one order on every rank.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._jobs: deque[_Job] = deque()
        self._signal = threading.Condition()
        self._running = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        _queues.add(self)

    def submit(self, run: Callable[[], T]) -> Handle[T]:
        """Queue `run`; its handle gives the result."""
        job = _Job(run)
        with self._signal:
            if self._closed:
                raise RuntimeError(f"{self.name} is closed: nothing more can be sent through it")
            self._jobs.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name=self.name, daemon=True)
                self._thread.start()
            self._signal.notify()
        return Handle(lambda: self._result(job), job.finished.is_set)

    def _result(self, job: _Job) -> Any:
        while not job.finished.is_set():
            if self._running.acquire(blocking=False):
                try:
                    self._run_next()
                finally:
                    self._running.release()
            else:
                job.finished.wait(0.05)
        if job.error is not None:
            raise job.error
        return job.value

    def _run_next(self) -> None:
        try:
            job = self._jobs.popleft()
        except IndexError:
            return
        job()

    def _loop(self) -> None:
        _thread.is_queue = True
        while True:
            with self._signal:
                while not self._jobs and not self._closed:
                    self._signal.wait()
                if self._closed and not self._jobs:
                    return
            with self._running:
                self._run_next()

    def close(self, timeout_s: float = 5.0) -> None:
        """Run what is queued, then end the thread."""
        with self._signal:
            self._closed = True
            self._signal.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=timeout_s)


_queues: weakref.WeakSet[SerialQueue] = weakref.WeakSet()
_EXIT_S = 3.0  # calls that wait for another rank end by their own deadline


@atexit.register
def _close_all() -> None:
    """At the end of the program: a thread that comes back from C++ while Python shuts down would abort the process."""
    deadline = time.monotonic() + _EXIT_S
    for queue in list(_queues):
        queue.close(max(0.0, deadline - time.monotonic()))
