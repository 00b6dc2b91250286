"""`un.ddp_hook`: our reducers below torch's own DistributedDataParallel, as its communication hook."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.futures import Future
from torch.optim import Optimizer

from unisono.background import SerialQueue
from unisono.methods.buckets import Bucket, on_device
from unisono.methods.exchange.reduction import Reduction
from unisono.methods.reducer import Reducer
from unisono.methods.spec import build
from unisono.world import World, join

__all__ = ["ddp_hook"]

Hook = Callable[[Any, Any], Future[Tensor]]


def ddp_hook(
    reducer: str | Reducer = "dense",
    *,
    optimizer: Optimizer | None = None,
    scaler: GradScaler | None = None,
    world: World | None = None,
) -> Hook:
    """A hook that averages gradients by one of Unisono's reducers; the rest stays DistributedDataParallel's:

        model = DistributedDataParallel(model)
        model.register_comm_hook(None, un.ddp_hook("nuqsgd(bits=4)"))

    The bytes go over Unisono's transports and into the ledger of `un.join()`. Every rank calls it, once per model.
    What a reducer keeps to send later is not in the program's checkpoints.

    reducer: its spec, or an object.
    optimizer: its learning rates rescale what a reducer keeps, when they change; without it, nothing is rescaled.
    scaler: AMP's, whose loss scale multiplies the gradients; without it, what is kept counts twice or half after each
    change of the scale.
    world: the ranks of the model's process group; by default those of `un.join()`.

    >>> ddp_hook("powersgd(rank=4)", world=World()).__name__
    'hook'
    """
    worker = _Worker(build(reducer, kind="reducer"), optimizer, scaler, world if world is not None else join())

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations, and takes no strings
        return worker.reduce(bucket)

    return cast(Hook, hook)


class _Worker:
    """Reduces the buckets of one model, one after the other, behind its backward pass."""

    def __init__(self, reducer: Reducer, optimizer: Optimizer | None, scaler: GradScaler | None, world: World) -> None:
        if reducer.check is not None and optimizer is not None:
            reducer.check(optimizer, world)
        self._names: dict[Tensor, str] = {}  # in the order in which DDP first shows them: the same on every rank
        constant = [{"params": self._names, "lr": 1.0}] if scaler is not None else []  # only the scale then counts
        rates = cast(Optimizer, optimizer if optimizer is not None else SimpleNamespace(param_groups=constant))
        self._world, self._channel = world, world.channel()
        self._reduction = Reduction(reducer, rates, lambda _: None, "gradients")
        self._scaler, self._scale = scaler, 1.0
        self._reduction.scale = lambda: self._scale
        self._lane = SerialQueue("unisono ddp hook")
        self._buckets: dict[tuple[Tensor, ...], Bucket] = {}
        self._made = 0

    def reduce(self, given: Any) -> Future[Tensor]:
        """Begin to reduce one of DDP's buckets; its buffer holds the mean when the future is done."""
        line: Tensor = given.buffer()
        if line.is_sparse:
            raise TypeError(
                "un.ddp_hook takes dense gradients, got sparse ones: use nn.Embedding(sparse=False), or un.parallel "
                "instead of DistributedDataParallel"
            )
        params, views, is_last = tuple(given.parameters()), given.gradients(), given.is_last()
        is_first = given.index() == 0
        if self._scaler is not None and is_first:  # once a pass: on a GPU, asking holds the program up
            self._scale = self._scaler.get_scale()
        future: Future[Tensor] = Future(devices=[line.device] if line.is_cuda else None)

        def job() -> None:
            try:
                if is_first:
                    self._reduction.end_window(void=True)  # of a pass that failed: else there is none
                self._average(params, views, is_last)
            except Exception as error:  # DDP raises it from backward
                future.set_exception(error)  # type: ignore[arg-type]  # annotated as a result
                return
            future.set_result(line)

        if line.is_cuda:  # on the stream of backward
            job()
        else:
            self._lane.submit(job)
        return future

    @torch.no_grad()
    def _average(self, params: tuple[Tensor, ...], views: Sequence[Tensor], is_last: bool) -> None:
        bucket = self._find_bucket(params)
        torch._foreach_copy_(bucket.tensors, list(views))
        self._reduction.begin(bucket, self._channel)
        self._reduction.drain()
        torch._foreach_copy_(list(views), bucket.tensors)
        if is_last:
            fell = torch.tensor([self._reduction.learning_rate_fell()], dtype=torch.uint8)
            self._channel.all_reduce(fell, "max", tag="used").wait()
            self._reduction.set_decayed(bool(fell))
            self._reduction.end_window()

    def _find_bucket(self, params: tuple[Tensor, ...]) -> Bucket:
        """Our bucket for one of DDP's, which DDP lays out anew after the first pass: states move by parameter."""
        if params not in self._buckets:
            named = [(self._names.setdefault(p, f"{len(self._names)}"), p) for p in params]
            mine = set(params)
            for old in [key for key in self._buckets if not mine.isdisjoint(key)]:
                self._reduction.set_buckets([])  # takes the states out
                self._channel.release(self._buckets.pop(old).flat)
            device = params[0].device
            empty = self._channel.empty if device.type == "cpu" else lambda n, dtype: on_device(device, n, dtype)
            self._buckets[params] = Bucket(self._made, named, empty)
            self._made += 1
            self._reduction.set_buckets(list(self._buckets.values()))
        return self._buckets[params]
