"""Some of a model's parameters, their anchors (the last values that all ranks agreed on), and how they travel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from unisono.background import Handle, SerialQueue
from unisono.buckets import Bucket, layout
from unisono.exchange.reduction import Reduction
from unisono.reducer import Reducer
from unisono.strategy import check_count
from unisono.world import World

T = TypeVar("T")


class Fragment:
    """Some of the model's parameters x, their anchors x0 (float32 for 16-bit ones), and buckets for x0 - x.

    Parameters take part while they are trainable, and after that until the ranks have agreed on them once more.
    """

    def __init__(self, index: int, named: Sequence[tuple[str, Parameter]], reducer: Reducer, optimizer: Optimizer):
        self.index = index
        self.params = dict(named)
        self.anchors: dict[str, Tensor] = {}
        self.live: list[str] = []  # those that take part
        self._trainable: list[bool] = []
        self.together = True  # every rank's parameters are the anchors
        self.reduction = Reduction(reducer, optimizer, lambda world: None)
        self.buckets: list[Bucket] = []
        self.follow()

    def follow(self) -> None:
        """Parameters that have become trainable take part, from where they are."""
        trainable = [p.requires_grad for p in self.params.values()]
        if trainable == self._trainable:
            return
        self._trainable, before = trainable, set(self.live)
        for name, p in self.params.items():
            if p.requires_grad and name not in before:
                self.set_anchor(name, p.detach())
        self.live = [name for name, p in self.params.items() if p.requires_grad or name in before]

    def set_anchor(self, name: str, value: Tensor) -> None:
        """Anchors stay the same tensors: buckets and an outer optimizer hold them."""
        if name not in self.anchors:
            self.anchors[name] = wide(self.params[name])
        self.anchors[name].copy_(value)

    @property
    def laid_out(self) -> bool:
        """Whether the buckets are those of the parameters that take part."""
        return {name for bucket in self.buckets for name in bucket.names} == set(self.live)

    def build(self, channel: World, bucket_bytes: int) -> None:
        """Lay the buckets out; the memory is the channel's (every rank calls it alike)."""
        self.release(channel)
        named: list[Any] = [(name, self.anchors[name]) for name in self.live]
        for i, some in enumerate(layout(named, bucket_bytes)):
            device = some[0][1].device
            bucket = Bucket(
                1000 * self.index + i, some, channel.empty if device.type == "cpu" else partial(_on, device)
            )
            bucket.tag = f"differences/{self.index}.{i}"
            self.buckets.append(bucket)
        self.reduction.laid_out(self.buckets)

    def release(self, channel: World) -> None:
        """Give the buckets' memory back; reducer states stay, by parameter."""
        self.reduction.laid_out([])
        for bucket in self.buckets:
            channel.release(bucket.flat)
        self.buckets = []

    def moved(self, name: str) -> Tensor:
        """x0 - x: how far this rank has come; x0 as the parameter's dtype holds it, so that standing still is 0."""
        anchor, param = self.anchors[name], self.params[name].detach()
        return anchor.to(param.dtype).to(anchor.dtype) - param.to(anchor.dtype)

    def take(self) -> None:
        """Write the differences into the buckets."""
        for bucket in self.buckets:
            params = [self.params[name].detach() for name in bucket.names]
            if all(p.dtype == bucket.dtype for p in params):
                torch._foreach_copy_(bucket.tensors, bucket.params)
                torch._foreach_sub_(bucket.tensors, params)
            else:
                torch._foreach_copy_(bucket.tensors, [self.moved(name) for name in bucket.names])

    def reduce(self, channel: World) -> None:
        """Turn the differences in the buckets into their mean."""
        for bucket in self.buckets:
            self.reduction.begin(bucket, channel)
        self.reduction.drain()

    def means(self) -> dict[str, Tensor]:
        """What the buckets hold, by parameter."""
        return {n: t for bucket in self.buckets for n, t in zip(bucket.names, bucket.tensors, strict=True)}

    def return_to_anchors(self, mix: float = 0.0) -> None:
        """x <- mix * x + (1 - mix) * x0. Parameters that were frozen become x0, and leave."""
        kept = [name for name in self.live if mix > 0.0 and self.params[name].requires_grad]
        back = [name for name in self.live if mix == 0.0 or not self.params[name].requires_grad]
        if back:
            torch._foreach_copy_([self.params[n].detach() for n in back], [self.anchors[n] for n in back])
        for name in kept:
            param, anchor = self.params[name].detach(), self.anchors[name]
            param.copy_(torch.lerp(anchor, param.to(anchor.dtype), mix))
        self.live = [name for name in self.live if self.params[name].requires_grad]
        self.together = mix == 0.0


