"""The operations of a world: their tensors checked and laid out as lines of memory, run in one order on the transport
that fits, and recorded with their times."""

from __future__ import annotations

import math
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from unisono import packing
from unisono.background import Handle, SerialQueue, in_background
from unisono.launchers.runtime import debug_pause, status
from unisono.launchers.runtime.variables import are_checks_on
from unisono.launchers.runtime.watchdog import find_watchdog
from unisono.world.call_signatures import Call, CallHistory, note_trouble
from unisono.world.ledger import Ledger, Record
from unisono.world.transports import Mismatch, Op, PeerLost, Transport
from unisono.world.transports.cuda_route import Route, choose_route

T = TypeVar("T")


class Operations:
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
        self._queues: dict[str, SerialQueue] = {}
        self._sequences: dict[str, int] = {}
        self._history = CallHistory(ledger) if base is not None and are_checks_on() else None
        self._watchdog = find_watchdog() if base is not None and base.timeout_s < math.inf else None
        self._owner: int | None = None  # in a forked child: the process that the world belongs to
        self._paused_s = 0.0  # that is in the ledger
        self._made_in = os.getpid()
        _living.add(self)

    @property
    def base(self) -> Transport:
        """The transport for CPU tensors."""
        assert self._transport is not None, "a world of one moves nothing"
        return self._transport

    @property
    def transports(self) -> list[Transport]:
        """Those for CPU and CUDA tensors."""
        return [one for one in (self._transport, self.accelerated) if one is not None]

    def record(
        self,
        op: str,
        tag: str,
        bytes_sent: int,
        how: str = "",
        dtype: torch.dtype | None = None,
        shapes: tuple[Any, ...] = ((), 0),
        *,
        queue: str = "main",
    ) -> Record:
        """The record of an operation that begins now; its number is the same on every rank.

        `how`, `dtype`, `shapes`: what has to be the same on every rank as well.
        """
        if self._owner is not None:
            raise RuntimeError(
                f"this process was forked from process {self._owner}, which is rank {self.base.rank} of the world: "
                "only that one can exchange something with the other ranks. Train in the process that un.join() was "
                "called in; more workers are started by `unisono run -n N`, and a forked child may load data"
            )
        if self.closed:
            raise RuntimeError(f"{self.name!r} is closed: nothing more can be sent through it")
        if debug_pause.active:
            debug_pause.look("before")
        channel = self.name if queue == "main" else f"{self.name}:{queue}"
        sequence = self._sequences.get(channel, 0)
        self._sequences[channel] = sequence + 1
        record = Record(op, tag, bytes_sent, channel, sequence)
        if self._history is not None and queue == "main":
            key = (how, dtype, *shapes)
            record.signature = Call(self._history, op, tag, key, sequence + 1, self.base.rank, self.ledger.step_count)
        return record

    def call(self, run: Callable[[], T]) -> T:
        """Run in the order of the collectives, and wait; numbered, but not kept in the ledger."""
        record = self.record("call", "", 0)

        def job() -> T:
            self.base.begin(record.sequence + 1, record.signature)
            try:
                return run()
            except (Mismatch, PeerLost) as error:
                note_trouble(error, record.signature, self.ledger)
                raise

        return job() if self.inline else self._queue("main").submit(job).wait()

    def post(self, x: Tensor, op: Op, record: Record, result: T) -> Handle[T] | None:
        """A small all-reduce that needs no thread: begun here, ended by whoever waits. None: not offered.

        Whether it is offered depends only on what ranks have in common: memory order may differ between them.
        """
        if x.device.type != "cpu" or not x.numel():
            return None
        plain = x.layout == torch.strided and x.is_contiguous() and not x.is_conj() and not x.is_neg()
        line = x if plain else flatten(x)
        record.start = self.ledger.clock()
        posted = self.base.post(line, op, record.sequence + 1, record.signature)
        if posted is None:
            return None
        finish, ready = posted

        def wait() -> T:
            began = self.ledger.clock()
            if self._watchdog is not None:
                self._watchdog.enter(self._describe(record), self.base.timeout_s)
            try:
                record.last = finish()
            except (Mismatch, PeerLost) as error:
                note_trouble(error, record.signature, self.ledger)
                raise
            finally:
                if self._watchdog is not None:
                    self._watchdog.leave()
            if not plain:
                put_back(x, line)
            record.end = self.ledger.clock()
            self.ledger.close_record(record)
            self._note_pause(record)
            self._record_blocked(began, record.end)
            return result

        return Handle(wait, ready)

    def run(
        self, record: Record, like: Tensor | None, run: Callable[[Transport], tuple[float, T]], queue: str = "main"
    ) -> Handle[T]:
        """Do `run` in order, on the transport for `like`'s device, and record it.

        `run` returns when the last rank arrived, and the result.
        """
        base = self.base
        route = Route(base) if like is None or not like.is_cuda else choose_route(base, self.accelerated, like)

        if self._history is not None and not route.transport.meets_on_host:
            self._history.roll(record.signature)

        def job() -> T:
            doing = self._describe(record)
            status.note(doing=doing)
            if self._watchdog is not None:
                self._watchdog.enter(doing, base.timeout_s)
            if queue == "main":
                base.begin(record.sequence + 1, record.signature)
                if route.transport is not base:
                    route.transport.begin(record.sequence + 1, record.signature)
            record.start = self.ledger.clock()
            try:
                with route.around():
                    record.last, value = run(route.transport)
            except (Mismatch, PeerLost) as error:
                note_trouble(error, record.signature, self.ledger)
                raise
            finally:
                if self._watchdog is not None:
                    self._watchdog.leave()
            record.end = self.ledger.clock()
            self.ledger.close_record(record)
            self._note_pause(record)
            status.note(doing="")
            return value

        def finish(value: T) -> T:
            return value if route.finish is None else _keep_until_now(run, route.finish(value))

        if route.at_once:
            value = job()
            return Handle(lambda: finish(value))
        if self.inline:
            value = job()
            self._record_blocked(record.start, record.end)
            return Handle.of(finish(value))
        handle = self._queue(queue).submit(job, wakes=route.wakes if queue == "main" else True)

        def wait() -> T:
            began = self.ledger.clock()
            value = handle.wait()
            self._record_blocked(began, self.ledger.clock())
            return finish(value)

        return Handle(wait, handle.done)

    def disown(self, owner: int) -> None:
        """Refuse operations from now on: this process was forked from the one that the world belongs to."""
        self._owner = self._owner or owner

    def close(self) -> None:
        """Run what is queued, then let go of the threads and the transports."""
        self.closed = True
        for queue in self._queues.values():
            queue.close()
        for transport in self.transports:
            transport.close()

    def __del__(self) -> None:
        """A world that was dropped without `close()`: no handle and no job of it is left either, as these hold me."""
        if not getattr(self, "closed", True) and self._made_in == os.getpid() and not sys.is_finalizing():
            self.close()

    def _describe(self, record: Record) -> str:
        """The operation, and what it carries: "all_reduce gradients/0 (layer4.weight)"."""
        held = self.ledger.tag_names.get(record.tag)
        return f"{record.op} {record.tag}{held or ''}".rstrip()

    def _queue(self, name: str) -> SerialQueue:
        if name not in self._queues:
            self._queues[name] = SerialQueue(f"unisono {self.name} {name}", moves=True)
        return self._queues[name]

    def _note_pause(self, record: Record) -> None:
        """Enter into the ledger that connections had broken, and for how long they were not there."""
        if (total_s := self.base.paused_s) > self._paused_s:
            paused_s, self._paused_s = total_s - self._paused_s, total_s
            self.ledger.event("outage", during=self._describe(record), seconds=paused_s)

    def _record_blocked(self, start: float, end: float) -> None:
        """Enter into the ledger that the program waited for an exchange, unless this is a background thread."""
        if not in_background():
            self.ledger.close_span("blocked", start, end)
            if debug_pause.active:
                debug_pause.look("after")


