"""What the methods of torch's own share: a process group of torch's, windows that end with the backward pass, and
DistributedDataParallel below a model that the program goes on calling itself."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from unisono.methods.exchange.windows import if_alive
from unisono.methods.reducer import all_reduce_bytes
from unisono.methods.strategy import Replica, Strategy
from unisono.world import World
from unisono.world.ledger import Record

_TIMEOUT = timedelta(minutes=10)


class TorchStrategy(Strategy):
    """A method of torch's own."""

    def why_torch_optimizer(self) -> str:
        return "it goes around a module of torch's and its optimizer"


class TorchReplica(Replica):
    """Counts a window for each backward pass, after all that torch does at its end.

    The ledger has an exchange from the end of backward on; what torch does before is hidden, or part of compute.
    """

    slow_ranks = "ignore"
    bytes_by_formula = True

    def __init__(self, model: nn.Module, optimizer: Optimizer, world: World, strategy: Strategy) -> None:
        super().__init__(model, optimizer, world, strategy)
        join_group(world)
        self._passes_begun = -1  # the backward pass that is under way
        self._ended_at = 0.0  # when backward itself was over
        self._window_ended = False
        self._stepped_by: list[Optimizer] = []  # with the window that ended last

    def watch_backward(self, params: Iterable[torch.Tensor]) -> None:
        """Follow backward passes, by hooks on these parameters."""
        ready = weakref.WeakMethod(self._ready)
        self._hooks += [
            p.register_post_accumulate_grad_hook(partial(if_alive, ready, "")) for p in params if p.requires_grad
        ]

    def _ready(self, _name: str, _param: torch.Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._passes_begun:
            self._passes_begun = task
            Variable._execution_engine.queue_callback(self._end_pass)

    def _end_pass(self) -> None:
        """Backward is over; what torch still waits for comes with a callback of its own, after this one."""
        self._ended_at = self.world.ledger.clock()
        Variable._execution_engine.queue_callback(self._end_exchange)

    def _end_exchange(self) -> None:
        if not self.is_syncing():
            return
        ledger, start = self.world.ledger, self._ended_at
        end = ledger.clock()
        ledger.close_span("blocked", start, end)
        ledger.close_record(Record("torch", "gradients", self.bytes_a_window(), "torch", self.step, 0, start, end=end))
        self._window_ended = True
        self.advance()

    def is_syncing(self) -> bool:
        """Whether this backward pass ends a window."""
        return True

    def bytes_a_window(self) -> int:
        """What a rank sends in a window, by formula."""
        raise NotImplementedError

    def before_step(self) -> None:
        again = not self._stepped_by or any(other is self.stepping for other in self._stepped_by)
        if not self._window_ended and again:  # a step without a backward pass
            self.advance()
        if self._window_ended or again:
            self._stepped_by = []

    def after_step(self) -> None:
        self._window_ended = False
        self._stepped_by.append(self.stepping)

    def switch(self, strategy: str | Strategy) -> Replica:
        raise ValueError("torch's own methods are offered for comparison: they cannot be switched in mid-run")


def join_group(world: World) -> None:
    """Make torch's default process group of the world's ranks, unless the program has made one."""
    if net := os.environ.get("UNISONO_NET", "") if world.size > 1 else "":
        raise ValueError(
            f"the workers' own transport emulates the link ({net}), and what torch sends does not pass through it: its "
            "times would be those of the machine. The kernel can hold torch back too: as root, with --net without a "
            "latency"
        )
    if dist.is_initialized():
        return
    backend = "nccl" if world.device.type == "cuda" else "gloo"
    if world.size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group(backend, timeout=_TIMEOUT)


def gradient_bytes(model: nn.Module) -> int:
    """Those of all gradients."""
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


class _Forward(nn.Module):
    """A model's forward alone: its hooks have run when the program called the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._forward = model.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)


class DataParallelReplica(TorchReplica):
    """The model's `forward` goes through DistributedDataParallel, which exchanges the gradients in backward."""

    same_parameters = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        world: World,
        strategy: Strategy,
        *,
        count_sent: Callable[[], int | None] = lambda: None,
        **settings: Any,
    ) -> None:
        """`count_sent`: how many bytes of gradients were reduced since it was last asked; None: all of them."""
        super().__init__(model, optimizer, world, strategy)
        devices = [world.device] if world.device.type == "cuda" else None
        self._count_sent = count_sent
        self.wrapped = DistributedDataParallel(_Forward(model), device_ids=devices, **settings)
        forward = model.forward

        def call(*args: Any, **kwargs: Any) -> Any:
            # Evaluation may be one rank's alone; torch would wait there, to share buffers.
            return (self.wrapped if torch.is_grad_enabled() else forward)(*args, **kwargs)

        model.forward = call
        self.watch_backward(model.parameters())

    def is_syncing(self) -> bool:
        return bool(self.wrapped.require_backward_grad_sync)

    def bytes_a_window(self) -> int:
        sent = self._count_sent()
        return all_reduce_bytes(gradient_bytes(self.model) if sent is None else sent, self.world.size)

    def no_sync(self) -> AbstractContextManager[None]:
        """As DistributedDataParallel has it: forward belongs inside the block too."""
        return self.wrapped.no_sync()

    def close(self) -> None:
        super().close()
        self.model.__dict__.pop("forward", None)