class Courier:
    """A channel of the world whose jobs run one after the other: in the program itself, or `behind` it.

    Behind it is a thread; or, where CUDA tensors travel from device to device, a stream.
    """

    def __init__(self, world: World, cuda: torch.device | None, *, inline: bool, behind: bool) -> None:
        self.channel = world.channel(inline=inline)
        self._cuda = cuda
        self._stream = torch.cuda.Stream(cuda) if behind and cuda is not None and world.has_nccl else None
        self._lane = SerialQueue("unisono fragments") if behind and self._stream is None else None

    def start(self, job: Callable[[World], T]) -> Handle[T]:
        """Run a job on the channel, after those before it and after what the program's CUDA stream has to do."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._cuda))
            with torch.cuda.stream(self._stream):
                value = job(self.channel)
            return Handle(lambda: self._joined(value))
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
        return Handle(lambda: self._joined(handle.wait()), handle.done)

    def _joined(self, value: T) -> T:
        """`value`; the program's CUDA stream goes on after what made it (a thread works on the default stream)."""
        made = self._stream or torch.cuda.default_stream(self._cuda)
        torch.cuda.current_stream(self._cuda).wait_stream(made)
        return value

    def finish(self) -> None:
        """Run what is queued, and end the thread."""
        if self._lane is not None:
            self._lane.close()


def divided(named: Sequence[tuple[str, Parameter]], count: int) -> list[list[tuple[str, Parameter]]]:
    """The parameters in `count` parts of about equal bytes, each in the model's order: the largest first, always to
    the part that has least."""
    weights = [p.numel() * p.element_size() if p.requires_grad else 0 for _, p in named]
    trainable = sum(p.requires_grad for _, p in named)
    if count > trainable:
        raise ValueError(
            f"fragments={count}, but the model has {trainable} trainable tensors: give at most so many fragments"
        )
    loads, parts = [0] * count, [[] for _ in range(count)]  # type: tuple[list[int], list[list[int]]]
    for i in sorted(range(len(named)), key=lambda i: (-weights[i], i)):
        part = loads.index(min(loads))
        loads[part] += weights[i]
        parts[part].append(i)
    return [[named[i] for i in sorted(part)] for part in parts]


def check_settings(strategy: Any) -> None:
    """Refuse what no method that exchanges differences can work with."""
    counts = (
        ("every", "windows from one exchange to the next"),
        ("accumulate", "backward passes a window"),
        ("bucket_bytes", "bytes a bucket"),
    )
    for name, meaning in counts:
        check_count(name, getattr(strategy, name), meaning)
    if strategy.buffers not in ("average", "broadcast", "local"):
        raise ValueError(f"buffers must be 'average', 'broadcast' or 'local', got {strategy.buffers!r}")
    if strategy.reducer is not None and not isinstance(strategy.reducer, Reducer):
        name = type(strategy).__name__
        raise TypeError(
            f"reducer must be a Reducer such as unisono.reducers.dense.dense(), got {strategy.reducer!r}; for a text, "
            f"write it into the spec: '{name}(reducer={strategy.reducer})'"
        )


def wide(param: Tensor) -> Tensor:
    """A copy that small changes add up in: float32 of 16-bit numbers."""
    dtype = torch.float32 if param.is_floating_point() and param.element_size() < 4 else param.dtype
    return param.detach().to(dtype, copy=True)


def _on(device: torch.device, n: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(n, dtype=dtype, device=device)