_living: weakref.WeakSet[Operations] = weakref.WeakSet()


def _disown_all() -> None:
    for operations in list(_living):
        operations.disown(os.getppid())


os.register_at_fork(after_in_child=_disown_all)


def _keep_until_now(run: Callable[[Transport], object], value: T) -> T:
    """`value`; what `run` holds, the memory that a stream reads, is kept until here."""
    return value


# Memory ------------------------------------------------------------------------------------------------------


def flatten(x: Tensor) -> Tensor:
    """`x` as one contiguous line: a view if possible, else a copy."""
    if x.layout != torch.strided:
        raise TypeError(f"a collective takes dense tensors, got layout {x.layout}: send its indices and values")
    return x.detach().resolve_conj().resolve_neg().contiguous().view(-1)


def put_back(x: Tensor, line: Tensor) -> None:
    """Copy the result into `x` if `flatten` had to copy."""
    if x.numel() and x.data_ptr() != line.data_ptr():
        narrow(x.detach(), x.stride()).copy_(narrow(line.view(x.shape), x.stride()))


def narrow(x: Tensor, strides: Sequence[int]) -> Tensor:
    """The elements of `x` with memory of their own in a tensor of these strides: one of each expanded dimension."""
    for dim, stride in enumerate(strides):
        if stride == 0:
            x = x[(slice(None),) * dim + (slice(1),)]
    return x


