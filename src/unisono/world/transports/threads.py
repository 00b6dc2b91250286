"""Ranks as threads of one process, with true arithmetic: for tests, notebooks and teaching."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unisono.background import LongWait, be_among_ranks, watch_long_waits
from unisono.launchers.runtime import debug_pause
from unisono.launchers.runtime.files import anonymous_file
from unisono.launchers.runtime.frames import find_current_call
from unisono.launchers.runtime.huge_pages import map_shared
from unisono.world.transports import (
    CallDescription,
    CallSignature,
    Mismatch,
    Op,
    PeerLost,
    Transport,
    find_group,
    warn_of_each_other,
)
from unisono.world.transports.arithmetic import combine
from unisono.world.transports.mapped import map_view

RETURNED = "has returned from its function"
_LOOK_S = 0.25  # how often one that waits looks where the others are


class Hub:
    """What the threads of one world share: a place to meet, and message boxes."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.size = size
        self.timeout_s = timeout_s
        self.changed = threading.Condition()
        self.items: list[Any] = [None] * size
        self.times = [0.0] * size
        self.round = 0
        self.found: tuple[list[Any], float] = ([], 0.0)
        self.messages: dict[tuple[int, int], deque[tuple[Tensor, _Mark | None]]] = {}
        self.lost: str | None = None
        self.left: dict[int, str] = {}  # ranks that will not come any more, and why
        self.members: dict[int, Member] = {}
        self.here: set[int] = set()  # those that have come to the meeting
        self.subs: dict[tuple[int, ...], list[Hub]] = {}

    def lose(self, why: str) -> None:
        with self.changed:
            self.lost = self.lost or why
            self.changed.notify_all()
            inside = [hub for made in self.subs.values() for hub in made]
        for hub in inside:
            hub.lose(why)

    def wait_for(self, ready: Callable[[], bool], what: str, ranks: Sequence[int], me: int) -> None:
        """With the lock held; `ranks` are those that are waited for, and I am `me`."""

        def is_in_vain() -> bool:
            return self.lost is not None or not self.left.keys().isdisjoint(ranks)

        began, wait = debug_pause.clock(), LongWait()
        while not self.changed.wait_for(lambda: ready() or is_in_vain(), min(_LOOK_S, self.timeout_s)):
            wait.check()
            self._compare_waits(me, ranks)
            if debug_pause.clock() - began > self.timeout_s:
                wait.end()
                waits = "".join(f"; rank {r} waits in {where}" for r, where in self._find_waits(me, ranks).items())
                raise PeerLost(f"{what}: no answer within {self.timeout_s:g} s{waits}")
        wait.end()
        if not ready():
            gone = " and ".join(f"rank {r} {why}" for r, why in sorted(self.left.items()) if r in ranks)
            error = PeerLost(f"{self.lost or gone}; waited {debug_pause.clock() - began:.1f} s in {what}")
            done = [r for r, why in self.left.items() if r in ranks and why == RETURNED]
            error.ended = done[0] if done and self.lost is None else None
            raise error

    def _find_waits(self, me: int, ranks: Sequence[int]) -> dict[int, str]:
        """Which of those that have not come wait in another call of the program than I."""
        found = {r: self.members[r].waits for r in ranks if r in self.members and r not in self.here}
        return {r: where for r, where in found.items() if where and where != self.members[me].waits}

    def _compare_waits(self, me: int, ranks: Sequence[int]) -> None:
        """Warn once if the programs of two ranks have waited for long in different calls."""
        member = self.members[me]
        for rank, where in self._find_waits(me, ranks).items():
            if rank > me and member.waits and not member.has_warned:
                member.has_warned = True
                warn_of_each_other(member.waits, rank, where)


@dataclass
class _Mark:
    """What a rank's stream had to do when the rank came to a meeting."""

    device: torch.device
    stream: torch.cuda.Stream
    event: torch.cuda.Event

    @classmethod
    def of(cls, near: Tensor | None) -> _Mark | None:
        if near is None or not near.is_cuda:
            return None
        stream = torch.cuda.current_stream(near.device)
        return cls(near.device, stream, stream.record_event())

    def wait_for(self, other: _Mark) -> None:
        """Whatever my stream does next comes after that."""
        if other.stream != self.stream:
            self.stream.wait_event(other.event)


