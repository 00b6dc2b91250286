"""Gradients in flat buckets, exchanged while backward goes on.

Three phases, in one backward:
1. filling: each parameter's gradient is copied into its bucket as soon as it is there, or taken over as it is;
2. exchanging: a full bucket is handed to the exchange thread (a side stream on GPUs), in a fixed order;
3. finishing: at the end of backward, what is missing counts as zero, the rest is exchanged, and `p.grad`
   is the mean, a view into the bucket where it was copied.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from unisono.background import Handle, SerialQueue
from unisono.methods.buckets import APART_BYTES, Bucket, group_into_buckets, on_device, view_like
from unisono.methods.exchange.noise_scale import NoiseScale
from unisono.methods.exchange.reduction import Reduction, overlap_pays
from unisono.methods.exchange.windows import BackwardWatcher, TrainableParameters, Window
from unisono.world import World


class Exchange(BackwardWatcher):
    """Exchanges the gradients of some parameters, once a window.

    `reduction` turns a bucket's tensors into their mean; `advance()` is called when all of a window's gradients are
    means. `overlap`: a bucket is exchanged as soon as it is full; None: if that gains time. `by_ready`: after the first
    window the buckets are laid out in the order in which rank 0's gradients came. `apart`: large gradients are
    exchanged where autograd put them, instead of in a bucket's flat memory.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, Parameter]],
        sparse: Sequence[tuple[str, Parameter]],
        world: World,
        reduction: Reduction,
        *,
        bucket_bytes: int,
        overlap: bool | None,
        accumulate: int,
        advance: Callable[[], None],
        by_ready: bool = False,
        apart: bool = False,
    ) -> None:
        super().__init__(world, accumulate=accumulate, advance=advance)
        self.named, self.sparse = list(named), list(sparse)
        self._parameters = TrainableParameters(self.named)
        pays = overlap_pays(world)
        # inline: the exchange thread moves the bytes itself, instead of a thread of its own behind it
        self.channel = world.channel(inline=reduction.reducer.stages is None or not pays)
        self.overlap, self.bucket_bytes = pays if overlap is None else overlap, bucket_bytes
        self._reduction = reduction
        self._lane = SerialQueue("unisono exchange")
        self._cuda = next((p.device for _, p in (*self.named, *self.sparse) if p.is_cuda), None)
        self._apart_bytes = APART_BYTES if apart and self._cuda is None else None
        self._is_alone = self._cuda is not None and world.size == 1  # nothing travels: all at the end, in its order
        self.takes_each = not self._is_alone
        self._stream = torch.cuda.Stream() if world.has_nccl and any(p.is_cuda for _, p in self.named) else None
        self.noise: NoiseScale | None = None  # measures own gradients and their mean, of exact exchanges
        self._kept_local = False  # gradients of a no_sync pass are waiting
        self._came: list[str] | None = [] if by_ready else None  # gradients in order, until the ranks agree on it
        self._places: dict[str, int] = {}  # what they agreed on
        self._is_reordered = False
        self.buckets: list[Bucket] = []
        self._memory: dict[Bucket, list[_Memory]] = {}  # the channel's, then what took its place for a while
        self._build_if_changed()
        self.watch((*named, *sparse))

    # Layout ----------------------------------------------------------------------------------------------

    def _build_if_changed(self) -> None:
        """Lay the buckets out for the parameters that now require gradients, where these are others than before."""
        if not self._parameters.have_changed() and not self._is_reordered:
            self._leave_kept_gradients()
            return
        self._is_reordered = False
        for first, *_ in self._memory.values():
            self.channel.release(first.flat)
        device = self.world.device
        groups = group_into_buckets(self._in_order(), self.bucket_bytes)
        self.buckets = [
            Bucket(
                i,
                named,
                self.channel.empty if named[0][1].device.type == "cpu" else partial(on_device, device),
                apart_bytes=self._apart_bytes,
                flags=self._count_flags(groups) if i == len(groups) - 1 else 0,
            )
            for i, named in enumerate(groups)
        ]
        for bucket in self.buckets:
            self.world.ledger.name_tag(bucket.tag, bucket.names)
        self._memory = {bucket: [_Memory(bucket)] for bucket in self.buckets}
        self._slots = {name: (b, k) for b in self.buckets for k, name in enumerate(b.names)}
        self._reduction.set_buckets(self.buckets)
        self._reset()

    def _count_flags(self, groups: Sequence[Sequence[tuple[str, Parameter]]]) -> int:
        """How many flags travel in the last bucket: one a parameter, and whether a learning rate fell. 0: they have a
        message of their own, as a bucket on a GPU would have to be waited for, and sparse gradients come later. Ranks
        that may be lost in an exchange have one, too: it says that all have the means, before any rank steps. A rank
        that has lost a peer clears its gradients, while others may still be reading them."""
        travel = self._reduction.carries and self._cuda is None and not self.sparse and self.world.elastic is None
        return sum(map(len, groups)) + 1 if travel and groups[-1][0][1].is_floating_point() else 0

    def _leave_kept_gradients(self) -> None:
        """Take other memory for a bucket whose gradients the program still holds: those of a window before, which it
        has taken off the parameters. In one process the next backward pass writes elsewhere too."""
        for bucket, every in self._memory.items():
            for memory in every:
                memory.renew_moved(bucket)
            off = [k for k, (p, x) in enumerate(zip(bucket.params, bucket.tensors, strict=True)) if p.grad is not x]
            if not off or (len(every) == 1 and not every[0].is_kept(off)):
                continue
            present = next(memory for memory in every if memory.flat is bucket.flat)
            kept = [
                memory for memory in every if memory.is_kept(off if memory is present else range(len(bucket.params)))
            ]
            free = next((memory for memory in every if memory not in kept), None)
            if free is not present:
                bucket.use(*((torch.empty_like(bucket.flat), None) if free is None else (free.flat, free.tensors)))
                for k in {*range(len(bucket.params))}.difference(off):  # it goes on adding up
                    bucket.params[k].grad = bucket.tensors[k].copy_(present.tensors[k])
            some = [memory for memory in every if memory in kept or memory in (every[0], free)]
            self._memory[bucket] = [*some, _Memory(bucket)] if free is None else some

    def _in_order(self) -> list[tuple[str, Parameter]]:
        """The trainable parameters as if registered so: those that backward reaches first come last."""
        trainable = self._parameters.trainable
        last = len(self._places)
        return sorted(trainable, key=lambda one: -self._places.get(one[0], last)) if self._places else trainable

    def _agree_on_order(self) -> None:
        """Rank 0's order becomes everyone's, once."""
        names = [name for name, _ in self.named]
        came = {name: i for i, name in enumerate(names)}
        order = torch.full((len(names),), -1, dtype=torch.int64)
        found = [came[name] for name in self._came or ()]
        order[: len(found)] = torch.tensor(found, dtype=torch.int64)
        self.channel.broadcast(order, tag="bucket order").wait()
        before = self._in_order()
        self._places = {names[i]: place for place, i in enumerate(order.tolist()) if i >= 0}
        self._is_reordered = [name for name, _ in self._in_order()] != [name for name, _ in before]
        self._came = None

    def _reset(self) -> None:
        for bucket in self.buckets:
            if bucket.apart:  # hold these gradients no more: the program may clear them
                bucket.lines = [bucket.flat]
                for k in bucket.apart:
                    bucket.tensors[k] = bucket.flat[:0]
        self._missing = [len(b.params) for b in self.buckets]
        self._launched = 0
        self._handles: list[Handle[None]] = []
        self._fired: set[str] = set()

    # During backward -------------------------------------------------------------------------------------

    def take(self, name: str) -> None:
        if not self._is_last or name not in self._slots:
            return
        if name in self._fired:
            if self.overlap:
                raise RuntimeError(
                    f"the gradient of {name!r} was accumulated twice in one backward pass, after its exchange may "
                    "have begun (re-entrant checkpointing of a shared parameter does this): use "
                    "torch.utils.checkpoint with use_reentrant=False, or the strategy with overlap=False"
                )
            return
        self._fired.add(name)
        if self._came is not None:
            self._came.append(name)
        bucket, k = self._slots[name]
        if self._cuda is None:  # while it is in the cache; on CUDA all of a bucket's in one go, when it is full
            self._fill(bucket, [k])
        self._missing[bucket.index] -= 1
        if self.overlap:
            while self._launched < len(self.buckets) - 1 and not self._missing[self._launched]:
                if self._cuda is not None:
                    full = self.buckets[self._launched]
                    self._fill(full, range(len(full.params)))
                self._launch()

    def begin_pass(self, name: str) -> None:
        if self._launched:  # a backward pass that failed half-way left these
            self._run(self._reduction.drain)
            self._run(lambda: self._reduction.end_window(void=True))
            for handle in self._handles:
                handle.wait()
        self._build_if_changed()
        self._reset()
        if self._came:  # of a pass that failed
            self._came = []

    def _fill(self, bucket: Bucket, which: Sequence[int]) -> list[bool]:
        """Bring gradients into their bucket; False where there is none."""
        if not bucket.apart and len(which) == len(bucket.params) and self._fill_whole(bucket):
            return [True] * len(which)
        present, views, grads = [], [], []
        for k in which:
            grad = bucket.params[k].grad
            present.append(grad is not None)
            if grad is not None and grad.is_sparse:
                raise TypeError(
                    f"the gradient of {bucket.names[k]!r} is sparse, but its module does not say so: "
                    "use nn.Embedding(sparse=True) or nn.EmbeddingBag(sparse=True), or dense gradients"
                )
            if k in bucket.apart:
                if grad is None or bucket.tensors[k] is not grad:
                    bucket.tensors[k] = own_gradient(bucket.params[k], grad)
                if grad is not None:
                    bucket.params[k].grad = bucket.tensors[k]
                continue
            view = bucket.tensors[k]
            if grad is None:
                view.zero_()
            elif grad.data_ptr() != view.data_ptr() or grad.stride() != view.stride():
                views.append(view)
                grads.append(grad.detach())
                bucket.params[k].grad = view
        if len(views) == 1:
            views[0].copy_(grads[0])
        elif views:
            torch._foreach_copy_(views, grads)
        return present

    def _fill_whole(self, bucket: Bucket) -> bool:
        """The same for all of a bucket at once, where every gradient is new and dense; else False, and nothing done."""
        grads = []
        for param, view in zip(bucket.params, bucket.tensors, strict=True):
            grad = param.grad
            if grad is None or grad is view or grad.is_sparse or grad.requires_grad:
                return False
            grads.append(grad)
        torch._foreach_copy_(bucket.tensors, grads)
        for param, view in zip(bucket.params, bucket.tensors, strict=True):
            param.grad = view
        return True

    def _launch(self) -> None:
        self._run(self._take_next())

    def _take_next(self) -> Callable[[], None]:
        """What exchanges the next bucket."""
        bucket = self.buckets[self._launched]
        self._launched += 1
        if bucket.apart:  # the memory of all its gradients, those apart too
            apart = [bucket.tensors[k].as_strided((bucket.params[k].numel(),), (1,)) for k in bucket.apart]
            bucket.lines = [bucket.flat, *apart] if bucket.flat.numel() else apart
        if self.noise is not None:
            if self.noise.is_due:
                self.noise.add_own(bucket.tensors)
            if self.noise.keeps_norm:
                self.noise.add_whole(bucket.tensors)
        return partial(self._reduction.begin, bucket, self.channel)

    def _run(self, job: Callable[[], None]) -> None:
        """On the exchange thread; on the side stream where the device's transport returns at once; alone, here."""
        if self._is_alone:
            job()
            return
        if self._stream is None:
            self._handles.append(self._on_lane(job))
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            job()

    def _on_lane(self, run: Callable[[], None]) -> Handle[None]:
        """Run on the exchange thread, whose CUDA stream is its own: after what my stream has to do so far."""
        device = self._cuda
        if device is None:  # after backward, this thread waits for it anyway
            return self._lane.submit(run, wakes=self.overlap and self._launched < len(self.buckets))
        here = torch.cuda.Event()
        here.record(torch.cuda.current_stream(device))

        def job() -> None:
            torch.cuda.current_stream(device).wait_event(here)
            run()

        return self._lane.submit(job)

    def give_up_pass(self) -> None:
        torch._foreach_zero_([p.grad for _, p in self.named if p.grad is not None])

    def end_pass(self) -> None:
        if self._local:
            self._kept_local = True
        elif self._is_last:
            self._exchange()
        else:
            self._passes += 1
            self.window = Window.OPEN

    def _exchange(self) -> None:
        """Phase 3: exchange what is left, and make every `p.grad` the mean."""
        used: list[int] = []
        for bucket in self.buckets:
            if bucket.index < self._launched:
                used += [True] * len(bucket.params)
                continue
            used += self._fill(bucket, range(len(bucket.params)))
            if bucket is not self.buckets[-1]:  # with that, flags may travel
                self._launch()
        used += [layout_of(p.grad) for _, p in self.sparse]
        start = self.world.ledger.clock()
        used.append(self._reduction.learning_rate_fell())
        found = self._settle(used)
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        if self._cuda is not None and not self._is_alone:  # the exchange thread works on the default stream
            torch.cuda.current_stream(self._cuda).wait_stream(torch.cuda.default_stream(self._cuda))
        self.world.ledger.close_span("blocked", start, self.world.ledger.clock())
        self._reduction.set_decayed(bool(found[-1]))
        self._reduction.end_window(sparse_values(p for _, p in self.sparse))
        if self.noise is not None:
            if self.noise.is_due:
                self.noise.add_mean(x for bucket in self.buckets for x in bucket.tensors)
            self.noise.end_window()
        anywhere = iter(found)
        for bucket in self.buckets:
            for param, view in zip(bucket.params, bucket.tensors, strict=True):
                if (next(anywhere) or (self._reduction.keeps and bool(view.any()))) and param.grad is not view:
                    param.grad = view
        self._reset()
        for bucket, every in self._memory.items():
            next(memory for memory in every if memory.flat is bucket.flat).count_users()
        if self._came is not None:
            self._agree_on_order()
        self._passes, self._kept_local, self.window = 0, False, Window.ENDED
        self._advance()

    def _settle(self, used: list[int]) -> list[int]:
        """Exchange the last bucket, and wait for all that is under way; what some rank used, and whether a learning
        rate fell on one."""
        if self._is_alone:
            for _ in self.buckets[-1:]:
                self._launch()
            self._reduction.drain()
            self._tail(used)
            return used
        flags, carried = torch.tensor(used, dtype=torch.uint8), False
        jobs: list[Callable[[], None]] = []
        if self.buckets:
            last = self.buckets[-1]
            if carried := last.flat.numel() > last.layout.numel:
                flags = last.flat[last.layout.numel :].copy_(flags)
            jobs.append(self._take_next())
        jobs.append(self._reduction.drain)
        if self._stream is not None:
            while jobs:
                self._run(jobs.pop(0))
        found: list[int] = []

        def agree() -> None:
            for job in jobs:
                job()
            if not carried:
                self.channel.all_reduce(flags, "max", tag="used").wait()
            found.extend(flags.tolist())
            self._tail(found)

        if self._cuda is not None or not self._lane.try_run(agree):  # at once, if nothing else is under way
            self._handles.append(self._on_lane(agree))
            for handle in self._handles:
                handle.wait()
        return found

    def _tail(self, anywhere: list[int]) -> None:
        """After the buckets: sparse gradients, and what the strategy still has to say."""
        anywhere = anywhere[len(anywhere) - len(self.sparse) - 1 : -1]
        for (name, param), layout in zip(self.sparse, anywhere, strict=True):
            if layout and param.requires_grad:
                mean_of_sparse(param, layout, self.channel, f"gradients/{name}")
        self._reduction.after_last_bucket(self.channel)

    # Outside backward ------------------------------------------------------------------------------------

    def count_pass(self) -> None:
        self._kept_local = False
        super().count_pass()

    def before_step(self) -> None:
        """Close the window: a rank whose backward touched nothing, or a last short window, still takes part."""
        if self.window is not Window.ENDED and not self._kept_local and not self._local:
            self.weigh_given()
            self._build_if_changed()
            self._exchange()

    def sync(self) -> None:
        self._kept_local = False
        self.before_step()

    def close(self) -> None:
        """Take the hooks off; gradients stay where they are."""
        super().close()
        self._lane.close()
        self.channel.close()


