"""A world's operations: run in one order, on the transport that fits, and recorded with their times."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from unisono.background import Handle, Lane, in_background
from unisono.runtime import status
from unisono.world.ledger import Ledger, Record
from unisono.world.operands import flat, put_back
from unisono.world.transports import Op, Transport
from unisono.world.transports.cuda_route import Route, on_device

T = TypeVar("T")


class Schedule:
    """Collectives run one after the other; each direction of `send` and `recv` has an order of its own.

    `inline`: they run in the thread that calls, instead of a thread behind the program.
    """

    def __init__(
        self, name: str, base: Transport | None, accelerated: Transport | None, ledger: Ledger, *, inline: bool
    ) -> None:
        self.name, self.ledger = name, ledger
        self.accelerated = accelerated
        self.closed = False
        self._transport = base
        self.inline = inline
        self._lanes: dict[str, Lane] = {}
        self._sequences: dict[str, int] = {}

    @property
    def base(self) -> Transport:
        """The transport for the memory of the host."""
        assert self._transport is not None, "a world of one moves nothing"
        return self._transport

    def record(self, op: str, tag: str, bytes_sent: int, *, lane: str = "main") -> Record:
        """The record of an operation that begins now; its number is the same on every rank."""
        if self.closed:
            raise RuntimeError(f"{self.name!r} is closed: nothing more can be sent through it")
        channel = self.name if lane == "main" else f"{self.name}:{lane}"
        sequence = self._sequences.get(channel, 0)
        self._sequences[channel] = sequence + 1
        return Record(op, tag, bytes_sent, channel, sequence)

    def call(self, run: Callable[[], T]) -> T:
        """Run in the order of the collectives, and wait; numbered, but not kept in the ledger."""
        sequence = self.record("call", "", 0).sequence

        def job() -> T:
            self.base.sequence = sequence + 1
            return run()

        return job() if self.inline else self._lane("main").submit(job).wait()

    def post(self, x: Tensor, op: Op, record: Record, result: T) -> Handle[T] | None:
        """A small all-reduce that needs no thread: begun here, ended by whoever waits. None: not offered.

        Whether it is offered depends only on what ranks have in common: memory order may differ between them.
        """
        if x.device.type != "cpu" or not x.numel():
            return None
        plain = x.layout == torch.strided and x.is_contiguous() and not x.is_conj() and not x.is_neg()
        line = x if plain else flat(x)
        record.start = self.ledger.clock()
        posted = self.base.post(line, op, record.sequence + 1)
        if posted is None:
            return None
        finish, ready = posted

        def wait() -> T:
            began = self.ledger.clock()
            record.last = finish()
            if not plain:
                put_back(x, line)
            record.end = self.ledger.clock()
            self.ledger.close_record(record)
            self._stood_still(began, record.end)
            return result

        return Handle(wait, ready)

    def run(
        self, record: Record, like: Tensor | None, run: Callable[[Transport], tuple[float, T]], lane: str = "main"
    ) -> Handle[T]:
        """Do `run` in order, on the transport for `like`'s device, and record it.

        `run` returns when the last rank arrived, and the result.
        """
        base = self.base
        route = Route(base) if like is None or not like.is_cuda else on_device(base, self.accelerated, like)

        def job() -> T:
            status.note(doing=f"{record.op} {record.tag}")
            if lane == "main":
                base.sequence = record.sequence + 1
            record.start = self.ledger.clock()
            with route.around():
                record.last, value = run(route.transport)
            record.end = self.ledger.clock()
            self.ledger.close_record(record)
            status.note(doing="")
            return value

        if self.inline or route.on_stream:
            value = job()
            if not route.on_stream:
                self._stood_still(record.start, record.end)
            return Handle(lambda: _after(run, route.finish(value)))
        handle = self._lane(lane).submit(job)

        def wait() -> T:
            began = self.ledger.clock()
            value = handle.wait()
            self._stood_still(began, self.ledger.clock())
            return value

        return Handle(wait, handle.done)

    def close(self) -> None:
        """Run what is queued, then let go of the threads and the transports."""
        self.closed = True
        for lane in self._lanes.values():
            lane.close()
        for transport in (self._transport, self.accelerated):
            if transport is not None:
                transport.close()

    def _lane(self, name: str) -> Lane:
        if name not in self._lanes:
            self._lanes[name] = Lane(f"unisono {self.name} {name}")
        return self._lanes[name]

    def _stood_still(self, start: float, end: float) -> None:
        """The program waited for an exchange, unless this is a thread that works behind it."""
        if not in_background():
            self.ledger.close_span("blocked", start, end)


def _after(run: Callable[[Transport], object], value: T) -> T:
    """`value`; what `run` holds, the memory that a stream reads, is kept until here."""
    return value
