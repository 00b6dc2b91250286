"""One rank of N whose messages take no time: tensors are real, and a listener hears of every operation."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from torch import Tensor

from unisono.world.transports import UNKNOWN, CallSignature, Op, Transport, find_group
from unisono.world.transports.arithmetic import count_bytes, multiply
from unisono.world.transports.rings import IN_RINGS

Among = Literal["all", "inside", "across"]
Listener = Callable[[str, int, Among, float, float], None]  # what, bytes, among whom, and when it began and ended


class SilentTransport(Transport):
    """What the others would send counts as equal to what this rank sends.

    hosts: of every rank. by_messages: the ranks would talk by messages alone, which take the mean of narrow numbers in
    two operations. posts: they would take small all-reduces in memory that they share.
    """

    name = "silent"

    def __init__(
        self,
        rank: int,
        size: int,
        listener: Listener,
        *,
        hosts: Sequence[str],
        by_messages: bool = True,
        posts: bool = False,
        among: Among = "all",
    ) -> None:
        self.rank, self.size = rank, size
        self._listener, self._hosts, self._among = listener, list(hosts), among
        self._by_messages, self._posts = by_messages, posts

    @contextmanager
    def _told(self, *operations: tuple[str, int]) -> Iterator[None]:
        began = time.perf_counter()
        yield
        ended = time.perf_counter()
        for op, nbytes in operations:
            self._listener(op, nbytes, self._among, began, ended)
            began = ended

    def all_reduce(self, parts: Sequence[Tensor], op: Op) -> float:
        nbytes = count_bytes(parts)
        wide = parts[0].dtype in IN_RINGS or not self._by_messages
        told = [("all_reduce", nbytes)] if wide else [("all_to_all", nbytes), ("all_gather", -(-nbytes // self.size))]
        with self._told(*told):
            if op == "sum":
                for part in parts:
                    multiply(part, self.size)
        return UNKNOWN

    def post(
        self, x: Tensor, op: Op, sequence: int, signature: CallSignature | None = None
    ) -> tuple[Callable[[], float], Callable[[], bool]] | None:
        return (lambda: self.all_reduce([x], op), lambda: True) if self._posts else None

    def reduce_scatter(self, x: Tensor, counts: Sequence[int], op: Op, out: Tensor) -> float:
        with self._told(("reduce_scatter", count_bytes([x]))):
            out.copy_(x.split(list(counts))[self.rank])
            if op == "sum":
                multiply(out, self.size)
        return UNKNOWN

    def all_gather(self, x: Tensor, outs: Sequence[Tensor]) -> float:
        with self._told(("all_gather", count_bytes([x]))):
            for out in outs:
                out.copy_(x)
        return UNKNOWN

    def broadcast(self, parts: Sequence[Tensor], src: int) -> float:
        with self._told(("broadcast", count_bytes(parts))):
            return UNKNOWN

    def all_to_all(self, parts: Sequence[Tensor], outs: Sequence[Tensor]) -> float:
        mine = parts[self.rank]
        with self._told(("all_to_all", count_bytes(parts))):
            for part, out in zip(parts, outs, strict=True):
                like = mine if mine.shape == out.shape else part
                if like.shape == out.shape:
                    out.copy_(like)
                else:
                    out.zero_()
        return UNKNOWN

    def send(self, x: Tensor, dst: int) -> None:
        with self._told(("send", count_bytes([x]))):
            return

    def recv(self, x: Tensor, src: int) -> None:
        x.zero_()

    def exchange(self, data: bytes) -> list[bytes]:
        with self._told(("exchange", len(data))):
            return [data] * self.size

    def split(self, groups: Sequence[Sequence[int]]) -> Transport:
        mine = find_group(groups, self.rank, self.size)
        hosts = [self._hosts[r] for r in mine]
        among = self._among
        if len(mine) < self.size and len(set(hosts)) == 1:
            among = "inside"
        elif len(mine) < self.size and len(set(hosts)) == len(hosts):
            among = "across"
        return SilentTransport(
            mine.index(self.rank),
            len(mine),
            self._listener,
            hosts=hosts,
            by_messages=self._by_messages,
            posts=self._posts,
            among=among,
        )