def split_sparse(model: nn.Module) -> tuple[list[tuple[str, Parameter]], list[tuple[str, Parameter]]]:
    """The parameters with dense gradients, and those of embeddings with sparse ones."""
    sparse: set[Tensor] = {
        m.weight for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse
    }
    named = list(model.named_parameters())
    return [(n, p) for n, p in named if p not in sparse], [(n, p) for n, p in named if p in sparse]


def own_gradient(param: Tensor, grad: Tensor | None) -> Tensor:
    """A gradient as memory that is this parameter's alone, in its strides: itself, where it is that; zero for None.

    Autograd may give one memory to two parameters, or that of a tensor of the program: what is added to it, and what
    is read of it meanwhile, must not be another's.
    """
    if grad is None:
        return view_like(torch.zeros(param.numel(), dtype=param.dtype), param)
    if _is_alike(grad, param) and not grad.requires_grad and _count_users(grad) == _ALONE:
        return grad
    return view_like(torch.empty(param.numel(), dtype=param.dtype), param).copy_(grad.detach())


def _is_alike(grad: Tensor, param: Tensor) -> bool:
    """Whether both are in one memory order, without gaps."""
    if grad.is_contiguous() and param.is_contiguous():
        return True
    if grad.stride() != param.stride():
        return False
    lengths = sorted((stride, size) for stride, size in zip(grad.stride(), grad.shape, strict=True) if size > 1)
    steps = accumulate((size for _, size in lengths), operator.mul, initial=1)
    return all(stride == step for (stride, _), step in zip(lengths, steps, strict=False))


