"""World: who is here, and the collectives; every byte between ranks passes through it and is recorded."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from unisono import state
from unisono.lanes import Handle, Lane
from unisono.launchers import status
from unisono.ledger import Ledger, Record
from unisono.transports import Mismatch, Op, PeerLost, Transport, group_of
from unisono.transports.arithmetic import check_op
from unisono.transports.staging import Route, on_device

__all__ = ["Handle", "Mismatch", "Op", "PeerLost", "World", "join"]

T = TypeVar("T")
_here = threading.local()
_process: list[World] = []


class World:
    """A group of ranks that run the same program.

    Every collective is called by every rank in the same order, and returns a `Handle` at once; `wait()` gives
    the result. In a world of one they return their input and cost nothing.

    >>> world = World()
    >>> world.all_reduce(torch.ones(3), "sum").wait()
    tensor([1., 1., 1.])
    """

    def __init__(
        self,
        transport: Transport | None = None,
        *,
        device: torch.device | None = None,
        hosts: Sequence[str] = ("localhost",),
        ledger: Ledger | None = None,
        accelerated: Transport | None = None,
        name: str = "world",
        inline: bool = False,
    ) -> None:
        self.rank = transport.rank if transport else 0
        self.size = transport.size if transport else 1
        self.device = device or torch.device("cpu")
        self.hosts = tuple(hosts)
        self.host = self.hosts[self.rank]
        mine = [r for r in range(self.size) if self.hosts[r] == self.host]
        self.local_rank, self.local_size = mine.index(self.rank), len(mine)
        self.ledger = ledger if ledger is not None else Ledger(self.rank)
        self.name = name
        self.transport = transport
        self.shards: dict[str, Any] = {}
        self.pending_shards: dict[str, Any] = {}
        self._accelerated = accelerated
        self._inline = inline
        self._lanes: dict[str, Lane] = {}
        self._sequences: dict[str, int] = {}
        self._children = 0
        self._weight = 1.0
        self._weight_listeners: weakref.WeakSet[Any] = weakref.WeakSet()

    def __repr__(self) -> str:
        how = self.transport.name if self.transport else "alone"
        return f"World(rank={self.rank}, size={self.size}, host={self.host!r}, device={str(self.device)!r}, {how})"

    @property
    def has_nccl(self) -> bool:
        """Whether CUDA tensors travel from device to device."""
        return self._accelerated is not None

    # The weight of my batch ------------------------------------------------------------------------------

    @property
    def weight(self) -> float:
        """My batch's share of the global batch, times the number of ranks: 1 but at uneven ends."""
        return self._weight

    @weight.setter
    def weight(self, value: float) -> None:
        if value != self._weight:
            self._weight = value
            for listener in list(self._weight_listeners):
                listener.weight_changed(value)

    def on_weight(self, listener: Any) -> None:
        """Call `listener.weight_changed(weight)` when the weight changes."""
        self._weight_listeners.add(listener)

    # Collectives -----------------------------------------------------------------------------------------

    def all_reduce(self, x: Any, op: Op = "mean", *, tag: str = "") -> Handle[Any]:
        """Replace `x` (a tensor, or a list of tensors) on every rank by the sum, mean, max or min of all.

        The result has the same bits on every rank. Sends 2(N-1)/N of its bytes.
        """
        parts = [x] if isinstance(x, Tensor) else list(x)
        for part in parts:
            check_op(part.dtype, op)
        if self.size == 1 or not parts:
            return Handle.of(x)
        nbytes = sum(p.numel() * p.element_size() for p in parts)
        record = self._record("all_reduce", tag, math.ceil(2 * (self.size - 1) * nbytes / self.size))
        if len(parts) == 1 and nbytes <= 4096 and (posted := self._post(parts[0], op, record)) is not None:
            return posted
        flats = [_flat(p) for p in parts]

        def run(transport: Transport) -> tuple[float, Any]:
            last = math.nan
            for group in _by_dtype(flats):
                last = transport.all_reduce(group, op)
            for part, flat in zip(parts, flats, strict=True):
                _put_back(part, flat)
            return last, x

        return self._run(record, parts[0], run)

    def reduce_scatter(
        self, parts: Any, op: Op = "mean", *, out: Tensor | None = None, tag: str = ""
    ) -> Handle[Tensor]:
        """Reduce, and keep my part: of a list of N tensors the one of my rank, of a tensor my N-th of rows.

        `out`: contiguous memory for the result. Sends (N-1)/N of the bytes.
        """
        if isinstance(parts, Tensor):
            if parts.dim() == 0 or parts.shape[0] % self.size:
                raise ValueError(
                    f"reduce_scatter of a tensor needs a first dimension divisible by the {self.size} ranks, "
                    f"got shape {tuple(parts.shape)}: pad it, or pass a list of {self.size} tensors"
                )
            pieces = list(parts.chunk(self.size)) if parts.shape[0] else [parts] * self.size
        else:
            pieces = self._one_each("reduce_scatter", parts)
        check_op(pieces[0].dtype, op)
        mine = pieces[self.rank]
        if self.size == 1:
            return Handle.of(mine)
        x = _flat(parts) if isinstance(parts, Tensor) else torch.cat([_flat(p) for p in pieces])
        counts = [p.numel() for p in pieces]
        target = _memory("reduce_scatter", out, mine.shape, mine)
        nbytes = x.numel() * x.element_size()
        record = self._record("reduce_scatter", tag, math.ceil((self.size - 1) * nbytes / self.size))

        def run(transport: Transport) -> tuple[float, Tensor]:
            return transport.reduce_scatter(x, counts, op, target), target.view(mine.shape)

        return self._run(record, mine, run)

    def all_gather(
        self, x: Tensor, *, even: bool = False, out: Sequence[Tensor] | None = None, tag: str = ""
    ) -> Handle[list[Tensor]]:
        """Every rank's `x`, on every rank. Shapes may differ, unless `even` promises that they do not
        (which saves a small message). `out`: one contiguous tensor a rank for the results.
        Sends (N-1) times my bytes.
        """
        into = [None] * self.size if out is None else self._one_each("all_gather(out=...)", out)
        if self.size == 1:
            return Handle.of([x.clone()])
        record = self._record("all_gather", tag, (self.size - 1) * x.numel() * x.element_size())
        flat = _flat(x)

        def run(transport: Transport) -> tuple[float, list[Tensor]]:
            shapes = [tuple(x.shape)] * self.size if even else self._shapes(x, tag)
            outs = [_memory("all_gather", o, s, x) for o, s in zip(into, shapes, strict=True)]
            last = transport.all_gather(flat, outs)
            return last, [o.view(s) for o, s in zip(outs, shapes, strict=True)]

        return self._run(record, x, run)

    def broadcast(self, x: Any, src: int = 0, *, tag: str = "") -> Handle[Any]:
        """Replace `x` (a tensor, or a list of tensors) on every rank by rank `src`'s.

        Counted as the bytes once for every rank but one, as in a chain.
        """
        self._check_rank("broadcast", src)
        parts = [x] if isinstance(x, Tensor) else list(x)
        if self.size == 1 or not parts:
            return Handle.of(x)
        nbytes = sum(p.numel() * p.element_size() for p in parts)
        end_of_chain = (self.rank - src) % self.size == self.size - 1
        record = self._record("broadcast", tag, 0 if end_of_chain else nbytes)
        flats = [_flat(p) for p in parts]

        def run(transport: Transport) -> tuple[float, Any]:
            last = transport.broadcast([f.view(torch.uint8) for f in flats], src)
            for part, flat in zip(parts, flats, strict=True):
                _put_back(part, flat)
            return last, x

        return self._run(record, parts[0], run)

    def all_to_all(self, parts: Sequence[Tensor], *, tag: str = "") -> Handle[list[Tensor]]:
        """Send `parts[r]` to rank r; returns what every rank sent to me, in rank order. Shapes may differ."""
        pieces = self._one_each("all_to_all", parts)
        if self.size == 1:
            return Handle.of([pieces[0].clone()])
        nbytes = sum(p.numel() * p.element_size() for r, p in enumerate(pieces) if r != self.rank)
        record = self._record("all_to_all", tag, nbytes)

        def run(transport: Transport) -> tuple[float, list[Tensor]]:
            sent = state.to_bytes([list(p.shape) for p in pieces])
            shapes = [tuple(state.from_bytes(m)[self.rank]) for m in self._base.exchange(sent)]
            outs = [torch.empty(math.prod(s), dtype=pieces[0].dtype, device=pieces[0].device) for s in shapes]
            last = transport.all_to_all([_flat(p) for p in pieces], outs)
            return last, [o.view(s) for o, s in zip(outs, shapes, strict=True)]

        return self._run(record, pieces[0], run)

    def send(self, x: Tensor, dst: int, *, tag: str = "") -> Handle[Tensor]:
        """Send `x` to rank `dst`, which receives into a tensor of the same size and dtype."""
        self._check_rank("send", dst, other=True)
        record = self._record("send", tag, x.numel() * x.element_size(), lane=f"send-{dst}")
        flat = _flat(x)

        def run(transport: Transport) -> tuple[float, Tensor]:
            transport.send(flat, dst)
            return math.nan, x

        return self._run(record, x, run, lane=f"send-{dst}")

    def recv(self, x: Tensor, src: int, *, tag: str = "") -> Handle[Tensor]:
        """Receive into `x` from rank `src`."""
        self._check_rank("recv", src, other=True)
        record = self._record("recv", tag, 0, lane=f"recv-{src}")
        flat = _flat(x)

        def run(transport: Transport) -> tuple[float, Tensor]:
            transport.recv(flat, src)
            _put_back(x, flat)
            return math.nan, x

        return self._run(record, x, run, lane=f"recv-{src}")

    def barrier(self, *, tag: str = "") -> None:
        """Return when every rank has called it."""
        self.all_reduce(torch.zeros(1, dtype=torch.uint8), "max", tag=tag or "barrier").wait()

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """Rank `src`'s `obj`: plain values, lists, dicts, bytes and tensors (never pickled)."""
        self._check_rank("broadcast_object", src)
        return obj if self.size == 1 else self._objects(obj if self.rank == src else None)[src]

    def gather_objects(self, obj: Any) -> list[Any]:
        """Every rank's `obj`, on every rank."""
        return [obj] if self.size == 1 else self._objects(obj)

    # Worlds inside worlds, memory ------------------------------------------------------------------------

    def split(self, by: Literal["host"] | Sequence[Sequence[int]] = "host", *, inline: bool = False) -> World:
        """The world of my group: the ranks of my host, or the group of ranks that holds me.

        Every rank calls it alike; `[[0, 2], [1]]` numbers the ranks of a group in the order given.
        """
        if by == "host":
            groups: Sequence[Sequence[int]] = [
                [r for r in range(self.size) if self.hosts[r] == host] for host in dict.fromkeys(self.hosts)
            ]
        elif isinstance(by, str):
            raise ValueError(f"split takes 'host' or lists of ranks, got {by!r}")
        else:
            groups = by
        mine = group_of(groups, self.rank, self.size)
        self._children += 1
        name = f"{self.name}/{self._children}[{','.join(map(str, mine))}]"
        hosts = [self.hosts[r] for r in mine]
        if self.size == 1:
            return World(None, device=self.device, hosts=hosts, ledger=self.ledger, name=name, inline=inline)
        fast = self._accelerated
        base, accelerated = self._call(lambda: (self._base.split(groups), fast.split(groups) if fast else None))
        alone = len(mine) == 1
        if alone:
            base.close()
        return World(
            None if alone else base,
            device=self.device,
            hosts=hosts,
            ledger=self.ledger,
            accelerated=None if alone else accelerated,
            name=name,
            inline=inline,
        )

    def channel(self) -> World:
        """The same ranks with an order of their own: for a thread that talks beside the main program.

        Its collectives run in the thread that calls them.
        """
        return self.split([list(range(self.size))], inline=True)

    def empty(self, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Memory for `n` elements that this world moves fastest: shared between the workers of a host.

        Every rank calls it alike; `release` gives it back before the world is closed.
        """
        if self.size == 1 or self.device.type != "cpu":
            return torch.empty(n, dtype=dtype, device=self.device)
        return self._call(lambda: self._base.empty(n, dtype))

    def release(self, x: Tensor) -> None:
        """Give memory of `empty` back."""
        if self.transport is not None:
            self.transport.release(x)

    def close(self) -> None:
        """Let go of threads, sockets and shared memory; a world of one has none."""
        for lane in self._lanes.values():
            lane.close()
        for transport in (self.transport, self._accelerated):
            if transport is not None:
                transport.close()
        if _process and _process[0] is self:
            _process.clear()

    # Inside ----------------------------------------------------------------------------------------------

    @property
    def _base(self) -> Transport:
        assert self.transport is not None, "a world of one moves nothing"
        return self.transport

    def _lane(self, name: str) -> Lane:
        if name not in self._lanes:
            self._lanes[name] = Lane(f"unisono {self.name} {name}")
        return self._lanes[name]

    def _call(self, run: Callable[[], T], lane: str = "main") -> T:
        """Run in the order of the collectives, and wait."""
        return run() if self._inline else self._lane(lane).submit(run).wait()

    def _record(self, op: str, tag: str, bytes_sent: int, *, lane: str = "main") -> Record:
        channel = self.name if lane == "main" else f"{self.name}:{lane}"
        sequence = self._sequences.get(channel, 0)
        self._sequences[channel] = sequence + 1
        return Record(op, tag, bytes_sent, channel, sequence)

    def _post(self, x: Tensor, op: Op, record: Record) -> Handle[Any] | None:
        """A small all-reduce that needs no thread: begun here, ended by whoever waits."""
        if x.device.type != "cpu" or not x.is_contiguous() or not x.numel():
            return None
        start = self.ledger.clock()
        finish = self._base.post(x, op)
        if finish is None:
            return None

        def wait() -> Tensor:
            record.start = start
            record.last = finish()
            record.end = self.ledger.clock()
            self.ledger.close_record(record)
            return x

        return Handle(wait)

    def _run(
        self, record: Record, like: Tensor, run: Callable[[Transport], tuple[float, T]], lane: str = "main"
    ) -> Handle[T]:
        """Do `run` in order, on the transport for `like`'s device, and record it."""
        route = on_device(self._base, self._accelerated, like) if like.is_cuda else Route(self._base)

        def job() -> T:
            status.note(doing=f"{record.op} {record.tag}")
            record.start = self.ledger.clock()
            with route.around():
                record.last, value = run(route.transport)
            record.end = self.ledger.clock()
            self.ledger.close_record(record)
            status.note(doing="")
            return value

        if self._inline or route.on_stream:
            value = job()
            return Handle(lambda: route.finish(value))
        return self._lane(lane).submit(job)

    def _shapes(self, x: Tensor, tag: str) -> list[tuple[int, ...]]:
        seen = [state.from_bytes(m) for m in self._base.exchange(state.to_bytes([str(x.dtype), list(x.shape)]))]
        if len({dtype for dtype, _ in seen}) > 1:
            raise Mismatch(
                f"all_gather {tag!r}: the ranks' dtypes differ: "
                + ", ".join(f"rank {r} {dtype}" for r, (dtype, _) in enumerate(seen))
            )
        return [tuple(shape) for _, shape in seen]

    def _objects(self, obj: Any) -> list[Any]:
        data = state.to_bytes(obj)
        record = self._record("objects", "", (self.size - 1) * len(data))

        def job() -> list[bytes]:
            record.start = self.ledger.clock()
            found = self._base.exchange(data)
            record.end = self.ledger.clock()
            self.ledger.close_record(record)
            return found

        return [state.from_bytes(m) for m in self._call(job)]

    def _one_each(self, what: str, parts: Sequence[Tensor]) -> list[Tensor]:
        pieces = list(parts)
        if len(pieces) != self.size:
            raise ValueError(f"{what} needs one tensor for each of the {self.size} ranks, got {len(pieces)}")
        if len({p.dtype for p in pieces}) > 1:
            raise TypeError(f"{what} needs tensors of one dtype, got {sorted({str(p.dtype) for p in pieces})}")
        return pieces

    def _check_rank(self, what: str, rank: int, *, other: bool = False) -> None:
        if not 0 <= rank < self.size or (other and rank == self.rank):
            who = "another rank" if other else "a rank"
            raise ValueError(f"{what} needs {who} of 0..{self.size - 1}, got {rank} (I am rank {self.rank})")


def _flat(x: Tensor) -> Tensor:
    """`x` as one contiguous line: the same memory where it can be."""
    return x.detach().contiguous().view(-1)


def _memory(what: str, given: Tensor | None, shape: Sequence[int], like: Tensor) -> Tensor:
    """A line of memory for a result of `shape`: the one given, or a new one."""
    if given is None:
        return torch.empty(math.prod(shape), dtype=like.dtype, device=like.device)
    if tuple(given.shape) != tuple(shape) or given.dtype != like.dtype or not given.is_contiguous():
        raise ValueError(
            f"{what}: out must be contiguous {like.dtype} of shape {tuple(shape)}, "
            f"got {given.dtype} of shape {tuple(given.shape)}"
        )
    return given.detach().view(-1)


def _put_back(x: Tensor, flat: Tensor) -> None:
    """Copy the result into `x` where `_flat` had to copy."""
    if x.numel() and x.data_ptr() != flat.data_ptr():
        x.detach().copy_(flat.view(x.shape))


def _by_dtype(flats: Sequence[Tensor]) -> list[list[Tensor]]:
    groups: dict[torch.dtype, list[Tensor]] = {}
    for flat in flats:
        groups.setdefault(flat.dtype, []).append(flat)
    return list(groups.values())


def join(device: str | torch.device | None = None) -> World:
    """The world that this process was started in; a world of one where it was started alone.

    Reads what the launcher left (`unisono run`, `torchrun`, or an initialised torch.distributed), meets the
    other ranks, and returns the same world each time. `device` is "cpu" or "cuda"; by default CUDA where
    there is one for every worker of this host.
    """
    world = getattr(_here, "world", None)
    if world is not None:
        return world  # type: ignore[no-any-return]
    if not _process:
        from unisono.rendezvous import meet

        _process.append(meet(device))
    elif device is not None and torch.device(device).type != _process[0].device.type:
        raise ValueError(
            f"this process already joined with device {str(_process[0].device)!r}, got device={str(device)!r}: "
            "give the device at the first un.join()"
        )
    return _process[0]


def enter(world: World | None) -> None:
    """Make `world` what `join()` returns in this thread (None: back to the process's)."""
    _here.world = world
