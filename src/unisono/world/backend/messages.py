"""Messages from one rank to another, matched by their tags as torch's users expect, also from any source.

A message has its tag as a label. Who reads from a rank holds that direction's order, and gives each message to the
first receive with its tag; one that nobody asked for yet is kept. Between workers of one host a send is done when it is
called, where it has room in the outbox, and a short receive when it is waited for: no thread need wake up for them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from unisono.background import SerialQueue, Wakes
from unisono.world.backend.works import Work
from unisono.world.transports import Mismatch, PeerLost
from unisono.world.world import World

__all__ = ["EVERY_RANK", "Messages"]

EVERY_RANK = {"*": "for each receive the other rank calls a send, and for each send a receive, of one tag and size"}

_POLL_S = 0.0002
_SOON_BYTES = 1 << 20  # a longer message has its sender wait for the receiver to take it


class _Receive:
    """A receive that waits for its message; `source` None: from any rank."""

    def __init__(self, x: Tensor, source: int | None, tag: int, work: Work) -> None:
        self.x, self.source, self.tag, self.work = x, source, tag, work

    def takes_directly(self, numel: int, dtype: torch.dtype) -> bool:
        """Whether such a message can be received into `x` itself."""
        x = self.x
        return x.is_contiguous() and not x.is_cuda and (x.numel(), x.dtype) == (numel, dtype)


class Messages:
    """All messages of one rank in a group."""

    def __init__(self, world: World, lane: Callable[[str], SerialQueue]) -> None:
        self._world, self._lane = world, lane
        self._lock = threading.Lock()
        self._waiting: list[_Receive] = []  # in the order of their calls
        self._kept: list[tuple[int, int, Tensor]] = []  # source, tag, message
        self._reading = {r: threading.Lock() for r in range(world.size)}
        self.timeout_s = 0.0

    def send(self, x: Tensor, dst: int, tag: int, work: Work) -> Work:
        """Begin to send; CUDA tensors go through host memory, as either end may not know yet of a faster way."""
        if x.is_cuda:
            torch.cuda.current_stream(x.device).synchronize()

        def run() -> None:
            self._world.send(x.detach().cpu(), dst, label=tag).wait()

        def has_room() -> bool:
            transport = self._world.transport
            return transport is not None and transport.has_room(dst, x.numel() * x.element_size())

        lane = self._lane(f"send-{dst}")
        if lane.try_run(lambda: work.execute(run), when=has_room):
            return work
        return work.begin(lane, run, wakes=True)

    def receive(self, x: Tensor, src: int | None, tag: int, work: Work) -> Work:
        """Begin to receive from `src`; None: from whoever sends first."""
        if x.is_cuda:
            torch.cuda.current_stream(x.device).synchronize()
        wanted = _Receive(x, src, tag, work)
        work.is_receive = True
        with self._lock:
            kept = next((k for k in self._kept if src in (None, k[0]) and k[1] == tag), None)
            if kept is None:
                self._waiting.append(wanted)
            else:
                self._kept.remove(kept)
        if kept is not None:
            work.execute(lambda: self._deliver(wanted, kept[0], kept[2]))
            return work
        where = "recv-any" if src is None else f"recv-{src}"
        run = self._read_from_any if src is None else self._read_for
        wakes: Wakes = "soon" if x.numel() * x.element_size() <= _SOON_BYTES else True
        return work.begin(self._lane(where), lambda: run(wanted), wakes=wakes)

    def _read_for(self, wanted: _Receive) -> None:
        """Read messages of one rank until the one of `wanted` has come."""
        assert wanted.source is not None
        try:
            with self._reading[wanted.source]:
                while not wanted.work.is_completed():
                    if self._read(wanted.source, wanted):
                        return
        finally:
            self._forget(wanted)  # if its rank was lost

    def _read_from_any(self, wanted: _Receive) -> None:
        """Read from whichever rank has sent something until the message of `wanted` has come."""
        others = [r for r in range(self._world.size) if r != self._world.rank]
        transport = self._world.transport
        assert transport is not None
        deadline = time.monotonic() + self.timeout_s
        while not wanted.work.is_completed():
            for r in others:
                if not self._reading[r].acquire(blocking=False):  # another receive reads from it, and finds mine, too
                    continue
                try:
                    if not wanted.work.is_completed() and transport.has_message(r) and self._read(r, wanted):
                        return
                finally:
                    self._reading[r].release()
            if time.monotonic() > deadline:
                self._forget(wanted)
                raise PeerLost(f"recv from any source: no rank has sent anything within {self.timeout_s:g} s")
            time.sleep(_POLL_S)

    def _read(self, src: int, own: _Receive) -> bool:
        """Read one message of `src` and give it to who waits for it; whether that is `own`."""
        match: _Receive | None = None
        line = torch.empty(0, dtype=torch.uint8)
        tag = 0

        def find(label: int, numel: int, dtype: torch.dtype) -> Tensor:
            nonlocal match, line, tag
            tag = label
            with self._lock:
                match = self._take_match(src, tag)
            is_direct = match is not None and match.takes_directly(numel, dtype)
            line = match.x.detach().view(-1) if match is not None and is_direct else torch.empty(numel, dtype=dtype)
            return line

        try:
            self._world.recv_labelled(src, find).wait()
        except Exception as error:
            if match is not None and match is not own:
                match.work.execute(partial(_raise, error))
                match.work.resolve_future()
            raise
        with self._lock:
            match = match or self._take_match(src, tag)  # its receive may have begun in between
            if match is None:
                self._kept.append((src, tag, line))
                return False
        found = match
        self._hand_over(found, own, lambda: self._deliver(found, src, line))
        return found is own

    def _take_match(self, src: int, tag: int) -> _Receive | None:
        """The first receive that waits for such a message, which waits no more."""
        match = next((w for w in self._waiting if w.source in (None, src) and w.tag == tag), None)
        if match is not None:
            self._waiting.remove(match)
        return match

    def _forget(self, wanted: _Receive) -> None:
        with self._lock:
            if wanted in self._waiting:
                self._waiting.remove(wanted)

    def _hand_over(self, match: _Receive, own: _Receive, deliver: Callable[[], None]) -> None:
        if match is own:
            deliver()  # inside its own work, which ends with this
        else:
            match.work.execute(deliver)
            match.work.resolve_future()

    def _deliver(self, wanted: _Receive, src: int, line: Tensor) -> None:
        wanted.work.source = src
        if line.numel() != wanted.x.numel() or line.dtype != wanted.x.dtype:
            raise Mismatch(
                f"recv from rank {src}: it sent {line.numel()} x {line.dtype}, "
                f"I receive into {wanted.x.numel()} x {wanted.x.dtype}"
            )
        if line.data_ptr() != wanted.x.data_ptr():
            wanted.x.detach().copy_(line.view(wanted.x.shape))


def _raise(error: Exception) -> None:
    raise error