def is_held(x: Tensor) -> bool:
    """Whether a graph holds `x` for its backward pass, or another tensor lies in its memory."""
    return _count_holders(x) > 1 or _count_users(x) > _ALONE


def _count_holders(x: Tensor) -> int:
    """How many hold the tensor itself: Python, whatever the number of its references, and each graph that saved it."""
    return int(x._use_count())  # type: ignore[attr-defined]


def _count_users(x: Tensor) -> int:
    """How many tensors lie in the memory of `x`, and some more."""
    return int(torch._C._storage_Use_Count(x.untyped_storage()._cdata))


_ALONE = _count_users(torch.empty(1, dtype=torch.uint8))


class _Memory:
    """Memory in which a bucket's gradients are handed over, and how to see whether the program still holds some."""

    def __init__(self, bucket: Bucket) -> None:
        self.flat, self.tensors = bucket.flat, bucket.tensors
        self._places = [*map(Tensor.data_ptr, self.tensors)]
        self._users: int | None = None

    def renew_moved(self, bucket: Bucket) -> None:
        """Where the program gave a gradient of ours other memory (`p.grad.data = x`), another tensor is made for its
        place here."""
        if [*map(Tensor.data_ptr, self.tensors)] == self._places:
            return
        views = bucket.views(self.flat)
        for k in bucket.apart:
            views.insert(k, self.tensors[k])
        for k, (view, place) in enumerate(zip(views, self._places, strict=True)):
            if self.tensors[k].data_ptr() != place:
                self.tensors[k] = view

    def count_users(self) -> None:
        """A window ends: the tensors that lie here now are ours."""
        self._users = _count_users(self.flat)

    def is_kept(self, which: Iterable[int]) -> bool:
        """Whether someone else holds one of these gradients, or another tensor lies in this memory."""
        if self._users is None:  # nothing was handed over yet
            return False
        return is_any_held([self.tensors[k] for k in which]) or _count_users(self.flat) > self._users


