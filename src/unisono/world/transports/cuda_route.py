"""Which transport serves a CUDA tensor: NCCL on a stream of its own; memory that ranks on one device map; that of ranks
which are threads and share the device; or the CPU transport, through host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unisono.background import Wakes
from unisono.world.transports import Op, Transport


@dataclass(slots=True)
class Route:
    """How one operation runs: on which transport, inside which context, and what its waiter does last."""

    transport: Transport
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    finish: Callable[[Any], Any] | None = None  # set if the program's stream has to know of it
    at_once: bool = False  # the host does not wait for other ranks: the stream keeps the operations' order
    wakes: Wakes = True  # as SerialQueue.submit takes it


_streams: dict[int, torch.cuda.Stream] = {}


def choose_route(base: Transport, accelerated: Transport | None, x: Tensor) -> Route:
    """The route of an operation on CUDA tensor `x`."""
    here = torch.cuda.current_stream(x.device)
    ready = torch.cuda.Event()
    if accelerated is not None and not accelerated.serves(x.device):
        accelerated = None
    are_threads = accelerated is None and base.takes_cuda
    served = accelerated if accelerated is not None else base if are_threads else StagedTransport(base)
    meets = served.meets_on_host and not are_threads
    waits = not meets or not here.query()  # an event makes the device change between ranks that share it
    if waits:
        ready.record(here)
    stream = _streams.get(x.device.index) or _streams.setdefault(x.device.index, torch.cuda.Stream(x.device))
    done = torch.cuda.Event()

    def finish(value: Any) -> Any:
        here = torch.cuda.current_stream(x.device)
        if not meets:
            here.wait_event(done)
        for result in value if isinstance(value, list | tuple) else [value]:
            if isinstance(result, Tensor) and result.is_cuda:
                result.record_stream(here)  # its memory is another stream's: not to be given out while it is read here
        return value

    if meets:

        @contextmanager
        def synchronise() -> Iterator[None]:
            if waits and served is accelerated:
                stream.wait_event(ready)  # it waits for its stream before the ranks meet
            elif waits:
                ready.synchronize()
            with torch.cuda.stream(stream):
                yield
                stream.synchronize()

        return Route(served, synchronise, finish, wakes="soon" if served is accelerated else True)

    @contextmanager
    def in_order() -> Iterator[None]:
        used = torch.cuda.current_stream(x.device) if are_threads else stream
        used.wait_event(ready)
        with torch.cuda.stream(used):
            yield
            done.record(used)

    return Route(served, in_order, finish, at_once=not are_threads)


class StagedTransport(Transport):
    """CUDA tensors over a CPU transport: down to the host, across, and up again."""

    name = "staged"

    def __init__(self, base: Transport) -> None:
        self.base = base
        self.rank, self.size = base.rank, base.size

    def all_reduce(self, parts: Sequence[Tensor], op: Op) -> float:
        return self._both(parts, lambda host: self.base.all_reduce(host, op))

    def broadcast(self, parts: Sequence[Tensor], src: int) -> float:
        return self._both(parts, lambda host: self.base.broadcast(host, src))

    def reduce_scatter(self, x: Tensor, counts: Sequence[int], op: Op, out: Tensor) -> float:
        host = torch.empty(out.shape, dtype=out.dtype)
        last = self.base.reduce_scatter(x.cpu(), counts, op, host)
        out.copy_(host)
        return last

    def all_gather(self, x: Tensor, outs: Sequence[Tensor]) -> float:
        return self._up(outs, lambda host: self.base.all_gather(x.cpu(), host))

    def all_to_all(self, parts: Sequence[Tensor], outs: Sequence[Tensor]) -> float:
        return self._up(outs, lambda host: self.base.all_to_all([p.cpu() for p in parts], host))

    def send(self, x: Tensor, dst: int) -> None:
        self.base.send(x.cpu(), dst)

    def recv(self, x: Tensor, src: int) -> None:
        host = torch.empty(x.shape, dtype=x.dtype)
        self.base.recv(host, src)
        x.copy_(host)

    def exchange(self, data: bytes) -> list[bytes]:
        return self.base.exchange(data)

    def split(self, groups: Sequence[Sequence[int]]) -> Transport:
        return StagedTransport(self.base.split(groups))

    def _both(self, parts: Sequence[Tensor], run: Callable[[list[Tensor]], float]) -> float:
        host = [p.cpu() for p in parts]
        last = run(host)
        for part, moved in zip(parts, host, strict=True):
            part.copy_(moved)
        return last

    def _up(self, outs: Sequence[Tensor], run: Callable[[list[Tensor]], float]) -> float:
        host = [torch.empty(o.shape, dtype=o.dtype) for o in outs]
        last = run(host)
        for out, moved in zip(outs, host, strict=True):
            out.copy_(moved)
        return last
