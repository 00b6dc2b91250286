"""Large amounts of bytes between ranks: what arrives is worked on piece by piece and passed on while the rest comes.

A flow has one stream out and one stream in, and runs in one thread. An operation runs several at once, each over
connections and with a part of the bytes of its own, if the host has cores for that.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from torch import Tensor

from unisono.world.transports.streams import COPIED, InStream, OutStream, Patience, poll

__all__ = ["Copy", "Flow", "Helpers", "Piece", "as_bytes"]

_TURN = 2 << 20  # bytes received at a time


class Piece(NamedTuple):
    """What a flow receives next: where to, what is then done with it, and which bytes are sent on.

    `passed`: bytes that are sent on at a time, before the piece is whole; 0 if something is done with it first.
    """

    target: memoryview
    then: Callable[[], None] | None = None
    forward: memoryview | None = None
    reused: bool = False  # the bytes sent on are of memory that a later piece is received into
    passed: int = 0


class Flow:
    """Sends the bytes of `first`, receives `pieces` in order, and sends on what these say."""

    def __init__(
        self,
        out: OutStream | None,
        source: InStream | None,
        first: Iterable[memoryview],
        pieces: Iterable[Piece],
        *,
        spare: int = 0,
    ) -> None:
        """`spare`: how many pieces that are sent on from memory used again may be under way."""
        self._out, self._in = out, source
        self._first: Iterator[memoryview] | None = iter(first) if out is not None else None
        self._pieces: Iterator[Piece] | None = iter(pieces) if source is not None else None
        self._piece: Piece | None = None
        self._at = self._passed = 0  # bytes of the piece that have come, and that have been sent on before it was whole
        self._received = 0
        self._later: deque[tuple[memoryview, bool]] = deque()  # to be sent on, and whether of memory used again
        self._under_way: deque[int] = deque()  # where the bytes end that are sent from memory used again
        self._spare = spare  # if there is any, the previous rank waits for memory too, and is told of each piece
        self._next_piece()

    def begin(self) -> None:
        """Send what goes at once, without waiting."""
        if self._out is not None:
            self._send()

    def run(self, patience: Patience) -> None:
        """Move all bytes, and wait until the other end has those that were not copied."""
        out, source = self._out, self._in
        while True:
            moved = self._send() if out is not None else False
            if self._piece is not None:
                moved |= self._receive()
            is_sent = out is None or (self._first is None and not self._later and self._has_settled(out))
            if is_sent and self._piece is None:
                return
            if moved:
                patience.moved()
                continue
            if patience.is_fresh():
                continue
            patience.look()
            waits = []
            if out is not None and not is_sent:
                waits.append(out.wait_for())
            if source is not None and self._can_receive():
                waits.append(source.wait_for())
            poll(waits)

    def _send(self) -> bool:
        out = self._out
        assert out is not None
        if out.sent == out.queued:
            view = next(self._first, None) if self._first is not None else None
            if view is None:
                self._first = None
                self._send_on(out)
            else:
                out.push(view)
        return out.pump() if not self._has_settled(out) or self._under_way else False

    def _has_settled(self, out: OutStream) -> bool:
        """Whether the other end has what it has to have before this ends: all of it if it tells of each piece. A rank
        that left before it is told would answer with a reset, which may overtake what is still on its way."""
        return out.settled and (not self._spare or out.acked == out.queued)

    def _send_on(self, out: OutStream) -> None:
        """Queue what was received and goes on from here; only after all that this rank sends by itself."""
        while self._later:
            view, is_reused = self._later.popleft()
            out.push(view)
            if is_reused and len(view) > COPIED:
                self._under_way.append(out.queued)

    def _can_receive(self) -> bool:
        """Whether the memory that the next piece goes to is free."""
        if self._piece is None:
            return False
        if not self._piece.reused:
            return True
        assert self._out is not None
        while self._under_way and self._under_way[0] <= self._out.acked:
            self._under_way.popleft()
        return len(self._under_way) + len(self._later) < self._spare

    def _receive(self) -> bool:
        if not self._can_receive():
            return False
        source, piece = self._in, self._piece
        assert source is not None
        assert piece is not None
        count = source.recv_into(piece.target[self._at : self._at + _TURN])
        self._at += count
        self._received += count
        is_whole = self._at == len(piece.target)
        if is_whole and self._spare:
            source.acknowledge()
        if is_whole and piece.then is not None:
            piece.then()
        if piece.forward is not None and (is_whole or 0 < piece.passed <= self._at - self._passed):
            self._later.append((piece.forward[self._passed : self._at], piece.reused))
            self._passed = self._at
        if is_whole:
            self._next_piece()
        return count > 0

    def _next_piece(self) -> None:
        self._at = self._passed = 0
        self._piece = next(self._pieces, None) if self._pieces is not None else None
        if self._piece is None and self._in is not None and self._pieces is not None:
            self._pieces = None
            if self._received > COPIED:  # else nobody waits for that
                self._in.acknowledge()


class Copy:
    """What a rank sends to itself: done in a thread as flows are."""

    def __init__(self, source: Tensor, target: Tensor) -> None:
        self._source, self._target = source, target

    def begin(self) -> None:
        """Nothing leaves."""

    def run(self, patience: Patience) -> None:
        """Copy."""
        self._target.copy_(self._source)


class Helpers:
    """Threads that run flows beside the caller's own; started when they are first needed."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._jobs: list[queue.SimpleQueue[Callable[[], None] | None]] = []

    def run(self, jobs: list[Callable[[], None]], stop: Callable[[], None]) -> None:
        """Run all jobs at once, the first here; if one fails, `stop` is called, so that the others fail too."""
        errors: list[BaseException] = []
        ended: queue.SimpleQueue[None] = queue.SimpleQueue()

        def guard(job: Callable[[], None], tells: bool) -> None:
            try:
                job()
            except BaseException as error:
                errors.append(error)
                stop()
            finally:
                if tells:
                    ended.put(None)

        for number, job in enumerate(jobs[1:]):
            if number == len(self._threads):
                self._start()
            self._jobs[number].put(lambda job=job: guard(job, True))  # type: ignore[misc]
        guard(jobs[0], False)
        for _ in jobs[1:]:
            ended.get()
        if errors:
            raise errors[0]

    def close(self) -> None:
        """End the threads."""
        for jobs in self._jobs:
            jobs.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self._threads, self._jobs = [], []

    def _start(self) -> None:
        jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

        def work() -> None:
            while (job := jobs.get()) is not None:
                job()

        thread = threading.Thread(target=work, name=f"unisono lane {len(self._threads) + 1}", daemon=True)
        self._threads.append(thread)
        self._jobs.append(jobs)
        thread.start()


def as_bytes(x: Tensor) -> memoryview:
    """The memory of a flat, contiguous tensor on the CPU."""
    import torch

    view: memoryview = x.detach().view(torch.uint8).numpy().data
    return view