# Of a tensor that one list, or one object, holds: of what `sys.getrefcount(views[k])` counts.
UNSHARED = next(sys.getrefcount(views[k]) for views in [[torch.empty(1, dtype=torch.uint8)]] for k in [0])


def is_any_held(views: list[Tensor]) -> bool:
    """Whether anyone holds one of these tensors, but for this list and one other. It is asked of all gradients in each
    step, so without a line of Python for each."""
    return max(map(sys.getrefcount, views), default=0) > _TWICE or max(map(_use_count, views), default=0) > 1


_use_count: Callable[[Tensor], int] = Tensor._use_count  # type: ignore[attr-defined]
_TWICE = next(max(map(sys.getrefcount, [*views])) for views in [[torch.empty(1, dtype=torch.uint8)]])


def sparse_values(params: Iterable[Parameter]) -> list[Tensor]:
    """The numbers of the gradients that there are."""
    grads = [p.grad for p in params if p.grad is not None]
    return [grad._values() if grad.is_sparse else grad for grad in grads]


def layout_of(grad: Tensor | None) -> int:
    """How the gradient of an embedding is there: not at all, as rows, or (2) whole, as where its weight is also that of
    a linear layer. The largest of all ranks' is what the mean is taken of."""
    return 0 if grad is None else 1 if grad.is_sparse else 2