@dataclass
class Member:
    """What is known of a rank, in a world and in those split from it."""

    why: str = "has closed this world"  # it will not come any more
    waits: str = ""  # the call of its program that has waited for long
    has_warned: bool = False


class _Thread(threading.local):
    member: Member | None = None


_thread = _Thread()


def be(member: Member | None) -> None:
    """Declare that this thread runs the program of a rank."""
    _thread.member = member
    be_among_ranks(member is not None)


@watch_long_waits
def _note_wait(is_waiting: bool) -> None:
    if _thread.member is not None:
        _thread.member.waits = str(find_current_call() or "") if is_waiting else ""


class ThreadTransport(Transport):
    """One rank of a world of threads. On a GPU that all share, streams wait for each other where ranks meet."""

    name = "threads"
    takes_cuda = True

    def __init__(self, hub: Hub, rank: int, member: Member | None = None) -> None:
        self.hub = hub
        self.member = hub.members[rank] = member if member is not None else Member()
        self.rank, self.size = rank, hub.size
        self._splits = 0

    def _meet(self, what: str, sign: Any, item: Any = None, near: Tensor | None = None) -> tuple[list[Any], float]:
        """Every rank's item, and when the last came; all must be in the same operation with the same sign. `near`: one
        of the tensors that are about to be read, or were."""
        hub, mark = self.hub, _Mark.of(near)
        with hub.changed:
            now = hub.round
            hub.items[self.rank] = (what, (sign, mark and mark.device), item, self.signature, mark)
            hub.times[self.rank] = time.perf_counter()
            hub.here.add(self.rank)
            if len(hub.here) == hub.size:
                hub.found = (list(hub.items), max(hub.times))
                hub.round = now + 1
                hub.here.clear()
                hub.changed.notify_all()
            hub.wait_for(lambda: hub.round > now, what, range(hub.size), self.rank)
            found, last = hub.found
        signatures: list[CallSignature] = [signature for _, _, _, signature, _ in found if signature is not None]
        whats = {one.what for one in signatures} if len(signatures) == self.size else set()

        def describe() -> list[CallDescription]:
            return [one.description for one in signatures]

        if any(other[:2] != found[0][:2] for other in found) or len(whats) > 1:
            places = [(sign, f" on {device}" if device is not None else "") for _, (sign, device), *_ in found]
            each = ", ".join(f"rank {r} has {found[r][0]} {sign}{place}" for r, (sign, place) in enumerate(places))
            raise Mismatch(f"{what}: the ranks disagree; {each}", calls=describe())
        if self.signature is not None and whats and sign != "end":
            self.signature.check_places([one.where for one in signatures], describe)
        if mark is not None:
            for *_, other in found:
                mark.wait_for(other)
        return [item for _, _, item, *_ in found], last

    def _end(self, what: str, near: Tensor) -> None:
        """Wait until all ranks have read what the others brought."""
        self._meet(what, "end", near=near)

    def all_reduce(self, parts: Sequence[Tensor], op: Op) -> float:
        sign = (op, [f"{p.numel()} x {p.dtype}" for p in parts])
        ranks, last = self._meet("all_reduce", sign, parts, parts[0])
        if parts[0].is_cuda:  # one device: one rank reduces for all
            if self.rank == 0:
                for every in zip(*ranks, strict=True):
                    combine(every, op, every[0])
                for other in ranks[1:]:
                    torch._foreach_copy_(other, ranks[0])
            del ranks
            self._end("all_reduce", parts[0])
            return last
        results = [torch.empty_like(p) for p in parts]
        for i, result in enumerate(results):
            combine([rank[i] for rank in ranks], op, result)
        del ranks  # after this, only a rank itself holds its memory: an exchange counts who does
        self._end("all_reduce", parts[0])
        for part, result in zip(parts, results, strict=True):
            part.copy_(result)
        return last

    def reduce_scatter(self, x: Tensor, counts: Sequence[int], op: Op, out: Tensor) -> float:
        ranks, last = self._meet("reduce_scatter", (op, f"{list(counts)} x {x.dtype}"), x, x)
        result = torch.empty_like(out)
        combine([torch.split(other, list(counts))[self.rank] for other in ranks], op, result)
        self._end("reduce_scatter", x)
        out.copy_(result)
        return last

    def all_gather(self, x: Tensor, outs: Sequence[Tensor]) -> float:
        sizes = [out.numel() for out in outs]
        ranks, last = self._meet("all_gather", f"{sizes} x {x.dtype}", x, x)
        for out, other in zip(outs, ranks, strict=True):
            out.copy_(other)
        self._end("all_gather", x)
        return last

    def broadcast(self, parts: Sequence[Tensor], src: int) -> float:
        ranks, last = self._meet("broadcast", (f"from {src}", [p.numel() for p in parts]), parts, parts[0])
        if self.rank != src:
            for part, other in zip(parts, ranks[src], strict=True):
                part.copy_(other)
        self._end("broadcast", parts[0])
        return last

    def all_to_all(self, parts: Sequence[Tensor], outs: Sequence[Tensor]) -> float:
        ranks, last = self._meet("all_to_all", str(parts[0].dtype), parts, parts[0])
        for out, other in zip(outs, ranks, strict=True):
            out.copy_(other[self.rank])
        self._end("all_to_all", parts[0])
        return last

    def send(self, x: Tensor, dst: int) -> None:
        with self.hub.changed:
            copied = x.clone()
            self.hub.messages.setdefault((self.rank, dst), deque()).append((copied, _Mark.of(copied)))
            self.hub.changed.notify_all()

    def recv(self, x: Tensor, src: int) -> None:
        with self.hub.changed:
            box = self.hub.messages.setdefault((src, self.rank), deque())
            self.hub.wait_for(lambda: bool(box), f"recv from rank {src}", [src], self.rank)
            message, mark = box.popleft()
        if message.numel() != x.numel() or message.dtype != x.dtype:
            raise Mismatch(
                f"recv from rank {src}: it sent {message.dtype} of {message.numel()}, "
                f"I receive into {x.dtype} of {x.numel()}"
            )
        if mark is not None:
            here = torch.cuda.current_stream(mark.device)
            here.wait_event(mark.event)
            message.record_stream(here)
        x.copy_(message)

    def has_message(self, src: int) -> bool:
        return bool(self.hub.messages.get((src, self.rank)))

    def shared(self, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        fd, nbytes = anonymous_file("unisono") if self.rank == 0 else -1, n * dtype.itemsize
        try:
            if self.rank == 0:
                os.ftruncate(fd, nbytes)
            mine = torch.frombuffer(map_shared(fd, nbytes), dtype=dtype) if self.rank == 0 else None
            first, line = self._meet("shared", f"{n} x {dtype}", (fd, mine))[0][0]
            view = map_view(first, nbytes).view(dtype)
            self._meet("shared", "end")  # nobody closes before all have mapped
        finally:
            if self.rank == 0:
                os.close(fd)
        return line, view

    def close(self) -> None:
        """Tell the other ranks that this one will not come any more."""
        with self.hub.changed:
            self.hub.left.setdefault(self.rank, self.member.why)
            self.hub.changed.notify_all()

    def exchange(self, data: bytes) -> list[bytes]:
        return self._meet("exchange", "", data)[0]

    def split(self, groups: Sequence[Sequence[int]]) -> Transport:
        mine = find_group(groups, self.rank, self.size)
        self._splits += 1
        key = (self._splits, *mine)
        with self.hub.changed:
            made = self.hub.subs.setdefault(key, [])
            if not made:
                made.append(Hub(len(mine), self.hub.timeout_s))
        self._meet("split", [list(group) for group in groups])
        return ThreadTransport(made[0], mine.index(self.rank), self.member)
