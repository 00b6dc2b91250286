"""World: who is here, and the collectives; every byte between ranks passes through it and is recorded."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from unisono import packing
from unisono.background import Handle
from unisono.predict.costs import all_reduce_bytes
from unisono.world.batch_weights import BatchWeights, WeightListener
from unisono.world.call_signatures import shapes_of
from unisono.world.inference import in_plain_memory, leave_inference, name_frame
from unisono.world.ledger import Ledger
from unisono.world.operations import (
    Operations,
    check_one_each,
    check_rank,
    flatten,
    gather_shapes,
    group_by_dtype,
    list_groups,
    list_tensors,
    pass_through,
    provide_line,
    put_back,
    split_rows,
    swap_shapes,
)
from unisono.world.transports import SMALL_BYTES, Op, Transport, find_group
from unisono.world.transports.arithmetic import check_op, count_bytes

if TYPE_CHECKING:
    from unisono.world.elastic import Elastic
    from unisono.world.stragglers import Straggler

__all__ = ["Axes", "WeightListener", "World", "WorldFollower"]
F = TypeVar("F", bound=Callable[..., Any])
_KINDS = 256  # of all-reduces that are remembered
_NARROWED = ("rank", "size", "hosts", "host", "local_rank", "local_size", "name", "transport", "_operations", "_known")


def _survivable(*, changes: bool, handle: bool, alone: Callable[..., Any]) -> Callable[[F], F]:
    """Decorate a collective that programs call: in an elastic world it completes although a peer is lost in it.

    changes: Whether the collective writes to its first argument.
    handle: Whether it returns a Handle.
    alone: Its result in the rest of a step that was given up, from the number of ranks and its first argument (see
        `Elastic.call`).
    """

    def decorate(collective: F) -> F:
        @wraps(collective)
        def call(self: World, *args: Any, **kwargs: Any) -> Any:
            if torch.is_inference_mode_enabled():
                return leave_inference(call, (self, *args), kwargs)
            elastic = self.elastic
            if elastic is None:
                return collective(self, *args, **kwargs)
            if elastic.is_inside:
                return collective(elastic.solo if elastic.is_joining else self, *args, **kwargs)
            value = elastic.call(
                lambda: collective(self, *args, **kwargs),
                args[:1] if changes else (),
                alone=lambda: alone(self.size, *[*args, *kwargs.values()][:1]),
            )
            return Handle.of(value) if handle else value

        return name_frame(call, collective)

    return decorate


class WorldFollower(Protocol):
    """An object that depends on a world whose ranks may change."""

    def world_changed(self, world: World, /) -> None:
        """Called after the ranks have changed; worlds that were split from this one are closed."""


class Axes(Protocol):
    """The other axes of the mesh whose data axis a world is: what a replica in that world asks of them.

    world: all ranks. sizes, place: (data, tensor, pipeline).
    """

    world: World
    sizes: tuple[int, int, int]
    place: tuple[int, int, int]

    def prepare(self, model: Any, optimizer: Any, /) -> None:
        """Called before a strategy is bound: replace parameters that are split over ranks by this rank's parts."""

    def attach(self, replica: Any, /) -> None:
        """Called after `replica` has been bound."""

    def end_window(self, replica: Any, /) -> None:
        """Called at the end of a window, when its gradients have been exchanged."""

    def check_norm(self) -> None:
        """Refuse the norm of a gradient of which other ranks have parts, unless all ranks are asked together."""

    def agree_overflow(self, found_inf: Tensor, /) -> None:
        """Called after AMP has looked for non-finite values here: combine `found_inf` over all ranks of the model."""

    def clip(self, parameters: Any, max_norm: float, /) -> Any:
        """Clip gradients by their norm over all axes."""

    def make_savable(self, replica: Any, /) -> Any:
        """The object that is saved and loaded in place of the replica: the model of the whole mesh."""


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
        self.stragglers: tuple[Straggler, ...] = ()  # ranks that are slower than the others now
        self.speeds: tuple[float, ...] | None = None  # to deal samples by (`un.shard(balance=True)`); None: evenly
        self.on_close: Callable[[], object] | None = None  # called when this world has been closed
        self.elastic: Elastic | None = None  # set if ranks may come and go
        self.axes: Axes | None = None  # set if this is the data axis of a mesh
        self.is_device_known = False  # whether it has been decided how CUDA tensors travel (see `accelerate`)
        self._followers: list[weakref.ref[WorldFollower]] = []
        self._operations = Operations(name, transport, accelerated, self.ledger, inline=inline)
        self._known: dict[Any, tuple[Any, ...]] = {}  # what is the same in all-reduces of a kind
        self._splits = 0
        self._children: weakref.WeakKeyDictionary[World, None] = weakref.WeakKeyDictionary()  # dropped: they end
        self._whole: World | None = None  # this world as it was before `narrow`, kept alive
        self._parent: weakref.ref[World] | None = None
        self.batch_weights = BatchWeights()

    def __repr__(self) -> str:
        how = self.transport.name if self.transport else "alone"
        return f"World(rank={self.rank}, size={self.size}, host={self.host!r}, device={str(self.device)!r}, {how})"

    @property
    def inline(self) -> bool:
        """Whether collectives run in the thread that calls them, not in a background thread."""
        return self._operations.inline or self.size == 1

    @property
    def has_nccl(self) -> bool:
        """Whether CUDA tensors travel from device to device by NCCL."""
        fast = self._operations.accelerated
        return fast is not None and not fast.meets_on_host

    @property
    def reads_peers(self) -> bool:
        """Whether a reduction of large CPU tensors reads them from the other processes: then copying them into memory
        from `empty` gains nothing."""
        return self.transport is not None and self.transport.reads_peers

    @property
    def takes_parts(self) -> bool:
        """Whether an all-reduce of several large CPU tensors works on them where they are: then copying them into one
        line gains nothing."""
        return self.transport is not None and self.transport.takes_parts

    def use_for_cuda(self, transport: Transport | None) -> None:
        """Send CUDA tensors over `transport` from now on."""
        self._operations.accelerated = transport

    def rename(self, name: str) -> None:
        """Change the name that later operations have in the ledger."""
        self.name = self._operations.name = name

    # The weight of my batch ------------------------------------------------------------------------------

    @property
    def weight(self) -> float:
        """The weight of the batch in use: its part of the global batch times the number of ranks; 1 but at uneven ends.
        A batch is in use from the call of the model with it, or from when it was drawn if none waits for backward."""
        return self.batch_weights.weight

    @weight.setter
    def weight(self, value: float) -> None:
        self.batch_weights.set(value)

    def weigh(self, loss: Tensor, batch: Any) -> Tensor:
        """The loss times the weight of a batch, as `un.shard` gave it out; its backward pass is not weighed otherwise.

        For losses of several batches in one backward pass, whose weights may differ:
        `(world.weigh(loss(a), a) + world.weigh(loss(b), b)).backward()`.
        """
        return self.batch_weights.weigh(loss, batch)

    def on_weight(self, listener: WeightListener) -> None:
        """Call `listener.weight_changed(weight)` when the weight changes."""
        self.batch_weights.add(listener)

    def off_weight(self, listener: WeightListener) -> None:
        """Remove a weight listener."""
        self.batch_weights.remove(listener)

    # Collectives -----------------------------------------------------------------------------------------

    @_survivable(changes=True, handle=True, alone=lambda size, x: x)
    def all_reduce(self, x: Any, op: Op = "mean", *, tag: str = "") -> Handle[Any]:
        """Replace `x` (a tensor, or a list of tensors) on every rank by the sum, mean, max or min of all.

        The result has the same bits on every rank. Sends 2(N-1)/N of its bytes.
        """
        kind = (op, x.dtype, x.shape) if type(x) is Tensor else None
        if (known := self._known.get(kind)) is not None and x.device.type == "cpu":
            record = self._operations.record("all_reduce", tag, *known)
            if x.nbytes <= SMALL_BYTES and (posted := self._operations.post(x, op, record, x)) is not None:
                return posted
            parts = [x]
        else:
            parts = list_tensors("all_reduce", x)
            for part in parts:
                check_op(part.dtype, op)
            if self.size == 1 or not parts:
                return Handle.of(x)
            nbytes = count_bytes(parts)
            same = all_reduce_bytes(nbytes, self.size), op, parts[0].dtype, shapes_of(parts)
            record = self._operations.record("all_reduce", tag, *same)
            if kind is not None and len(self._known) < _KINDS:
                self._known[kind] = same
            is_small = len(parts) == 1 and nbytes <= SMALL_BYTES
            if is_small and (posted := self._operations.post(parts[0], op, record, x)) is not None:
                return posted
        lines = [flatten(p) for p in parts]

        def run(transport: Transport) -> tuple[float, Any]:
            last = [transport.all_reduce(group, op) for group in group_by_dtype(lines)]
            for part, line in zip(parts, lines, strict=True):
                put_back(part, line)
            return last[0], x

        return self._operations.run(record, parts[0], run)

    def reduce_joined(
        self,
        lines: Sequence[Tensor],
        op: Op = "mean",
        *,
        out: Tensor,
        counts: Sequence[int] | None = None,
        tag: str = "",
    ) -> Handle[Tensor]:
        """Reduce the concatenation of flat, contiguous tensors, and write this rank's N-th of it to `out`. With
        `reads_peers` the tensors are not copied to join them. `counts`: how many elements each rank takes instead.
        Sends (N-1)/N of the bytes."""
        lines, target = [line.detach() for line in list_tensors("reduce_joined", lines)], out.detach()
        check_op(target.dtype, op)
        if self.size == 1:
            return Handle.of(target.copy_(torch.cat(lines)))
        bytes_sent = math.ceil((self.size - 1) * count_bytes(lines) / self.size)
        record = self._operations.record("reduce_scatter", tag, bytes_sent)
        each = [target.numel()] * self.size if counts is None else list(counts)

        def run(transport: Transport) -> tuple[float, Tensor]:
            return transport.reduce_scatter_parts(lines, each, op, target), target

        return self._operations.run(record, target, run)

    @in_plain_memory
    def reduce_scatter(
        self, parts: Any, op: Op = "mean", *, out: Tensor | None = None, tag: str = ""
    ) -> Handle[Tensor]:
        """Reduce, and keep my part: of a list of N tensors the one of my rank, of a tensor my N-th of rows.

        `out`: contiguous memory for the result. Sends (N-1)/N of the bytes.
        """
        whole = isinstance(parts, Tensor)
        pieces = split_rows(parts, self.size) if whole else check_one_each("reduce_scatter", parts, self.size)
        check_op(pieces[0].dtype, op)
        mine = pieces[self.rank]
        if self.size == 1:
            return Handle.of(pass_through("reduce_scatter", out, mine))
        x = flatten(parts) if whole else torch.cat([flatten(p) for p in pieces])
        counts = [p.numel() for p in pieces]
        target = provide_line("reduce_scatter", out, mine.shape, mine)
        bytes_sent = math.ceil((self.size - 1) * count_bytes([x]) / self.size)
        same: dict[str, Any] = {"how": op, "dtype": mine.dtype, "shapes": shapes_of(pieces)}
        record = self._operations.record("reduce_scatter", tag, bytes_sent, **same)

        def run(transport: Transport) -> tuple[float, Tensor]:
            return transport.reduce_scatter(x, counts, op, target), target.view(mine.shape)

        return self._operations.run(record, mine, run)

    @_survivable(changes=False, handle=True, alone=lambda size, x: [x.clone() for _ in range(size)])
    def all_gather(
        self, x: Tensor, *, even: bool = False, out: Sequence[Tensor] | None = None, tag: str = ""
    ) -> Handle[list[Tensor]]:
        """Every rank's `x`, on every rank. Shapes may differ, unless `even` promises that they do not
        (which saves a small message). `out`: one contiguous tensor a rank for the results, of its shape.
        Sends (N-1) times my bytes.
        """
        into = [None] * self.size if out is None else check_one_each("all_gather(out=...)", out, self.size)
        if self.size == 1:
            return Handle.of([pass_through("all_gather", into[0], x) if into[0] is not None else x.clone()])
        shapes = shapes_of([x]) if even else ((), 0)
        sent = (self.size - 1) * count_bytes([x])
        record = self._operations.record("all_gather", tag, sent, dtype=x.dtype, shapes=shapes)
        line = flatten(x)

        def run(transport: Transport) -> tuple[float, list[Tensor]]:
            if even:
                shapes = [tuple(x.shape)] * self.size
            elif out is not None:
                shapes = [tuple(o.shape) for o in out]
            else:
                shapes = gather_shapes(self._operations.base, x, tag)
            outs = [provide_line("all_gather", o, s, x) for o, s in zip(into, shapes, strict=True)]
            last = transport.all_gather(line, outs)
            return last, [o.view(s) for o, s in zip(outs, shapes, strict=True)]

        return self._operations.run(record, x, run)

    @_survivable(changes=True, handle=True, alone=lambda size, x: x)
    def broadcast(self, x: Any, src: int = 0, *, tag: str = "") -> Handle[Any]:
        """Replace `x` (a tensor, or a list of tensors) on every rank by rank `src`'s.

        Counted as the bytes once for every rank but one, as in a chain.
        """
        check_rank("broadcast", src, self.rank, self.size)
        parts = list_tensors("broadcast", x)
        if self.size == 1 or not parts:
            return Handle.of(x)
        end_of_chain = (self.rank - src) % self.size == self.size - 1
        same: dict[str, Any] = {"how": f"from rank {src}", "dtype": parts[0].dtype, "shapes": shapes_of(parts)}
        record = self._operations.record("broadcast", tag, 0 if end_of_chain else count_bytes(parts), **same)
        lines = [flatten(p) for p in parts]

        def run(transport: Transport) -> tuple[float, Any]:
            last = transport.broadcast([line.view(torch.uint8) for line in lines], src)
            for part, line in zip(parts, lines, strict=True):
                put_back(part, line)
            return last, x

        return self._operations.run(record, parts[0], run)

    @in_plain_memory
    def all_to_all(
        self, parts: Sequence[Tensor], *, out: Sequence[Tensor] | None = None, tag: str = ""
    ) -> Handle[list[Tensor]]:
        """Send `parts[r]` to rank r; returns what every rank sent to me, in rank order. Shapes may differ.

        `out`: one contiguous tensor a rank, of the shape that it sends to me (which saves a small message).
        """
        into = [None] * self.size if out is None else check_one_each("all_to_all(out=...)", out, self.size)
        pieces = check_one_each("all_to_all", parts, self.size)
        if self.size == 1:
            return Handle.of([pieces[0].clone() if into[0] is None else pass_through("all_to_all", into[0], pieces[0])])
        bytes_sent = count_bytes([p for r, p in enumerate(pieces) if r != self.rank])
        record = self._operations.record("all_to_all", tag, bytes_sent, dtype=pieces[0].dtype)
        lines = [flatten(p) for p in pieces]

        def run(transport: Transport) -> tuple[float, list[Tensor]]:
            shapes = swap_shapes(self._operations.base, pieces, tag) if out is None else [tuple(o.shape) for o in out]
            outs = [provide_line("all_to_all", o, s, pieces[0]) for o, s in zip(into, shapes, strict=True)]
            last = transport.all_to_all(lines, outs)
            return last, [o.view(s) for o, s in zip(outs, shapes, strict=True)]

        return self._operations.run(record, pieces[0], run)

    @in_plain_memory
    def send(self, x: Tensor, dst: int, *, tag: str = "", label: int | None = None) -> Handle[Tensor]:
        """Send `x` to rank `dst`, which receives into a tensor of the same size and dtype.

        `label`: a number that says what it is, for a rank that calls `recv_labelled`. The handle may end only when the
        other receives: if two ranks send to each other, begin both sends and receives, then wait.
        """
        check_rank("send", dst, self.rank, self.size, other=True)
        record = self._operations.record("send", tag, count_bytes([x]), queue=f"send-{dst}")
        line = flatten(x)

        def run(transport: Transport) -> tuple[float, Tensor]:
            if label is None:
                transport.send(line, dst)
            else:
                transport.send_labelled(line, dst, label)
            return math.nan, x

        return self._operations.run(record, x, run, queue=f"send-{dst}")

    @in_plain_memory
    def recv(self, x: Tensor, src: int, *, tag: str = "") -> Handle[Tensor]:
        """Receive into `x` from rank `src`."""
        check_rank("recv", src, self.rank, self.size, other=True)
        record = self._operations.record("recv", tag, 0, queue=f"recv-{src}")
        line = flatten(x)

        def run(transport: Transport) -> tuple[float, Tensor]:
            transport.recv(line, src)
            put_back(x, line)
            return math.nan, x

        return self._operations.run(record, x, run, queue=f"recv-{src}")

    def recv_labelled(self, src: int, find: Callable[[int, int, torch.dtype], Tensor]) -> Handle[None]:
        """Receive the next message of rank `src` into the line of memory that `find(label, numel, dtype)` gives."""
        check_rank("recv", src, self.rank, self.size, other=True)
        record = self._operations.record("recv", "", 0, queue=f"recv-{src}")

        def run(transport: Transport) -> tuple[float, None]:
            transport.recv_labelled(src, find)
            return math.nan, None

        return self._operations.run(record, None, run, queue=f"recv-{src}")

    @_survivable(changes=False, handle=False, alone=lambda size, *_: None)
    def barrier(self, *, tag: str = "") -> None:
        """Wait until every rank has called this."""
        self.all_reduce(torch.zeros(1, dtype=torch.uint8), "max", tag=tag or "barrier").wait()

    @_survivable(changes=False, handle=False, alone=lambda size, obj: obj)
    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """Rank `src`'s `obj`: plain values, lists, dicts, bytes and tensors (never pickled)."""
        check_rank("broadcast_object", src, self.rank, self.size)
        return obj if self.size == 1 else self._objects(obj if self.rank == src else None)[src]

    @_survivable(changes=False, handle=False, alone=lambda size, obj: [obj] * size)
    def gather_objects(self, obj: Any) -> list[Any]:
        """Every rank's `obj`, on every rank."""
        return [obj] if self.size == 1 else self._objects(obj)

    # Worlds inside worlds --------------------------------------------------------------------------------

    @in_plain_memory
    def split(self, by: Literal["host"] | Sequence[Sequence[int]] = "host", *, inline: bool = False) -> World:
        """The world of my group: the ranks of my host, or the group of ranks that holds me.

        Every rank calls it alike; `[[0, 2], [1]]` numbers the ranks of a group in the order given.
        """
        if self.elastic is not None and self.elastic.is_joining:  # till it is let in, this rank is alone
            return self.elastic.solo.split([[0]], inline=inline)
        groups = list_groups(by, self.hosts)
        mine = find_group(groups, self.rank, self.size)
        self._splits += 1
        name = f"{self.name}/{self._splits}[{','.join(map(str, mine))}]"
        base, fast = None, None
        if self.size > 1:
            parent = self._operations.accelerated
            base, fast = self._operations.call(
                lambda: (self._operations.base.split(groups), parent.split(groups) if parent else None)
            )
            if len(mine) == 1:  # a world of one moves nothing
                for transport in (base, fast):
                    if transport is not None:
                        transport.close()
                base, fast = None, None
        hosts = [self.hosts[r] for r in mine]
        child = World(
            base, device=self.device, hosts=hosts, ledger=self.ledger, accelerated=fast, name=name, inline=inline
        )
        child._parent = weakref.ref(self)
        self._children[child] = None
        return child

    def channel(self, *, inline: bool = True) -> World:
        """The same ranks with an order of their own: for a thread that talks beside the main program.

        `inline`: its collectives run in the thread that calls them, not in one of their own.
        """
        return self.split([list(range(self.size))], inline=inline)

    def narrow(self, ranks: Sequence[int]) -> World:
        """From here on this world is `ranks` alone, for all that hold it; returns the world as it was.

        Every rank calls it alike: those left out have another part to play (a server's), and find themselves in a
        world of their own.
        """
        rest = [r for r in range(self.size) if r not in ranks]
        other = self.split([list(ranks), rest] if rest else [list(ranks)])
        self._trade(other, _NARROWED)
        self._whole = other
        return other

    def _trade(self, other: World, names: Sequence[str]) -> None:
        for name in names:
            mine, theirs = getattr(self, name), getattr(other, name)
            setattr(self, name, theirs)
            setattr(other, name, mine)

    # Ranks that come and go ------------------------------------------------------------------------------

    def run_tolerating_loss(self, call: Callable[[], Any]) -> Any:
        """Run `call`, which exchanges something. If a peer is lost in it and the world is elastic, return None: the
        rest of the window is not exchanged, and the world is formed anew with the next batch."""
        return call() if self.elastic is None else self.elastic.run_tolerating_loss(call)

    def adopt(self, other: World) -> World:
        """From here on this world is `other`, for all that hold it; returns the world as it was, to be closed."""
        self._trade(other, (*_NARROWED, "_children", "_splits"))
        self.ledger.rank = self.rank
        return other

    def follow(self, follower: WorldFollower) -> None:
        """Call `follower.world_changed(world)` when ranks have come or gone, on every rank in the same order."""
        self._followers.append(weakref.ref(follower))

    def tell_followers(self) -> None:
        """Tell all followers that the ranks have changed."""
        for ref in list(self._followers):
            follower = ref()
            if follower is None:
                self._followers.remove(ref)
            else:
                follower.world_changed(self)

    def abandon(self, why: Exception) -> None:
        """Tell the other ranks that this one leaves, also those that wait for it in worlds split from this one."""
        for child in list(self._children):
            child.abandon(why)
        for transport in self._operations.transports:
            transport.abandon(why)

    def set_timeout(self, seconds: float) -> None:
        """Set how long to wait for another rank from now on."""
        for transport in self._operations.transports:
            transport.set_timeout(seconds)

    # Memory ----------------------------------------------------------------------------------------------

    def shared(self, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Memory for `n` elements, zero at first, that every rank sees: what one writes, all read.

        Every rank calls it alike; ValueError where the ranks have no memory in common.
        """
        return self.shared_view(n, dtype)[0]

    def shared_view(self, n: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Memory as from `shared`, and a private view of it: what this rank writes there, no other rank sees."""
        if self.size == 1:
            line = torch.zeros(n, dtype=dtype)
            return line, line
        return self._operations.call(lambda: self._operations.base.shared(n, dtype))

    def empty(self, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Memory for `n` elements that this world moves fastest: shared between the workers of a host.

        Every rank calls it alike; `release` gives it back before the world is closed.
        """
        if self.size == 1 or self.device.type != "cpu":
            return torch.empty(n, dtype=dtype, device=self.device)
        return self._operations.call(lambda: self._operations.base.empty(n, dtype))

    def release(self, x: Tensor) -> None:
        """Free memory that came from `empty`."""
        if self.transport is not None:
            self.transport.release(x)

    def close(self) -> None:
        """Release threads, sockets and shared memory, also of the worlds split from this one."""
        for child in list(self._children):
            child.close()
        self._operations.close()
        parent = self._parent() if self._parent is not None else None
        if parent is not None:  # it would hold my memory
            parent._children.pop(self, None)
        if self.on_close is not None:
            self.on_close()

    def _objects(self, obj: Any) -> list[Any]:
        data = packing.to_bytes(obj)
        record = self._operations.record("objects", "", (self.size - 1) * len(data))
        found = self._operations.run(record, None, lambda transport: (math.nan, transport.exchange(data))).wait()
        return [packing.from_bytes(message) for message in found]