def mean_of_sparse(param: Parameter, layout: int, world: World, tag: str) -> None:
    """The mean of the gradients of an embedding: every rank's rows, added up; whole ones where a rank has such."""
    grad = param.grad
    if layout == 2:
        param.grad = torch.zeros_like(param) if grad is None else grad.detach().to_dense().clone()
        world.all_reduce(param.grad, "mean", tag=tag).wait()
        return
    if grad is None:
        grad = torch.sparse_coo_tensor(
            torch.empty(1, 0, dtype=torch.int64), torch.empty(0, *param.shape[1:], dtype=param.dtype), param.shape
        ).to(param.device)
    grad = grad.coalesce()
    indices = world.all_gather(grad.indices(), tag=tag + " rows").wait()
    values = world.all_gather(grad.values(), tag=tag).wait()
    rows, means = torch.cat(indices, 1), torch.cat(values) / world.size
    total = torch.sparse_coo_tensor(rows, means, param.shape, check_invariants=False)
    param.grad = total.coalesce()


T = TypeVar("T")


class SideChannel:
    """A channel of the world whose jobs run one after the other: in the program itself, or `behind` it.

    Behind it is a thread; or, where CUDA tensors travel from device to device, a stream.
    """

    def __init__(self, world: World, cuda: torch.device | None, *, inline: bool, behind: bool) -> None:
        self.channel = world.channel(inline=inline)
        self._cuda = cuda
        self._stream = torch.cuda.Stream(cuda) if behind and cuda is not None and world.has_nccl else None
        self._lane = SerialQueue("unisono side channel") if behind and self._stream is None else None

    def start(self, job: Callable[[World], T]) -> Handle[T]:
        """Run a job on the channel, after those before it and after what the program's CUDA stream has to do."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._cuda))
            with torch.cuda.stream(self._stream):
                value = job(self.channel)
            return Handle(lambda: self._wait_for(value))
        if self._lane is None:
            return Handle.of(job(self.channel))
        if self._cuda is None:
            return self._lane.submit(lambda: job(self.channel))
        here = torch.cuda.Event()
        here.record(torch.cuda.current_stream(self._cuda))

        def later() -> T:
            torch.cuda.current_stream(self._cuda).wait_event(here)
            return job(self.channel)

        handle = self._lane.submit(later)
        return Handle(lambda: self._wait_for(handle.wait()), handle.done)

    def _wait_for(self, value: T) -> T:
        """`value`; the program's CUDA stream goes on after what made it (a thread works on the default stream)."""
        made = self._stream or torch.cuda.default_stream(self._cuda)
        torch.cuda.current_stream(self._cuda).wait_stream(made)
        return value

    def finish(self) -> None:
        """Run what is queued, and end the thread."""
        if self._lane is not None:
            self._lane.close()
