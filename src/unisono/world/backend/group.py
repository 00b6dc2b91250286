"""A process group of torch over a world of its own: every group meets in the store that torch hands it.

Collectives run in order, on one lane a group; each direction of send and recv has a lane of its own. A lane has a
thread, and a thread that waits works itself. The methods have the names by which torch calls them: its Python as
attributes, its C++ (DDP's reducer, functional collectives) through the virtual functions that a subclass of
`ProcessGroup` can have. Some have two names, as torch renamed them in 2.13.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FunctionType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.background import SerialQueue, Wakes
from unisono.methods.model_copies import hide_from_compiler
from unisono.world.backend import accounts
from unisono.world.backend.arguments import (
    as_list,
    check_count,
    check_dtypes,
    check_multiple,
    check_shapes,
    find_splits,
    provide,
    reduce_options,
    root_options,
)
from unisono.world.backend.errors import translate
from unisono.world.backend.messages import Messages
from unisono.world.backend.operators import Reduction, reduce_sparse
from unisono.world.backend.works import Work
from unisono.world.operations import flatten, put_back
from unisono.world.rendezvous import accelerate, meet_in_store
from unisono.world.transports import PeerLost
from unisono.world.world import World

__all__ = ["EVERY_RANK", "Group"]

T = TypeVar("T")
EVERY_RANK = {"*": "every rank of the process group calls the same collectives, as often and in the same order"}
Pairs = Sequence[tuple[Tensor, Tensor]]


_ProcessGroup: Any = dist.ProcessGroup  # whose methods are overloaded in ways that types cannot follow


class Group(_ProcessGroup):  # type: ignore[misc]
    """One process group. `world` is what it talks through, `ledger` the one of all groups."""

    @classmethod
    def meet(cls, options: Any) -> Group:
        """The group that torch describes; waits for its other ranks."""
        ranks = list(options.global_ranks_in_group)
        return cls(options.store, options.group_rank, options.group_size, options.timeout, str(options.group_id), ranks)

    def __init__(
        self, store: dist.Store, rank: int, size: int, timeout: timedelta, name: str, ranks: Sequence[int]
    ) -> None:
        """`ranks`: those of the default group that are in this one; none: it is the default group itself."""
        super().__init__(rank, size)  # with a store it would not be open to overrides
        self._store, self._name, self._ranks, self._splits = store, name, list(ranks), 0
        self._desc = "undefined"
        self._timeout = timeout
        self.ledger = accounts.open_ledger(self, is_default=not ranks, rank=rank)
        self.world = self._meet(rank, size)
        self._lanes: dict[str, SerialQueue] = {}
        self._messages = Messages(self.world, self._lane)
        self._messages.timeout_s = timeout.total_seconds()
        self._begun = 0
        self._is_closed = False
        self._pieces: list[Work] | None = None

    def _meet(self, rank: int, size: int) -> World:
        try:
            return meet_in_store(
                self._store,
                rank,
                size,
                timeout_s=self._timeout.total_seconds(),
                ledger=self.ledger,
                name=self._describe(),
            )
        except PeerLost as error:
            raise translate(error, "its making", self._describe()) from None

    # Who it is -----------------------------------------------------------------------------------------------

    def _describe(self) -> str:
        if not self._ranks:
            return "default"
        return f"group {self._name}" if self._desc == "undefined" else f"{self._desc} {self._name}"

    def getBackendName(self) -> str:
        """The backend's name, for torch's C++."""
        return "unisono"

    def name(self) -> str:
        """The backend's name, for torch's Python."""
        return "unisono"

    def getGroupName(self) -> str:
        """The name that torch gave this group."""
        return self._name

    def setGroupName(self, name: str) -> None:
        """Set the name that torch gives this group."""
        self._name = name

    def getGroupDesc(self) -> str:
        """The description that the program gave this group."""
        return self._desc

    def setGroupDesc(self, desc: str) -> None:
        """Set the program's description of this group; later operations have it in the ledger."""
        self._desc = desc
        self.world.rename(self._describe())

    @property
    def group_name(self) -> str:
        """The name that torch gave this group."""
        return self._name

    @property
    def pg_name(self) -> str:
        """The same as `group_name`, which some of torch's callers ask for by this name."""
        return self._name

    @property
    def group_desc(self) -> str:
        """The description that the program gave this group."""
        return self._desc

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]

    def _get_backend(self, device: Any) -> Group:
        return self

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False
    supports_shrinking = False

    def supports_tensor_alloc(self, device: Any) -> bool:
        """Whether torch may ask this group for memory: no."""
        return False

    @property
    def options(self) -> Any:
        """Options of this group, as torch's own backends have them."""
        found = dist.ProcessGroup.Options("unisono") if hasattr(dist.ProcessGroup, "Options") else None
        if found is not None:
            found._timeout = self._timeout
        return found

    def get_group_store(self) -> dist.Store:
        """The store in which the ranks of this group met."""
        return self._store

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._messages.timeout_s = timeout.total_seconds()
        self.world.set_timeout(timeout.total_seconds())

    set_timeout = _set_default_timeout

    def _set_sequence_number_for_group(self) -> None:
        """No-op: operations are numbered from the start."""

    def _get_sequence_number_for_group(self) -> int:
        return self._begun

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        for lane in list(self._lanes.values()):
            lane.submit(lambda: None).wait()

    # Reductions ----------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Work:
        """Replace every tensor by its reduction over the ranks."""
        parts, opts = as_list(tensors), reduce_options(dist.AllreduceOptions, opts, timeout)
        reduction = Reduction(opts.reduceOp, parts[0].dtype, self.size())

        def run() -> None:
            for part in parts:
                if part.layout != torch.strided:
                    reduce_sparse(self.world, part, reduction.op)
                    continue
                self._all_reduce([part], reduction)

        work = self._begin("all_reduce", parts, opts, run)
        accounts.note_work(work)
        return work

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        """All-reduce several tensors in one operation."""
        parts, opts = list(tensors), reduce_options(dist.AllreduceCoalescedOptions, opts, None)
        if not parts:
            return self._begin("all_reduce", [], opts, lambda: None)
        reduction = Reduction(opts.reduceOp, parts[0].dtype, self.size())
        return self._begin("all_reduce", parts, opts, lambda: self._all_reduce(parts, reduction))

    def _all_reduce(self, parts: list[Tensor], reduction: Reduction) -> None:
        reduction.before(parts)
        self.world.all_reduce(parts if len(parts) > 1 else parts[0], reduction.op).wait()
        reduction.after(parts)

    def reduce(self, tensors: Any, opts: Any = None, *more: Any) -> Work:
        """Replace the root's tensor by the reduction; the other ranks keep theirs."""
        parts, opts = as_list(tensors), root_options(dist.ReduceOptions, opts, more)
        reduction = Reduction(opts.reduceOp, parts[0].dtype, self.size())

        def run() -> None:
            for part in parts:
                self._all_reduce([part if self.rank() == opts.rootRank else part.detach().clone()], reduction)

        return self._begin("reduce", parts, opts, run)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Work:
        """Reduce lists of one tensor for each rank; each rank gets its own."""
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = reduce_options(dist.ReduceScatterOptions, opts, timeout)
        pairs = [(out, list(parts)) for out, parts in zip(outputs, inputs, strict=True)]
        for out, parts in pairs:
            check_count("reduce_scatter", parts, self.size())
            check_shapes("reduce_scatter", parts[self.rank()], [out])

        def run() -> None:
            for out, parts in pairs:
                self._reduce_scatter(out, parts, Reduction(opts.reduceOp, out.dtype, self.size()))

        return self._begin("reduce_scatter", list(outputs), opts, run)

    def _reduce_scatter_base(self, output: Tensor, given: Tensor, opts: Any = None) -> Work:
        return self.reduce_scatter_tensor_coalesced([output], [given], opts)

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Reduce tensors, and give each rank its part of each."""
        opts = reduce_options(dist.ReduceScatterOptions, opts, None)
        pairs = list(zip(outputs, inputs, strict=True))
        for out, given in pairs:
            check_multiple("reduce_scatter", given, out, self.size())

        def run() -> None:
            for out, given in pairs:
                parts = list(flatten(given).chunk(self.size())) if given.numel() else [flatten(given)] * self.size()
                self._reduce_scatter(out, parts, Reduction(opts.reduceOp, out.dtype, self.size()), whole=flatten(given))

        return self._begin("reduce_scatter", list(outputs), opts, run)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def _reduce_scatter(self, out: Tensor, parts: list[Tensor], reduction: Reduction, whole: Any = None) -> None:
        if reduction.changes_input:
            parts = [part.detach().clone() for part in parts]
            reduction.before(parts)
            whole = None
        target, target_line = provide(out, parts)
        given = whole if whole is not None else [flatten(part) for part in parts]
        self.world.reduce_scatter(given, reduction.op, out=target_line).wait()
        reduction.after([target])
        put_back(out, target)

    # Copies --------------------------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Work:
        """Copy the root's tensors to every rank."""
        parts, opts = as_list(tensors), root_options(dist.BroadcastOptions, opts, (timeout,))

        def run() -> None:
            if any(part.layout != torch.strided for part in parts):
                raise TypeError("broadcast takes dense tensors: send indices and values of a sparse one by themselves")
            self.world.broadcast(parts, opts.rootRank).wait()

        return self._begin("broadcast", parts, opts, run)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Work:
        """Gather every rank's tensor on every rank, in a list."""
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        return self._gather_lists(outputs, inputs, opts)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Gather several tensors: `outputs[rank][i]`, as gloo has them."""
        return self._gather_lists([list(each) for each in zip(*outputs, strict=True)], inputs, opts)

    def _gather_lists(self, outputs: Any, inputs: Any, opts: Any) -> Work:
        pairs = [(x, list(outs)) for x, outs in zip(inputs, outputs, strict=True)]
        for x, outs in pairs:
            check_count("all_gather", outs, self.size())
            check_dtypes("all_gather", x, outs)

        def run() -> None:
            for x, outs in pairs:
                is_even = all(out.shape == x.shape for out in outs)
                self._all_gather(x, outs, even=is_even)

        return self._begin("all_gather", [out for _, outs in pairs for out in outs], opts, run)

    def _all_gather(self, x: Tensor, outs: Sequence[Tensor], *, even: bool) -> None:
        x = x.to_dense() if x.layout != torch.strided else x.detach()
        targets = [provide(out)[0] for out in outs]
        self.world.all_gather(x, even=even, out=targets).wait()
        for out, target in zip(outs, targets, strict=True):
            put_back(out, target)

    def _allgather_base(self, output: Tensor, given: Tensor, opts: Any = None) -> Work:
        return self.allgather_into_tensor_coalesced([output], [given], opts)

    all_gather_single = _allgather_base

    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Gather every rank's tensor on every rank, one behind the other in one tensor."""
        pairs = list(zip(outputs, inputs, strict=True))
        for out, given in pairs:
            check_multiple("all_gather", out, given, self.size())

        def run() -> None:
            for out, given in pairs:
                target, line = provide(out)
                self._all_gather(flatten(given), list(line.view(self.size(), -1)), even=True)
                put_back(out, target)

        return self._begin("all_gather", list(outputs), opts, run)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, *more: Any) -> Work:
        """Gather every rank's tensor on the root."""
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs] if outputs else [], [inputs]
        opts = root_options(dist.GatherOptions, opts, more)
        x, is_root = inputs[0], self.rank() == opts.rootRank
        outs = self._take_list("gather", x, outputs, "outputs", is_root=is_root)

        def run() -> None:
            none = x.new_empty(0)
            parts = [x if r == opts.rootRank else none for r in range(self.size())]
            self._swap(parts, outs if is_root else [none] * self.size())

        return self._begin("gather", outs, opts, run)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, *more: Any) -> Work:
        """Send each rank its tensor of the root's list."""
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs] if inputs else []
        opts = root_options(dist.ScatterOptions, opts, more)
        out, is_root = outputs[0], self.rank() == opts.rootRank
        given = self._take_list("scatter", out, inputs, "inputs", is_root=is_root)

        def run() -> None:
            none = out.new_empty(0)
            outs = [out if r == opts.rootRank else none for r in range(self.size())]
            self._swap(given if is_root else [none] * self.size(), outs)

        return self._begin("scatter", [out], opts, run)

    def _take_list(self, what: str, like: Tensor, lists: Any, noun: str, *, is_root: bool) -> list[Tensor]:
        """The root's list of one tensor for each rank, checked; empty on the other ranks, which must not give one."""
        if not is_root and lists:
            raise ValueError(f"{what}: only the root rank gives a list of {noun}")
        found = list(lists[0]) if lists else []
        if is_root:
            check_count(what, found, self.size())
            check_shapes(what, like, found)
        return found

    def alltoall(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None, timeout: Any = None
    ) -> Work:
        """Send the i-th tensor to rank i."""
        outs, parts = list(outputs), list(inputs)
        check_count("all_to_all", outs, self.size())
        check_count("all_to_all", parts, self.size())
        return self._begin("all_to_all", outs, opts, lambda: self._swap(parts, outs))

    def alltoall_base(
        self, output: Tensor, given: Tensor, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> Work:
        """Send the i-th part of a tensor to rank i."""
        sizes_out = find_splits(output, output_splits, self.size())
        sizes_in = find_splits(given, input_splits, self.size())

        def run() -> None:
            target, _ = provide(output)
            self._swap(list(given.split(sizes_in)), list(target.split(sizes_out)))
            put_back(output, target)

        return self._begin("all_to_all", [output], opts, run)

    all_to_all_single = alltoall_base

    def _swap(self, parts: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        targets = [provide(out, parts)[0] for out in outs]
        self.world.all_to_all([part.detach() for part in parts], out=targets).wait()
        for out, target in zip(outs, targets, strict=True):
            put_back(out, target)

    def barrier(self, opts: Any = None, timeout: Any = None) -> Work:
        """Wait until all ranks have called this."""
        opts = opts if isinstance(opts, dist.BarrierOptions) else dist.BarrierOptions()
        if timeout is not None:
            opts.timeout = timeout

        return self._begin("barrier", [], opts, self.world.barrier)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """A barrier whose error names the ranks that did not come, as every error of this backend does."""
        self.barrier(timeout=timeout).wait()

    # Messages ------------------------------------------------------------------------------------------------

    def send(self, tensors: Sequence[Tensor], dst: int, tag: int = 0) -> Work:
        """Send a tensor to one rank."""
        return self._coalesce(self._messages.send(tensors[0], dst, tag, self._work("send", tensors)))

    def recv(self, tensors: Sequence[Tensor], src: int, tag: int = 0) -> Work:
        """Receive a tensor from one rank."""
        return self._coalesce(self._messages.receive(tensors[0], src, tag, self._work("recv", tensors)))

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> Work:
        """Receive a tensor from whichever rank sends first."""
        return self._messages.receive(tensors[0], None, tag, self._work("recv", tensors))

    def _start_coalescing(self, device: Any) -> None:
        self._pieces = []

    def _end_coalescing(self, device: Any) -> Work:
        pieces, self._pieces = self._pieces or [], None

        def run() -> None:
            for piece in pieces:
                piece.wait()

        return self._work("coalesced operations", []).begin(self._lane("coalesced"), run, wakes=True)

    def _coalesce(self, work: Work) -> Work:
        if self._pieces is not None:
            self._pieces.append(work)
        return work

    # Groups of it, and its end -------------------------------------------------------------------------------

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: Any = None,
        opts: Any = None,
        group_name: Any = None,
        group_desc: Any = None,
        **_: Any,
    ) -> Group | None:
        """A group of some of its ranks, which all call this alike; None on ranks that are not in it."""
        self._splits += 1
        name = group_name or f"{self._name}:split:{self._splits}"
        if self.rank() not in new_ranks:
            return None
        mine = [self._ranks[r] if self._ranks else r for r in new_ranks]
        store = dist.PrefixStore(f"split/{self._splits}/{'-'.join(map(str, new_ranks))}", self._store)
        made = Group(store, list(new_ranks).index(self.rank()), len(new_ranks), timeout or self._timeout, name, mine)
        if group_desc is not None:
            made.setGroupDesc(str(group_desc))
        return made

    def in_order(self, call: Callable[[World], T]) -> T:
        """Run `call(world)` after all collectives so far, and return its result."""
        found: list[T] = []
        self._begin("call", [], None, lambda: found.append(call(self.world))).wait()
        return found[0]

    def shutdown(self) -> None:
        """Run what is queued, then let go of threads and memory; other ranks that wait for this one are told."""
        if self._is_closed:
            return
        try:
            accounts.close_default(self)
        finally:
            self._is_closed = True
            for lane in list(self._lanes.values()):
                lane.close()
            self.world.close()

    def abort(self) -> None:
        """Leave at once: those who wait for this rank get an error."""
        self.world.abandon(RuntimeError("aborted its process group"))

    # Inside --------------------------------------------------------------------------------------------------

    def _lane(self, name: str) -> SerialQueue:
        if name not in self._lanes:
            self._lanes[name] = SerialQueue(f"unisono {self._describe()} {name}", moves=True)
        return self._lanes[name]

    def _work(self, what: str, tensors: Sequence[Tensor]) -> Work:
        self._begun += 1
        if self._is_closed:
            raise RuntimeError(f"{what}: the process group {self._describe()!r} was destroyed")
        return Work(what, self._describe(), self.ledger, tensors)

    def _begin(self, what: str, tensors: Sequence[Tensor], opts: Any, run: Callable[[], None]) -> Work:
        """Queue a collective; `tensors` are what its future gives, `opts` torch's options (None: the defaults)."""
        work = self._work(what, tensors)
        seconds = opts.timeout.total_seconds() if opts is not None else -1.0
        if seconds > 0 and seconds != self._timeout.total_seconds():
            run = self._within(seconds, run)
        if any(tensor.is_cuda for tensor in tensors):
            run = self._on_device(next(tensor.device for tensor in tensors if tensor.is_cuda), run)
        wakes: Wakes = bool(getattr(opts, "asyncOp", True))
        if wakes and _is_functional():  # its result is used by the next operation, as a rule
            wakes = "soon"
        return work.begin(self._lane("main"), run, wakes=wakes)

    def _within(self, seconds: float, run: Callable[[], None]) -> Callable[[], None]:
        """`run` under another timeout than the group's."""

        def limited() -> None:
            self.world.set_timeout(seconds)
            try:
                run()
            finally:
                self.world.set_timeout(self._timeout.total_seconds())

        return limited

    def _on_device(self, device: torch.device, run: Callable[[], None]) -> Callable[[], None]:
        """`run` after what the caller's stream holds now; it returns when the device has finished."""
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(device))

        def run_there() -> None:
            with torch.cuda.device(device):
                accelerate(self.world, device)
                here = torch.cuda.current_stream(device)
                here.wait_event(ready)
                run()
                here.synchronize()

        return run_there


def _is_functional() -> bool:
    """Whether the operation comes from torch.ops (functional collectives, DTensor), and not from DDP or a program."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return frame.f_code.co_filename == torch._ops.__file__


# Else they would be compiled where torch's C++ calls one in a compiled program, as DDP does to broadcast buffers.
hide_from_compiler(*(one for kind in (Group, Work) for one in vars(kind).values() if isinstance(one, FunctionType)))
