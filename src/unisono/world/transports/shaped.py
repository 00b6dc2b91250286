"""Messages between emulated hosts of one machine, held back as slow links would: for latency, and for rates if the
kernel does not shape them.

Messages move as fast as the machine does it (sockets.py); then every rank waits until the time at which they would have
arrived over the links that UNISONO_NET names. Links and times are in memory that all ranks map
(runtime/link_emulation.py).

An operation costs what its algorithm sends, which follows from its sizes:

- the link of a rank's host is taken for the bytes that the rank sends and receives, after what it is taken for already;
- the operation ends when the last link has passed its bytes, and a latency later for each message that must have
  arrived before the next one is sent (`hops`).

So a ring is as slow as its slowest link, workers of one host share its link, and a rank that comes late is waited for.
Where the kernel shapes the rate, links have a latency only: it is added to what the operation took.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.launchers.runtime.link_emulation import Link, Wire, parse_link
from unisono.launchers.runtime.machine import read_boot_id
from unisono.world.transports import CallDescription, Op, Transport, find_group
from unisono.world.transports.arithmetic import count_bytes
from unisono.world.transports.mapped import open_published, publish
from unisono.world.transports.rings import IN_RINGS, PIECE
from unisono.world.transports.sockets import INLINE, SMALL, goes_at_once

__all__ = ["ShapedTransport", "shape"]

_SIGN_BYTES = 128  # that a rank tells of its operation


@dataclass(frozen=True)
class _Cost:
    """What this rank sends and receives in an operation, and how many messages follow each other."""

    up: float = 0.0
    down: float = 0.0
    hops: int = 0

    def __add__(self, other: _Cost) -> _Cost:
        """The cost of one operation after the other."""
        return _Cost(self.up + other.up, self.down + other.down, self.hops + other.hops)


def shape(inner: Transport, nets: Sequence[str], hosts: Sequence[str]) -> Transport:
    """`inner` over the links that every rank names ("" for none); all ranks call it."""
    links = [parse_link(net) if net else Link() for net in nets]
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    wire = _open_wire(inner, len(numbers))
    return ShapedTransport(inner, wire, links, [numbers[host] for host in hosts])


def _open_wire(inner: Transport, hosts: int) -> Wire:
    """The wire that rank 0 makes. If processes cannot open each other's memory, each has its host's link for itself."""
    fd = Wire.create(hosts)
    mine = f"{_read_machine()} {publish(fd)}"
    machine, _, address = inner.exchange(mine.encode())[0].decode().rpartition(" ")
    other = -1
    if machine == _read_machine() and inner.rank > 0:
        with contextlib.suppress(OSError):
            other = open_published(address)
    machines = {text.decode().rpartition(" ")[0] for text in inner.exchange(mine.encode())}  # all have opened it
    if other >= 0:
        os.close(fd)
        fd = other
    if len(machines) > 1:
        os.close(fd)
        raise ValueError("UNISONO_NET is for emulated hosts of one machine, and these ranks are on several: unset it")
    return Wire(fd, hosts)


def _read_machine() -> str:
    try:
        return read_boot_id()
    except OSError:  # not on this system
        return "this"


class ShapedTransport(Transport):
    """Another transport's messages over slow links."""

    def __init__(self, inner: Transport, wire: Wire, links: Sequence[Link], hosts: Sequence[int]) -> None:
        """`links` and `hosts`: of every rank; hosts are numbered as in the wire."""
        self._inner, self._wire, self._links, self._hosts = inner, wire, list(links), list(hosts)
        self.rank, self.size, self.name, self.timeout_s = inner.rank, inner.size, inner.name, inner.timeout_s
        self._host, self._link = self._hosts[self.rank], self._links[self.rank]
        around = [self._latency(r, (r + 1) % self.size) for r in range(self.size)]
        self._latency_s = max(around, default=0.0)

    # Collectives -----------------------------------------------------------------------------------------

    def all_reduce(self, parts: Sequence[Tensor], op: Op) -> float:
        share = (self.size - 1) / self.size * count_bytes(parts)
        if not share:
            cost = _Cost()
        elif goes_at_once(count_bytes(parts)):
            cost = self._direct((self.size - 1) * (_SIGN_BYTES + count_bytes(parts)))
        elif count_bytes(parts) <= SMALL:
            cost = self._direct(share) + self._direct(share)
        elif parts[0].dtype in IN_RINGS:
            cost = self._ring(2 * share, 2 * share, 2 * (self.size - 1))
        else:
            cost = self._direct(share) + self._ring(share, share, self.size - 1)
        return self._run(cost, lambda: self._inner.all_reduce(parts, op))

    def reduce_scatter(self, x: Tensor, counts: Sequence[int], op: Op, out: Tensor) -> float:
        sizes = [count * x.element_size() for count in counts]
        if x.dtype in IN_RINGS and sum(sizes) > SMALL:
            up, down = sum(sizes) - sizes[self.rank], sum(sizes) - sizes[self.rank - 1]
            cost = self._ring(up, down, self.size - 1)
        else:
            cost = self._direct((self.size - 1) / self.size * sum(sizes))
        return self._run(cost, lambda: self._inner.reduce_scatter(x, counts, op, out))

    def all_gather(self, x: Tensor, outs: Sequence[Tensor]) -> float:
        cost = self._gather([count_bytes([out]) for out in outs])
        return self._run(cost, lambda: self._inner.all_gather(x, outs))

    def broadcast(self, parts: Sequence[Tensor], src: int) -> float:
        """A chain, cut into pieces, after its source has heard a sign; few bytes go to all at once."""
        nbytes, place = count_bytes(parts), (self.rank - src) % self.size
        if nbytes * (self.size - 1) <= SMALL:
            cost = _Cost(0 if place else (self.size - 1) * nbytes, nbytes if place else 0, 1)
        else:
            filled = place * min(PIECE, nbytes)  # before the first piece is here
            cost = _Cost(0 if place == self.size - 1 else nbytes, nbytes + filled if place else 0, place + 1)
        return self._run(cost, lambda: self._inner.broadcast(parts, src))

    def all_to_all(self, parts: Sequence[Tensor], outs: Sequence[Tensor]) -> float:
        largest = max(count_bytes([x]) for x in (*parts, *outs))
        cost = _Cost(self._count_far(parts), self._count_far(outs), 1 if largest <= INLINE else 2)
        return self._run(cost, lambda: self._inner.all_to_all(parts, outs))

    def exchange(self, data: bytes) -> list[bytes]:
        found: list[bytes] = []

        def run() -> float:
            found.extend(self._inner.exchange(data))
            return math.nan

        self._run(self._direct((self.size - 1) * min(len(data), INLINE)), run)
        if any(len(each) > INLINE for each in found):
            self._run(self._direct((self.size - 1) * len(data)), lambda: math.nan)
        return found

    # From one rank to another ----------------------------------------------------------------------------

    def send(self, x: Tensor, dst: int) -> None:
        began = self._wire.clock()
        is_far = self._hosts[dst] != self._host
        end = self._wire.take(self._host, self._link, up=is_far * (count_bytes([x]) + _SIGN_BYTES))
        self._inner.send(x, dst)
        if self._link.bits_per_s is None:
            end = self._wire.clock()
        self._inner.send(torch.tensor([began, end], dtype=torch.float64), dst)
        self._wire.hold(end)

    def recv(self, x: Tensor, src: int) -> None:
        began = self._wire.clock()
        self._inner.recv(x, src)
        came = self._wire.clock()
        times = torch.empty(2, dtype=torch.float64)
        self._inner.recv(times, src)
        sent_from, sent = times.tolist()
        end = sent
        if self._hosts[src] != self._host:
            nbytes = count_bytes([x]) + _SIGN_BYTES
            end = max(end, self._wire.take(self._host, self._link, down=nbytes, since=sent_from))
        if self._links[src].bits_per_s is None and began < sent:  # it was waited for: the kernel says when it came
            end = max(end, came)
        self._wire.hold(end + self._latency(src, self.rank))

    # All else --------------------------------------------------------------------------------------------

    def split(self, groups: Sequence[Sequence[int]]) -> Transport:
        mine = find_group(groups, self.rank, self.size)
        inner = self._inner.split(groups)
        return ShapedTransport(inner, self._wire, [self._links[r] for r in mine], [self._hosts[r] for r in mine])

    def empty(self, n: int, dtype: torch.dtype) -> Tensor:
        return self._inner.empty(n, dtype)

    def shared(self, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return self._inner.shared(n, dtype)

    def release(self, x: Tensor) -> None:
        self._inner.release(x)

    def exchange_descriptions(self) -> list[CallDescription]:
        return self._inner.exchange_descriptions()

    @property
    def paused_s(self) -> float:  # type: ignore[override]
        return self._inner.paused_s

    @property
    def is_encrypted(self) -> bool:  # type: ignore[override]
        return self._inner.is_encrypted

    def connect_again(self, *, is_encrypted: bool) -> Transport | None:
        inner = self._inner.connect_again(is_encrypted=is_encrypted)
        return inner and ShapedTransport(inner, self._wire, self._links, self._hosts)

    def abandon(self, why: Exception) -> None:
        self._inner.abandon(why)

    def close(self) -> None:
        self._inner.close()

    # Inside ----------------------------------------------------------------------------------------------

    def _run(self, cost: _Cost, run: Callable[[], float]) -> float:
        """Do it, agree on when the last link has passed its bytes, and wait until then and for the latency."""
        self._inner.begin(self.sequence, self.signature)
        cost = self._ring(_SIGN_BYTES, _SIGN_BYTES, 0) + cost
        end = self._wire.take(self._host, self._link, up=cost.up, down=cost.down)
        last = run()
        if self._link.bits_per_s is None:
            end = self._wire.clock()
        latest = torch.tensor([end], dtype=torch.float64)
        self._inner.all_reduce([latest], "max")
        if self._link.bits_per_s is not None and (cost.up or cost.down):
            self._wire.keep(self._host, latest.item())
        self._wire.hold(latest.item() + cost.hops * self._latency_s)
        return last

    def _latency(self, source: int, target: int) -> float:
        """How long a message is on its way: half of it on either link."""
        if self._hosts[source] == self._hosts[target]:
            return 0.0
        return (self._links[source].latency_s + self._links[target].latency_s) / 2

    def _ring(self, up: float, down: float, hops: int) -> _Cost:
        """The cost of a ring: bytes to the next rank and from the previous one count if these are on other hosts."""
        is_up = self._hosts[(self.rank + 1) % self.size] != self._host
        is_down = self._hosts[self.rank - 1] != self._host
        return _Cost(is_up * up, is_down * down, hops)

    def _gather(self, sizes: Sequence[float]) -> _Cost:
        """The cost of a ring in which each rank passes on what it gets, but for the next rank's own; few bytes go to
        all at once."""
        if sum(sizes) <= SMALL:
            far = [size for size, host in zip(sizes, self._hosts, strict=True) if host != self._host]
            return _Cost(len(far) * sizes[self.rank], sum(far), 1)
        up, down = sum(sizes) - sizes[(self.rank + 1) % self.size], sum(sizes) - sizes[self.rank]
        return self._ring(up, down, self.size - 1)

    def _direct(self, nbytes: float) -> _Cost:
        """The cost of `nbytes` to all other ranks together, and as many from them."""
        far = sum(host != self._host for host in self._hosts) / max(1, self.size - 1)
        return _Cost(far * nbytes, far * nbytes, 1)

    def _count_far(self, parts: Sequence[Tensor]) -> int:
        """Bytes of the parts that go to other hosts, or come from them."""
        return count_bytes([part for host, part in zip(self._hosts, parts, strict=True) if host != self._host])
