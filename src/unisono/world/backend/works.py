"""What torch holds of an operation under way: `wait`, a future, its error. Whoever waits does the work itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.background import Handle, SerialQueue, Wakes, in_background
from unisono.world.backend.errors import GroupTimeout, translate
from unisono.world.ledger import Ledger

__all__ = ["Work"]


class Work(dist.Work):
    """One operation of a group, on one of its lanes.

    Callbacks of its future run where the operation ended, but outside the lane's order: they may begin and wait for
    further operations, as PowerSGD's hook does.
    """

    def __init__(self, what: str, group: str, ledger: Ledger, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.what, self.source = what, -1
        self.submitted = ledger.clock()
        self.ended = float("nan")
        self.is_receive = False  # which another receive of its lane may end
        self.by_future = False  # waited for through a future: then the program's wait is not seen
        self._group, self._ledger, self._tensors = group, ledger, list(tensors)
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._future: _Future | None = None
        self._is_resolved = False
        self._lock = threading.Lock()
        self._lane: SerialQueue | None = None
        self._handle: Handle[None] | None = None

    def begin(self, lane: SerialQueue, run: Callable[[], None], *, wakes: Wakes) -> Work:
        """Queue `run`; `wakes`: as of `SerialQueue.submit`."""
        self._lane = lane
        self._handle = lane.submit(lambda: self.execute(run), after=self.resolve_future, wakes=wakes)
        return self

    def execute(self, run: Callable[[], None]) -> None:
        """Run the operation in this thread, and keep its error for whoever waits."""
        if self._done.is_set():  # a message that another receive has taken along
            return
        try:
            run()
        except BaseException as error:
            self._error = translate(error, self.what, self._group)
            if not isinstance(error, Exception):  # Ctrl-C is for this thread
                raise
        finally:
            self.finish()

    def finish(self, error: BaseException | None = None) -> None:
        """Note that the operation has ended, with its error if it failed."""
        self._error = self._error or error
        self.ended = self._ledger.clock()
        self._done.set()

    def resolve_future(self) -> None:
        """Complete the future with the result, if one was asked for."""
        with self._lock:
            future = self._future
            if future is None or self._is_resolved or not self._done.is_set():
                return
            self._is_resolved = True
        future.work = None
        if self._error is None:
            future.set_result(self._tensors)
        elif isinstance(self._error, Exception):
            future.set_exception(self._error)

    # What torch and its users call ---------------------------------------------------------------------------

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the operation; raises its error, or GroupTimeout after `timeout`."""
        if not self._done.is_set():
            began = self._ledger.clock()
            self._await(timeout.total_seconds())
            if not in_background() and self.ended > began:
                self._ledger.close_span("blocked", began, self._ledger.clock())
        if self._error is not None:
            raise self._error
        return True

    def _await(self, timeout_s: float) -> None:
        assert self._lane is not None
        if self.is_receive and timeout_s <= 0 and not self._lane.holds_one():
            self._lane.wake()  # in the work of another receive I would stay until that one has ended
            self._done.wait()
            return
        if timeout_s <= 0 and self._handle is not None:
            self._handle.wait()
            self._done.wait()
            return
        self._lane.wake()
        if not self._done.wait(timeout_s if timeout_s > 0 else None):
            raise GroupTimeout(
                f"{self.what} of process group {self._group!r} has not ended within the {timeout_s:g} s that wait() "
                "was given: it is still under way, and not all ranks may have called it"
            )

    def is_completed(self) -> bool:
        """Whether `wait()` would return at once."""
        return self._done.is_set()

    def is_success(self) -> bool:
        """Whether it has ended without an error."""
        return self._done.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        """The operation's error, if it failed."""
        return self._error

    def result(self) -> list[Tensor]:
        """The tensors that hold the result."""
        return self._tensors

    def synchronize(self) -> None:
        """The same as `wait`."""
        self.wait()

    def block_current_stream(self) -> None:
        """The same as `wait`: results are on the device when the host is told so."""
        self.wait()

    def source_rank(self) -> int:
        """The rank that sent the received message."""
        return self.source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the result's tensors."""
        with self._lock:
            self.by_future = True
            if self._future is None:
                devices: Any = sorted({t.device for t in self._tensors if t.is_cuda}, key=str)
                self._future = _Future(devices=devices)
                self._future.work = self
        self.resolve_future()
        return self._future


class _Future(torch.futures.Future[Any]):
    """A future whose waiter does the work."""

    work: Work | None = None

    def wait(self) -> Any:
        self._finish()
        return super().wait()

    def then(self, callback: Callable[[torch.futures.Future[Any]], Any]) -> torch.futures.Future[Any]:
        """In a hook of DDP, what follows is called here, as with NCCL: collectives that it begins (PowerSGD's does)
        would else come before or after those of the next bucket as the threads happen to run, on each rank in another
        order. torch's default hooks begin none: theirs go on behind the backward pass."""
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward and getattr(callback, "__module__", "") != _BEGINS_NONE:
            self._finish()
        return super().then(callback)

    def _finish(self) -> None:
        work = self.work
        if work is not None and not work.is_completed():
            with suppress(Exception):  # the future has it, too
                work.wait()
            work.resolve_future()


_BEGINS_NONE = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
