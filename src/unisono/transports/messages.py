"""Messages between hosts through torch.distributed's gloo, with our own rings where gloo's are slow.

Gloo's all-reduce is near the bandwidth bound. Its reduce-scatter sends as much as an all-reduce and its
broadcast is an unpipelined tree: here they are a segmented ring and a pipelined chain of sends and receives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.transports import UNKNOWN, Op, PeerLost, Transport, group_of
from unisono.transports.arithmetic import combine

if TYPE_CHECKING:
    from torch.distributed import Store

SEGMENT = 256 << 10  # bytes a message of a ring carries
_AHEAD = 8  # receives posted before they are needed
_SMALL = 64 << 10
_NATIVE = (torch.float32, torch.float64, torch.float16, torch.int8, torch.uint8, torch.int32, torch.int64)
_OPS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_LETTER = 1 << 30  # the tag of `send` and `recv`, apart from those of the rings


class MessageTransport(Transport):
    """One rank of a gloo group of our own: the default group of torch.distributed is left alone."""

    name = "messages"

    def __init__(self, store: Store, rank: int, size: int, *, timeout_s: float) -> None:
        self.rank, self.size = rank, size
        self._store, self._timeout_s = store, timeout_s
        self._group: Any = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s))
        self._splits = 0
        self._rounds = 0

    # Collectives -----------------------------------------------------------------------------------------

    def all_reduce(self, parts: Sequence[Tensor], op: Op) -> float:
        x = parts[0] if len(parts) == 1 else torch.cat(list(parts))
        if x.numel():
            if x.dtype in _NATIVE:
                self._native(x, op)
            elif x.dtype.is_complex:
                self._native(torch.view_as_real(x), op)
            elif x.dtype == torch.bool:
                self._native(x.view(torch.uint8), op)
            else:
                self._gathered(x, op)
        if len(parts) > 1:
            for part, done in zip(parts, x.split([p.numel() for p in parts]), strict=True):
                part.copy_(done)
        return UNKNOWN

    def _native(self, x: Tensor, op: Op) -> None:
        if op == "mean":  # divide before summing: no overflow
            x.mul_(1.0 / self.size)
        with self._talking("all_reduce"):
            self._group.allreduce([x], _OPS[op]).wait()

    def _gathered(self, x: Tensor, op: Op) -> None:
        """For dtypes that gloo cannot add: a ring in fp32 or wider, rounded once at the end."""
        if x.dtype == torch.bfloat16:
            wide = x.float()
            self._native(wide, op)
            x.copy_(wide)
            return
        outs = [torch.empty_like(x) for _ in range(self.size)]
        self.all_gather(x, outs)
        combine(outs, op, x)

    def reduce_scatter(self, x: Tensor, counts: Sequence[int], op: Op, out: Tensor) -> float:
        """A ring: what arrives has come through all ranks before me; I add mine and pass it on."""
        chunks = x.split(list(counts))
        room = max(1, SEGMENT // x.element_size())
        order = [(self.rank - s - 1) % self.size for s in range(self.size)]  # order[s]: sent in step s, mine last
        scratch = [torch.empty(max(counts), dtype=x.dtype) for _ in range(3)]
        with self._talking("reduce_scatter"):
            flow = _Flow(self, [s for s in chunks[order[0]].split(room) if s.numel()])
            for step, chunk in enumerate(order[1:]):
                last = step == self.size - 2
                own = chunks[chunk]
                flow.settle(keep=2)
                target = scratch[step % 3][: own.numel()]
                pieces = list(zip(own.split(room), target.split(room), strict=True)) if own.numel() else []

                def arrived(i: int, pieces: Any = pieces, last: bool = last) -> None:
                    mine, came = pieces[i]
                    combine([came, mine], "sum" if op == "mean" else op, came)
                    if not last:
                        flow.send(came)

                flow.receive([came for _, came in pieces], arrived)
                if last:
                    out.copy_(target)
            flow.settle()
        if op == "mean":
            out.mul_(1.0 / self.size)
        return UNKNOWN

    def all_gather(self, x: Tensor, outs: Sequence[Tensor]) -> float:
        """A ring: each rank passes on what it receives, segment by segment."""
        outs[self.rank].copy_(x)
        room = max(1, SEGMENT // x.element_size())
        with self._talking("all_gather"):
            flow = _Flow(self, [s for s in outs[self.rank].split(room) if s.numel()])
            for step in range(self.size - 1):
                source = outs[(self.rank - step - 1) % self.size]
                pieces = [s for s in source.split(room) if s.numel()]
                last = step == self.size - 2

                def arrived(i: int, pieces: list[Tensor] = pieces, last: bool = last) -> None:
                    if not last:
                        flow.send(pieces[i])

                flow.receive(pieces, arrived)
            flow.settle()
        return UNKNOWN

    def broadcast(self, parts: Sequence[Tensor], src: int) -> float:
        """A chain from `src` on: each rank passes a segment on while the next one comes."""
        nbytes = sum(p.numel() * p.element_size() for p in parts)
        if not nbytes:
            return UNKNOWN
        if nbytes <= _SMALL or self.size == 2:
            x = parts[0] if len(parts) == 1 else torch.cat(list(parts))
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = src, 0
            with self._talking("broadcast"):
                self._group.broadcast([x], options).wait()
            if len(parts) > 1:
                for part, done in zip(parts, x.split([p.numel() for p in parts]), strict=True):
                    part.copy_(done)
            return UNKNOWN
        room = SEGMENT // parts[0].element_size()
        pieces = [s for part in parts for s in part.split(room) if s.numel()]
        place = (self.rank - src) % self.size
        with self._talking("broadcast"):
            flow = _Flow(self, pieces if place == 0 else [])
            if place > 0:
                last = place == self.size - 1
                flow.receive(pieces, lambda i: None if last else flow.send(pieces[i]))
            flow.settle()
        return UNKNOWN

    def all_to_all(self, parts: Sequence[Tensor], outs: Sequence[Tensor]) -> float:
        outs[self.rank].copy_(parts[self.rank])
        tag = self.next_round()
        with self._talking("all_to_all"):
            works = []
            for distance in range(1, self.size):
                source, target = (self.rank - distance) % self.size, (self.rank + distance) % self.size
                if outs[source].numel():
                    works.append(self._group.recv([outs[source]], source, tag))
                if parts[target].numel():
                    works.append(self._group.send([parts[target]], target, tag))
            for work in works:
                work.wait()
        return UNKNOWN

    def send(self, x: Tensor, dst: int) -> None:
        if x.numel():
            with self._talking(f"send to rank {dst}"):
                self._group.send([x], dst, _LETTER).wait()

    def recv(self, x: Tensor, src: int) -> None:
        if x.numel():
            with self._talking(f"recv from rank {src}"):
                self._group.recv([x], src, _LETTER).wait()

    def exchange(self, data: bytes) -> list[bytes]:
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        with self._talking("exchange"):
            self._group.allgather([sizes], [torch.tensor([len(data)])]).wait()
        x = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        outs = [torch.empty(int(n), dtype=torch.uint8) for n in sizes]
        self.all_gather(x, outs)
        return [out.numpy().tobytes() for out in outs]

    def split(self, groups: Sequence[Sequence[int]]) -> Transport:
        mine = group_of(groups, self.rank, self.size)
        self._splits += 1
        name = f"{self._splits}/{'-'.join(map(str, mine))}"
        store = dist.PrefixStore(name, self._store)
        return MessageTransport(store, mine.index(self.rank), len(mine), timeout_s=self._timeout_s)

    def close(self) -> None:
        self._group = None

    # Inside ----------------------------------------------------------------------------------------------

    def next_round(self) -> int:
        """A tag for the messages of one operation, the same on every rank."""
        self._rounds = (self._rounds + 1) % 4096
        return self._rounds << 18

    @contextmanager
    def _talking(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, PeerLost):
                raise
            raise PeerLost(f"{what}: a connection to another rank broke or timed out ({error})") from error


class _Flow:
    """The messages of one ring or chain: to the next rank and from the previous one, in order."""

    def __init__(self, transport: MessageTransport, first: Sequence[Tensor]) -> None:
        self._group = transport._group
        self._tag = transport.next_round()
        self._next = (transport.rank + 1) % transport.size
        self._previous = (transport.rank - 1) % transport.size
        self._sent = self._received = 0
        self._sending: deque[list[Any]] = deque([[]])
        for piece in first:
            self.send(piece)

    def send(self, piece: Tensor) -> None:
        self._sending[-1].append((self._group.send([piece], self._next, self._tag + self._sent), piece))
        self._sent += 1

    def receive(self, pieces: Sequence[Tensor], arrived: Callable[[int], None]) -> None:
        """Receive `pieces` in order, some ahead, and call `arrived(i)` after each."""
        self._sending.append([])
        posted: deque[Any] = deque()
        for i in range(len(pieces)):
            while len(posted) < _AHEAD and i + len(posted) < len(pieces):
                piece = pieces[i + len(posted)]
                posted.append(self._group.recv([piece], self._previous, self._tag + self._received))
                self._received += 1
            posted.popleft().wait()
            arrived(i)

    def settle(self, keep: int = 0) -> None:
        """Wait for what was sent, but for the last `keep` steps."""
        while len(self._sending) > keep:
            for work, _ in self._sending.popleft():
                work.wait()
        if not self._sending:
            self._sending.append([])