def provide_line(what: str, given: Tensor | None, shape: Sequence[int], like: Tensor) -> Tensor:
    """A line of memory for a result of `shape`: the one given, or a new one."""
    if given is None:
        return torch.empty(math.prod(shape), dtype=like.dtype, device=like.device)
    if tuple(given.shape) != tuple(shape) or given.dtype != like.dtype or not given.is_contiguous():
        raise ValueError(
            f"{what}: out must be contiguous {like.dtype} of shape {tuple(shape)}, "
            f"got {given.dtype} of shape {tuple(given.shape)}"
        )
    return given.detach().view(-1)


def pass_through(what: str, out: Tensor | None, x: Tensor) -> Tensor:
    """The result in a world of one: `x`, or `out` filled with it."""
    if out is None:
        return x
    provide_line(what, out, x.shape, x).copy_(flatten(x))
    return out


def group_by_dtype(lines: Sequence[Tensor]) -> list[list[Tensor]]:
    """Lines that can travel as one, in the order in which their dtypes first occur."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    for line in lines:
        groups.setdefault(line.dtype, []).append(line)
    return list(groups.values())


# Checks ------------------------------------------------------------------------------------------------------


def list_tensors(what: str, x: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """One tensor or several, all on one device."""
    if isinstance(x, Tensor):
        return [x]
    if not isinstance(x, Iterable):
        raise TypeError(f"{what} takes a tensor or a list of tensors, got {x!r}: put a number into torch.tensor(...)")
    parts = list(x)
    for part in parts:
        if not isinstance(part, Tensor):
            raise TypeError(f"{what} takes a tensor or a list of tensors, got {type(part).__name__} in it")
    devices = {p.device for p in parts}
    if len(devices) > 1:
        raise ValueError(f"{what} needs tensors of one device, got {sorted(map(str, devices))}: call it for each")
    return parts


def check_one_each(what: str, parts: Sequence[Tensor], size: int) -> list[Tensor]:
    """One tensor for each rank, all of one dtype."""
    pieces = list_tensors(what, parts) if not isinstance(parts, Tensor) else list(parts)
    if len(pieces) != size:
        raise ValueError(f"{what} needs one tensor for each of the {size} ranks, got {len(pieces)}")
    if len({p.dtype for p in pieces}) > 1:
        raise TypeError(f"{what} needs tensors of one dtype, got {sorted({str(p.dtype) for p in pieces})}")
    return pieces


def split_rows(x: Tensor, size: int) -> list[Tensor]:
    """The rows of `x` in `size` equal parts."""
    if x.dim() == 0 or x.shape[0] % size:
        raise ValueError(
            f"reduce_scatter of a tensor needs a first dimension divisible by the {size} ranks, "
            f"got shape {tuple(x.shape)}: pad it, or pass a list of {size} tensors"
        )
    each = x.shape[0] // size
    return [x[r * each : (r + 1) * each] for r in range(size)]


def check_rank(what: str, rank: int, me: int, size: int, *, other: bool = False) -> None:
    """Refuse a rank that is not in this world; with `other`, also this rank itself."""
    if isinstance(rank, bool) or not isinstance(rank, int):
        raise TypeError(f"{what} needs a rank as a whole number, got {rank!r}")
    if not 0 <= rank < size or (other and rank == me):
        who = "another rank" if other else "a rank"
        raise ValueError(f"{what} needs {who} of 0..{size - 1}, got {rank} (I am rank {me})")


def list_groups(by: Literal["host"] | Sequence[Sequence[int]], hosts: Sequence[str]) -> list[list[int]]:
    """The groups of ranks that a split names."""
    if by == "host":
        return [[r for r, other in enumerate(hosts) if other == host] for host in dict.fromkeys(hosts)]
    if isinstance(by, str):
        raise ValueError(f"split takes 'host' or lists of ranks, got {by!r}")
    return [list(group) for group in by]


# Agreement ---------------------------------------------------------------------------------------------------


def gather_shapes(transport: Transport, x: Tensor, tag: str) -> list[tuple[int, ...]]:
    """Every rank's shape, of tensors of one dtype."""
    seen = _exchange_shapes(transport, [str(x.dtype), list(x.shape)], f"all_gather {tag!r}")
    return [tuple(shape) for _, shape in seen]


def swap_shapes(transport: Transport, pieces: Sequence[Tensor], tag: str) -> list[tuple[int, ...]]:
    """The shape of what every rank sends to me, of tensors of one dtype."""
    seen = _exchange_shapes(transport, [str(pieces[0].dtype), [list(p.shape) for p in pieces]], f"all_to_all {tag!r}")
    return [tuple(shapes[transport.rank]) for _, shapes in seen]


def _exchange_shapes(transport: Transport, mine: list[Any], what: str) -> list[Any]:
    seen = [packing.from_bytes(message) for message in transport.exchange(packing.to_bytes(mine))]
    if len({dtype for dtype, _ in seen}) > 1:
        each = ", ".join(f"rank {r} {dtype}" for r, (dtype, _) in enumerate(seen))
        raise Mismatch(f"{what}: the ranks' dtypes differ: {each}")
    return seen
